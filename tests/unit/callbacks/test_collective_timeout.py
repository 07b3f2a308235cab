from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diffusion.callbacks.collectives import CollectiveTimeout


@pytest.fixture
def mesh():
    is_first = not dist.is_initialized()
    if is_first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    if is_first:
        dist.destroy_process_group()


def timeout_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_collectives_wait_longer_in_the_first_steps(mesh: DeviceMesh):
    own = dist.new_group(timeout=timedelta(seconds=7))
    groups = [dist.group.WORLD, *mesh.get_all_groups(), own]
    callback = CollectiveTimeout(first=3600, then=600, num_first_steps=2)
    state: Any = SimpleNamespace(device_mesh=mesh)
    logger: Any = None
    callback.fit_start(state, logger)
    found = [[timeout_of(group) for group in groups]]
    for _ in range(3):
        callback.batch_end(state, logger)
        found.append([timeout_of(group) for group in groups])
    first, then = [3600.0] * 3 + [7.0], [600.0] * 3 + [7.0]
    assert found == [first, first, then, then], "groups of others keep theirs"
