"""The demo's data set: captioned shapes as a folder of images, WebDataset tars and parquet files.

python -m demo.shapes OUT --num-images 6000
"""

import dataclasses
import io
import json
import random
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from demo.scenes import SHARES, Scene, caption, draw, scenes
from diffusion.files import atomic_path
from diffusion.launch import CommandParser, run_command

SHORTER_SIDES = (40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
FORMATS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


def write_data_set(
    folder: Path | str,
    num_images: int = 6000,
    seed: int = 17,
    *,
    split: str = "train",
    shares: tuple[float, float, float] = SHARES,
    shard_size: int = 500,
) -> dict[str, int]:
    """Write the data set in three layouts, a third of the images each; the same arguments write the same bytes.

    - `folder/images`: PNG, JPEG and WebP files, each with its caption in a .txt file beside it.
    - `folder/webdataset`: tar files as img2dataset writes them: NAME.png or NAME.jpg, NAME.txt and NAME.json.
    - `folder/parquet`: files with the columns `image` (struct of `bytes` and `path`) and `caption`.

    Half of the PNGs of scenes with a white background are transparent: only on white do they agree with their captions.

    Args:
        folder: where to write; must not hold a data set.
        num_images: images in all three layouts together.
        seed: of scenes, resolutions and formats.
        split: `train`, or another name for independent scenes, such as `validation`.
        shares: of scenes with one object, two objects and a group.
        shard_size: images per subfolder, tar file and parquet file.

    Returns:
        The number of images in each layout.
    """
    folder = Path(folder)
    layouts = {"images": _write_images, "webdataset": _write_tars, "parquet": _write_parquet}
    rng = random.Random(f"files {split} {seed}")
    drawn: dict[str, list[_Image]] = {layout: [] for layout in layouts}
    for index, scene in enumerate(scenes(num_images, seed, split=split, shares=shares)):
        layout = tuple(layouts)[index % len(layouts)]
        suffixes = ("png", "jpg") if layout == "webdataset" else tuple(FORMATS)
        drawn[layout].append(_image(scene, f"{split}-{index:06d}", rng.choice(suffixes), rng))
    for layout, write in layouts.items():
        (folder / layout).mkdir(parents=True)
        for shard, start in enumerate(range(0, len(drawn[layout]), shard_size)):
            write(folder / layout, shard, drawn[layout][start : start + shard_size])
    return {layout: len(images) for layout, images in drawn.items()}


class Brightness:
    """A scorer of `prepare`: the mean of the pixels, 0 to 255."""

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[float]:
        """Score images."""
        return [float(np.asarray(image).mean()) for image in images]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Image:
    key: str
    suffix: str
    content: bytes
    caption: str
    width: int
    height: int


def _image(scene: Scene, key: str, suffix: str, rng: random.Random) -> _Image:
    """Draw and encode a scene at a random resolution."""
    side = rng.choice(SHORTER_SIDES)
    longer = round(side * rng.choice((1, 1, 1.125, 1.25)))
    width, height = (side, longer) if rng.random() < 0.5 else (longer, side)
    transparent = suffix == "png" and scene.background == "white" and rng.random() < 0.5
    image = draw(scene, (width, height), transparent=transparent)
    options = {"png": {"compress_level": 1}, "jpg": {"quality": 95, "subsampling": 0}, "webp": {"quality": 95}}[suffix]
    content = io.BytesIO()
    image.save(content, FORMATS[suffix], **options)
    return _Image(
        key=key, suffix=suffix, content=content.getvalue(), caption=caption(scene), width=width, height=height
    )


def _write_images(folder: Path, shard: int, images: list[_Image]) -> None:
    subfolder = folder / f"{shard:03d}"
    subfolder.mkdir()
    for image in images:
        (subfolder / f"{image.key}.{image.suffix}").write_bytes(image.content)
        (subfolder / f"{image.key}.txt").write_text(image.caption + "\n", encoding="utf-8")


def _write_tars(folder: Path, shard: int, images: list[_Image]) -> None:
    with tarfile.open(folder / f"{shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for image in images:
            record = {
                "caption": image.caption,
                "url": f"shapes://{image.key}",
                "key": image.key,
                "status": "success",
                "error_message": None,
                "width": image.width,
                "height": image.height,
                "original_width": image.width,
                "original_height": image.height,
            }
            _add(tar, f"{image.key}.{image.suffix}", image.content)
            _add(tar, f"{image.key}.txt", image.caption.encode())
            _add(tar, f"{image.key}.json", json.dumps(record).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add one file to a tar; its owner and time stay at zero, so that the bytes depend on the content alone."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_parquet(folder: Path, shard: int, images: list[_Image]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [{"bytes": image.content, "path": f"{image.key}.{image.suffix}"} for image in images]
    file_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array(files, file_type), "caption": pa.array([image.caption for image in images])}
    pq.write_table(pa.table(columns), folder / f"{shard:03d}.parquet", row_group_size=100)


def main() -> None:
    """Draw, atomically."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder; replaced if it exists")
    parser.add_argument("--num-images", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument(
        "--shares",
        type=float,
        nargs=3,
        default=SHARES,
        metavar="SHARE",
        help="of scenes with one object, two objects and a group of three or four",
    )
    arguments = parser.parse_args()
    with atomic_path(arguments.out) as partial:
        counts = write_data_set(partial, arguments.num_images, arguments.seed, shares=tuple(arguments.shares))
        shutil.rmtree(arguments.out, ignore_errors=True)
    print(f"{arguments.out}: " + ", ".join(f"{count} in {layout}" for layout, count in counts.items()))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
