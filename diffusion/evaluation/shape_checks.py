"""Object checks of the drawn shapes, for `protocol.compositional.suite=shapes`, and their detector."""

import itertools
from collections.abc import Sequence

from PIL import Image

from diffusion.evaluation.object_checks import Check, Detection, Wanted
from diffusion.evaluation.oracle import describe
from diffusion.evaluation.shapes import COLOURS, SHAPES, Scene, caption, prompts

ANY_SHAPE = "shape"
"""Label of the oracle for an unknown outline."""

COUNTS = {2: "two", 3: "three", 4: "four"}
"""Counts in prompts of the demo."""


class ShapesOracle:
    """Detector of the demo's coloured shapes by image processing."""

    identity = "shapes oracle 1"

    def find(self, image: Image.Image, labels: Sequence[str], colours: Sequence[str]) -> list[Detection]:
        """Detect shapes with colours, the largest first; an unknown outline has the label `shape`."""
        return [
            Detection(label=found.shape or ANY_SHAPE, colour=found.colour, x=found.x, y=found.y)
            for found in describe(image)
        ]


def shape_checks() -> list[Check]:
    """Checks of the demo: pairs of colour and shape, relations of two objects, and counts of each shape."""
    single, pairs = prompts()
    colours = itertools.cycle(COLOURS)
    counted = [_counted(num, next(colours), shape) for num in COUNTS for shape in SHAPES]
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
    """Check of exactly `num` objects of one shape, all of one colour."""
    return Check(
        prompt=f"{COUNTS[num]} {colour} {shape}s on a gray background",
        category="count",
        include=(Wanted(label=shape, count=num, colour=colour),),
        exclude=(Wanted(label=shape, count=num + 1),),
    )
