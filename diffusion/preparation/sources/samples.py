"""An image with a .txt and a .json of the same name: members of a tar, or files of a folder."""

from dataclasses import dataclass, field
from typing import Any

from diffusion.preparation.records import (
    Location,
    Reason,
    Record,
    Rejected,
    decode_text,
    make_record,
    parse_object,
)

_CAPTION_KEYS = ("captions", "caption", "text")


@dataclass
class Sample:
    """The contents of the files of one stem."""

    stem: str
    """Path and name, up to the first dot in a tar."""

    image: bytes | None = None
    """Content of the first image."""

    text: bytes | None = None
    """Content of the .txt."""

    json: bytes | None = None
    """Content of the .json."""

    others: list[str] = field(default_factory=list)
    """Extensions of what is none of these."""


def record_of(key: str, sample: Sample, location: Location) -> Record | Rejected:
    """Make the record of a sample.

    The caption is the .txt; without one, `caption` or `text` of the .json. All entries of a list `captions` in the
    .json come with it. The other entries of the .json are metadata. A `status` other than `success` is a rejection.
    """
    metadata: dict[str, Any] = {}
    if sample.json is not None:
        try:
            metadata = parse_object(decode_text(sample.json))
        except ValueError as error:
            return Rejected(key, Reason.INVALID_JSON, location, str(error)[:80])
    status = metadata.get("status", "success")
    if status != "success":
        detail = ascii(f"{status}: {metadata.get('error_message')}"[:80])
        return Rejected(key, Reason.NOT_SUCCESSFUL, location, detail)
    if sample.image is None:
        others = ", ".join(f".{extension}" for extension in sample.others)
        return Rejected(key, Reason.MISSING_IMAGE, location, ascii(f"besides: {others}")[1:-1] if others else "")
    rest = {name: metadata[name] for name in metadata if name not in _CAPTION_KEYS}
    return make_record(key, sample.image, _captions(sample.text, metadata), rest, location)


def _captions(text: bytes | None, metadata: dict[str, Any]) -> list[Any]:
    listed = metadata.get("captions")
    listed = listed if isinstance(listed, list) else [listed]
    if text is not None:
        single: Any = decode_text(text)
        return [single, *(caption for caption in listed if caption != single.strip())]
    if any(isinstance(caption, str) for caption in listed):
        return listed
    single = next((metadata[name] for name in ("caption", "text") if metadata.get(name) is not None), None)
    return single if isinstance(single, list) else [single]
