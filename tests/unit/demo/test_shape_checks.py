"""The demo's oracle: nearly always right on real images, blurred ones too, and at chance on shuffled captions."""

import dataclasses
import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from demo import scenes as shapes
from demo.scenes import Scene, Thing
from demo.shape_checks import ANY_SHAPE, Score, ShapesOracle, score
from demo.shapes import SHORTER_SIDES

NUM_SCENES = 200


def _seen(scene: Scene, side: int, rng: random.Random) -> Image.Image:
    """Return a validation image as training sees it: shorter side resized, centre cropped."""
    natural = rng.choice([size for size in SHORTER_SIDES if size >= side])
    image = shapes.draw(scene, (round(natural * 1.125), natural))
    image = image.resize((round(image.width * side / natural), side), Image.Resampling.BICUBIC)
    left = (image.width - side) // 2
    return image.crop((left, 0, left + side, side))


def _images(side: int) -> list[tuple[Image.Image, Scene]]:
    rng = random.Random(side)
    return [(_seen(scene, side, rng), scene) for scene in shapes.scenes(NUM_SCENES, 17, split="validation")]


def _scene(*things: tuple[str, str, float, float], relation: str | None = None, background: str = "gray") -> Scene:
    drawn = tuple(
        Thing(colour=colour, shape=shape, size="small", x=x, y=y, radius=0.17) for colour, shape, x, y in things
    )
    return Scene(things=drawn, background=background, relation=relation)


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("blur", [0.0, 0.015])
def test_right_on_validation_images(side: int, blur: float) -> None:
    scores = [score(image.filter(ImageFilter.GaussianBlur(blur * side)), scene) for image, scene in _images(side)]
    assert np.mean([one.colour for one in scores]) >= 0.98
    assert np.mean([one.shape for one in scores]) >= 0.98
    relations = [one.relation for one in scores if one.relation is not None]
    assert len(relations) >= 20 and np.mean(relations) >= 0.98


def test_describes_two_objects() -> None:
    scene = _scene(("red", "circle", 0.27, 0.5), ("blue", "star", 0.73, 0.4))
    found = sorted(ShapesOracle().find(shapes.draw(scene, 96)), key=lambda thing: thing.x)
    assert [(thing.colour, thing.label) for thing in found] == [("red", "circle"), ("blue", "star")]
    for thing, asked in zip(found, scene.things, strict=True):
        assert thing.x == pytest.approx(asked.x, abs=0.01)
        assert thing.y == pytest.approx(asked.y, abs=0.02)
        assert thing.confidence > 0.9


def test_a_relation_counts_only_with_the_right_objects_in_the_right_order() -> None:
    drawn = _scene(("red", "circle", 0.27, 0.5), ("blue", "star", 0.73, 0.5))
    image = shapes.draw(drawn, 64)
    asked = (("red", "circle", 0.5, 0.5), ("blue", "star", 0.5, 0.5))
    assert score(image, _scene(*asked, relation="left of")).relation
    assert score(image, _scene(*asked[::-1], relation="right of")).relation
    for relation in ("right of", "above", "below"):
        wrong = score(image, _scene(*asked, relation=relation))
        assert wrong.colour and wrong.shape and not wrong.relation
    swapped = score(image, _scene(("red", "star", 0, 0), ("blue", "circle", 0, 0), relation="left of"))
    assert swapped.colour and not swapped.shape and not swapped.relation
    alone = shapes.draw(_scene(("red", "circle", 0.3, 0.5)), 64)
    assert score(alone, _scene(*asked, relation="left of")) == Score(
        colour=False, shape=False, count=False, relation=False
    )


@pytest.mark.parametrize("background", shapes.BACKGROUNDS)
def test_an_empty_image_shows_nothing(background: str) -> None:
    image = Image.new("RGB", (64, 64), shapes.BACKGROUNDS[background])
    assert ShapesOracle().find(image) == []
    assert score(image, shapes.prompts()[0][0]) == Score(colour=False, shape=False, count=False)


def test_noise_and_specks_are_not_objects_with_a_shape() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert all(found.label == ANY_SHAPE for found in ShapesOracle().find(Image.fromarray(noise)))
    speck = np.full((64, 64, 3), 128, dtype=np.uint8)
    speck[10:13, 10:13] = shapes.COLOURS["red"]
    assert ShapesOracle().find(Image.fromarray(speck)) == []


def test_a_bar_has_a_colour_and_no_shape() -> None:
    bar = np.full((64, 64, 3), 128, dtype=np.uint8)
    bar[28:36, 10:54] = shapes.COLOURS["green"]
    (found,) = ShapesOracle().find(Image.fromarray(bar))
    assert found.colour == "green" and found.label == ANY_SHAPE


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shapes_survive_noise_and_pale_colours(shape: str) -> None:
    """Generated images are noisy, and their colours are not the pure ones."""
    rng = np.random.default_rng(1)
    for colour in shapes.COLOURS:
        image = np.asarray(shapes.draw(_scene((colour, shape, 0.5, 0.5)), 64), dtype=float)
        image = 128 + 0.8 * (image - 128) + rng.normal(0, 6, image.shape)
        result = score(Image.fromarray(image.clip(0, 255).astype(np.uint8)), _scene((colour, shape, 0.5, 0.5)))
        assert result.colour and result.shape


CORNERS = (("red", "circle", 0.26, 0.26), ("blue", "star", 0.74, 0.26), ("green", "square", 0.26, 0.74))


def test_the_objects_of_a_group_count_in_their_corners() -> None:
    asked = _scene(*CORNERS)
    assert score(shapes.draw(asked, 64), asked) == Score(colour=True, shape=True, count=True, position=1.0)
    swapped = _scene(CORNERS[0], ("green", "star", 0.74, 0.26), ("blue", "square", 0.26, 0.74))
    third = pytest.approx(1 / 3)
    assert score(shapes.draw(swapped, 64), asked) == Score(colour=False, shape=True, count=True, position=third)
    more = _scene(*CORNERS, ("yellow", "square", 0.74, 0.74))
    assert score(shapes.draw(more, 64), asked) == Score(colour=True, shape=True, count=False, position=1.0)
    fewer = _scene(*CORNERS[:2])
    assert score(shapes.draw(fewer, 64), asked).position == pytest.approx(2 / 3)


def test_positions_of_single_objects() -> None:
    scenes = [scene for scene in shapes.task() if scene.position is not None]
    for scene in scenes:
        assert score(shapes.draw(scene, 32), scene).position == 1.0
        elsewhere = next(one for one in shapes.POSITIONS if one != scene.position)
        assert score(shapes.draw(scene, 32), dataclasses.replace(scene, position=elsewhere)).position == 0.0
