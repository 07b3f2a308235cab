"""Image files and data folders that the tests of the preparation make."""

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encode(image: Image.Image, image_format: str = "PNG", **options) -> bytes:
    """Return an image as the bytes of a file."""
    content = io.BytesIO()
    image.save(content, image_format, **options)
    return content.getvalue()


def noise(width: int, height: int, seed: int = 0, image_format: str = "PNG", **options) -> bytes:
    """Return a file with random pixels."""
    pixels = random.Random(f"{seed} {width} {height}").randbytes(width * height * 3)
    return encode(Image.frombytes("RGB", (width, height), pixels), image_format, **options)


def write_folder(folder: Path, num: int, *, side: int = 32, start: int = 0) -> None:
    """Write numbered images, each with a caption beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(start, start + num):
        (folder / f"{index:04d}.png").write_bytes(noise(side + 5, side + index % 5, index))
        (folder / f"{index:04d}.txt").write_text(f"image {index}\n")


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_table(path: Path, columns: Any, **options: Any) -> Path:
    """Write columns as a parquet file, or where the name ends in .arrow, an Arrow file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, **options)
    else:
        pq.write_table(table, path, **options)
    return path


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> Path:
    """Write an MDS folder with small shards."""
    from streaming import MDSWriter  # It brings torch.

    with MDSWriter(out=str(folder), columns=columns, **{"hashes": ["xxh64"], "size_limit": 4096, **options}) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def sample(stem: str, image: bytes, caption: bytes | None = None, /, **metadata) -> list[tuple[str, bytes]]:
    """Return the members of a sample as img2dataset names them."""
    members = [(f"{stem}.png", image)]
    if caption is not None:
        members.append((f"{stem}.txt", caption))
    return [*members, (f"{stem}.json", json.dumps(metadata).encode())]


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
