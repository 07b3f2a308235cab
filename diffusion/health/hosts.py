"""On which hosts a run starts: those that are fit, and of these as many as its batch can be divided among."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diffusion.config.data import DataConfig
from diffusion.config.groups import group_size, legal_world_sizes
from diffusion.errors import MachineError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where to start."""

    hosts: tuple[str, ...]
    world_size: int
    unfit: tuple[str, ...]
    spare: tuple[str, ...]
    """Fit, and not needed."""


def choose_hosts(
    hosts: Sequence[str], unfit: Collection[int], *, wanted: int, ranks_per_node: int, data: DataConfig
) -> Choice:
    """Choose hosts in the given order: as many as wanted, or else the largest number that is legal.

    What is computed does not depend on it; a smaller number takes longer.

    Args:
        hosts: all that are there, spare ones last.
        unfit: places of those that are to be left out.
        wanted: nodes.
        ranks_per_node: ranks of each.
        data: what is divided among the ranks.

    Raises:
        MachineError: not even one host can do it.
    """
    fit = [host for place, host in enumerate(hosts) if place not in unfit]
    left_out = tuple(host for place, host in enumerate(hosts) if place in unfit)
    legal = set(legal_world_sizes(data.global_batch_size, group_size(data)))
    num = next((num for num in range(min(wanted, len(fit)), 0, -1) if num * ranks_per_node in legal), None)
    if num is None:
        raise MachineError(
            f"{len(fit)} of {len(hosts)} hosts are fit, and no number of them with {ranks_per_node} ranks each divides "
            f"data.global_batch_size={data.global_batch_size} evenly: mend {', '.join(left_out) or 'nothing'}, or "
            "start another number of ranks on each"
        )
    return Choice(hosts=tuple(fit[:num]), world_size=num * ranks_per_node, unfit=left_out, spare=tuple(fit[num:]))
