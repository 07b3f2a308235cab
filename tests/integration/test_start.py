"""The start of a run on several ranks: requests to the store, and which rank waits how long for a slow one."""

import time
from pathlib import Path

import pytest

from diffusion.config.schema import Config
from diffusion.planning.downloads import World
from tests.integration.test_failures import latents
from tests.integration.test_object_store_pipeline import OPTIONS, SECTIONS
from tests.tools.faulty_proxy import proxy
from tests.tools.s3_server import s3_process, s3_server, upload
from verification.simulate_start import simulate

__all__ = ["proxy", "s3_process", "s3_server"]
pytestmark = [pytest.mark.s3, pytest.mark.slow]


@pytest.mark.world_size(4)
def test_requests_of_a_start_do_not_grow_with_the_ranks(server, proxy, shapes, tmp_path: Path) -> None:
    upload(shapes / "latents-32", "s3://tests/start")
    remotes = [f"{section}.remote=s3://tests/start/{split}" for section, split in SECTIONS]
    caches = [f"{section}.local={tmp_path}/{{node}}/{split}" for section, split in SECTIONS]
    overrides = [*OPTIONS, *remotes, *caches, f"output_folder={tmp_path}/run", f"model.vae={shapes}/vae"]
    proxy.requests.clear()
    job = server.start(4, ["tests/tools/ranks_as_nodes.py", "2", "yamls/tiny/phase1.yaml", *overrides]).finish()
    assert not any(job.codes), job.output[-6000:]
    counts = {name: num for name, num in proxy.requests.items() if name.endswith(".json")}
    # Manifest and marks are looked for in start/train, start/validation and start, by rank 0 for all.
    descriptions = dict.fromkeys(("manifest.json", "withdrawn.json", "damaged.json"), 3)
    assert counts == descriptions | {"index.json": 2 * 4}, "two buckets of two splits on two nodes"


@pytest.mark.world_size(2)
def test_a_download_longer_than_collectives_may_take_does_not_end_a_start(
    server, proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node downloads the checkpoint; the other one waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    timeout, asked = 15, []
    folder = "trainer.checkpoint_folder=s3://tests/slow-start"
    overrides = [
        f"output_folder={tmp_path}/run",
        "trainer.parallelism=ddp",
        folder,
        "samples.prompts=[]",
        "algorithms.ema=null",
    ]
    program = ["tests/tools/ranks_as_nodes.py", "1", "tests/tools/toy.yaml", *overrides]
    first = server.start(2, [*program, "trainer.max_duration=2ba"]).finish()
    assert not any(first.codes), first.output[-6000:]

    def delay(name: str, count: int) -> None:
        if name == "ep0-ba2.pt":
            asked.append(time.monotonic())
            time.sleep(1.5 * timeout)

    proxy.fault = delay
    second = server.start(2, [*program, "trainer.max_duration=4ba", f"trainer.dist_timeout={timeout}"]).finish()
    assert not any(second.codes), second.output[-6000:]
    assert len(asked) == 2
    assert asked[1] - asked[0] > timeout


@pytest.mark.world_size(2)
def test_a_rank_whose_loader_gives_nothing_says_so_before_the_collectives_of_others_end(
    server, shapes, tmp_path: Path
) -> None:
    """With the default time-outs, made shorter by the same factor."""
    defaults, dist_timeout = Config(), 40.0
    loader_timeout = dist_timeout * defaults.data.loader_timeout / defaults.trainer.dist_timeout
    overrides = [
        "trainer.max_duration=30ba",
        "data.num_workers=1",
        f"data.loader_timeout={loader_timeout}",
        f"trainer.dist_timeout={dist_timeout}",
        "plugins.callbacks=[{path: tests.tools.toys.StallWorkers, arguments: {step: 2}}]",
    ]
    job = server.run(2, [latents(shapes, shapes / "latents-32", tmp_path / "run", *overrides)])
    assert job.codes[0] == 2, job.output[-6000:]
    before, found, _ = job.output.partition("rank 0: DataError: no batch came from a loader worker")
    assert found
    assert "Traceback" not in before, "the other rank's collective ended before"


def test_simulated_ranks_read_indexes_once_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    starts, counts = simulate(400, 2, World(num_nodes=2, ranks_per_node=2))
    assert len(starts) == 4
    descriptions = [counts[path][0] for path in counts if path.endswith(".json") and not path.endswith("index.json")]
    assert descriptions == [1] * 6
    assert [counts[path][0] for path in counts if path.endswith("index.json")] == [2, 2]
    assert all(num <= 2 for path, (num, _) in counts.items() if path.endswith(".mds"))
    assert sum(num for path, (num, _) in counts.items() if path.endswith(".mds")) >= 4
