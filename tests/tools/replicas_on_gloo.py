"""Train with `trainer.num_replicas` (HSDP) on CPUs, as `training_runs.py` does: `replicas_on_gloo.py RUNS`.

The check of the machine refuses it, for two reasons, and this program goes around them:

- gloo has no all_reduce(AVG), by which FSDP2 averages gradients between replicas: here it is a sum and a division;
- streams of CPUs record no events, and FSDP2 (torch 2.7) asserts that there is one after an all_reduce.

All else is what runs on GPUs: Composer's mesh, the groups of FSDP2, clipping, optimizers, averages and checkpoints.
"""

import json
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.tools.training_runs import train_runs

_all_reduce = dist.all_reduce


def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Average by a sum and a division."""
    if op != dist.ReduceOp.AVG:
        return _all_reduce(tensor, op, group, async_op)
    _all_reduce(tensor, dist.ReduceOp.SUM, group)
    return tensor.div_(dist.get_world_size(group))


if __name__ == "__main__":
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(torch.cpu.Stream, "record_event", lambda stream: object()),
        mock.patch("diffusion.train.check_machine"),
    ):
        sys.exit(train_runs(json.loads(sys.argv[1])))
