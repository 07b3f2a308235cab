"""Coloured shapes that an image shows, found by image processing, and the object checks of the drawn shapes.

The background is the colour of the border. A pixel belongs to the named colour for which it lies closest to the
straight line from the background to that colour: anti-aliased and blurred edges lie on that line. Connected pixels of
one colour are an object. Its soft outline, moved and scaled to a standard size, is compared with the same outline of
each shape; the agreement (intersection over union) decides, and an outline that agrees with no shape has none.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from PIL import Image
from scipy import ndimage

from demo.scenes import (
    COLOURS,
    POSITIONS,
    SHAPES,
    TRIANGLE_OFFSET,
    Scene,
    Thing,
    caption,
    corner,
    draw,
    prompts,
)
from diffusion.evaluation.object_checks import Check, CheckSuite, Detection, Wanted

SIDE = 64
"""Pixels of the shorter side to which every image is scaled."""
BORDER = 0.04
"""Width of the border whose median is the background, as a fraction of the shorter side."""
MIN_AREA = 0.01
"""Smallest object, as a fraction of the image; the smallest that the data set draws has 0.06."""
MIN_CONTRAST = 40.0
"""Minimum distance in RGB (0 to 255) between an object's middle and the background."""
MIN_COVERAGE = 0.5
"""Share of the object's colour in a pixel from which on it belongs to the object; the rest is background."""
MIN_AGREEMENT = 0.7
"""Minimum intersection over union of an object with a shape."""
MAX_ASPECT = 1.6
"""Maximum aspect ratio of an object with a shape."""
STANDARD_SIDE = 24
STANDARD_SPAN = 2.2
"""Half the side of the window of the standard outline, in standard deviations of the object's area."""

MIDDLE = (0.45, 0.55)
"""Range of the centre of an object in the middle column or row."""

ANY_SHAPE = "shape"
"""Label of an object whose outline agrees with no shape."""

COUNTS = {2: "two", 3: "three", 4: "four"}
"""Counts in prompts of the demo."""

PALETTE = np.array(list(COLOURS.values()), dtype=np.float64)


class ShapesOracle:
    """Detector of the demo's coloured shapes."""

    identity = "shapes oracle 1"

    def find(self, image: Image.Image, labels: Sequence[str] = (), colours: Sequence[str] = ()) -> list[Detection]:
        """Detect shapes with colours, the largest first; labels and colours are ignored.

        Args:
            image: an image of 32 pixels or more on the shorter side, sharp or blurred.
            labels: unused.
            colours: unused.

        Returns:
            Objects without a size; the confidence is the agreement with the shape.
        """
        scale = SIDE / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
        background = _background(pixels)
        coverage, nearest = _coverage(pixels, background)
        objects = []
        for index in range(len(COLOURS)):
            found = (nearest == index) & (coverage[index] >= MIN_COVERAGE)
            labels, num_labels = cast("tuple[Any, int]", ndimage.label(found))
            for label in range(1, num_labels + 1):
                mask = np.equal(labels, label)
                if mask.mean() >= MIN_AREA:
                    objects += _objects(mask, pixels, background)
        return [one for _, one in sorted(objects, key=lambda entry: entry[0], reverse=True)]


def _background(pixels: np.ndarray) -> np.ndarray:
    """Median colour of the image's border."""
    width = max(1, round(BORDER * min(pixels.shape[:2])))
    inner = np.zeros(pixels.shape[:2], dtype=bool)
    inner[width:-width, width:-width] = True
    return np.median(pixels[~inner], axis=0)


def _coverage(pixels: np.ndarray, background: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Explain each pixel as a mixture of the background and one named colour.

    Returns:
        The share of each colour in the mixture, float (colours, H, W), 0 to 1; and the index of the colour that
        explains the pixel best, int (H, W).
    """
    towards = PALETTE - background
    offset = pixels - background
    coverage = np.einsum("kc,hwc->khw", towards, offset) / np.square(towards).sum(1)[:, None, None]
    coverage = coverage.clip(0.0, 1.0)
    residual = np.square(offset - coverage[..., None] * towards[:, None, None]).sum(-1)
    return coverage, residual.argmin(0)


def _objects(mask: np.ndarray, pixels: np.ndarray, background: np.ndarray) -> list[tuple[float, Detection]]:
    """Area and description of a component; an empty list if it does not stand out from the background."""
    contrast = np.linalg.norm(pixels[mask] - background, axis=1)
    # The half that stands out most is free of the soft edge.
    core = pixels[mask][contrast >= np.median(contrast)].mean(0)
    if np.linalg.norm(core - background) < MIN_CONTRAST:
        return []
    colour = list(COLOURS)[np.linalg.norm(PALETTE - core, axis=1).argmin()]
    # Measured against the object's own colour, which need not be the pure named one, the edge is where it appears.
    towards = core - background
    own = ((pixels - background) @ towards / np.square(towards).sum()).clip(0.0, 1.0)
    soft = np.where(ndimage.binary_dilation(mask, np.ones((5, 5))), own, 0.0)
    outline, (y, x), spreads = _standard(soft)
    agreements = {
        shape: float(np.minimum(outline, other).sum() / np.maximum(outline, other).sum())
        for shape, other in _standard_outlines().items()
    }
    shape = max(agreements, key=agreements.__getitem__)
    has_shape = agreements[shape] >= MIN_AGREEMENT and max(spreads) / min(spreads) <= MAX_ASPECT
    found = Detection(
        label=shape if has_shape else ANY_SHAPE,
        colour=colour,
        x=x / mask.shape[1],
        y=y / mask.shape[0],
        confidence=agreements[shape],
    )
    return [(float(soft.mean()), found)]


def _standard(soft: np.ndarray) -> tuple[np.ndarray, list[float], list[float]]:
    """Move and scale a soft outline so that its area has mean 0 and standard deviation 1 on both axes.

    Returns:
        The outline sampled on STANDARD_SIDE x STANDARD_SIDE points; its centre (y, x), and its standard deviations
        (y, x), in pixels.
    """
    steps = np.linspace(-STANDARD_SPAN, STANDARD_SPAN, STANDARD_SIDE)
    centre, spreads, samples = [], [], []
    for axis in (0, 1):
        positions = np.arange(soft.shape[axis]) + 0.5
        shares = soft.sum(1 - axis) / soft.sum()
        centre.append(float(positions @ shares))
        spreads.append(max(float(np.sqrt(np.square(positions - centre[axis]) @ shares)), 0.5))
        samples.append(centre[axis] + spreads[axis] * steps - 0.5)
    # Beyond the image the outline is 0.
    outline = ndimage.map_coordinates(soft, np.meshgrid(*samples, indexing="ij"), order=1, mode="grid-constant")
    return outline, centre, spreads


@functools.cache
def _standard_outlines() -> dict[str, np.ndarray]:
    outlines = {}
    for shape in SHAPES:
        thing = Thing(colour="red", shape=shape, size="medium", x=0.5, y=0.5, radius=0.25)
        image = draw(Scene(things=(thing,), background="black"), SIDE, transparent=True)
        outlines[shape] = _standard(np.asarray(image.getchannel("A"), dtype=np.float64) / 255)[0]
    return outlines


@dataclass(frozen=True, kw_only=True)
class Score:
    """Agreement of an image with the scene of its caption."""

    colour: bool
    """Every object has its colour."""

    shape: bool
    """Every object has its shape."""

    count: bool
    """The image has as many objects as the scene."""

    relation: bool | None = None
    """Colours, shapes and relation are right; None unless the scene has two objects."""

    position: float | None = None
    """Share of the objects with their position, colour and shape; None if the caption has no positions."""


def score(image: Image.Image, scene: Scene) -> Score:
    """Compare an image with a scene.

    One object and two are compared with the largest in the image, in the order that gives the most matches; the objects
    of a group with the largest in their corners.
    """
    found = ShapesOracle().find(image)
    if len(scene.things) > 2:
        return _score_group(found, scene)
    has_count = len(found) == len(scene.things)
    is_positioned = scene.position is not None
    if len(found) < len(scene.things):
        missed = None if scene.relation is None else False
        return Score(colour=False, shape=False, count=False, relation=missed, position=0.0 if is_positioned else None)

    def compared(objects: Sequence[Detection]) -> Score:
        colour = all(one.colour == thing.colour for one, thing in zip(objects, scene.things, strict=True))
        shape = all(one.label == thing.shape for one, thing in zip(objects, scene.things, strict=True))
        relation = position = None
        if scene.relation is not None:
            relation = colour and shape and _relation(objects[0], objects[1]) == scene.relation
        if scene.position is not None:
            position = float(colour and shape and _thirds(objects[0], scene.things[0]) == POSITIONS[scene.position])
        return Score(colour=colour, shape=shape, count=has_count, relation=relation, position=position)

    scores = map(compared, itertools.permutations(found[: len(scene.things)]))
    return max(scores, key=lambda one: (bool(one.relation), one.colour + one.shape))


def _score_group(found: Sequence[Detection], scene: Scene) -> Score:
    """Compare a group with the largest object in each corner."""
    largest = {corner(one.x, one.y): one for one in reversed(found)}
    pairs = [(thing, largest.get(corner(thing.x, thing.y))) for thing in scene.things]
    colours = [one is not None and one.colour == thing.colour for thing, one in pairs]
    shapes = [one is not None and one.label == thing.shape for thing, one in pairs]
    right = sum(colour and shape for colour, shape in zip(colours, shapes, strict=True))
    return Score(colour=all(colours), shape=all(shapes), count=len(found) == len(pairs), position=right / len(pairs))


def _thirds(one: Detection, thing: Thing) -> tuple[int, int]:
    """Column and row of an object that is detected where a thing was asked for."""
    # The centroid of a triangle is below the centre of its bounding box.
    y = one.y - (TRIANGLE_OFFSET * thing.radius if thing.shape == "triangle" else 0.0)
    column, row = (0 if centre < MIDDLE[0] else 2 if centre > MIDDLE[1] else 1 for centre in (one.x, y))
    return column, row


def _relation(first: Detection, second: Detection) -> str:
    """Main direction from the second object to the first."""
    right, down = first.x - second.x, first.y - second.y
    if abs(right) > abs(down):
        return "left of" if right < 0 else "right of"
    return "above" if down < 0 else "below"


def shapes() -> CheckSuite:
    """Checks of the demo and their oracle, as `protocol.compositional.suite` takes them."""
    return CheckSuite(checks=shape_checks(), colours=tuple(COLOURS), detector=ShapesOracle(), any_object=True)


def shape_checks() -> list[Check]:
    """Checks of the demo: pairs of colour and shape, relations of two objects, and counts of each shape."""
    single, pairs = prompts()
    colours = itertools.cycle(COLOURS)
    checks = [
        Check(
            prompt=caption(scene),
            category="colour and shape",
            include=(Wanted(label=scene.things[0].shape, colour=scene.things[0].colour),),
        )
        for scene in single
    ]
    for scene in pairs:
        first, second = scene.things
        target = Wanted(label=second.shape, colour=second.colour)
        wanted = Wanted(label=first.shape, colour=first.colour, relation=scene.relation, target=0)
        checks.append(Check(prompt=caption(scene), category="relation", include=(target, wanted)))
    for (num, word), shape in itertools.product(COUNTS.items(), SHAPES):
        colour = next(colours)
        checks.append(
            Check(
                prompt=f"{word} {colour} {shape}s on a gray background",
                category="count",
                include=(Wanted(label=shape, count=num, colour=colour),),
                exclude=(Wanted(label=shape, count=num + 1),),
            )
        )
    return checks
