"""The pages hold the tables of the committed rows, and the tables say what was measured."""

import copy

import pytest

from benchmarks.rows import read_rows
from benchmarks.tables import fill
from tests.tools.training_runs import ROOT

PAGE = "".join(f"<!-- benchmark:{name} -->\n<!-- /benchmark:{name} -->\n" for name in ("gpu", "summary"))
MACHINE = {"device": "NVIDIA H200", "type": "cuda", "torch": "2.11.0"}


def line(name, **result):
    parameters = {"architecture": "stable_diffusion_2"}
    head = {"name": name, "kind": name.split("/")[0], "date": "2026-12-01T00:00:00", "machine": MACHINE}
    return {**head, "parameters": parameters, "result": result}


def speed(name, rate):
    steps = {"images_per_second": rate, "num_gpus": 1, "tflops": rate * 2.4, "seconds": 64 / rate, "deviation": 0.01}
    return line(name, **steps, peak_bytes=70e9)


@pytest.fixture
def lines():
    """Rows of a GPU, one of which failed."""
    failed = line("step/512/128/bf16 stock")
    del failed["result"]
    return [
        line("rates", datasheet_flops=989e12, matmul_flops=780e12),
        speed("step/512/64/bf16 stock", 80.0),
        speed("trainer/512/64", 149.5),
        {**failed, "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GB"},
        line(
            "trainer/256/64", **speed("", 300.0)["result"], busy_ms=90.0, num_kernels=4000, classes={"copy": [5.0, 9]}
        ),
    ]


def row(page, *beginning):
    """Cells after the first that follow these."""
    [found] = [
        cells
        for text in page.splitlines()
        if (cells := text.strip("| ").split(" | "))[: len(beginning)] == list(beginning)
    ]
    return found[len(beginning) :]


def test_pages_hold_the_tables_of_the_committed_rows():
    files = sorted((ROOT / "benchmarks").glob("*.jsonl"))
    committed = [line for file in files for line in read_rows(file).values()]
    for name, path in {"gpu": "docs/performance.md", "summary": "README.md"}.items():
        page = (ROOT / path).read_text()
        assert f"<!-- benchmark:{name} -->" in page
        assert fill(page, committed) == page, "run python -m benchmarks tables"


def test_speed_beside_the_limits_of_the_machine(lines):
    page = fill(PAGE, lines).partition("<!-- /benchmark:gpu")[0]
    rate, of_mlperf, tflops, mfu, of_product, milliseconds, _, peak = row(page, "trainer", "512", "64")
    assert (rate, of_mlperf, tflops, milliseconds, peak) == ("149.5", "100%", "359", "428.1", "70.0")
    assert float(mfu.rstrip("%")) == pytest.approx(100 * 149.5 * 2.4 / 989, abs=0.06)
    assert float(of_product.rstrip("%")) == pytest.approx(100 * 149.5 * 2.4 / 780, abs=0.06)
    assert row(page, "loop, bf16 stock", "512", "128")[0] == "out of memory"
    assert row(page, "trainer/256/64") == ["213.3", "90.0", "5.0", "4,000"]


def test_tables_follow_the_rows(lines):
    page = fill(PAGE, lines)
    faster = copy.deepcopy(lines)
    faster[2]["result"]["images_per_second"] = 180.0
    assert row(fill(page, faster).partition("<!-- /benchmark:gpu")[0], "trainer", "512", "64")[0] == "180.0"
    assert fill(fill(page, faster), lines) == page
    assert "NVIDIA H200" not in fill(page, [])
