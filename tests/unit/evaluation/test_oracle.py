"""The demo's oracle: nearly always right on real images, blurred ones too, and at chance on shuffled captions."""

import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from demo.shapes import SHORTER_SIDES
from diffusion.evaluation import oracle, shapes
from diffusion.evaluation.shapes import Scene, Thing

NUM_SCENES = 200


def _seen(scene: Scene, side: int, rng: random.Random) -> Image.Image:
    """Return a held-out image as training sees it: shorter side resized, centre cropped."""
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
def test_right_on_held_out_images(side: int, blur: float) -> None:
    scores = [
        oracle.score(image.filter(ImageFilter.GaussianBlur(blur * side)), scene) for image, scene in _images(side)
    ]
    assert np.mean([score.colour for score in scores]) >= 0.98
    assert np.mean([score.shape for score in scores]) >= 0.98
    relations = [score.relation for score in scores if score.relation is not None]
    assert len(relations) >= 20 and np.mean(relations) >= 0.98


def test_at_chance_on_shuffled_captions() -> None:
    images = [(image, scene) for image, scene in _images(64) if scene.relation is None]
    asked = [scene for _, scene in images]
    random.Random(0).shuffle(asked)
    scores = [oracle.score(image, scene) for (image, _), scene in zip(images, asked, strict=True)]
    # Six colours and four shapes; with about 150 images one standard deviation is 0.03 and 0.035.
    assert abs(np.mean([score.colour for score in scores]) - 1 / 6) < 0.12
    assert abs(np.mean([score.shape for score in scores]) - 1 / 4) < 0.14


def test_describes_two_objects() -> None:
    scene = _scene(("red", "circle", 0.27, 0.5), ("blue", "star", 0.73, 0.4))
    found = sorted(oracle.describe(shapes.draw(scene, 96)), key=lambda thing: thing.x)
    assert [(thing.colour, thing.shape) for thing in found] == [("red", "circle"), ("blue", "star")]
    for thing, asked in zip(found, scene.things, strict=True):
        assert thing.x == pytest.approx(asked.x, abs=0.01)
        assert thing.y == pytest.approx(asked.y, abs=0.02)
        assert thing.agreement > 0.9
    assert found[0].area == pytest.approx(np.pi * 0.17**2, rel=0.05)


def test_a_relation_counts_only_with_the_right_objects_in_the_right_order() -> None:
    drawn = _scene(("red", "circle", 0.27, 0.5), ("blue", "star", 0.73, 0.5))
    image = shapes.draw(drawn, 64)
    asked = (("red", "circle", 0.5, 0.5), ("blue", "star", 0.5, 0.5))
    assert oracle.score(image, _scene(*asked, relation="left of")).relation
    assert oracle.score(image, _scene(*asked[::-1], relation="right of")).relation
    for relation in ("right of", "above", "below"):
        wrong = oracle.score(image, _scene(*asked, relation=relation))
        assert wrong.colour and wrong.shape and not wrong.relation
    swapped = oracle.score(image, _scene(("red", "star", 0, 0), ("blue", "circle", 0, 0), relation="left of"))
    assert swapped.colour and not swapped.shape and not swapped.relation
    alone = shapes.draw(_scene(("red", "circle", 0.3, 0.5)), 64)
    assert oracle.score(alone, _scene(*asked, relation="left of")) == oracle.Score(
        colour=False, shape=False, relation=False
    )


@pytest.mark.parametrize("background", shapes.BACKGROUNDS)
def test_an_empty_image_shows_nothing(background: str) -> None:
    image = Image.new("RGB", (64, 64), shapes.BACKGROUNDS[background])
    assert oracle.describe(image) == []
    assert oracle.score(image, shapes.prompts()[0][0]) == oracle.Score(colour=False, shape=False, relation=None)


def test_noise_and_specks_are_not_objects_with_a_shape() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert all(found.shape is None for found in oracle.describe(Image.fromarray(noise)))
    speck = np.full((64, 64, 3), 128, dtype=np.uint8)
    speck[10:13, 10:13] = shapes.COLOURS["red"]
    assert oracle.describe(Image.fromarray(speck)) == []


def test_a_bar_has_a_colour_and_no_shape() -> None:
    bar = np.full((64, 64, 3), 128, dtype=np.uint8)
    bar[28:36, 10:54] = shapes.COLOURS["green"]
    (found,) = oracle.describe(Image.fromarray(bar))
    assert found.colour == "green" and found.shape is None


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shapes_survive_noise_and_pale_colours(shape: str) -> None:
    """Generated images are noisy, and their colours are not the pure ones."""
    rng = np.random.default_rng(1)
    for colour in shapes.COLOURS:
        image = np.asarray(shapes.draw(_scene((colour, shape, 0.5, 0.5)), 64), dtype=float)
        image = 128 + 0.8 * (image - 128) + rng.normal(0, 6, image.shape)
        score = oracle.score(Image.fromarray(image.clip(0, 255).astype(np.uint8)), _scene((colour, shape, 0.5, 0.5)))
        assert score.colour and score.shape
