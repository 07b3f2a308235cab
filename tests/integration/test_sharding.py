"""Ways to reduce gradients: averages in 16 bits, on real ranks, and what cannot be."""

import pytest
import torch

from diffusion.config.checks import check, check_machine
from diffusion.config.data import DataConfig, StreamConfig
from diffusion.config.schema import Config
from diffusion.config.training import NumberFormat, Parallelism, Precision, TrainerConfig
from diffusion.errors import ConfigurationError, MachineError


def test_averages_in_bf16_are_those_in_fp32_but_for_rounding(server, tmp_path):
    def run(name):
        recorder = f"{{path: tests.tools.toys.RecordGradients, arguments: {{path: {tmp_path}/{name}.pt}}}}"
        options = [f"output_folder={tmp_path}/{name}", "trainer.max_duration=1ba", "algorithms.ema=null"]
        options += ["samples.prompts=[]", "schedule.warmup=0ba", f"plugins.callbacks=[{recorder}]"]
        return "tests/tools/toy.yaml", [*options, f"trainer.reduce_precision={name}"]

    server.train(2, [run("fp32"), run("bf16")])
    plain, rounded = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("fp32", "bf16"))
    assert plain
    for name, gradient in plain.items():
        assert (rounded[name] - gradient).abs().max() <= 2**-7 * gradient.abs().max(), name
    differing = [name for name, gradient in plain.items() if not torch.equal(rounded[name], gradient)]
    assert len(differing) > len(plain) / 2, "nothing was rounded"


def test_what_cannot_be():
    def checked(**trainer):
        settings = TrainerConfig(max_duration="100000ba", **trainer)
        data = DataConfig(resolution=256, global_batch_size=8, local="here", streams=[StreamConfig(name="a")])
        config = Config(data=data, trainer=settings)
        check(config, world_size=4)

    with pytest.raises(ConfigurationError, match=r"trainer.num_replicas"):
        checked(num_replicas=3)
    with pytest.raises(ConfigurationError, match=r"trainer.num_replicas"):
        checked(num_replicas=2, parallelism=Parallelism.ddp)
    with pytest.raises(ConfigurationError, match=r"trainer.reduce_precision"):
        checked(reduce_precision=NumberFormat.bf16, parallelism=Parallelism.ddp)
    with pytest.raises(ConfigurationError, match=r"trainer.reduce_precision"):
        checked(reduce_precision=NumberFormat.fp16)
    config = Config(trainer=TrainerConfig(precision=Precision.fp32, num_replicas=2))
    with pytest.raises(MachineError, match=r"trainer.num_replicas"):
        check_machine(config, num_gpus=0, bf16_supported=False)
