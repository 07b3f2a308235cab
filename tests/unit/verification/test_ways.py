from pathlib import Path
from types import SimpleNamespace

import pytest

from diffusion.config.checks import check
from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from verification.runs import Recipe
from verification.verify_elastic import ROOT, main
from verification.ways import VALUES, RunSpec, covering_set, pairs, product, references, short_set


def test_every_pair_of_values_occurs_in_a_run_that_is_compared_with_another():
    chosen = covering_set()
    assert chosen[:4] == references()
    assert set().union(*(pairs(spec) for spec in chosen[4:])) == set().union(*(pairs(spec) for spec in product()))
    assert {spec.data_setting for spec in chosen[4:]} == {spec.data_setting for spec in references()}
    assert len(chosen) < 20
    assert len({spec.name for spec in chosen}) == len(chosen)


def test_the_references_are_undisturbed_runs_on_one_rank_and_run_first():
    assert {spec.data_setting for spec in references()} == {
        (representation, buckets) for representation in VALUES["representation"] for buckets in VALUES["buckets"]
    }
    assert all(spec.interruption == "none" and spec.world_size == 1 for spec in references())
    assert product()[:4] == references()


def test_the_short_set_varies_what_belongs_to_the_machine():
    chosen = short_set()
    assert chosen[0] == RunSpec()
    for name in ("world_size", "microbatch", "workers", "parallelism"):
        assert len({getattr(spec, name) for spec in chosen}) > 1, name
    assert {spec.interruption for spec in chosen} == set(VALUES["interruption"])


@pytest.mark.parametrize("name", ["autoencoder_dc", "pixel"])
def test_each_way_to_run_a_recipe_is_one_that_is_possible(name: str, tmp_path: Path, monkeypatch) -> None:
    run_specs = []

    def run(recipe: Recipe, spec: RunSpec, data: list[str]) -> None:
        command = recipe.command(spec, tmp_path / spec.name, spec.world_size, data)
        words = command[command.index(str(recipe.yaml)) + 1 :]
        check(load_config(str(recipe.yaml), words, may_lack=is_location), world_size=spec.world_size)
        run_specs.append(spec)

    stubs = {
        "make_data": lambda folder, resolution: folder,
        "run": run,
        "compare": lambda outcome, reference: SimpleNamespace(is_equal=True),
        "format_table": lambda comparisons: "head\nrow",
    }
    for function, stub in stubs.items():
        monkeypatch.setattr(f"verification.runs.{function}", stub)
    yaml = str(ROOT / f"yamls/tiny/{name}.yaml")
    monkeypatch.setattr("sys.argv", ["verify_elastic", yaml, "--short", "--out", str(tmp_path / "out")])
    main()
    assert [spec.world_size for spec in run_specs] == [1, 2, 3]
