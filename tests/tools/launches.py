"""What a step launches on a GPU, and what it copies there, counted on the meta device in the GPU's place.

Tensors on the meta device have no contents, so that whoever reads one from there fails.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WITHOUT_KERNEL = ("empty", "new_empty", "detach", "_unsafe_view", "_reshape_alias", "lift_fresh")
"""Beginnings of the names of operations that launch nothing."""


@contextmanager
def pinned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context, `pin_memory` works without a GPU: it marks what it copies as pinned."""
    kept: dict[int, Tensor] = {}

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        kept[copy.untyped_storage().data_ptr()] = copy
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in kept)
        yield


class LaunchCounter(TorchDispatchMode):
    """Counts what a step does with the meta device, by part of the step.

    Attributes:
        part: what follows is counted there.
        launches: operations by (part, name).
        uploads: copies from pinned host memory, which the copy engine does beside the launches, by part.
        copies: copies from host memory that is not pinned, by part.
    """

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.launches: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def clear(self) -> None:
        """Forget what was counted."""
        self.launches.clear()
        self.uploads.clear()
        self.copies.clear()

    def total(self, part: str) -> int:
        """Launches of a part."""
        return sum(count for (of, _), count in self.launches.items() if of == part)

    def watch(self, part: str, module: nn.Module) -> None:
        """Count the forward pass of a module as a part of its own."""
        before: list[str] = []

        def enter(*_: Any) -> None:
            before.append(self.part)
            self.part = part

        def leave(*_: Any) -> None:
            self.part = before.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = (
            [value for value in tree_leaves(values) if isinstance(value, Tensor)] for values in (args, result)
        )
        if not any(value.is_meta for value in outputs) or func.is_view or name.startswith(WITHOUT_KERNEL):
            return result
        if name in ("_to_copy", "copy_") and not inputs[-1].is_meta:
            (self.uploads if inputs[-1].is_pinned() else self.copies)[self.part] += 1
        else:
            self.launches[self.part, name] += 1
        return result
