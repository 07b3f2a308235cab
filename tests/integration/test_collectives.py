"""SageMaker's collectives: training over a backend that its library registers, and one message without it."""

import json

import pytest

from diffusion.errors import MachineError
from diffusion.formats.run_folder import read_metrics, series
from diffusion.sharding import load_smddp

LIBRARY = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    print(f"rank {rank} of {size} uses smddp")
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("smddp", create, devices=["cpu"])
"""
PROGRAM = """
import runpy, sys
sys.path.insert(0, {folder!r})
runpy.run_path("tests/tools/training_runs.py", run_name="__main__")
"""


@pytest.mark.world_size(2)
def test_two_ranks_train_over_the_library(server, tmp_path):
    package = tmp_path / "smdistributed" / "dataparallel" / "torch"
    package.mkdir(parents=True)
    (package / "torch_smddp.py").write_text(LIBRARY)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    overrides = [f"output_folder={tmp_path}/run", "trainer.collectives=smddp", "trainer.parallelism=fsdp"]
    overrides += ["trainer.max_duration=4ba", "samples.prompts=[]"]
    job = server.command(2, [str(program), json.dumps([("tests/tools/toy.yaml", overrides)])])
    assert "rank 1 of 2 uses smddp" in job.output
    steps, _ = series(read_metrics(tmp_path / "run" / "metrics.jsonl"), "loss/train/total")
    assert len(steps) == 4


def test_without_the_library_one_message_says_so():
    with pytest.raises(MachineError, match=r"trainer.collectives=nccl"):
        load_smddp()
