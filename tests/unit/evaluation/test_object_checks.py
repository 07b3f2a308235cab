"""Object checks: relations, counts and colours; the oracle of the shapes and zero-shot detectors."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou

from demo.scenes import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing, draw
from demo.scenes import prompts as shape_scenes
from demo.shape_checks import ShapesOracle, shape_checks
from diffusion.config.model import Architecture
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import CompositionalConfig
from diffusion.evaluation.object_checks import (
    MAX_OVERLAP,
    RELATIONS,
    Check,
    Detection,
    ObjectChecks,
    Wanted,
    ZeroShotDetector,
    is_shown,
    read_checks,
    relations,
)
from diffusion.models.architectures import with_seed
from diffusion.models.tokenizers import build_tokenizer

CPU = torch.device("cpu")
LABELS, QUERY_COLOURS = ["dog", "cat"], ["red", "green", "blue"]
SIDE = 64


def write_detector(folder: Path, kind: str) -> str:
    """Save a random model with its processor, in the layout of transformers."""
    import transformers

    name = {"owlvit": "OwlViT", "owlv2": "Owlv2"}[kind]
    tokenizer = build_tokenizer(Architecture.tiny)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**sizes, **special, "vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
    vision = {**sizes, "image_size": SIDE, "patch_size": 16}
    configuration = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, projection_dim=16)
    model = with_seed(0, lambda: getattr(transformers, f"{name}ForObjectDetection")(configuration))
    with torch.no_grad():
        model.box_head.dense2.weight *= 0.1 / model.box_head.dense2.weight.std()  # Depends on the library's version.
        model.box_head.dense2.bias[2:] += 4.0  # Boxes that are large enough to overlap.
    model.save_pretrained(folder)
    images = getattr(transformers, f"{name}ImageProcessor")(size={"height": SIDE, "width": SIDE})
    getattr(transformers, f"{name}Processor")(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["owlvit", "owlv2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "owlv2":
        pytest.importorskip("scipy", reason="transformers' OWLv2 needs scipy")
    return write_detector(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    """Twice as wide as high."""
    coarse = np.random.default_rng(0).integers(0, 256, (3, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((120, 60))


def scored_boxes(folder: str, image: Image.Image, query: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [N] of all boxes for one query, and their corners [N, 4] in pixels, as transformers' processor tells."""
    from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = model(**processor(text=[[query]], images=image, return_tensors="pt"))
    sizes = [(image.height, image.width)]
    (found,) = processor.image_processor.post_process_object_detection(outputs, threshold=-1.0, target_sizes=sizes)
    return found["scores"], found["boxes"]


def corners(found: list[Detection], image: Image.Image) -> torch.Tensor:
    half = [
        (one.x - one.width / 2, one.y - one.height / 2, one.x + one.width / 2, one.y + one.height / 2) for one in found
    ]
    return torch.tensor(half) * torch.tensor([*image.size, *image.size])


def test_boxes_are_those_of_transformers_and_overlapping_ones_count_once(folder: str, image: Image.Image) -> None:
    expected = {label: scored_boxes(folder, image, f"a photo of a {label}") for label in LABELS}
    ordered = torch.cat([scores for scores, _ in expected.values()]).sort().values
    threshold = float(ordered[len(ordered) // 2 - 1 :][:2].mean())  # No score, which another order of sums may lower.
    found = ZeroShotDetector(folder, threshold, CPU).find(image, LABELS, [])
    assert [one.confidence for one in found] == sorted((one.confidence for one in found), reverse=True)
    assert {one.colour for one in found} == {None}
    for label, (scores, boxes) in expected.items():
        own = [one for one in found if one.label == label]
        places = corners(own, image)
        confident = boxes[scores >= threshold]
        assert 0 < len(own) < len(confident), "none of the boxes overlap"
        nearest = (boxes[:, None] - places[None]).abs().amax(dim=2).min(dim=0)
        assert nearest.values.max() < 1e-3
        assert [one.confidence for one in own] == pytest.approx(scores[nearest.indices].tolist(), rel=1e-5)
        assert (box_iou(places, places) - torch.eye(len(own))).max() <= MAX_OVERLAP
        covered = box_iou(confident, places).amax(dim=1)
        assert covered.min() > MAX_OVERLAP, "a box that overlaps none of those found is missing"


def test_the_colour_is_that_whose_query_a_box_answers_to_best(folder: str, image: Image.Image) -> None:
    by_colour = {colour: scored_boxes(folder, image, f"a photo of a {colour} cat") for colour in QUERY_COLOURS}
    scores = torch.stack([scores for scores, _ in by_colour.values()])
    boxes = by_colour["red"][1]
    found = ZeroShotDetector(folder, 0.0, CPU).find(image, ["dog", "cat"], QUERY_COLOURS)
    cats = [one for one in found if one.label == "cat"]
    numbers = (boxes[:, None] - corners(cats, image)[None]).abs().amax(dim=2).argmin(dim=0)
    assert [one.colour for one in cats] == [QUERY_COLOURS[int(best)] for best in scores[:, numbers].argmax(dim=0)]


def test_nothing_is_found_above_the_greatest_confidence(folder: str, image: Image.Image) -> None:
    assert ZeroShotDetector(folder, 1.1, CPU).find(image, LABELS, QUERY_COLOURS) == []


def test_a_suite_is_judged_by_a_detector_whose_weights_are_in_the_protocol(folder: str, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"tag": "single", "prompt": "a cat", "include": [{"class": "cat", "count": 1}]}\n')
    judge = ObjectChecks.open(CompositionalConfig(suite=str(suite), detector=folder, threshold=0.0), CPU)
    kind, weights = judge.detector.identity.split()
    assert kind == Path(folder).name.rstrip("0")
    assert len(weights) == 16
    assert judge.protocols({})["compositional/single"]["detector"] == judge.detector.identity


def test_a_folder_without_a_detector_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"protocol\.compositional\.detector=.*OWLv2"):
        ZeroShotDetector(str(tmp_path), 0.3, CPU)


def box(label, colour, x, y, side=0.2):
    return Detection(label=label, colour=colour, x=x, y=y, width=side, height=side)


def test_relations_need_a_clear_distance():
    left, right = box("dog", None, 0.2, 0.5), box("cat", None, 0.8, 0.5)
    assert relations(left, right) == {"left of"}
    assert relations(right, left) == {"right of"}
    assert relations(box("dog", None, 0.2, 0.2), box("cat", None, 0.7, 0.7)) == {"left of", "above"}
    assert relations(box("dog", None, 0.5, 0.51), box("cat", None, 0.5, 0.5)) == set()
    near = relations(box("dog", None, 0.43, 0.5), box("cat", None, 0.5, 0.5))
    assert near == set(), "of an offset of 0.07, 0.03 are left, less than half"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([box("dog", "red", 0.2, 0.5), box("cat", "blue", 0.8, 0.5)], True),
        ([box("dog", "red", 0.8, 0.5), box("cat", "blue", 0.2, 0.5)], False),
        ([box("dog", "green", 0.2, 0.5), box("cat", "blue", 0.8, 0.5)], False),
        ([box("dog", "red", 0.2, 0.5)], False),
        ([box("dog", "red", 0.2, 0.5), *[box("cat", "blue", 0.8, 0.5)] * 2], False),
    ],
)
def test_a_check_of_colour_count_and_relation(tmp_path, found, expected):
    row = {
        "tag": "position",
        "prompt": "a red dog left of a cat",
        "include": [
            {"class": "cat", "count": 1},
            {"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]},
        ],
        "exclude": [{"class": "cat", "count": 2}],
    }
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (check,) = read_checks(path)
    assert check.category == "position"
    assert is_shown(check, found) is expected


def test_counts_are_least_counts():
    check = Check(prompt="", category="", include=(Wanted(label="dog", count=2),))
    dog = box("dog", None, 0.5, 0.5)
    assert [is_shown(check, [dog] * num) for num in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([Wanted(label="dog", colour="red")], [box("dog", "green", 0.2, 0.5), box("dog", "red", 0.2, 0.5)]),
        (
            [Wanted(label="dog", count=2), Wanted(label="cat", relation="left of", target=0)],
            [box("cat", None, 0.5, 0.5), box("dog", None, 0.9, 0.5), box("dog", None, 0.1, 0.5)],
        ),
        (
            [Wanted(label="dog"), Wanted(label="cat", relation="left of", target=0)],
            [box("dog", None, 0.1, 0.5), box("cat", None, 0.5, 0.5), box("dog", None, 0.9, 0.5)],
        ),
    ],
)
def test_the_most_confident_objects_must_have_the_colour_and_each_pair_the_relation(wanted, found):
    check = Check(prompt="", category="", include=tuple(wanted))
    assert [is_shown(check, found, any_object=any_object) for any_object in (False, True)] == [False, True]


@dataclasses.dataclass
class Fixed:
    """Detects the same in every image."""

    found: list[Detection]
    identity: str = "fixed"

    def find(self, *_: Any) -> list[Detection]:
        return self.found


@pytest.mark.parametrize(
    ("size", "shown"), [((64, 64), ["left of", "above"]), ((128, 64), ["left of"]), ((64, 128), ["above"])]
)
def test_positions_are_compared_in_pixels(size, shown):
    target = Wanted(label="cat")
    checks = [
        Check(prompt="", category="", include=(target, Wanted(label="dog", relation=relation, target=0)))
        for relation in RELATIONS
    ]
    found = [box("dog", None, 0.3, 0.35, 0.25), box("cat", None, 0.7, 0.65, 0.25)]
    suite = ObjectChecks(
        items=checks,
        images_per_prompt=1,
        config=CompositionalConfig(suite=""),
        detector=Fixed(found),
        colours=(),
        any_object=False,
    )
    judged = [check.include[1].relation for check in checks if suite.judge(check, Image.new("RGB", size))]
    assert judged == shown
    of_size, square = ({"width": width, "height": height} for width, height in (size, (64, 64)))
    protocols = [suite.protocols(images)["compositional"] | {"images": {}} for images in (of_size, square)]
    assert (protocols[0] == protocols[1]) == (size == (64, 64)), "of other rules in earlier versions"


def several(num, colour, shape, background="gray"):
    """A scene of so many equal objects, up to nine, in rows of three."""
    places = [((place % 3 + 0.5) / 3, (place // 3 + 0.5) / 3) for place in range(num)]
    things = tuple(Thing(colour=colour, shape=shape, size="small", x=x, y=y, radius=0.12) for x, y in places)
    return Scene(things=things, background=background)


def asked_for(check):
    """A scene of counted objects as a check asks for."""
    (wanted,) = check.include
    return several(wanted.count, wanted.colour, wanted.label)


@pytest.mark.parametrize("side", [32, 64])
def test_the_oracle_finds_drawn_objects_only(tmp_path, side):
    suite = ObjectChecks.open(
        CompositionalConfig(suite="demo.shape_checks.shapes", images_per_prompt=1), torch.device("cpu")
    )
    assert suite.detector.identity == ShapesOracle.identity
    single, pairs = shape_scenes()
    counted = [asked_for(check) for check in suite.items if check.category == "count"]
    assert len(counted) == 12
    files = []
    for i, scene in enumerate([*single, *pairs, *counted]):
        files.append(tmp_path / f"{i}.png")
        draw(scene, side).save(files[-1])
    found = suite.evaluate(files, {}, tmp_path / "of files")
    assert {name: number.value for name, number in found.items()} == {
        f"compositional{category}": 1.0 for category in ("", "/colour and shape", "/relation", "/count")
    }
    shifted = [*files[1:], files[0]]
    wrong = suite.evaluate(shifted, {}, tmp_path / "of shifted")
    assert wrong["compositional/colour and shape"].value == 0.0
    assert wrong["compositional/relation"].value < 0.2
    assert wrong["compositional/count"].value == 0.0


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_oracle_counts(shape, background):
    for num, colour in zip(range(1, 10), itertools.cycle(COLOURS)):
        found = ShapesOracle().find(draw(several(num, colour, shape, background), 64), [shape], [colour])
        assert [(one.label, one.colour) for one in found] == [(shape, colour)] * num


@pytest.mark.parametrize(
    ("num", "colour", "more", "expected"),
    [
        (3, "purple", None, True),
        (2, "purple", None, False),
        (4, "purple", None, False),
        (3, "blue", None, False),
        (3, "purple", "blue", False),
    ],
)
def test_a_count_is_of_that_colour_and_of_no_more_of_that_shape(num, colour, more, expected):
    (check,) = [check for check in shape_checks() if check.prompt == "three purple circles on a gray background"]
    scene = several(num, colour, "circle")
    if more is not None:
        another = dataclasses.replace(scene.things[0], colour=more, x=0.8, y=0.8)
        scene = dataclasses.replace(scene, things=(*scene.things, another))
    assert is_shown(check, ShapesOracle().find(draw(scene, 64), [], [])) is expected


def test_a_suite_of_other_things_needs_a_detector(tmp_path: Path) -> None:
    suite = tmp_path / "geneval.jsonl"
    suite.write_text('{"prompt": "a cat", "include": [{"class": "cat"}]}\n')
    with pytest.raises(ConfigurationError, match="OWL-ViT"):
        ObjectChecks.open(CompositionalConfig(suite=str(suite)), torch.device("cpu"))


def test_the_old_name_of_the_shapes_names_the_new_one():
    with pytest.raises(ConfigurationError, match=r"demo\.shape_checks\.shapes"):
        ObjectChecks.open(CompositionalConfig(suite="shapes"), torch.device("cpu"))
