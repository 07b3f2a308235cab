"""Source: tar files in the WebDataset layout, as img2dataset writes them."""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffusion.datasets.images import EXTENSIONS, MAX_BYTES
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
from diffusion.preparation.sources.remote_files import open_file
from diffusion.storage import shown

_CAPTION_KEYS = ("captions", "caption", "text")
_DAMAGE = (tarfile.TarError, EOFError, zlib.error)
_REST_BYTES = 2**20


@dataclass
class Sample:
    """The members of a tar that share a stem (what stands before the first dot of the name), or files of a folder.

    Attributes:
        stem: Path and name up to the first dot.
        image: Content of the first member whose extension is that of an image.
        text: Content of the .txt member.
        json: Content of the .json member.
        others: Extensions of the members that are none of these.
        more_images: Extensions of the images behind the first.
        too_large: Extension and size of a member that was not read because of its size; empty if there is none.
    """

    stem: str
    image: bytes | None = None
    text: bytes | None = None
    json: bytes | None = None
    others: list[str] = field(default_factory=list)
    more_images: list[str] = field(default_factory=list)
    too_large: str = ""


@dataclass(frozen=True)
class WebDatasetSource(FileSource):
    """One tar or several, read in one pass each; the members of a sample must lie together.

    The caption is the .txt member; without one, `caption` or `text` of the .json member. All entries of a list
    `captions` in the .json come with it. The other entries of the .json are metadata, unchanged. Samples whose .json
    has a `status` other than `success` are refused. Of two samples with the same stem in one tar the first is taken and
    the second refused; of a sample's images the first is taken and each of the others refused. A tar that is damaged
    counts as one refusal more: one that ends early, without its end mark (a block of zeros), or with something else
    than zeros behind it, as tars do that were joined by `cat`. What lies before the damage is read. A remote tar is
    read as a stream. The rest of a key is the tar's path below `path` and the stem.
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
                    for extension in sample.more_images:
                        yield Refused(f"{key}.{extension}", Reason.DUPLICATE_KEY, "another image of its sample")
            except _DAMAGE as error:
                yield Refused(prefix, Reason.DAMAGED_FILE, f"{error}; what came before was read")
            except OSError as error:
                if error.errno is not None:
                    raise MachineError(f"cannot read {shown(tar)}: {error.strerror}") from error
                yield Refused(prefix, Reason.DAMAGED_FILE, f"{error}; what came before was read")


class _DamagedHeaderError(tarfile.ReadError):
    """Where a member or the end of the tar should be, there is something else; the members before it are whole."""


class _CheckedHeader(tarfile.TarInfo):
    """A header of a member; tarfile itself takes a damaged one, unless it is the first, for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> "_CheckedHeader":
        """Read the next header.

        Raises:
            tarfile.EOFHeaderError: There is the end mark.
            _DamagedHeaderError: There is something else, or nothing.
        """
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        except tarfile.EmptyHeaderError as error:  # pyright: ignore[reportAttributeAccessIssue]
            raise _DamagedHeaderError(f"ends without an end mark at byte {tarfile_.offset}") from error
        except tarfile.HeaderError as error:
            raise _DamagedHeaderError(f"{error} at byte {tarfile_.offset}") from error


def _check_end(tar: tarfile.TarFile) -> None:
    """Check that behind the end mark there are zeros only.

    Raises:
        _DamagedHeaderError: There is something else: the mark is a hole, or other tars were appended.
    """
    assert tar.fileobj is not None, "it is open"
    while rest := tar.fileobj.read(_REST_BYTES):
        if rest.strip(b"\0"):
            raise _DamagedHeaderError(f"goes on behind an end mark at byte {tar.offset}")


def _samples(place: str) -> Iterator[Sample]:
    """Yield the samples of a tar up to a damaged place, whose error is raised; a sample that ends in it is dropped."""
    sample: Sample | None = None
    with open_file(place) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_CheckedHeader) as tar:
        try:
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
            _check_end(tar)
        except _DamagedHeaderError:
            if sample is not None:
                yield sample
            raise
    if sample is not None:
        yield sample


def _add(sample: Sample, extension: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Read a member into its sample if it is of use there."""
    is_image = f".{extension}" in EXTENSIONS
    if is_image and sample.image is not None:
        sample.more_images.append(extension)
        return
    if not (is_image or extension in ("txt", "json")):
        sample.others.append(extension)
        return
    if member.size > MAX_BYTES:
        sample.too_large = f".{extension}: {member.size} bytes are more than {MAX_BYTES}"
        return
    file = tar.extractfile(member)
    assert file is not None, "a regular file has content"
    if extension == "txt":
        sample.text = file.read()
    elif extension == "json":
        sample.json = file.read()
    else:
        sample.image = file.read()


def record_of(key: str, sample: Sample) -> Record | Refused:
    """Make the record of a sample.

    Args:
        key: Key of the record.
        sample: Contents, of a tar's members or of files.
    """
    if sample.too_large:
        return Refused(key, Reason.TOO_LARGE, sample.too_large)
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
