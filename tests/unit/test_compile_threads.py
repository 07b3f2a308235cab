"""The environment of a rank."""

import os

import pytest

from diffusion import launch

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [(8, None, "24"), (1, None, "32"), (256, None, "1"), (8, "3", "3")]
)
def test_ranks_of_a_node_share_its_cores_for_compilation(monkeypatch, ranks, given, expected):
    monkeypatch.setattr(launch, "end_with_parent", lambda number: None)
    monkeypatch.setattr(launch, "num_cores", lambda: 192)
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": str(ranks), THREADS: given or ""}.items():
        monkeypatch.setenv(name, value)
    if given is None:
        monkeypatch.delenv(THREADS)
    found = []
    assert launch.run_command(lambda: found.append(os.environ[THREADS])) == 0
    assert found == [expected]
