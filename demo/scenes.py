"""Scenes of coloured shapes with captions, drawn from a seed: the demo's data, and prompts of compositional checks.

A scene is one object, two objects with a relation, or a group: three or four objects in the corners, with a caption of
some hundred tokens. All coordinates are fractions of the image's centred square, so that a centre crop to a square
loses no object. A single object without a size word in its caption is of medium size.
"""

import dataclasses
import functools
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
CORNERS = tuple(name for name, thirds in POSITIONS.items() if 1 not in thirds)
GROUP_SIZES = {"small": (0.115, 0.13), "large": (0.165, 0.185)}
"""Radius of an object of a group."""
NUMBERS = {3: "three", 4: "four"}
GROUP = "an image of {number} objects on a plain {background} background, and nothing else is in this image. {things}"
MEMBER = "{position} corner there is a {size} {shape}, and the colour of this {shape} is {colour}."
SHARES = (0.8, 0.2, 0.0)
"""Shares of the scenes with one object, two objects and a group."""
TASK = "task"
CENTER = "in the center"
OFF_CENTER_SHARE = 0.35
"""Share of the small and medium single objects that lie elsewhere; their captions say so."""
TRIANGLE_OFFSET = 1.25 / 4
"""Distance from the centre of a triangle's bounding box, which is its position, to its centroid, in radii."""
SUPERSAMPLING = 4
MARGIN = 0.03
"""Minimum distance from an object to the border."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """One coloured shape; lengths are fractions of the centred square's side."""

    colour: str
    shape: str
    size: str
    """Key of SIZES."""

    x: float
    """Centre, from the left."""

    y: float
    """Centre, from the top."""

    radius: float
    """Radius of the circle that is about as wide and high."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Content of an image, and how its caption says it."""

    things: tuple[Thing, ...]
    """One to four objects, in the order of the caption."""

    background: str
    relation: str | None = None
    """Position of the first object relative to the second, one of RELATIONS; only for two objects."""

    position: str | None = None
    """Key of POSITIONS, if the caption has the position of the one object."""

    phrasing: int = 0
    """Index into PHRASINGS; groups have one phrasing."""


def caption(scene: Scene) -> str:
    """Caption of a scene, such as "a large blue star in the top left on a gray background"."""
    first, *others = scene.things
    if len(others) > 1:
        members = (
            MEMBER.format(position=corner(thing.x, thing.y), size=thing.size, shape=thing.shape, colour=thing.colour)
            for thing in scene.things
        )
        return GROUP.format(number=NUMBERS[len(scene.things)], background=scene.background, things=" ".join(members))
    if scene.relation is not None:
        second = others[0]
        things = f"a {first.colour} {first.shape} {scene.relation} a {second.colour} {second.shape}"
    else:
        size = "" if first.size == "medium" else f"{first.size} "
        position = "" if scene.position is None else f" {scene.position}"
        things = f"a {size}{first.colour} {first.shape}{position}"
    return PHRASINGS[scene.phrasing].format(things=things, background=scene.background)


def corner(x: float, y: float) -> str:
    """Corner, one of CORNERS, of a point."""
    return next(name for name in CORNERS if POSITIONS[name] == (2 * (x > 0.5), 2 * (y > 0.5)))


def outline(thing: Thing) -> list[tuple[float, float]]:
    """Corners of an object in the units of the square; for a circle, the two corners of its bounding box."""
    x, y, radius = thing.x, thing.y, thing.radius
    if thing.shape == "circle":
        return [(x - radius, y - radius), (x + radius, y + radius)]
    if thing.shape == "square":
        half = 0.88 * radius
        return [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
    if thing.shape == "triangle":
        arm = 1.25 * radius
        y += TRIANGLE_OFFSET * radius
        return [(x + arm * math.sin(turn), y - arm * math.cos(turn)) for turn in (0, 2 * math.pi / 3, -2 * math.pi / 3)]
    arms = [1.25 * radius if corner % 2 == 0 else 0.55 * radius for corner in range(10)]
    turns = [math.pi * corner / 5 for corner in range(10)]
    return [(x + arm * math.sin(turn), y - arm * math.cos(turn)) for arm, turn in zip(arms, turns, strict=True)]


def draw(scene: Scene, size: int | tuple[int, int], *, transparent: bool = False) -> Image.Image:
    """Draw a scene with anti-aliased edges.

    Args:
        scene: the scene.
        size: width and height in pixels, or one number for a square.
        transparent: draw an RGBA image without a background (black underneath), not an RGB image.
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


def scenes(
    num: int,
    seed: int = 17,
    *,
    split: str = "train",
    shares: tuple[float, float, float] = SHARES,
) -> list[Scene]:
    """Draw random scenes; the same arguments give the same ones, and splits are independent of each other.

    Only the split `TASK` has the scenes of the task (`task`).

    Args:
        num: number of scenes.
        seed: of the scenes.
        split: name of the data set.
        shares: of scenes with one object, two objects and a group.
    """
    rng = random.Random(f"{split} {seed}")
    in_task = set() if split == TASK else {content(scene) for scene in task()}
    drawn = []
    for _ in range(num):
        kind = rng.random()
        draw_one = _two_things if kind < shares[1] else _group if kind < shares[1] + shares[2] else _one_thing
        scene = draw_one(rng)
        while content(scene) in in_task:
            scene = draw_one(rng)
        drawn.append(scene)
    return drawn


def content(scene: Scene) -> str:
    """Caption of a scene in the first phrasing."""
    return caption(dataclasses.replace(scene, phrasing=0))


def prompts() -> tuple[list[Scene], list[Scene]]:
    """Scenes whose captions the evaluation asks a model to draw, all on gray.

    Returns:
        One scene for each pair of colour and shape, and two for each relation and each shape of the first object.
        Centres and radii are typical values.
    """
    radius = sum(SIZES["medium"]) / 2
    single = [
        Scene(
            things=(Thing(colour=colour, shape=shape, size="medium", x=0.5, y=0.5, radius=radius),), background="gray"
        )
        for colour in COLOURS
        for shape in SHAPES
    ]
    rng = random.Random("relation prompts")
    double = []
    for relation in RELATIONS:
        for shape in SHAPES * 2:
            first, second = _two_things(rng).things
            things = _placed((dataclasses.replace(first, shape=shape), second), relation)
            double.append(Scene(things=things, background="gray", relation=relation))
    return single, double


@functools.cache
def task() -> tuple[Scene, ...]:
    """Scenes of the task `shapes`: 128 with one object, 192 with two, and 192 groups.

    No other split has them, with any phrasing.
    """
    drawn = {content(scene): scene for scene in scenes(2000, split=TASK, shares=(0.3, 0.35, 0.35))}
    kinds = [[scene for scene in drawn.values() if min(len(scene.things), 3) == num] for num in (1, 2, 3)]
    return (*kinds[0][:128], *kinds[1][:192], *kinds[2][:192])


def _one_thing(rng: random.Random) -> Scene:
    size = rng.choices(tuple(SIZES), (1, 2, 1))[0]
    radius = rng.uniform(*SIZES[size])
    # A caption without a position means the centre; a large object fills the image.
    is_off_center = size != "large" and rng.random() < OFF_CENTER_SHARE
    position = rng.choice([name for name in POSITIONS if name != CENTER]) if is_off_center else CENTER
    x, y = (_coordinate(third, radius, rng) for third in POSITIONS[position])
    colour, shape = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
    return Scene(
        things=(Thing(colour=colour, shape=shape, size=size, x=x, y=y, radius=radius),),
        background=rng.choice(tuple(BACKGROUNDS)),
        position=position if is_off_center or rng.random() < 0.1 else None,
        phrasing=_phrasing(rng),
    )


def _two_things(rng: random.Random) -> Scene:
    """Draw a scene with two small objects of different colours."""
    things = []
    for colour in rng.sample(tuple(COLOURS), 2):
        shape, radius = rng.choice(SHAPES), rng.uniform(*SIZES["small"])
        things.append(Thing(colour=colour, shape=shape, size="small", x=0.5, y=0.5, radius=radius))
    along = 0.27 + rng.uniform(-0.02, 0.02), 0.73 + rng.uniform(-0.02, 0.02)
    across = 0.5 + rng.uniform(-0.1, 0.1)
    relation, background = rng.choice(RELATIONS), rng.choice(tuple(BACKGROUNDS))
    things = _placed(things, relation, along, across)
    return Scene(things=things, background=background, relation=relation, phrasing=_phrasing(rng))


def _group(rng: random.Random) -> Scene:
    """Draw a scene with three or four objects of different colours in the corners."""
    corners = rng.sample(CORNERS, rng.choice(tuple(NUMBERS)))
    things = []
    for position, colour in zip(corners, rng.sample(tuple(COLOURS), len(corners)), strict=True):
        size = rng.choice(tuple(GROUP_SIZES))
        x, y = (0.26 + 0.24 * third + rng.uniform(-0.01, 0.01) for third in POSITIONS[position])
        radius = rng.uniform(*GROUP_SIZES[size])
        things.append(Thing(colour=colour, shape=rng.choice(SHAPES), size=size, x=x, y=y, radius=radius))
    return Scene(things=tuple(things), background=rng.choice(tuple(BACKGROUNDS)))


def _placed(
    things: Iterable[Thing], relation: str, along: tuple[float, float] = (0.27, 0.73), across: float = 0.5
) -> tuple[Thing, ...]:
    """Move two objects to where the relation says.

    Args:
        things: the objects.
        relation: one of RELATIONS.
        along: the lower and the higher coordinate on the relation's axis.
        across: the coordinate of both on the other axis.
    """
    axis, other = ("x", "y") if relation in ("left of", "right of") else ("y", "x")
    coordinates = along if relation in ("left of", "above") else along[::-1]
    return tuple(
        dataclasses.replace(thing, **{axis: coordinate, other: across})
        for thing, coordinate in zip(things, coordinates, strict=True)
    )


def _coordinate(third: int, radius: float, rng: random.Random) -> float:
    """Draw a centre in the first, middle or last third of the range of an object of this radius."""
    low = 1.25 * radius + MARGIN
    if third == 1:
        slack = min(0.03, (1 - low - low) / 2)
        return rng.uniform(0.5 - slack, 0.5 + slack)
    near = rng.uniform(low, max(low, min(0.38, low + 0.1)))
    return near if third == 0 else 1 - near


def _phrasing(rng: random.Random) -> int:
    return rng.choices(range(len(PHRASINGS)), (4, 1, 1))[0]
