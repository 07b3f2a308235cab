import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpreted_group_norm.py")
TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3, "large mean": 2e-4, "compiled": 1e-6}
"""Largest error relative to the largest value, of result and gradients, against float64."""


def errors(device: str, **environment: str) -> dict[str, float]:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), device],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check(found: dict[str, float]) -> None:
    assert {"opcheck test_schema", "opcheck test_autograd_registration", "opcheck test_faketensor"} <= found.keys()
    assert "opcheck test_aot_dispatch_dynamic" in found
    for name, tolerance in TOLERANCES.items():
        assert found[name] < tolerance, name


def test_kernels_agree_with_float64_in_the_interpreter():
    check(errors("cpu", TRITON_INTERPRET="1"))


@pytest.mark.gpu
def test_kernels_agree_with_float64_on_a_gpu():
    check(errors("cuda"))
