"""Suites: prompts of their own, whose images a detector, or a model that answers questions, judges one by one."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from PIL import Image

from diffusion.distributed import is_first_rank, map_on_ranks
from diffusion.errors import ConfigurationError, explained_writes
from diffusion.evaluation.images import read_image
from diffusion.evaluation.prompts import Prompt
from diffusion.evaluation.protocol import VERSION, Number, protocol_hash
from diffusion.evaluation.protocol import Protocol as NumberProtocol
from diffusion.files import read_json, write_json


class Item(Protocol):
    """A prompt, and what its images must show."""

    @property
    def prompt(self) -> str:
        """Text of the prompt."""
        ...


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass(frozen=True, kw_only=True)
class Suite(ABC, Generic[AnyItem]):
    """Prompts, the judgement of an image, and the numbers of all judgements."""

    name: ClassVar[str]
    """Folder of the images, and label of the progress bar."""

    unit: ClassVar[float] = 100.0
    """Value of a number whose scores are all 1."""

    items: Sequence[AnyItem]
    images_per_prompt: int

    def prompts(self) -> list[Prompt]:
        """The prompts, in the order of their images."""
        return [Prompt(text=item.prompt) for item in self.items]

    @abstractmethod
    def record(self) -> NumberProtocol:
        """Everything that the numbers depend on besides the images."""

    def judgement_record(self, images: Mapping[str, Any]) -> NumberProtocol:
        """Everything that the judgements of images with a record depend on besides the images."""
        return {"version": VERSION, **self.record()}

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the numbers."""

    @abstractmethod
    def judge(self, item: AnyItem, image: Image.Image) -> Any:
        """Judge an image of an item; the judgement is stored as JSON."""

    @abstractmethod
    def scores(self, item: AnyItem, judgement: Any) -> Iterable[tuple[str, float]]:
        """Scores of an image, 0 to 1, each with the name of its number."""

    def values(self, judged: Sequence[tuple[AnyItem, Any]]) -> dict[str, float]:
        """Values of the numbers, from the item and the judgement of each image: means of the scores."""
        scores: dict[str, list[float]] = {}
        for item, judgement in judged:
            for name, score in self.scores(item, judgement):
                scores.setdefault(name, []).append(score)
        return {name: self.unit * fmean(values) for name, values in scores.items()}

    def protocols(self, images: Mapping[str, Any]) -> dict[str, NumberProtocol]:
        """Protocol of each number, with the record of the images."""
        protocol = {**self.judgement_record(images), "images": dict(images)}
        return {name: dict(protocol) for name in self.names()}

    def evaluate(self, files: Sequence[Path], images: Mapping[str, Any], judgements: Path) -> dict[str, Number]:
        """Judge images and compute the numbers; collective.

        Args:
            files: images, with those of one prompt adjacent.
            images: record of the images.
            judgements: folder for one file per image, which all ranks see. An image that has one is not judged again.

        Returns:
            The numbers by name on the first rank; an empty dictionary on others.
        """
        folder = judgements / protocol_hash(self.judgement_record(images))
        of_images = [item for item in self.items for _ in range(self.images_per_prompt)]

        def judge(number: int) -> Any:
            path = folder / f"{number:06d}.json"
            if not path.is_file():
                judgement = self.judge(of_images[number], read_image(files[number]))
                with explained_writes(path):
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(path, judgement)
            return read_json(path)

        found = map_on_ranks(len(files), judge, self.name)
        if not is_first_rank():
            return {}
        values = self.values(list(zip(of_images, found, strict=True)))
        protocols = self.protocols(images)
        return {name: Number(value=values[name], protocol=protocols[name]) for name in protocols}


def read_json_items(path: Path, key: str, parse: Callable[[Any], AnyItem], kind: str) -> list[AnyItem]:
    """Read the items of a suite, each parsed from a JSON object on a line of its own.

    The key of the file in the configuration, and the kind, the name of its format, are for messages.

    Raises:
        ConfigurationError: the file is missing or empty, or a line is in another format.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{key}={path} cannot be read: {error}") from error
    items = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                items.append(parse(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path}, line {number}, is not in {kind}'s format: {error!r}") from error
    if not items:
        raise ConfigurationError(f"{key}={path} has no prompts")
    return items
