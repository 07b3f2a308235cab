"""Several processes that share an encoding: ranks of a launcher, or tasks on a Ray cluster."""

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from diffusion.errors import ConfigurationError, MachineError, UserError
from diffusion.preparation.encoding.models import Load
from diffusion.preparation.encoding.work import Counters, LocalCounters, Work, encode_items
from diffusion.preparation.ray_session import ray_session


class StoreCounters:
    """Numbers in the store of the process group, below a name of their own."""

    def __init__(self, name: str) -> None:
        from torch.distributed import distributed_c10d

        self._store = distributed_c10d._get_default_store()
        self._name = name

    def add(self, name: str, amount: int) -> int:
        """Add to a number, which begins at 0; return it."""
        return self._store.add(f"diffusion/encode/{self._name}/{name}", amount)


def end_group() -> None:
    """End a rank after an encoding that went well, when no rank waits for another; a single process goes on.

    Destroying a gloo group whose other ranks are gone can hang (torch 2.7), and the exit of the interpreter does it.
    """
    if has_group():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def has_group() -> bool:
    """Whether there are other ranks."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def shared_counters(name: str) -> Counters:
    """Return numbers that all ranks share; the name is that of this encoding."""
    return StoreCounters(name) if has_group() else LocalCounters()


@dataclass(frozen=True, kw_only=True)
class RayWorkers:
    """Tasks on a Ray cluster, which is that of `RAY_ADDRESS`, or one on this machine.

    Attributes:
        number: How many.
        load: Builds the networks in a task.
    """

    number: int
    load: Load

    def encode_items(self, work: Work, *, device: str, num_workers: int) -> None:
        """Do the work in the tasks; each has a GPU of its own if the device is one.

        Raises:
            ConfigurationError: Ray is not installed, or the cluster has too few GPUs.
            UserError: A task met it.
            MachineError: Ray cannot be started, or a task died.
        """
        if self.number < 1:
            raise ConfigurationError(f"--ray-workers {self.number}: it must be 1 or more")
        with ray_session(self.number + 1) as ray:
            try:
                failed = self._run(ray, work, device, num_workers)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:
                raise MachineError(
                    f"a worker died or ran out of memory; what was finished is kept: run the command again (Ray: "
                    f"{type(error).__name__})"
                ) from error
        for error in failed:
            if error is not None:
                raise error

    def _run(self, ray: Any, work: Work, device: str, num_workers: int) -> list[UserError | None]:
        """Return the mistake that each task met, if any."""
        on_gpu = device.startswith("cuda")
        if on_gpu and ray.cluster_resources().get("GPU", 0) < self.number:
            raise ConfigurationError(
                f"--ray-workers {self.number}: the cluster has {ray.cluster_resources().get('GPU', 0):.0f} GPUs"
            )
        counters = ray.remote(num_cpus=0)(LocalCounters).remote()
        task = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0, max_retries=0)(_in_task)
        given = ray.put(work)
        options = {"device": "cuda" if on_gpu else device, "num_workers": num_workers}
        return ray.get([task.remote(given, self.load, counters, **options) for _ in range(self.number)])


class RayCounters:
    """Numbers that an actor keeps."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def add(self, name: str, amount: int) -> int:
        """Add to a number, which begins at 0; return it."""
        import ray

        return ray.get(self._actor.add.remote(name, amount))


def _in_task(work: Work, load: Load, counters: Any, *, device: str, num_workers: int) -> UserError | None:
    """Take part in an encoding; return the mistake that it met, so that it arrives as what it is."""
    try:
        encode_items(work, load(), RayCounters(counters), device=device, num_workers=num_workers, progress=False)
    except UserError as error:
        return error
    return None
