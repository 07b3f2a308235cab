"""Source: tar files in the WebDataset layout, as img2dataset writes them."""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import MachineError
from diffusion.preparation.records import (
    Partition,
    Reason,
    Record,
    Refused,
    decode_text,
    key_of,
    make_record,
    parse_object,
)
from diffusion.preparation.sources.files import FileSource, whole_files
from diffusion.preparation.sources.remote_files import open_file, shown

_CAPTION_KEYS = ("captions", "caption", "text")
_DAMAGE = (tarfile.TarError, EOFError, zlib.error)


@dataclass
class Sample:
    """The members of a tar that share a stem (what stands before the first dot of the name), or files of a folder.

    Attributes:
        stem: Path and name up to the first dot.
        image: Content of the first member whose extension is that of a picture.
        text: Content of the .txt member.
        json: Content of the .json member.
        others: Extensions of the members that are none of these.
    """

    stem: str
    image: bytes | None = None
    text: bytes | None = None
    json: bytes | None = None
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WebDatasetSource(FileSource):
    """One tar or several, read in one pass each; the members of a sample must lie together.

    The caption is the .txt member; without one, `caption` or `text` of the .json member. All entries of a list
    `captions` in the .json come with it. The other entries of the .json are metadata, unchanged. Samples whose .json
    has a `status` other than `success` are refused. Of two samples with the same stem in one tar the first is taken and
    the second refused. A tar that ends early or is damaged counts as one refusal more. A remote one is read as a
    stream. The rest of a key is the tar's path below `path` and the stem.
    """

    num_records: int | None = None
    kind: str = "webdataset"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Return one partition per tar, whatever the size."""
        return whole_files(self, known, "tar")

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the samples in the order of the tars and of their members."""
        for below, tar in (self if partition is None else self.only(partition)).files:
            prefix = self.prefix(below)
            seen: set[str] = set()
            try:
                for sample in _samples(tar):
                    key = f"{prefix}/{key_of(sample.stem)}"
                    if sample.stem in seen:
                        yield Refused(
                            key, Reason.DUPLICATE_KEY, "its members do not lie together, or another has its name"
                        )
                        continue
                    seen.add(sample.stem)
                    yield record_of(key, sample)
            except _DAMAGE as error:
                yield Refused(prefix, Reason.DAMAGED_FILE, f"{error}; what came before was read")
            except OSError as error:
                if error.errno is not None:
                    raise MachineError(f"cannot read {shown(tar)}: {error.strerror}") from error
                yield Refused(prefix, Reason.DAMAGED_FILE, f"{error}; what came before was read")


def _samples(place: str) -> Iterator[Sample]:
    """Yield the samples of a tar; at a damaged place the sample that it belongs to is dropped and the error raised."""
    sample: Sample | None = None
    with open_file(place) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            vars(tar)["members"] = []  # otherwise the list of members grows without bound
            if not member.isfile():
                continue
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if name.startswith("."):
                continue
            stem, _, extension = name.partition(".")
            stem = f"{folder}/{stem}" if folder else stem
            if sample is None or stem != sample.stem:
                if sample is not None:
                    yield sample
                sample = Sample(stem)
            _add(sample, extension.lower(), tar, member)
    if sample is not None:
        yield sample


def _add(sample: Sample, extension: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Read a member into its sample if it is of use there."""
    file = tar.extractfile(member)
    assert file is not None, "a regular file has content"
    if extension == "txt":
        sample.text = file.read()
    elif extension == "json":
        sample.json = file.read()
    elif f".{extension}" in EXTENSIONS and sample.image is None:
        sample.image = file.read()
    else:
        sample.others.append(extension)


def record_of(key: str, sample: Sample) -> Record | Refused:
    """Make the record of a sample.

    Args:
        key: Key of the record.
        sample: Contents, of a tar's members or of files.
    """
    metadata: dict[str, Any] = {}
    if sample.json is not None:
        try:
            metadata = parse_object(decode_text(sample.json))
        except ValueError as error:
            return Refused(key, Reason.INVALID_JSON, str(error)[:80])
    status = metadata.get("status", "success")
    if status != "success":
        return Refused(key, Reason.NOT_SUCCESSFUL, ascii(f"{status}: {metadata.get('error_message')}"[:80]))
    if sample.image is None:
        others = ", ".join(f".{extension}" for extension in sample.others)
        return Refused(key, Reason.MISSING_IMAGE, ascii(f"besides: {others}")[1:-1] if others else "")
    rest = {name: metadata[name] for name in metadata if name not in _CAPTION_KEYS}
    return make_record(key, sample.image, _captions(sample.text, metadata), rest)


def _captions(text: bytes | None, metadata: dict[str, Any]) -> list[Any]:
    """Return the caption of the .txt or else of the .json, then what the list `captions` adds to it."""
    listed = metadata.get("captions")
    listed = listed if isinstance(listed, list) else [listed]
    if text is not None:
        single: Any = decode_text(text)
        return [single, *(caption for caption in listed if caption != single.strip())]
    if any(isinstance(caption, str) for caption in listed):
        return listed
    single = next((metadata[name] for name in ("caption", "text") if metadata.get(name) is not None), None)
    return single if isinstance(single, list) else [single]
