"""Muon, WSD and clipping in runs: the same on any number of ranks, and on another number after a resumption."""

import pytest
import torch

from diffusion.callbacks.step import GRADIENT_NORM
from diffusion.formats.run_folder import read_metrics, series

RUNS = {"one": (1, "ddp"), "sharded": (2, "fsdp"), "replicated": (2, "ddp")}
MAX_NORM = 0.05
HALF = ("trainer.max_duration=2ba", "schedule.decay=constant")


def options(folder, parallelism, *more):
    recorders = [
        f"{{path: tests.tools.toys.RecordGradients, arguments: {{path: {folder}-gradients.pt}}}}",
        f"{{path: tests.tools.toys.RecordWeights, arguments: {{folder: {folder}-weights}}}}",
    ]
    return "tests/tools/toy.yaml", [
        f"output_folder={folder}",
        f"trainer.parallelism={parallelism}",
        "trainer.max_duration=4ba",
        "trainer.device_train_microbatch_size=2",
        "schedule={warmup: 1ba, decay: wsd, cooldown: 2ba}",
        "algorithms.ema.start=1ba",
        "optimizer.name=muon",
        f"optimizer.max_grad_norm={MAX_NORM}",
        "samples.prompts=[]",
        f"plugins.callbacks=[{', '.join(recorders)}]",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    root = tmp_path_factory.mktemp("muon")
    for num_ranks in (1, 2):
        jobs = [options(root / name, way) for name, (number, way) in RUNS.items() if number == num_ranks]
        server.train(num_ranks, [*jobs, options(root / f"resumed-{num_ranks}", "fsdp", *HALF)])
    server.train(1, [options(root / "resumed-2", "fsdp")])
    server.train(2, [options(root / "resumed-1", "fsdp")])
    return root


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded", "replicated", "resumed-1", "resumed-2"])
def test_equal_over_ranks_and_resumptions(runs, name):
    for step in range(1, 5):
        weights, others = (torch.load(runs / f"{which}-weights/step-{step:03d}.pt") for which in (name, "one"))
        assert others
        for key, weight in others.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded", "replicated"])
def test_gradients_are_clipped_alike(runs, name):
    steps, norms = series(read_metrics(runs / name / "metrics.jsonl"), GRADIENT_NORM)
    expected_steps, expected = series(read_metrics(runs / "one" / "metrics.jsonl"), GRADIENT_NORM)
    assert steps == expected_steps == [1, 2, 3, 4], "logged at the end of each step"
    assert min(expected) > MAX_NORM, "every step is clipped"
    assert norms == pytest.approx(expected, rel=1e-6)
    for one in (name, "one"):
        gradients = torch.load(runs / f"{one}-gradients.pt")
        assert torch.cat([part.flatten() for part in gradients.values()]).norm().item() == pytest.approx(MAX_NORM, 1e-4)


@pytest.mark.world_size(2)
def test_learning_rate_of_both_groups_goes_on_after_a_resumption(runs):
    for group in (0, 1):
        for name in ("one", "resumed-1", "resumed-2"):
            rates = series(read_metrics(runs / name / "metrics.jsonl"), f"lr-Muon/group{group}")[1]
            assert rates[:4] == pytest.approx([0, 1e-3, 1e-3, 1e-3 * (1 - 0.5**0.5)])
