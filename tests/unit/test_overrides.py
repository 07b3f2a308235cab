"""The overrides that lift caps of Composer and Streaming say the same everywhere."""

import runpy
import tomllib
from unittest import mock

import pytest
import setuptools
from packaging.requirements import Requirement

from tests.tools.training_runs import ROOT

LINES = [line for line in (ROOT / "overrides.txt").read_text().splitlines() if not line.startswith("#")]
REQUIREMENTS = [line.partition("#")[0].strip() for line in LINES]


@pytest.fixture
def declared(monkeypatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs["install_requires"]


def test_setup_and_uv_have_the_same_bounds(declared):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    assert settings["override-dependencies"] == REQUIREMENTS
    bounds = {Requirement(text).name: Requirement(text).specifier for text in declared}
    overrides = {one.name: one.specifier for one in map(Requirement, REQUIREMENTS)}
    assert {name: bounds.get(name, specifier) for name, specifier in overrides.items()} == overrides
