"""`evaluate.py` end to end on a toy checkpoint: ranks, restarts, protocols."""

import json
import shutil

import pytest

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.protocol import Result, read_results, table
from tests.tools.evaluation_toys import (
    evaluate_on,
    numbers,
    overrides,
    write_all,
    write_drawbench,
    write_questions,
)
from tests.tools.vision_language_models import write_reward, write_vqa

pytestmark = pytest.mark.slow

NUM_IMAGES = 10
REPLIES = {"yes": 0.4, "Yes": 0.1, "no": 0.2, "two": 0.08}
HPSV3 = 9.75


@pytest.fixture(scope="module")
def root(server, tmp_path_factory):
    root = write_all(tmp_path_factory.mktemp("evaluate"))
    prompts = {"Colors": ["a red star", "a blue star", "a star"], "Counting": ["two stars", "six stars"]}
    write_drawbench(root / "DrawBench.csv", prompts)
    write_questions(root)
    write_vqa(root / "vqa")
    write_reward(root / "hpsv3")
    write_vqa(root / "constant" / "vqa", REPLIES)
    write_reward(root / "constant" / "hpsv3", HPSV3)
    server.train(1, [("tests/tools/toy.yaml", [f"output_folder={root / 'run'}", "trainer.max_duration=4ba"])])
    return root


def all_protocols(root, models):
    """Overrides for every metric and suite, with the models of a folder."""
    return [
        f"protocol.prompts.path={root / 'DrawBench.csv'}",
        "protocol.metrics=[fid, kid, clip_fid, cmmd, clip_score, hpsv3]",
        "protocol.compositional={suite: demo.shape_checks.shapes, images_per_prompt: 1}",
        f"protocol.dpg={{path: {root / 'dpg_bench.csv'}, images_per_prompt: 2}}",
        f"protocol.geneval2.path={root / 'geneval2_data.jsonl'}",
        *(f"protocol.networks.{name}={models / name}" for name in ("vqa", "hpsv3")),
    ]


@pytest.fixture(scope="module")
def outputs(server, root):
    """The same evaluation on one rank and, with one guidance scale, on two."""
    folders = {ranks: root / f"on-{ranks}" for ranks in (1, 2)}
    for ranks, folder in folders.items():
        model = (f"model={root / 'run'}", "weights=[raw, ema]", f"guidance_scales={[1.0, 3.0][ranks - 1 :]}")
        evaluate_on(server, ranks, overrides(root, folder, *model, *all_protocols(root, root)))
    return folders


def images(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("images/*/prompts/*.png"))}


def modification_times(folder, pattern):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern)}


@pytest.mark.world_size(2)
def test_images_and_numbers_are_the_same_on_one_rank_and_on_two(outputs):
    first, second = (images(outputs[ranks]) for ranks in (1, 2))
    assert (len(first), len(second)) == (2 * 2 * NUM_IMAGES, 2 * NUM_IMAGES)
    assert second.items() <= first.items()
    assert len(set(first.values())) > NUM_IMAGES
    one, two = (numbers(outputs[ranks]) for ranks in (1, 2))
    assert set(one) == {f"ep0-ba4-{weights}-cfg{scale}" for weights in ("raw", "ema") for scale in (1, 3)}
    for name, values in one.items():
        assert {"frechet_random-4", "kernel_random-4", "clip_fid", "cmmd", "clip_score", "compositional"} <= set(values)
        assert {"hpsv3", "hpsv3/Counting", "dpg", "soft_tifa_am", "soft_tifa_gm"} <= set(values)
        assert name not in two or two[name] == pytest.approx(values, abs=1e-6, rel=1e-6)


def test_numbers_stand_beside_their_protocols(outputs):
    content = json.loads((outputs[1] / "results" / "ep0-ba4-raw-cfg3.json").read_text())
    entry = content["numbers"]["clip_fid"]
    protocol = content["protocols"][entry["protocol"]]
    assert protocol["images"]["num_inference_steps"] == 2
    assert (protocol["images"]["num"], protocol["reference"]["num"]) == (NUM_IMAGES, 11)
    assert protocol["resize"].startswith("bicubic")
    assert len(protocol["network"]["weights"]) == 16
    assert "reference" not in content["protocols"][content["numbers"]["clip_score"]["protocol"]]


def test_the_table_has_one_row_for_each_result_and_tables_by_category(outputs):
    whole, *by_category = (outputs[1] / "table.md").read_text().split("\n\n")
    assert whole.splitlines()[0].startswith("| model | guidance | frechet_random-4 | kernel_random-4 |")
    tables = {}
    for text in by_category:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        assert len(rows) == 2 + 4
        tables[rows[0][-1]] = rows
    names = ["clip_score", "hpsv3", "compositional", "dpg", "soft_tifa_am", "soft_tifa_gm"]
    assert list(tables) == names
    rows = tables["compositional"]
    assert rows[0] == ["model", "guidance", "colour and shape", "relation", "count", "compositional"]
    found = numbers(outputs[1])["ep0-ba4-ema-cfg3"]
    shown = [f"{found[name]:.4g}" for name in ("compositional/count", "compositional")]
    assert ["ep0-ba4-ema", "3", *shown] in [[*row[:2], *row[-2:]] for row in rows]


def test_questions_and_rewards_have_the_values_of_models_that_always_say_the_same(server, root, tmp_path):
    settings = (f"model={root / 'run'}", "guidance_scales=[2.0]", *all_protocols(root, root / "constant"))
    metrics = ("protocol.metrics=[clip_score]", "protocol.reference=null", "protocol.compositional=null")
    evaluate_on(server, 1, overrides(root, tmp_path, *settings, *metrics))
    more = ("protocol.metrics=[hpsv3]", "protocol.dpg=null", "protocol.geneval2=null")
    evaluate_on(server, 1, overrides(root, tmp_path, *settings, *metrics, *more))
    yes, two = 50.0, 8.0
    expected = {
        "dpg": 100.0,
        "dpg/entity": 100.0,
        "dpg/attribute": 100.0,
        "soft_tifa_am": ((yes + two) / 2 + yes) / 2,
        "soft_tifa_am/count": two,
        "soft_tifa_am/object": yes,
        "soft_tifa_am/attribute": yes,
        "soft_tifa_gm": ((yes * two) ** 0.5 + yes) / 2,
        "soft_tifa_gm/2 atoms": (yes * two) ** 0.5,
        "soft_tifa_gm/3 atoms": yes,
        "hpsv3": HPSV3,
        "hpsv3/Colors": HPSV3,
        "hpsv3/Counting": HPSV3,
    }
    found = numbers(tmp_path)["ep0-ba4-raw-cfg2"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    both = 3 / 5 * found["clip_score/Colors"] + 2 / 5 * found["clip_score/Counting"]
    assert found["clip_score"] == pytest.approx(both, rel=1e-6)


def test_a_folder_of_images_has_the_scores_of_its_prompts_by_category(server, root, outputs, tmp_path):
    folder = outputs[1] / "images" / "ep0-ba4-raw-cfg3" / "prompts"
    settings = ["protocol.metrics=[clip_score, hpsv3]", "protocol.prompts=null", "protocol.reference=null"]
    networks = [f"protocol.networks.clip_score={root / 'clip'}", f"protocol.networks.hpsv3={root / 'hpsv3'}"]
    evaluate_on(server, 1, [f"output_folder={tmp_path}", f"images={folder}", *settings, *networks])
    scores = [f"{name}{part}" for name in ("clip_score", "hpsv3") for part in ("", "/Colors", "/Counting")]
    of_model = numbers(outputs[1])["ep0-ba4-raw-cfg3"]
    expected = {name: of_model[name] for name in scores}
    assert numbers(tmp_path) == {"prompts": pytest.approx(expected, rel=1e-6, abs=1e-6)}


def test_existing_images_are_not_generated_again(server, root, outputs, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(outputs[1], again)
    shutil.rmtree(again / "results")
    lost = sorted(again.rglob("prompts/*.png"))[0]
    whole = images(again)
    lost.unlink()
    judged = modification_times(again, "judgements/*/*.json")
    assert len(judged) == 4 * (68 + 2 * 2 + 2)
    before = modification_times(again, "*.png")
    model = (f"model={root / 'run'}", "weights=[raw, ema]")
    evaluate_on(server, 1, overrides(root, again, *model, *all_protocols(root, root)))
    assert images(again) == whole
    written = {path.name for path, time in modification_times(again, "*.png").items() if before.get(path) != time}
    assert written == {"000000.png", "000001.png", "000002.png"}
    assert modification_times(again, "judgements/*/*.json") == judged
    for name, values in numbers(again).items():
        assert values == pytest.approx(numbers(outputs[1])[name], rel=1e-6, abs=1e-6)


def test_numbers_of_two_protocols_are_not_put_into_one_table(outputs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(outputs[1] / "results", other / "results")
    for path in (other / "results").glob("*.json"):
        result = Result.read(path)
        for number in result.numbers.values():
            number.protocol["images"]["num_inference_steps"] = 50
        result.write(other)
    assert "ep0-ba4-raw" in table(read_results([other]))
    with pytest.raises(ConfigurationError, match=r"images.num_inference_steps: 2, 50"):
        table(read_results([outputs[1], other]))


def test_a_modified_protocol_is_reported(outputs, tmp_path):
    path = tmp_path / "result.json"
    text = (outputs[1] / "results" / "ep0-ba4-raw-cfg3.json").read_text()
    path.write_text(text.replace('"num_inference_steps": 2', '"num_inference_steps": 50'))
    with pytest.raises(DataError, match=r"result\.json"):
        Result.read(path)


@pytest.mark.world_size(2)
def test_memory_for_as_many_features_as_in_the_shipped_protocol(server, tmp_path):
    """10,000 images and as many of the reference, 2,048 features: 0.16 GB of features; twice 6.5 GiB by batches."""
    server.command(2, ["tests/tools/wide_features.py", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["distance"] == pytest.approx(0.0, abs=1e-6)
    assert found["bytes"] < 2**30, found
