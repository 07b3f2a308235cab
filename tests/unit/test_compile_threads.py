"""The environment of a rank."""

import os

import pytest

from diffusion import launch

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("own", "ranks", "given", "expected"),
    [
        (192, 8, None, "24"),
        (24, 8, None, "24"),
        (4, 8, None, "4"),
        (192, 1, None, "32"),
        (192, 256, None, "1"),
        (192, 8, "3", "3"),
    ],
)
def test_ranks_of_a_node_share_its_cores_for_compilation(monkeypatch, own, ranks, given, expected):
    monkeypatch.setattr(launch, "end_with_parent", lambda number: None)
    monkeypatch.setattr(launch, "num_cores", lambda process=0: 192 if process else own)
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": str(ranks), THREADS: given or ""}.items():
        monkeypatch.setenv(name, value)
    if given is None:
        monkeypatch.delenv(THREADS)
    found = []
    assert launch.run_command(lambda: found.append(os.environ[THREADS])) == 0
    assert found == [expected]
