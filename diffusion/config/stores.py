"""Locations of checkpoints: a folder, or a prefix of a bucket in an S3 store."""

from urllib.parse import urlsplit

SCHEME = "s3"


def is_store(location: str) -> bool:
    """Whether a location is in an S3 store."""
    return location.startswith(f"{SCHEME}://")


def url_problem(location: str, key: str) -> str | None:
    """Describe why a location is neither a folder nor in an S3 store; None if it is one of them.

    Args:
        location: path or URI.
        key: key of the configuration, for the message.
    """
    if "://" not in location:
        return None
    if not is_store(location):
        return (
            f"{key} is '{location}', but must be a folder or s3://bucket/prefix. S3_ENDPOINT_URL is the address of "
            "other stores with the S3 protocol."
        )
    return None if urlsplit(location).netloc else f"{key} is '{location}', which names no bucket: s3://bucket/prefix."
