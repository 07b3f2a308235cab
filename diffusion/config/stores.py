"""Places that a configuration names: a folder, or a prefix of a bucket in an object store."""

from urllib.parse import urlsplit

SCHEME = "s3"


def is_store(place: str) -> bool:
    """Whether a place is in an object store that is supported."""
    return place.startswith(f"{SCHEME}://")


def url_problem(place: str, key: str) -> str | None:
    """Why a place that a configuration names can be neither a folder nor in a store; None if it can.

    Args:
        place: path or URL.
        key: key of the configuration, for the message.
    """
    if "://" not in place:
        return None
    if not is_store(place):
        scheme = place.partition("://")[0]
        return (
            f"{key} is '{place}', but {scheme}:// is not supported: give a folder, or s3://bucket/prefix (a store that "
            "speaks S3 is reached by S3_ENDPOINT_URL)."
        )
    if not urlsplit(place).netloc:
        return f"{key} is '{place}', which names no bucket: give s3://bucket/prefix."
    return None
