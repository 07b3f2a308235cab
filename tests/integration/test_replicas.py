"""Muon, WSD and clipping on one rank, two ranks, and four as two replicas of two shards: the same training.

Checkpoints are interchangeable between them.
"""

import json

import pytest
import torch

from diffusion.callbacks.clipping import GRADIENT_NORM
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series

pytestmark = [pytest.mark.slow, pytest.mark.world_size(4)]

REPLICAS = ("trainer.num_replicas=2", "trainer.device_train_microbatch_size=1")
HALF = ("trainer.max_duration=2ba", "schedule.decay=constant")
MAX_NORM = 0.05


def options(folder, *more):
    names = {"RecordWeights": "{folder: %s}", "RecordGradients": "{path: %s.pt}", "RecordAverages": "{folder: %s}"}
    recorders = [
        f"{{path: tests.tools.toys.{name}, arguments: {text % f'{folder}-{name}'}}}" for name, text in names.items()
    ]
    return "tests/tools/toy.yaml", [
        f"output_folder={folder}",
        "trainer.max_duration=4ba",
        "trainer.save_interval=100ba",
        "schedule={warmup: 1ba, decay: wsd, cooldown: 2ba}",
        "algorithms.ema.start=1ba",
        "optimizer.name=muon",
        f"optimizer.max_grad_norm={MAX_NORM}",
        f"plugins.callbacks=[{', '.join(recorders)}]",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """The folders `one`, `two-fsdp`, `two-ddp`, `four` (ranks), `grown` (one rank, then four) and `shrunk`."""
    root = tmp_path_factory.mktemp("replicas")
    server.train(1, [options(root / "one"), options(root / "grown", *HALF)])
    replicated = [
        options(root / "four", *REPLICAS),
        options(root / "grown", *REPLICAS),
        options(root / "shrunk", *REPLICAS, *HALF),
    ]
    server.train(4, replicated)
    microbatch = "trainer.device_train_microbatch_size=2"
    server.train(2, [options(root / f"two-{way}", f"trainer.parallelism={way}", microbatch) for way in ("fsdp", "ddp")])
    server.train(1, [options(root / "shrunk")])
    return root


@pytest.mark.parametrize("name", ["two-fsdp", "two-ddp", "four"])
def test_gradients_and_their_norm_are_those_of_one_rank(runs, name):
    one, other = (torch.load(runs / f"{n}-RecordGradients.pt") for n in ("one", name))
    assert torch.cat([part.flatten() for part in one.values()]).norm().item() == pytest.approx(MAX_NORM, 1e-4)
    for key, gradient in one.items():
        torch.testing.assert_close(other[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
    norms = [series(read_metrics(runs / f"{n}/metrics.jsonl"), GRADIENT_NORM) for n in ("one", name)]
    assert norms[0][0] == norms[1][0] == [1, 2, 3, 4], "logged at the end of each step"
    assert min(norms[0][1]) > MAX_NORM, "every step is clipped"
    assert norms[1][1] == pytest.approx(norms[0][1], rel=1e-4)


@pytest.mark.parametrize("name", ["one", "grown", "shrunk"])
def test_learning_rates_of_both_groups_go_on_after_a_resumption(runs, name):
    for group in (0, 1):
        rates = series(read_metrics(runs / name / "metrics.jsonl"), f"lr-Muon/group{group}")[1]
        assert rates[:4] == pytest.approx([0, 1e-3, 1e-3, 1e-3 * (1 - 0.5**0.5)])


@pytest.mark.parametrize("name", ["two-fsdp", "two-ddp", "four", "grown", "shrunk"])
def test_losses_and_weights_are_those_of_one_rank(runs, name):
    losses = [series(read_metrics(runs / f"{n}/metrics.jsonl"), TRAIN_LOSS) for n in ("one", name)]
    assert losses[1][0] == list(range(4))
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-5)
    for step in range(1, 5):
        paths = [runs / f"{n}-RecordWeights" / f"step-{step:03d}.pt" for n in ("one", name)]
        one, weights = (torch.load(path) for path in paths)
        for key, weight in one.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-5, msg=key)


def test_replicas_hold_equal_halves_of_weights_and_averages(runs):
    """Ranks 0 and 1 share the model, and so do ranks 2 and 3."""
    folder = runs / "four-RecordAverages"
    rows = [
        [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()] for rank in range(4)
    ]
    assert rows[0] == rows[2] != rows[1] == rows[3]
    assert rows[0][-1]["average"] is not None
    alone = json.loads((runs / "one-RecordAverages/rank-0.jsonl").read_text().splitlines()[-1])
    assert rows[0][-1]["num_elements"] + rows[1][-1]["num_elements"] == alone["num_elements"]
