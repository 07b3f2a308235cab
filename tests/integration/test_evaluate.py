"""`evaluate.py` end to end on a toy checkpoint: ranks, restarts, protocols."""

import json
import shutil

import pytest

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.protocol import Result, read_results, table
from tests.tools.evaluation_toys import evaluate_on, numbers, overrides, write_all

COMPOSITIONAL = "protocol.compositional={images_per_prompt: 1}"
NUM_IMAGES = 10


@pytest.fixture(scope="module")
def root(server, tmp_path_factory):
    root = write_all(tmp_path_factory.mktemp("evaluate"))
    server.train(1, [("tests/tools/toy.yaml", [f"output_folder={root / 'run'}", "trainer.max_duration=4ba"])])
    return root


@pytest.fixture(scope="module")
def outputs(server, root):
    """The same evaluation on one rank and on two."""
    folders = {ranks: root / f"on-{ranks}" for ranks in (1, 2)}
    for ranks, folder in folders.items():
        evaluate_on(
            server, ranks, overrides(root, folder, f"model={root / 'run'}", COMPOSITIONAL, "weights=[raw, ema]")
        )
    return folders


def images(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("images/*/prompts/*.png"))}


@pytest.mark.world_size(2)
def test_images_and_numbers_are_the_same_on_one_rank_and_on_two(outputs):
    first, second = (images(outputs[ranks]) for ranks in (1, 2))
    assert len(first) == 2 * 2 * NUM_IMAGES
    assert first == second
    assert len(set(first.values())) > NUM_IMAGES
    one, two = (numbers(outputs[ranks]) for ranks in (1, 2))
    assert set(one) == {f"ep0-ba4-{weights}-cfg{scale}" for weights in ("raw", "ema") for scale in (1, 3)}
    for name, values in one.items():
        assert {"frechet_random-4", "kernel_random-4", "clip_fid", "cmmd", "clip_score", "compositional"} <= set(values)
        assert two[name] == pytest.approx(values, abs=1e-6, rel=1e-6)


def test_numbers_stand_beside_their_protocols(outputs):
    content = json.loads((outputs[1] / "results" / "ep0-ba4-raw-cfg3.json").read_text())
    entry = content["numbers"]["clip_fid"]
    protocol = content["protocols"][entry["protocol"]]
    assert protocol["images"]["num_inference_steps"] == 2
    assert (protocol["images"]["num"], protocol["reference"]["num"]) == (NUM_IMAGES, 11)
    assert protocol["resize"].startswith("bicubic")
    assert len(protocol["network"]["weights"]) == 16
    assert "reference" not in content["protocols"][content["numbers"]["clip_score"]["protocol"]]


def test_the_table_has_one_row_for_each_result_and_the_compositional_checks_by_category(outputs):
    whole, categories = (outputs[1] / "table.md").read_text().split("\n\n")
    assert whole.splitlines()[0].startswith("| model | guidance | frechet_random-4 | kernel_random-4 |")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in categories.splitlines()]
    assert rows[0] == ["model", "guidance", "colour and shape", "relation", "count", "mean"]
    assert len(rows) == 2 + 4
    found = numbers(outputs[1])["ep0-ba4-ema-cfg3"]
    shown = [f"{found[name]:.4g}" for name in ("compositional/count", "compositional")]
    assert ["ep0-ba4-ema", "3", *shown] in [[*row[:2], *row[-2:]] for row in rows]


def test_existing_images_are_not_generated_again(server, root, outputs, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(outputs[1], again)
    shutil.rmtree(again / "results")
    lost = sorted(again.rglob("prompts/*.png"))[0]
    whole = images(again)
    lost.unlink()
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*.png")}
    evaluate_on(server, 1, overrides(root, again, f"model={root / 'run'}", COMPOSITIONAL, "weights=[raw, ema]"))
    assert images(again) == whole
    written = {path.name for path in again.rglob("*.png") if before.get(path) != path.stat().st_mtime_ns}
    assert written == {"000000.png", "000001.png", "000002.png"}
    assert numbers(again) == numbers(outputs[1])


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


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_memory_at_the_shipped_protocol(server, tmp_path):
    """30,000 images and as many of the reference, 2,048 features: 0.49 GB of features; twice 58.6 GiB by batches."""
    server.command(2, ["tests/tools/wide_features.py", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["distance"] == pytest.approx(0.0, abs=1e-6)
    assert found["bytes"] < 2 * 2**30
