"""Automatic checks of colours, counts and spatial relations of generated objects, by an object detector.

The checks are those of GenEval (Ghosh et al. 2023, section 3), whose prompt files are read: required classes, each with
a minimum count, a colour and a position relative to another class, and upper limits of counts. The detector is a
zero-shot detector of transformers, or that of a plug-in, which has its own checks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError, error_context
from diffusion.evaluation.config import CompositionalConfig
from diffusion.evaluation.prompts import Prompt
from diffusion.evaluation.protocol import Protocol as NumberProtocol
from diffusion.evaluation.protocol import content_hash
from diffusion.evaluation.suites import Suite, read_json_items
from diffusion.models.model_folders import load_pretrained
from diffusion.models.pretrained import freeze, module_identity
from diffusion.plugins import build_plugin

MAX_OVERLAP = 0.5
"""Boxes of one label with a greater intersection over union are one object."""

MIN_DISTANCE, MIN_LENGTH = 0.1, 1e-3
"""Ignored part of an offset as a fraction of the sum of both sides, and minimum length of the rest (GenEval)."""

COLOUR_NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""Colours of GenEval."""

RELATIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Detected object; centre and size are fractions of the image's sides, from the top left."""

    label: str
    colour: str | None
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    confidence: float = 1.0


class Detector(Protocol):
    """Object detector."""

    identity: str
    """Name and hash, for the protocol."""

    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Detect objects of the labels and the best of the colours for each; by descending confidence."""
        ...


class ZeroShotDetector:
    """OWL-ViT (Minderer et al. 2022) or OWLv2: boxes for any label.

    The boxes do not depend on the labels. The colour of an object is that of the query ("a red apple") with the highest
    score of its box.

    Raises:
        ConfigurationError: the folder has no such model in the layout of transformers.
    """

    def __init__(self, folder: str, threshold: float, device: torch.device) -> None:
        from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

        options: dict[str, Any] = {
            "local_files_only": True,
            "remedy": "Give a folder with config.json, model.safetensors, tokenizer files and preprocessor_config.json "
            "of an OWL-ViT or OWLv2 model",
        }
        with error_context(f"protocol.compositional.detector={folder}"):
            self._processor: Any = load_pretrained(AutoProcessor, folder, **options)
            model: Any = load_pretrained(AutoModelForZeroShotObjectDetection, folder, **options)
        self._model = freeze(model).to(device)
        self._device, self.threshold = device, threshold
        self._pads_to_square = model.config.model_type == "owlv2"  # On the right and below.
        self.identity = f"{model.config.model_type} {module_identity(model)}"

    @torch.no_grad()
    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Detect objects of the labels, with non-maximum suppression for each label."""
        queries = [[f"a photo of a {label}" for label in labels]]
        queries += [[f"a photo of a {colour} {label}" for colour in colours] for label in labels] if colours else []
        flat = [query for group in queries for query in group]
        inputs = self._processor(text=[flat], images=image, return_tensors="pt").to(self._device)
        outputs = self._model(**inputs)
        scores, boxes = outputs.logits[0].sigmoid().cpu(), outputs.pred_boxes[0].cpu()
        if self._pads_to_square:
            boxes = boxes * max(image.size) / torch.tensor([*image.size, *image.size])
        of_labels, of_colours = scores[:, : len(labels)], scores[:, len(labels) :]
        found = []
        for number, label in enumerate(labels):
            for box in _suppressed(boxes, of_labels[:, number], self.threshold):
                near = of_colours[box, number * len(colours) : (number + 1) * len(colours)]
                colour = colours[int(near.argmax())] if colours else None
                x, y, width, height = boxes[box].tolist()
                confidence = float(of_labels[box, number])
                found.append(
                    Detection(label=label, colour=colour, confidence=confidence, x=x, y=y, width=width, height=height)
                )
        return sorted(found, key=lambda one: one.confidence, reverse=True)


def _suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Numbers of the boxes above the threshold after non-maximum suppression."""
    from torchvision.ops import nms

    chosen = (scores >= threshold).nonzero()[:, 0]
    centre, half = boxes[chosen, :2], boxes[chosen, 2:] / 2
    corners = torch.cat([centre - half, centre + half], dim=1)
    return chosen[nms(corners, scores[chosen], MAX_OVERLAP)].tolist()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Required objects of one class."""

    label: str
    count: int = 1
    """Minimum count."""

    colour: str | None = None
    relation: str | None = None
    """One of RELATIONS: position relative to the objects of `target`."""

    target: int | None = None
    """Number of another entry of the check."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A prompt and the objects that its images must show."""

    prompt: str
    category: str
    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...] = ()
    """Classes with fewer than `count` objects."""


@dataclass(frozen=True, kw_only=True)
class CheckSuite:
    """Checks of a file or plug-in."""

    checks: Sequence[Check]
    colours: Sequence[str]
    """Colours that a detector chooses from."""

    detector: Detector | None = None
    """Detector without `protocol.compositional.detector`."""

    any_object: bool = False
    """An object passes whatever the others of its class are; otherwise, as in GenEval, the most confident ones must."""


def is_shown(check: Check, found: Sequence[Detection], *, any_object: bool = False) -> bool:
    """Return whether detected objects, by descending confidence, pass a check (`CheckSuite.any_object`)."""
    taken: list[list[Detection]] = []
    for wanted in check.include:
        same = [one for one in found if one.label == wanted.label]
        same = same if any_object else same[: wanted.count]
        fitting = [one for one in same if wanted.colour is None or one.colour == wanted.colour]
        if wanted.relation is not None and wanted.target is not None:
            targets = taken[wanted.target]
            suffices = any if any_object else all
            fitting = [one for one in fitting if suffices(wanted.relation in relations(one, to) for to in targets)]
        if len(fitting) < wanted.count:
            return False
        taken.append(fitting)
    return all(sum(one.label == limit.label for one in found) < limit.count for limit in check.exclude)


def relations(first: Detection, second: Detection) -> set[str]:
    """Position of the first object relative to the second: one relation, or two on a diagonal (as in GenEval).

    Centres and sizes are in units of the height of the image.
    """
    offset = first.x - second.x, first.y - second.y
    apart = (
        _beyond(offset[0], MIN_DISTANCE * (first.width + second.width)),
        _beyond(offset[1], MIN_DISTANCE * (first.height + second.height)),
    )
    if math.hypot(*apart) < MIN_LENGTH:
        return set()
    length = math.hypot(*offset)
    right, down = apart[0] / length, apart[1] / length
    found = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, is_so in found.items() if is_so}


def _beyond(offset: float, margin: float) -> float:
    """Part of an offset beyond a margin, with its sign."""
    return math.copysign(max(abs(offset) - margin, 0.0), offset)


def read_checks(path: Path) -> list[Check]:
    """Read a file of GenEval: one JSON object a line with `prompt`, `tag`, `include` and `exclude`."""
    return read_json_items(path, "protocol.compositional.suite", _check, "GenEval")


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
class ObjectChecks(Suite[Check]):
    """Checks and their detector."""

    name, unit = "compositional", 1.0
    config: CompositionalConfig
    detector: Detector
    colours: Sequence[str]
    any_object: bool

    @classmethod
    def open(cls, config: CompositionalConfig, device: torch.device) -> "ObjectChecks":
        """Read the checks and load the detector; a ConfigurationError if one is missing."""
        key = "protocol.compositional.suite"
        if config.suite == "shapes":
            raise ConfigurationError(f"{key}=shapes: these checks moved to the demo, write demo.shape_checks.shapes")
        file = Path(config.suite).expanduser()
        if file.is_file() or file.suffix == ".jsonl":
            suite = CheckSuite(checks=read_checks(file), colours=COLOUR_NAMES)
        else:
            suite = build_plugin(Plugin(path=config.suite), key, CheckSuite)
        detector = suite.detector
        if config.detector is not None:
            detector = ZeroShotDetector(config.detector, config.threshold, device)
        if detector is None:
            raise ConfigurationError(
                f"{key}={config.suite} needs a detector: give protocol.compositional.detector, a folder with an "
                "OWL-ViT or OWLv2 model"
            )
        return cls(
            items=suite.checks,
            images_per_prompt=config.images_per_prompt,
            config=config,
            detector=detector,
            colours=suite.colours,
            any_object=suite.any_object,
        )

    def prompts(self) -> list[Prompt]:
        """Prompts of the checks."""
        return [Prompt(text=check.prompt, category=check.category) for check in self.items]

    def record(self) -> NumberProtocol:
        """Checks and detector."""
        return {
            "estimator": "share of images that show what was asked for, "
            + ("by any of their objects" if self.any_object else "by the rules of GenEval"),
            "suite": content_hash([asdict(check) for check in self.items]),
            "detector": self.detector.identity,
            "threshold": self.config.threshold if self.config.detector else None,
        }

    def judgement_record(self, images: Mapping[str, Any]) -> NumberProtocol:
        """Earlier versions compared fractions of both sides, which differs where these do."""
        is_square = images.get("height") == images.get("width")
        return super().judgement_record(images) | ({} if is_square else {"positions": "in pixels"})

    def names(self) -> list[str]:
        """`compositional`, and `compositional/CATEGORY`."""
        found = dict.fromkeys(check.category for check in self.items)
        return [self.name, *(f"{self.name}/{category}" for category in found)]

    def judge(self, item: Check, image: Image.Image) -> bool:
        """Return whether an image passes its check."""
        names = self.colours if any(one.colour for check in self.items for one in check.include) else []
        labels = list(dict.fromkeys(one.label for one in (*item.include, *item.exclude)))
        aspect = image.width / image.height  # In units of the height, relations compare lengths.
        found = [
            replace(one, x=one.x * aspect, width=one.width * aspect) for one in self.detector.find(image, labels, names)
        ]
        return is_shown(item, found, any_object=self.any_object)

    def scores(self, item: Check, judgement: bool) -> Iterable[tuple[str, float]]:
        """The check by its category."""
        yield f"{self.name}/{item.category}", judgement

    def values(self, judged: Sequence[tuple[Check, bool]]) -> dict[str, float]:
        """Shares of images that pass their checks, by category, and the mean of the categories (as in GenEval)."""
        shares = super().values(judged)
        return {self.name: fmean(shares.values()), **shares}
