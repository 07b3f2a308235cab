"""Options and fixtures that all tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.training_runs import TrainingServer

LONGEST = (
    "test_ray.py",
    "test_elastic_launch.py",
    "test_object_store.py",
    "test_ahead_of_time.py",
    "test_yamls.py",
    "test_speedrun.py",
    "test_parallel_compilation.py",
    "test_combinations.py",
    "test_resumption.py",
    "test_ema_runs.py",
    "test_chaos.py",
    "test_network_runs.py",
    "test_leaderboard.py",
    "test_utilisation.py",
    "test_fused_norms.py",
    "test_ssh.py",
    "test_slurm.py",
    "test_prepare.py",
    "test_changed_settings.py",
    "test_prepared_folder.py",
    "test_fast_unet.py",
    "test_start.py",
    "test_groups_training.py",
    "test_evaluate.py",
    "test_loss_guard.py",
    "test_loader_speed.py",
    "test_ingest.py",
    "test_stores.py",
    "test_verify_elastic.py",
    "test_saving_in_runs.py",
    "test_representations.py",
    "test_encode_ranks.py",
    "test_preemption.py",
    "test_benchmark_command.py",
    "test_preference_server.py",
    "test_growing.py",
    "test_failures.py",
    "test_killed_preparation.py",
    "test_your_own_data.py",
    "test_hostile_sources.py",
    "test_frozen_parts.py",
    "test_watch.py",
    "test_source_remote.py",
)
"""Files that take the longest, which start first: several workers then end at about the same time."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", default=None, help="folder with real images: emoji/ and prompts/")
    parser.addoption("--other-python", help="interpreter with other versions, to exchange checkpoints and exports with")
    parser.addoption("--kills", type=int, default=2, help="how often a preparation is killed in a test of that")


@pytest.fixture(scope="session")
def data_folder(request: pytest.FixtureRequest) -> Path:
    """Folder of real images, given by --data."""
    place = request.config.getoption("--data")
    if not place or not Path(place, "emoji").is_dir():
        pytest.skip("needs real images: pytest --data FOLDER, where FOLDER/emoji has the three layouts")
    return Path(place).resolve()


@pytest.fixture(scope="session")
def kills(request: pytest.FixtureRequest) -> int:
    """How often a preparation is killed, given by --kills."""
    return request.config.getoption("--kills")


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Take back handlers of signals: with those that training leaves, forked processes do not end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # Collections of garbage need not look at a million objects of imported modules each time.


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton would list hundreds of leaks.


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingServer]:
    """Starts training in real processes."""
    server = TrainingServer(tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def python(server: TrainingServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program like Python that has been started and has imported everything."""
    return str(server.programs(tmp_path_factory.mktemp("programs") / "bin") / "python")


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn shapes with captions: prepared/, a random VAE in vae/, and latents-32/ and latents-64/ made with it."""
    from demo.shapes import write_data_set
    from diffusion.config.model import Architecture, ModelConfig
    from diffusion.models import load_frozen_parts
    from diffusion.preparation.config import ScorerConfig
    from diffusion.preparation.encoding.encode import encode
    from diffusion.preparation.encoding.models import EncodingModels
    from tests.tools.preparing import prepare

    root = tmp_path_factory.mktemp("shapes")
    write_data_set(root / "source", 150, seed=3)
    sources = [root / "source" / layout for layout in ("images", "webdataset", "parquet")]
    scorers = [ScorerConfig(path="demo.shapes.Brightness", column="brightness")]
    prepare(sources, root / "prepared", edges=[32, 64], validation_fraction=0.2, scorers=scorers)
    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny))
    parts.vae.save_pretrained(root / "vae")
    for resolution in (32, 64):
        out = root / f"latents-{resolution}"
        options = {"models": EncodingModels.of(parts), "resolutions": [resolution], "scores": ["brightness"]}
        encode(root / "prepared", out, **options)
    return root
