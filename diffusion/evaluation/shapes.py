"""Scenes of coloured shapes with captions, drawn from a seed: the demo's data, and prompts of compositional checks.

A scene is one object, or two objects with a relation. All coordinates are fractions of the image's centred square, so
that a centre crop to a square loses no object. An object without a size word in its caption is of medium size.
"""

import dataclasses
import math
import random
from collections.abc import Iterable

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 90, 230),
    "yellow": (240, 210, 50),
    "purple": (150, 60, 190),
    "cyan": (60, 210, 225),
}
BACKGROUNDS = {"black": (15, 15, 15), "gray": (128, 128, 128), "white": (255, 255, 255), "navy": (20, 30, 80)}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = {"small": (0.15, 0.19), "medium": (0.26, 0.30), "large": (0.34, 0.375)}
"""Radius of the circle of each size, lowest and highest; the other shapes of that size are about as wide and high."""
RELATIONS = ("left of", "right of", "above", "below")
POSITIONS = {
    "in the top left": (0, 0),
    "at the top": (1, 0),
    "in the top right": (2, 0),
    "on the left": (0, 1),
    "in the center": (1, 1),
    "on the right": (2, 1),
    "in the bottom left": (0, 2),
    "at the bottom": (1, 2),
    "in the bottom right": (2, 2),
}
"""Column and row, in thirds of the image, that each phrase names."""
PHRASINGS = (
    "{things} on a {background} background",
    "an image of {things} on a {background} background",
    "{things}, {background} background",
)
RELATION_SHARE = 0.2
"""Share of the scenes that have two objects."""
CENTER = "in the center"
OFF_CENTER_SHARE = 0.35
"""Share of the small and medium single objects that lie elsewhere; their captions say so."""
SUPERSAMPLING = 4
MARGIN = 0.03
"""Least distance from an object to the border."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """One coloured shape.

    Attributes:
        colour: A key of COLOURS.
        shape: One of SHAPES.
        size: A key of SIZES.
        x: Horizontal centre, 0 (left) to 1 (right) of the centred square.
        y: Vertical centre, 0 (top) to 1 (bottom) of the centred square.
        radius: Radius of the circle that is about as wide and high, as a fraction of the square's side.
    """

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What an image shows and how its caption says it.

    Attributes:
        things: One object, or two.
        background: A key of BACKGROUNDS.
        relation: One of RELATIONS: where the first object lies as seen from the second. None for one object.
        position: A key of POSITIONS if the caption says where the one object lies, otherwise None.
        phrasing: Index into PHRASINGS.
    """

    things: tuple[Thing, ...]
    background: str
    relation: str | None = None
    position: str | None = None
    phrasing: int = 0


def caption(scene: Scene) -> str:
    """Return the scene's caption, such as "a large blue star in the top left on a gray background"."""
    first = scene.things[0]
    if scene.relation is not None:
        second = scene.things[1]
        things = f"a {first.colour} {first.shape} {scene.relation} a {second.colour} {second.shape}"
    else:
        size = "" if first.size == "medium" else f"{first.size} "
        position = "" if scene.position is None else f" {scene.position}"
        things = f"a {size}{first.colour} {first.shape}{position}"
    return PHRASINGS[scene.phrasing].format(things=things, background=scene.background)


def outline(thing: Thing) -> list[tuple[float, float]]:
    """Return the object's corners in the units of the square; for a circle, the two corners of its bounding box."""
    x, y, radius = thing.x, thing.y, thing.radius
    if thing.shape == "circle":
        return [(x - radius, y - radius), (x + radius, y + radius)]
    if thing.shape == "square":
        half = 0.88 * radius
        return [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
    if thing.shape == "triangle":
        arm = 1.25 * radius
        y += arm / 4  # the bounding box, not the centroid, is centred on y
        return [(x + arm * math.sin(turn), y - arm * math.cos(turn)) for turn in (0, 2 * math.pi / 3, -2 * math.pi / 3)]
    arms = [1.25 * radius if corner % 2 == 0 else 0.55 * radius for corner in range(10)]
    turns = [math.pi * corner / 5 for corner in range(10)]
    return [(x + arm * math.sin(turn), y - arm * math.cos(turn)) for arm, turn in zip(arms, turns, strict=True)]


def draw(scene: Scene, size: int | tuple[int, int], *, transparent: bool = False) -> Image.Image:
    """Draw a scene with anti-aliased edges.

    Args:
        scene: What to draw.
        size: Width and height in pixels, or one number for a square.
        transparent: Leave the background transparent (and black underneath) in place of filling it.

    Returns:
        An RGB image, or an RGBA image if `transparent`.
    """
    width, height = (size, size) if isinstance(size, int) else size
    side = min(width, height) * SUPERSAMPLING
    left, top = (width * SUPERSAMPLING - side) / 2, (height * SUPERSAMPLING - side) / 2
    canvas = (width * SUPERSAMPLING, height * SUPERSAMPLING)
    if transparent:
        image = Image.new("RGBA", canvas, (0, 0, 0, 0))
    else:
        image = Image.new("RGB", canvas, BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        corners = [(left + x * side, top + y * side) for x, y in outline(thing)]
        if thing.shape == "circle":
            pen.ellipse(corners, fill=COLOURS[thing.colour])
        else:
            pen.polygon(corners, fill=COLOURS[thing.colour])
    return image.reduce(SUPERSAMPLING)


def scenes(num: int, seed: int = 17, *, split: str = "train", relation_share: float = RELATION_SHARE) -> list[Scene]:
    """Return `num` random scenes; the same arguments give the same scenes, and splits are independent of each other."""
    rng = random.Random(f"{split} {seed}")
    return [_two_things(rng) if rng.random() < relation_share else _one_thing(rng) for _ in range(num)]


def prompts(*, background: str = "gray") -> tuple[list[Scene], list[Scene]]:
    """Return the scenes whose captions the evaluation asks a model to draw.

    Args:
        background: The background of all of them.

    Returns:
        One scene for each pair of colour and shape, and two for each relation and each shape of the first object. Only
        what the captions say counts: centres and radii are typical values.
    """
    low, high = SIZES["medium"]
    single = [
        Scene(
            things=(Thing(colour=colour, shape=shape, size="medium", x=0.5, y=0.5, radius=(low + high) / 2),),
            background=background,
        )
        for colour in COLOURS
        for shape in SHAPES
    ]
    rng = random.Random("relation prompts")
    double = []
    for relation in RELATIONS:
        for shape in SHAPES * 2:
            scene = _two_things(rng)
            things = (dataclasses.replace(scene.things[0], shape=shape), scene.things[1])
            double.append(_placed(things, relation, background))
    return single, double


def _one_thing(rng: random.Random) -> Scene:
    """Return a random scene with one object."""
    size = rng.choices(tuple(SIZES), (1, 2, 1))[0]
    radius = rng.uniform(*SIZES[size])
    # A caption that does not say where means the center; a large object fills the image, so that it is there too.
    off_center = size != "large" and rng.random() < OFF_CENTER_SHARE
    position = rng.choice([p for p in POSITIONS if p != CENTER]) if off_center else CENTER
    x, y = (_coordinate(third, radius, rng) for third in POSITIONS[position])
    thing = Thing(colour=_choose(COLOURS, rng), shape=_choose(SHAPES, rng), size=size, x=x, y=y, radius=radius)
    return Scene(
        things=(thing,),
        background=_choose(BACKGROUNDS, rng),
        position=position if off_center or rng.random() < 0.1 else None,
        phrasing=rng.choices((0, 1, 2), (4, 1, 1))[0],
    )


def _two_things(rng: random.Random) -> Scene:
    """Return a random scene with two objects of different colours."""
    things = tuple(
        Thing(
            colour=colour, shape=_choose(SHAPES, rng), size="small", x=0.5, y=0.5, radius=rng.uniform(*SIZES["small"])
        )
        for colour in rng.sample(tuple(COLOURS), 2)
    )
    along, across = (0.27 + rng.uniform(-0.02, 0.02), 0.73 + rng.uniform(-0.02, 0.02)), 0.5 + rng.uniform(-0.1, 0.1)
    relation, background = rng.choice(RELATIONS), _choose(BACKGROUNDS, rng)
    phrasing = rng.choices((0, 1, 2), (4, 1, 1))[0]
    return _placed(things, relation, background, along=along, across=across, phrasing=phrasing)


def _placed(
    things: Iterable[Thing],
    relation: str,
    background: str,
    *,
    along: tuple[float, float] = (0.27, 0.73),
    across: float = 0.5,
    phrasing: int = 0,
) -> Scene:
    """Return the scene in which two objects are where the relation says.

    Args:
        things: The two objects; their centres are replaced.
        relation: One of RELATIONS.
        background: A key of BACKGROUNDS.
        along: The lower and the higher coordinate on the relation's axis.
        across: The coordinate of both on the other axis.
        phrasing: Index into PHRASINGS.
    """
    lower, higher = along
    first_at, second_at = (lower, higher) if relation in ("left of", "above") else (higher, lower)
    first, second = things
    if relation in ("left of", "right of"):
        first = dataclasses.replace(first, x=first_at, y=across)
        second = dataclasses.replace(second, x=second_at, y=across)
    else:
        first = dataclasses.replace(first, x=across, y=first_at)
        second = dataclasses.replace(second, x=across, y=second_at)
    return Scene(things=(first, second), background=background, relation=relation, phrasing=phrasing)


def _coordinate(third: int, radius: float, rng: random.Random) -> float:
    """Return a centre in the first, middle or last third of the range that an object of this radius can have."""
    reach = 1.25 * radius + MARGIN
    low, high = reach, 1 - reach
    if third == 1:
        slack = min(0.03, (high - low) / 2)
        return rng.uniform(0.5 - slack, 0.5 + slack)
    near = rng.uniform(low, max(low, min(0.38, low + 0.1)))
    return near if third == 0 else 1 - near


def _choose(names: Iterable[str], rng: random.Random) -> str:
    """Return one of the names at random."""
    return rng.choice(tuple(names))
