"""The images of a study: those of each model for each prompt, and as raters receive them."""

import functools
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.images import read_image
from diffusion.evaluation.prompts import Prompt, read_listing, read_prompts

NOISE, BLANK = -1, -2
"""Numbers in place of a model's: the images of attention checks, noise or one grey."""

_GREY = 128


@dataclass(frozen=True, kw_only=True)
class Item:
    """One image of each model for one prompt."""

    prompt: str
    category: str
    """Empty where the prompts have none."""

    images: tuple[Path, ...]
    """In the order of the models."""


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """All images of a study."""

    models: tuple[str, ...]
    items: tuple[Item, ...]

    @property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Item and two models, as numbers, of each pair of images."""
        models = list(itertools.combinations(range(len(self.models)), 2))
        return [(i, a, b) for i in range(len(self.items)) for a, b in models]


def collect(folders: Mapping[str, Path], prompts_file: Path) -> ImageSet:
    """Find the images of each model for each prompt.

    A folder has a listing (`metadata.jsonl`, as scripts/generate.py writes it), or only images, in the order of the
    prompts by the numbers in their names, the same number for each. The k-th images of a prompt are compared.

    Args:
        folders: name of a model to folder of images; at least two.
        prompts_file: prompts, one a line, or a table (`evaluation.prompts.read_prompts`).

    Raises:
        ConfigurationError: fewer than two models, or no prompts in the file.
        DataError: a folder has no images, lacks a prompt, or has another number for a prompt than the first folder; a
            listing or a link names an image outside of its folder.
    """
    if len(folders) < 2:
        raise ConfigurationError("a comparison takes two models or more: A=FOLDER B=FOLDER")
    prompts: dict[str, Prompt] = {}
    listed = read_prompts(prompts_file)
    for prompt in listed:
        prompts.setdefault(prompt.text, prompt)
    texts = [prompt.text for prompt in listed]
    found = {name: _images_by_prompt(folder, texts) for name, folder in folders.items()}
    for name, folder in folders.items():
        top = folder.resolve()
        for image in itertools.chain.from_iterable(found[name].values()):
            if not image.resolve().is_relative_to(top):  # A listing may be someone else's.
                raise DataError(f"{image} is outside of {folder} and would be shown to raters: copy it into the folder")
    first = next(iter(folders))
    items = []
    for text, prompt in prompts.items():
        num_images = len(found[first].get(text, []))
        for name, folder in folders.items():
            images = found[name].get(text, [])
            if not images:
                raise DataError(f"{folder}: no image of the prompt {text!r} of {prompts_file}")
            if len(images) != num_images:
                raise DataError(
                    f"{folder}: {len(images)} images of the prompt {text!r}, {folders[first]} has {num_images}; "
                    "generate the same number with each model"
                )
        for images in zip(*(found[name][text] for name in folders), strict=True):
            items.append(Item(prompt=text, category=prompt.category, images=images))
    return ImageSet(models=tuple(folders), items=tuple(items))


def _images_by_prompt(folder: Path, texts: Sequence[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    if (listed := read_listing(folder)) is not None:
        for image in listed:
            found.setdefault(image.prompt, []).append(image.path)
        return found
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    images = [path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and path.stem != "grid"]
    images.sort(key=lambda path: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)])
    per_prompt, rest = divmod(len(images), len(texts))
    if rest or not images:
        raise DataError(
            f"{folder}: {len(images)} images without metadata.jsonl are no multiple of {len(texts)} prompts; give the "
            "same number for each, in the order of the prompts, or a folder that scripts/generate.py has written"
        )
    for i, text in enumerate(texts):  # A text may be there twice.
        found.setdefault(text, []).extend(images[i * per_prompt : (i + 1) * per_prompt])
    return found


@functools.lru_cache(maxsize=64)
def served_image(path: Path) -> bytes:
    """Encode an image anew as an RGB PNG: the same pixels, nothing else of the file; a DataError if it is damaged."""
    return _png(read_image(path))


def check_image(kind: int, beside: Path, seed: int) -> bytes:
    """Make the image of an attention check, NOISE or BLANK, as a PNG of the size of a model's image."""
    width, height = read_image(beside).size
    if kind == BLANK:
        return _png(Image.new("RGB", (width, height), (_GREY, _GREY, _GREY)))
    return _png(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def _png(image: Image.Image) -> bytes:
    """Encode pixels alone: an image made of them has none of the text or profile that came with the file."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
