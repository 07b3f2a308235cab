"""Averages of gradients in 16 bits, on real ranks."""

import torch


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
