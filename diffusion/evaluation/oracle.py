"""Coloured shapes that an image shows, found by image processing, without a trained model.

The background is the colour of the border. A pixel belongs to the named colour for which it lies closest to the
straight line from the background to that colour: anti-aliased and blurred edges lie on that line. Connected pixels of
one colour are an object. Its soft outline, moved and scaled to a standard size, is compared with the same outline of
each shape; the agreement (intersection over union) decides, and an outline that agrees with no shape has none.
"""

import dataclasses
import functools

import numpy as np
from PIL import Image
from scipy import ndimage

from diffusion.evaluation.shapes import COLOURS, SHAPES, Scene, Thing, draw

SIDE = 64
"""Pixels of the shorter side to which every image is scaled."""
BORDER = 0.04
"""Width of the border whose median is the background, as a fraction of the shorter side."""
MIN_AREA = 0.01
"""Smallest object, as a fraction of the image; the smallest that the data set draws has 0.06."""
MIN_CONTRAST = 40.0
"""Least distance in RGB (0 to 255) between an object's middle and the background."""
MIN_COVERAGE = 0.5
"""Where on the line from the background (0) to the object's colour (1) an object begins."""
MIN_AGREEMENT = 0.7
"""Least intersection over union of an object with a shape."""
MAX_ASPECT = 1.6
"""Most that an object may be stretched and still have a shape."""
STANDARD_SIDE = 24
STANDARD_SPAN = 2.2
"""Half the side of the window of the standard outline, in standard deviations of the object's area."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """An object that an image shows.

    Attributes:
        colour: A key of COLOURS.
        shape: One of SHAPES, or None where the outline agrees with none of them.
        x: Horizontal centre of the object's area, 0 (left) to 1 (right).
        y: Vertical centre of the object's area, 0 (top) to 1 (bottom).
        area: Fraction of the image that the object covers.
        agreement: Intersection over union of the outline with the most similar shape's, 0 to 1.
    """

    colour: str
    shape: str | None
    x: float
    y: float
    area: float
    agreement: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Whether an image shows the scene of its caption.

    Attributes:
        colour: Every object has its colour.
        shape: Every object has its shape.
        relation: Both objects are there, with their colours and shapes, and lie as the relation says. None for a scene
            of one object.
    """

    colour: bool
    shape: bool
    relation: bool | None


def describe(image: Image.Image) -> list[Found]:
    """Return the objects in an image, the largest first.

    Args:
        image: An image of 32 pixels or more on the shorter side, sharp or blurred.
    """
    scale = SIDE / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
    background = _background(pixels)
    coverage, nearest = _coverage(pixels, background)
    objects = []
    for index in range(len(COLOURS)):
        labels, num_labels = ndimage.label(  # pyright: ignore[reportGeneralTypeIssues]
            (nearest == index) & (coverage[index] >= MIN_COVERAGE)
        )
        for label in range(1, num_labels + 1):
            mask = labels == label
            if mask.mean() >= MIN_AREA:
                found = _found(mask, pixels, background)
                if found is not None:
                    objects.append(found)
    return sorted(objects, key=lambda found: found.area, reverse=True)


def score(image: Image.Image, scene: Scene) -> Score:
    """Compare an image with the scene of its caption.

    A scene of one object is compared with the image's largest object, a scene of two with the two largest, in the order
    that gives the most matches.
    """
    largest, next_largest = [*describe(image), None, None][:2]
    if scene.relation is None:
        thing = scene.things[0]
        return Score(colour=_has_colour(largest, thing), shape=_has_shape(largest, thing), relation=None)
    pairs = ((largest, next_largest), (next_largest, largest))
    return max(
        (_score_pair(first, second, scene) for first, second in pairs),
        key=lambda pair: (bool(pair.relation), pair.colour + pair.shape),
    )


def _score_pair(first: Found | None, second: Found | None, scene: Scene) -> Score:
    """Score two objects taken in the order of the scene's."""
    colour = _has_colour(first, scene.things[0]) and _has_colour(second, scene.things[1])
    shape = _has_shape(first, scene.things[0]) and _has_shape(second, scene.things[1])
    related = first is not None and second is not None and _related(first, second) == scene.relation
    return Score(colour=colour, shape=shape, relation=colour and shape and related)


def _related(first: Found, second: Found) -> str:
    """Return where the first object lies as seen from the second."""
    right, down = first.x - second.x, first.y - second.y
    if abs(right) > abs(down):
        return "left of" if right < 0 else "right of"
    return "above" if down < 0 else "below"


def _has_colour(found: Found | None, thing: Thing) -> bool:
    return found is not None and found.colour == thing.colour


def _has_shape(found: Found | None, thing: Thing) -> bool:
    return found is not None and found.shape == thing.shape


def _background(pixels: np.ndarray) -> np.ndarray:
    """Return the median colour of the image's border."""
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
    towards = np.array(list(COLOURS.values()), dtype=np.float64) - background
    offset = pixels - background
    coverage = np.einsum("kc,hwc->khw", towards, offset) / np.square(towards).sum(1)[:, None, None]
    coverage = coverage.clip(0.0, 1.0)
    residual = np.square(offset - coverage[..., None] * towards[:, None, None]).sum(-1)
    return coverage, residual.argmin(0)


def _found(mask: np.ndarray, pixels: np.ndarray, background: np.ndarray) -> Found | None:
    """Name the colour and the shape of one component, or return None if it does not stand out from the background."""
    offset = pixels[mask] - background
    contrast = np.linalg.norm(offset, axis=1)
    # The half that stands out most is free of the soft edge.
    core = pixels[mask][contrast >= np.median(contrast)].mean(0)
    if np.linalg.norm(core - background) < MIN_CONTRAST:
        return None
    names = list(COLOURS)
    colour = names[int(np.linalg.norm(np.array(list(COLOURS.values())) - core, axis=1).argmin())]
    # Measured against the object's own colour, which need not be the pure named one, the edge is where it appears.
    towards = core - background
    own = ((pixels - background) @ towards / np.square(towards).sum()).clip(0.0, 1.0)
    around = ndimage.binary_dilation(mask, np.ones((5, 5)))
    soft = np.where(around, own, 0.0)
    shape, agreement, x, y = _shape(soft)
    height, width = mask.shape
    return Found(colour=colour, shape=shape, x=x / width, y=y / height, area=float(soft.mean()), agreement=agreement)


def _shape(soft: np.ndarray) -> tuple[str | None, float, float, float]:
    """Return the shape's name or None, its agreement, and the centre in pixels of a soft outline."""
    standard, (x, y), (spread_x, spread_y) = _standard(soft)
    agreements = {
        shape: float(np.minimum(standard, outline).sum() / np.maximum(standard, outline).sum())
        for shape, outline in _outlines().items()
    }
    shape = max(agreements, key=agreements.__getitem__)
    aspect = max(spread_x, spread_y) / min(spread_x, spread_y)
    named = agreements[shape] >= MIN_AGREEMENT and aspect <= MAX_ASPECT
    return (shape if named else None), agreements[shape], x, y


def _standard(soft: np.ndarray) -> tuple[np.ndarray, tuple[float, float], tuple[float, float]]:
    """Move and scale a soft outline so that its area has mean 0 and standard deviation 1 on both axes.

    Returns:
        The outline sampled on STANDARD_SIDE x STANDARD_SIDE points; its centre (x, y), and its standard deviations
        (x, y), in pixels.
    """
    height, width = soft.shape
    down, right = np.arange(height) + 0.5, np.arange(width) + 0.5
    row_shares, column_shares = soft.sum(1) / soft.sum(), soft.sum(0) / soft.sum()
    y, x = float(down @ row_shares), float(right @ column_shares)
    spread_y = max(float(np.sqrt(np.square(down - y) @ row_shares)), 0.5)
    spread_x = max(float(np.sqrt(np.square(right - x) @ column_shares)), 0.5)
    steps = np.linspace(-STANDARD_SPAN, STANDARD_SPAN, STANDARD_SIDE)
    rows = _linear_weights(y + spread_y * steps, height)
    columns = _linear_weights(x + spread_x * steps, width)
    return rows @ soft @ columns.T, (x, y), (spread_x, spread_y)


def _linear_weights(at: np.ndarray, num: int) -> np.ndarray:
    """Return weights (S, num) that read `num` pixels at positions by linear interpolation; zero outside."""
    return np.maximum(0.0, 1.0 - np.abs(at[:, None] - (np.arange(num) + 0.5)))


@functools.cache
def _outlines() -> dict[str, np.ndarray]:
    """Return the standard outline of each shape."""
    outlines = {}
    for shape in SHAPES:
        thing = Thing(colour="red", shape=shape, size="medium", x=0.5, y=0.5, radius=0.25)
        image = draw(Scene(things=(thing,), background="black"), SIDE, transparent=True)
        outlines[shape] = _standard(np.asarray(image.getchannel("A"), dtype=np.float64) / 255)[0]
    return outlines
