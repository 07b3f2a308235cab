import functools
from collections.abc import Iterator

import pytest
import torch

from diffusion.models.fast import compilation


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` without code generation: graphs and breaks are the same."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compilation._compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    compilation._compiled.cache_clear()
    torch._dynamo.reset()
