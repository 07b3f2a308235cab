"""Prompts, images, resizing, compositional checks, validation and configuration of evaluations."""

import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.config.fields import check_sections
from diffusion.config.loading import load
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.config import (
    CompositionalConfig,
    EvaluationConfig,
    NetworksConfig,
    ReferenceConfig,
    ResizeFilter,
    SamplingConfig,
)
from diffusion.evaluation.features import resized
from diffusion.evaluation.generate import Task, addressed_latents
from diffusion.evaluation.images import open_reference, smallest_hashes
from diffusion.evaluation.object_checks import (
    Check,
    Detection,
    ShapesOracle,
    Wanted,
    is_shown,
    open_object_checks,
    read_checks,
    relations,
    shape_checks,
)
from diffusion.evaluation.prompts import Prompt, read_prompts
from diffusion.evaluation.shapes import BACKGROUNDS, COLOURS, SHAPES, Scene, Thing, draw
from diffusion.evaluation.shapes import prompts as shape_scenes
from diffusion.evaluation.watch import Entry, Ledger, LocalRun


def test_prompts_of_tables_and_lists(tmp_path):
    parti = tmp_path / "PartiPrompts.tsv"
    parti.write_text('Prompt\tCategory\tChallenge\na "bond\tAbstract\tBasic\na dog, a cat\tAnimals\tBasic\n')
    assert read_prompts(parti) == [
        Prompt(text='a "bond', category="Abstract"),
        Prompt(text="a dog, a cat", category="Animals"),
    ]
    bench = tmp_path / "DrawBench.csv"
    bench.write_text('Prompts,Category\n"a red, small car",Colors\n\n')
    assert read_prompts(bench) == [Prompt(text="a red, small car", category="Colors")]
    lines = tmp_path / "list.txt"
    lines.write_text("one\n\ntwo\n")
    assert [prompt.text for prompt in read_prompts(lines)] == ["one", "two"]
    with pytest.raises(ConfigurationError, match=r"DrawBench\.csv .*Text"):
        read_prompts(bench, column="Text")
    with pytest.raises(ConfigurationError, match="num=3"):
        read_prompts(lines, num=3)


def test_captions_and_images_of_a_prepared_data_set(shapes):
    prompts = read_prompts(shapes / "prepared" / "validation", num=7)
    assert len(prompts) == 7
    assert all("background" in prompt.text for prompt in prompts)
    pictures, identity = open_reference(ReferenceConfig(path=str(shapes / "prepared" / "validation"), num=7, size=32))
    assert {pictures[i].size for i in range(len(pictures))} == {(32, 32)}
    assert len(pictures) == 7
    other = open_reference(ReferenceConfig(path=str(shapes / "prepared" / "train"), num=7, size=32))[1]
    assert identity != other


def test_a_choice_is_a_function_of_the_names():
    names = [f"image-{i}" for i in range(50)]
    chosen = smallest_hashes(names, 10)
    wanted = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:10]
    assert chosen == sorted(chosen)
    assert {names[i] for i in chosen} == set(wanted)


def test_resizing_is_antialiased_and_rounded_once():
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:, ::2] = 255
    small = resized(Image.fromarray(pixels), 5, ResizeFilter.bilinear)
    assert small.shape == (3, 5, 5)
    assert small.dtype == np.uint8
    assert np.abs(small[:, :, 1:-1].astype(int) - 127).max() <= 1


def test_missing_weights_say_which_file_to_put_where(tmp_path):
    from diffusion.evaluation.features import Clip, Inception

    with pytest.raises(ConfigurationError, match=r"weights-inception-2015-12-05-6726825d\.pth"):
        Inception(NetworksConfig().inception)
    with pytest.raises(ConfigurationError, match=r"cmmd=.*model\.safetensors"):
        Clip(str(tmp_path), "protocol.networks.cmmd", local_files_only=True)


class Code:
    def __reduce__(self):
        return (print, ("run",))


def test_a_file_of_weights_that_would_run_code_is_refused(tmp_path, capsys):
    import torch

    from diffusion.evaluation.features import Inception

    path = tmp_path / "weights.pth"
    torch.save({"weight": Code()}, path)
    with pytest.raises(ConfigurationError, match=r"weights\.pth"):
        Inception(str(path))
    assert capsys.readouterr().out == ""


def test_inception_gives_the_features_of_torch_fidelity(tmp_path, monkeypatch):
    import torch
    from torch_fidelity import feature_extractor_inceptionv3 as original

    from diffusion.evaluation.features import Inception

    network = original.FeatureExtractorInceptionV3
    with monkeypatch.context() as patched:
        patched.setattr(original, "load_state_dict_from_url", lambda *arguments, **options: {})
        patched.setattr(network, "load_state_dict", lambda *arguments, **options: None)
        random = network("random", ["2048"]).eval()
    torch.save(random.state_dict(), tmp_path / "weights.pth")
    inception = Inception(str(tmp_path / "weights.pth"))
    pixels = torch.randint(0, 256, (2, 3, inception.size, inception.size), dtype=torch.uint8)
    features = inception.image_features(pixels)
    assert features.shape == (2, 2048)
    assert torch.equal(features, random(pixels)[0])


def box(label, colour, x, y, side=0.2):
    return Detection(label=label, colour=colour, x=x, y=y, width=side, height=side)


def test_relations_need_a_clear_distance():
    left, right = box("dog", None, 0.2, 0.5), box("cat", None, 0.8, 0.5)
    assert relations(left, right) == {"left of"}
    assert relations(right, left) == {"right of"}
    assert relations(box("dog", None, 0.2, 0.2), box("cat", None, 0.7, 0.7)) == {"left of", "above"}
    assert relations(box("dog", None, 0.5, 0.51), box("cat", None, 0.5, 0.5)) == set()


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
def test_the_oracle_finds_what_is_drawn_and_misses_what_is_not(tmp_path, side):
    import torch

    suite = open_object_checks(CompositionalConfig(images_per_prompt=1), torch.device("cpu"))
    assert suite.detector.identity == ShapesOracle.identity
    single, pairs = shape_scenes()
    counted = [asked_for(check) for check in suite.checks if check.category == "count"]
    assert len(counted) == 12
    files = []
    for i, scene in enumerate([*single, *pairs, *counted]):
        files.append(tmp_path / f"{i}.png")
        draw(scene, side).save(files[-1])
    found = suite.evaluate(files, {})
    assert {name: number.value for name, number in found.items()} == {
        f"compositional{category}": 1.0 for category in ("", "/colour and shape", "/relation", "/count")
    }
    shifted = [*files[1:], files[0]]
    wrong = suite.evaluate(shifted, {})
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


def test_a_suite_of_other_things_needs_a_detector():
    import torch

    with pytest.raises(ConfigurationError, match="OWL-ViT"):
        open_object_checks(CompositionalConfig(suite="geneval.jsonl"), torch.device("cpu"))


def test_configurations_that_ship_load_and_impossible_ones_are_refused(tmp_path):
    for yaml in ("yamls/evaluate.yaml", "yamls/tiny/evaluate.yaml"):
        places = [f"protocol.{part}.path=x" for part in ("prompts", "reference")]
        config = load(EvaluationConfig, yaml, ["output_folder=x", "model=x", *places])
        check_sections(config)
    config.images, config.guidance_scales = "y", [1.0, 1.0]
    with pytest.raises(ConfigurationError, match=r"(?s)model=.*guidance_scales"):
        check_sections(config)


def test_the_ledger_is_of_one_run(tmp_path):
    Ledger.open(tmp_path, "runs/a").add("ep0-ba2", Entry(step=2))
    assert Ledger.open(tmp_path, "runs/a").entries == {"ep0-ba2": Entry(step=2)}
    with pytest.raises(DataError, match="runs/a"):
        Ledger.open(tmp_path, "runs/b")


def test_a_checkpoint_that_is_gone_is_not_held(tmp_path):
    run = LocalRun(tmp_path / "run")
    assert run.list_checkpoints() == []
    assert run.copy("ep0-ba2", tmp_path / "held") is None
    assert not (tmp_path / "held" / "ep0-ba2").exists()


def test_initial_noise_is_drawn_on_the_cpu_for_any_device(monkeypatch):
    drawn_on = []

    def normal(seed, purpose, step, sample, shape):
        drawn_on.append((step.device.type, sample.device.type))
        return torch.zeros(len(sample), *shape)

    monkeypatch.setattr("diffusion.evaluation.generate.normal", normal)
    task = Task(prompts=[Prompt(text="a")], sampling=SamplingConfig(), guidance_scale=3.0, batch_size=2)
    assert addressed_latents(task, [0], (4, 8, 8), torch.device("meta")).device.type == "meta"
    assert drawn_on == [("cpu", "cpu")]
