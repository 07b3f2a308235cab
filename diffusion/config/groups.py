"""Groups: what has to fit when several streams meet in one step, in groups of one stream (`data.mixing: groups`)."""

from collections.abc import Iterator

from diffusion.config.data import DataConfig, Mixing


def group_size(data: DataConfig) -> int:
    """Samples that have to stay on one rank: 1 without groups, or where the size is no divisor of the batch."""
    size = data.group_size if data.mixing is Mixing.groups else None
    return size if size is not None and size > 0 and data.global_batch_size % size == 0 else 1


def legal_world_sizes(global_batch_size: int, unit_size: int = 1) -> list[int]:
    """World sizes that give each rank the same number of whole units (groups or samples)."""
    units = global_batch_size // unit_size
    return [size for size in range(1, units + 1) if units % size == 0]


def microbatch_size(data: DataConfig, limit: int | None, world_size: int) -> int:
    """Samples of a forward pass: the largest divisor of a rank's batch, or of a group, up to a limit.

    Args:
        data: the configuration's section `data`.
        limit: `trainer.device_train_microbatch_size`; None: no limit.
        world_size: ranks, which divide the batch.
    """
    share = max(1, data.global_batch_size // world_size)
    divisors = legal_world_sizes(group_size(data) if data.mixing is Mixing.groups else share)
    return max(size for size in divisors if limit is None or size <= limit)


def group_problems(data: DataConfig, world_size: int) -> Iterator[str]:
    """Sentences about what does not fit.

    Args:
        data: the configuration's section `data`.
        world_size: ranks.
    """
    size, group = data.global_batch_size, data.group_size
    if data.mixing is not Mixing.groups:
        if group is not None:
            yield f"data.group_size is {group}, but data.mixing is {data.mixing.value}. Set data.group_size=null."
        return
    divisors = _listed(legal_world_sizes(size))
    if group is None:
        yield f"data.mixing is groups without data.group_size. Give the samples of a group, one of {divisors}."
    elif group_size(data) != group:
        yield f"data.group_size is {group}, which does not divide data.global_batch_size {size}. Use one of {divisors}."
    elif (size // group) % world_size:
        yield (
            f"{world_size} ranks cannot share the {size // group} groups of a step (data.global_batch_size {size}, "
            f"data.group_size {group}): a rank gets whole groups. Legal numbers of ranks are "
            f"{_listed(legal_world_sizes(size, group))}."
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
