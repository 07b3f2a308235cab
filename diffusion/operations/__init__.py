"""Unattended runs: heartbeats, hang detection, restarts, checks of machines, events, costs."""
