"""The command that measures runs, and what it writes are rates of the same thing."""

import pytest

from benchmarks.rows import read_rows

pytestmark = pytest.mark.slow

PARTS = ("step", "open", "prepare")


def test_parts(server, tmp_path):
    options = ["trainer.parallelism=ddp", "--microbatches", "2", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    printed = server.command(0, ["benchmarks/__main__.py", *PARTS, *options]).output
    lines = read_rows(tmp_path / "rows.jsonl")
    assert [line["error"] for line in lines.values() if "error" in line] == []
    assert all(f"{name}: " in printed for name in lines)
    measured = {name: line["result"] for name, line in lines.items()}
    ratios = [value for key, value in measured["prepare"].items() if key.startswith("ratio")]
    assert ratios
    assert all(0 < ratio < 100 for ratio in ratios), ratios
    assert measured["open/40"]["requests"] > measured["open/1"]["requests"] > 1
    speed = measured["trainer/32/2"]
    assert speed["images_per_second"] == pytest.approx(2 / speed["seconds"])
    assert speed["tflops"] == pytest.approx(606_404_608 * speed["images_per_second"] / 1e12, rel=1e-6)
    parts = measured["parts/32/2"]
    assert parts["num_steps"] == 2
    assert all(seconds > 0 for seconds in parts["parts"].values())
