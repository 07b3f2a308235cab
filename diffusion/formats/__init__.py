"""Formats of what processes share: files and folders, read without torch and Composer."""
