"""Memory per rank of the recipe's runs, counted on a fake world of 128 ranks."""

import json

import pytest

from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.planning.memory import ParameterCounts, parameter_counts, plan_memory

pytestmark = pytest.mark.slow

NUM_PARAMETERS = 865_910_724
PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch.distributed as dist
from composer.core.state import _create_device_mesh
from composer.devices import DeviceCPU
from torch.testing._internal.distributed.fake_pg import FakeStore
from diffusion.sharding import fsdp_config
from diffusion.config.locations import is_location
from diffusion.config.loading import load_config
from tests.tools.rank_memory import count_rank_memory

def count(phase, num_ranks, rank, *overrides):
    config = load_config(f"yamls/phase{phase}.yaml", list(overrides), may_lack=is_location)
    return asdict(count_rank_memory(config, num_ranks=num_ranks, rank=rank))

counts = {f"{phase} {rank}": count(phase, 128, rank) for phase, rank in ((1, 0), (2, 0), (2, 127))}
counts["small"] = [count(2, 3, rank) for rank in range(3)]
averages = "algorithms.ema={start: 800000ba, decays: [0.9999, 0.999], power: {snapshot_interval: 5000ba}}"
counts["four averages"] = count(2, 3, 0, averages)
groups = ["trainer.num_replicas=16"]
counts["groups"] = count(1, 128, 0, *groups)
lora = load_config("tests/tools/toy.yaml", ["model.lora={rank: 4}"])
counts["lora"] = [asdict(count_rank_memory(lora, num_ranks=2, rank=rank)) for rank in range(2)]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=128)
settings = load_config("yamls/phase1.yaml", groups, may_lack=is_location).trainer
mesh = _create_device_mesh(DeviceCPU(), fsdp_config(settings), None)
counts["mesh"] = [list(mesh.mesh_dim_names), list(mesh.shape)]
dist.destroy_process_group()
assert not dist.is_initialized()
Path(sys.argv[1]).write_text(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    (folder / "program.py").write_text(PROGRAM)
    server.command(0, [str(folder / "program.py"), str(folder / "counts.json")])
    return json.loads((folder / "counts.json").read_text())


def test_first_rank_of_128(counts):
    """FSDP2 cuts each parameter by rows: of the 320 rows of many, rank 0 holds 3, not 2.5."""
    assert counts["1 0"] == {"weights": 27_233_720, "gradients": 27_233_720, "optimizer": 54_467_440, "ema": 0}
    assert counts["2 0"] == counts["1 0"] | {"ema": 27_233_720}


def test_last_rank_of_128_holds_padding_in_place_of_rows(counts):
    assert counts["2 127"]["weights"] == counts["2 0"]["weights"]
    assert counts["2 127"]["optimizer"] == 52_490_080
    assert counts["2 127"]["ema"] == 26_245_040


def test_all_ranks_together_hold_each_number_once(counts):
    assert sum(count["optimizer"] for count in counts["small"]) == 8 * NUM_PARAMETERS
    assert sum(count["ema"] for count in counts["small"]) == 4 * NUM_PARAMETERS
    assert 4 * NUM_PARAMETERS <= sum(count["weights"] for count in counts["small"]) < 4.01 * NUM_PARAMETERS


def test_each_of_several_averages_is_counted(counts):
    assert counts["four averages"] == counts["small"][0] | {"ema": 4 * counts["small"][0]["ema"]}


def test_of_lora_only_the_matrices_have_gradients_moments_and_averages(counts):
    """Two ranks divide the rows of every parameter of the toy evenly."""
    trained, fixed, *_ = parameter_counts(load_config("tests/tools/toy.yaml", ["model.lora={rank: 4}"]))
    together = {part: sum(count[part] for count in counts["lora"]) for part in counts["lora"][0]}
    assert together == {
        "weights": 4 * (trained + fixed),
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "ema": 4 * trained,
    }


def test_groups_of_ranks_hold_the_model_once_each(counts):
    """With 16 replicas a rank of 128 holds an eighth; the mesh that Composer makes has both dimensions."""
    assert counts["mesh"] == [["data_parallel_replicate", "data_parallel_shard"], [16, 8]]
    assert counts["groups"]["optimizer"] == pytest.approx(8 * NUM_PARAMETERS / 8, rel=0.01)
    assert counts["groups"]["weights"] == pytest.approx(4 * NUM_PARAMETERS / 8, rel=0.01)


@pytest.mark.parametrize("phase", [1, 2])
def test_the_plan_is_right_within_one_percent(counts, phase):
    config = load_config(f"yamls/phase{phase}.yaml", ["plan.num_gpus=128"], may_lack=is_location)
    _, shards_only, _ = plan_memory(config, ParameterCounts(NUM_PARAMETERS), 128).states
    for counted in (counts[name] for name in counts if name.startswith(f"{phase} ")):
        assert sum(counted.values()) == pytest.approx(shards_only.total, rel=0.03)
    assert sum(counts[f"{phase} 0"].values()) == pytest.approx(shards_only.total, rel=0.01)
