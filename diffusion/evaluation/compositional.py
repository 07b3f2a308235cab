"""Checks of colours, counts and spatial relations without people: a detector says whether an image shows them.

The checks are those of GenEval (Ghosh et al. 2023, section 3), whose files of prompts are read as they are: the classes
that have to be there, each with a least count, a colour and a position relative to another one, and the classes of
which there must be fewer.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm

from demo.shapes import COLOURS, Scene, caption
from demo.shapes import SHAPES as SHAPE_NAMES
from demo.shapes import prompts as shape_scenes
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import CompositionalConfig
from diffusion.evaluation.detectors import Detection, Detector, ShapesOracle, ZeroShotDetector
from diffusion.evaluation.prompts import Prompt
from diffusion.evaluation.protocol import Protocol, compositional_protocol
from diffusion.evaluation.ranks import Ranks
from diffusion.evaluation.results import COMPOSITIONAL, Number

SHAPES = "shapes"

MIN_DISTANCE, MIN_LENGTH = 0.1, 1e-3
"""The offset of two objects counts beyond this part of the sum of their sides, and from this length on (GenEval)."""

COLOUR_NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""The colours that GenEval tells apart."""

RELATIONS = ("left of", "right of", "above", "below")

COUNTS = {2: "two", 3: "three", 4: "four"}
"""How many objects the demo's prompts of counts ask for."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Objects of one class."""

    label: str
    count: int = 1
    """So many of them at least."""

    colour: str | None = None
    relation: str | None = None
    """One of RELATIONS: where they lie as seen from the objects of `target`."""

    target: int | None = None
    """Number of another entry of the check."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A prompt and what its images have to show."""

    prompt: str
    category: str
    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...] = ()
    """Classes of which there must be fewer than `count`."""


def is_shown(check: Check, found: Sequence[Detection]) -> bool:
    """Whether detected objects are those that a check asks for."""
    taken: list[list[Detection]] = []
    for wanted in check.include:
        same = [one for one in found if one.label == wanted.label]
        fitting = [one for one in same if wanted.colour is None or one.colour == wanted.colour]
        if wanted.relation is not None and wanted.target is not None:
            targets = taken[wanted.target]
            fitting = [one for one in fitting if any(wanted.relation in relations(one, other) for other in targets)]
        if len(fitting) < wanted.count:
            return False
        taken.append(fitting[: wanted.count])
    return all(sum(one.label == limit.label for one in found) < limit.count for limit in check.exclude)


def relations(first: Detection, second: Detection) -> set[str]:
    """Where the first object lies as seen from the second: one relation, or on a diagonal two (as in GenEval)."""
    apart = (
        _beyond(first.x - second.x, MIN_DISTANCE * (first.width + second.width)),
        _beyond(first.y - second.y, MIN_DISTANCE * (first.height + second.height)),
    )
    length = math.hypot(*apart)
    if length < MIN_LENGTH:
        return set()
    right, down = apart[0] / length, apart[1] / length
    found = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, is_so in found.items() if is_so}


def _beyond(offset: float, margin: float) -> float:
    """What of an offset exceeds a margin, with its sign."""
    return math.copysign(max(abs(offset) - margin, 0.0), offset)


def shape_checks() -> list[Check]:
    """The checks of the demo: each pair of colour and shape, relations of two objects, and counts of each shape."""
    single, pairs = shape_scenes()
    colours = itertools.cycle(COLOURS)
    counted = [_counted(num, next(colours), shape) for num in COUNTS for shape in SHAPE_NAMES]
    return [*(_single(scene) for scene in single), *(_pair(scene) for scene in pairs), *counted]


def _single(scene: Scene) -> Check:
    thing = scene.things[0]
    include = (Wanted(label=thing.shape, colour=thing.colour),)
    return Check(prompt=caption(scene), category="colour and shape", include=include)


def _pair(scene: Scene) -> Check:
    first, second = scene.things
    target = Wanted(label=second.shape, colour=second.colour)
    wanted = Wanted(label=first.shape, colour=first.colour, relation=scene.relation, target=0)
    return Check(prompt=caption(scene), category="relation", include=(target, wanted))


def _counted(num: int, colour: str, shape: str) -> Check:
    """So many objects of one colour and shape, and no more of that shape."""
    return Check(
        prompt=f"{COUNTS[num]} {colour} {shape}s on a gray background",
        category="count",
        include=(Wanted(label=shape, count=num, colour=colour),),
        exclude=(Wanted(label=shape, count=num + 1),),
    )


def read_checks(path: Path) -> list[Check]:
    """Read a file of GenEval: one JSON object a line with `prompt`, `tag`, `include` and `exclude`.

    Raises:
        ConfigurationError: there is no such file, or a line is not of this form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"protocol.compositional.suite={path} cannot be read: {error.strerror}") from error
    checks = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                checks.append(_check(json.loads(line)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(f"{path}, line {number}, is not of GenEval's form: {error!r}") from error
    if not checks:
        raise ConfigurationError(f"protocol.compositional.suite={path} holds no checks")
    return checks


def _check(row: Mapping[str, Any]) -> Check:
    include = tuple(_wanted(entry) for entry in row["include"])
    exclude = tuple(_wanted(entry) for entry in row.get("exclude", ()))
    for number, wanted in enumerate(include):
        if wanted.relation is not None and (wanted.relation not in RELATIONS or not 0 <= (wanted.target or 0) < number):
            raise ValueError(f"position {wanted.relation} of {wanted.target}")
    return Check(prompt=row["prompt"], category=row.get("tag", ""), include=include, exclude=exclude)


def _wanted(entry: Mapping[str, Any]) -> Wanted:
    relation, target = entry.get("position") or (None, None)
    count, colour = int(entry.get("count", 1)), entry.get("color")
    return Wanted(label=entry["class"], count=count, colour=colour, relation=relation, target=target)


@dataclass(frozen=True, kw_only=True)
class Compositional:
    """Checks and the detector that judges their images."""

    config: CompositionalConfig
    checks: Sequence[Check]
    detector: Detector

    def prompts(self) -> list[Prompt]:
        """One for each check."""
        return [Prompt(text=check.prompt, category=check.category) for check in self.checks]

    def protocols(self, images: Mapping[str, Any]) -> dict[str, Protocol]:
        """The protocol of each number."""
        content = json.dumps([asdict(check) for check in self.checks])
        suite = hashlib.sha256(content.encode()).hexdigest()[:16]
        protocol = compositional_protocol(self.config, images, suite=suite, detector=self.detector.identity)
        categories = dict.fromkeys(check.category for check in self.checks)
        return {COMPOSITIONAL: protocol, **{f"{COMPOSITIONAL}/{category}": protocol for category in categories}}

    def judge(self, files: Sequence[Path], images: Mapping[str, Any], ranks: Ranks) -> dict[str, Number]:
        """The shares of images that show what was asked for; to be called by all ranks.

        Args:
            files: images, those of one check next to one another.
            images: how they were made.
            ranks: this rank among all.

        Returns:
            `compositional/CATEGORY`, and `compositional`, the mean of the categories (as GenEval's); on the first
            rank, nothing on others.
        """
        colours = sorted({one.colour for check in self.checks for one in check.include if one.colour})
        names = list(COLOURS) if self.config.suite == SHAPES else [*COLOUR_NAMES] if colours else []
        own = []
        numbers = range(ranks.rank, len(files), ranks.size)
        for number in tqdm(numbers, desc="compositional", disable=not ranks.is_first, leave=False):
            check = self.checks[number // self.config.images_per_prompt]
            labels = list(dict.fromkeys(one.label for one in (*check.include, *check.exclude)))
            with Image.open(files[number]) as image:
                found = self.detector.find(image.convert("RGB"), labels, names)
            own.append((check.category, is_shown(check, found)))
        by_category: dict[str, list[bool]] = {}
        for category, is_right in (one for part in ranks.gather(own) for one in part):
            by_category.setdefault(category, []).append(is_right)
        if not by_category:
            return {}
        shares = {f"{COMPOSITIONAL}/{category}": sum(right) / len(right) for category, right in by_category.items()}
        values = {COMPOSITIONAL: sum(shares.values()) / len(shares), **shares}
        protocols = self.protocols(images)
        return {name: Number(value=values[name], protocol=protocols[name]) for name in protocols}


def open_compositional(config: CompositionalConfig, device: torch.device) -> Compositional:
    """Read the checks and load the detector.

    Raises:
        ConfigurationError: a file or the detector is missing, or the oracle is to judge what it does not know.
    """
    if config.suite != SHAPES and config.detector is None:
        raise ConfigurationError(
            f"protocol.compositional.suite={config.suite} needs a detector: give protocol.compositional.detector, a "
            "folder with an OWL-ViT or OWLv2 model; the oracle knows the shapes of the demo only"
        )
    checks = shape_checks() if config.suite == SHAPES else read_checks(Path(config.suite).expanduser())
    detector = (
        ShapesOracle() if config.detector is None else ZeroShotDetector(config.detector, config.threshold, device)
    )
    return Compositional(config=config, checks=checks, detector=detector)
