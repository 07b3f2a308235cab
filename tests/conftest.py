"""Options and fixtures that all tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", default=None, help="folder with real pictures: emoji/ and prompts/")


@pytest.fixture(scope="session")
def data_folder(request: pytest.FixtureRequest) -> Path:
    """Folder of real pictures, given by --data."""
    place = request.config.getoption("--data")
    if not place or not Path(place, "emoji").is_dir():
        pytest.skip("needs real pictures: pytest --data FOLDER, where FOLDER/emoji has the three layouts")
    return Path(place).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
