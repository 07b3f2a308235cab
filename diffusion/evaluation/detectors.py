"""What finds objects in images: the oracle of the demo's shapes, or a zero-shot detector of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from demo.oracle import describe
from diffusion.errors import ConfigurationError
from diffusion.models.pretrained import freeze, module_identity

ANY_SHAPE = "shape"
"""Label of the oracle for an object of any outline."""

MAX_OVERLAP = 0.5
"""Boxes of one label with a greater intersection over union are one object."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """An object in an image; lengths are fractions of the image's sides, from the top left."""

    label: str
    colour: str | None
    x: float
    """Horizontal centre."""

    y: float
    """Vertical centre."""

    width: float = 0.0
    height: float = 0.0
    confidence: float = 1.0


class Detector(Protocol):
    """Finds objects in images."""

    identity: str
    """Name and hash, for the protocol."""

    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Objects of some labels, and which of some colours each has; the most confident first."""
        ...


class ShapesOracle:
    """The oracle of the demo: coloured shapes, found by image processing alone."""

    identity = "shapes oracle 1"

    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Shapes with their colours, the largest first; an outline that is none of the shapes has the label `shape`."""
        return [
            Detection(label=found.shape or ANY_SHAPE, colour=found.colour, x=found.x, y=found.y)
            for found in describe(image)
        ]


class ZeroShotDetector:
    """OWL-ViT (Minderer et al. 2022) or OWLv2: boxes for any label.

    Its boxes do not depend on the labels, so the colour of an object is the one whose query ("a red apple") its box
    answers to best.

    Args:
        folder: config.json, safetensors, tokenizer and preprocessor of transformers.
        threshold: least confidence.
        device: where it runs.

    Raises:
        ConfigurationError: the folder holds no such model.
    """

    def __init__(self, folder: str, threshold: float, device: torch.device) -> None:
        from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

        place = Path(folder).expanduser()
        try:
            options: dict[str, Any] = {"local_files_only": True}
            self._processor: Any = AutoProcessor.from_pretrained(place, **options)
            model: Any = AutoModelForZeroShotObjectDetection.from_pretrained(place, use_safetensors=True, **options)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigurationError(
                f"protocol.compositional.detector={folder}: {reason} Give a folder with config.json, "
                "model.safetensors, tokenizer files and preprocessor_config.json of an OWL-ViT or OWLv2 model"
            ) from error
        self._model = freeze(model).to(device)
        self._device, self.threshold = device, threshold
        self._sees_squares = model.config.model_type == "owlv2"  # Padded on the right and below.
        self.identity = f"{model.config.model_type} {module_identity(model)}"

    @torch.no_grad()
    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Objects of the labels, overlapping boxes of one label taken once."""
        queries = [[f"a photo of a {label}" for label in labels]]
        queries += [[f"a photo of a {colour} {label}" for colour in colours] for label in labels] if colours else []
        flat = [query for group in queries for query in group]
        inputs = self._processor(text=[flat], images=image, return_tensors="pt").to(self._device)
        outputs = self._model(**inputs)
        scores, boxes = outputs.logits[0].sigmoid().cpu(), outputs.pred_boxes[0].cpu()
        if self._sees_squares:
            boxes = boxes * max(image.size) / torch.tensor([*image.size, *image.size])
        of_labels, of_colours = scores[:, : len(labels)], scores[:, len(labels) :]
        found = []
        for number, label in enumerate(labels):
            for box in _apart(boxes, of_labels[:, number], self.threshold):
                near = of_colours[box, number * len(colours) : (number + 1) * len(colours)]
                colour = colours[int(near.argmax())] if colours else None
                x, y, width, height = boxes[box].tolist()
                confidence = float(of_labels[box, number])
                place = {"x": x, "y": y, "width": width, "height": height}
                found.append(Detection(label=label, colour=colour, confidence=confidence, **place))
        return sorted(found, key=lambda one: one.confidence, reverse=True)


def _apart(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Numbers of the boxes above the threshold, without those that overlap a more confident one."""
    from torchvision.ops import nms

    chosen = (scores >= threshold).nonzero()[:, 0]
    centre, half = boxes[chosen, :2], boxes[chosen, 2:] / 2
    corners = torch.cat([centre - half, centre + half], dim=1)
    return chosen[nms(corners, scores[chosen], MAX_OVERLAP)].tolist()
