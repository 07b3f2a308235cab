"""A quarter of an hour with one GPU, in two calls.

    python -m benchmarks.quarter_hour first --out FOLDER
    python -m benchmarks.quarter_hour second --out FOLDER      # compiled code of the first call is in FOLDER/cache

Rows of a wave compile side by side, each in a process of its own. When all have made their first steps, or at the end
of `--patience`, they are timed and profiled one after the other, while the others wait. Each row is written to
FOLDER/rows.jsonl at once; output of its process is in FOLDER/logs. Rows that FOLDER has are not measured again.
`--wave ROW ... --wave ROW ...` replaces the waves of a call, and `--label` is added to the names of its rows.
"""

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, attempt, read_rows
from diffusion.launch import CommandParser, run_command

MODERN = [
    "model.text_encoder.chunks=3",
    "model.text_adapter={layers: 2}",
    "model.token_routing={share: 0.5}",
    "objective.prediction_type=flow",
    "optimizer={name: muon, lr: 3.0e-4, betas: [0.9, 0.95], max_grad_norm: 1.0}",
    "plugins.train_dataset.arguments.num_chunks=3",
]
"""`yamls/modern_256.yaml` beside SD2's recipe."""

OPTIONS = {
    "ddp": "trainer.parallelism=ddp",
    "log_late": "performance.log_late=true",
    "stages": "performance.compilation=stages",
    "compiled text": "performance.compile_text_encoder=true",
    "parallel": "performance.parallel_compilation=true",
    "stored text": "plugins.train_dataset.arguments.stores_text=true",
}
"""Short names of overrides in names of rows; others stand there as they are."""

RATES = "rates"
GRAPHS = "trainer/256/16/ddp/log_late/performance.compilation=unet/performance.cuda_graphs=true"
CALLS = {
    "first": [
        [RATES],
        ["trainer/256/32/modern", "trainer/256/128/ddp/log_late", "trainer/512/64/log_late/stages"],
    ],
    "second": [
        ["trainer/512/16/modern/parallel", "trainer/256/128/ddp/log_late/compiled text", GRAPHS],
    ],
}
"""Waves of rows, by call: those that no GPU has shown yet."""

TURN = ("ready", "go", "done")
"""Files by which the process of a row and this one take turns."""


def shape(name: str, device: str) -> dict[str, Any]:
    """Find the run of a row such as `trainer/256/64/modern`: arguments of `run_config`.

    On a CPU, networks are tiny, sides an eighth, and batches a sixteenth.
    """
    _, side, size, *options = name.split("/")
    is_gpu, resolution, batch_size = device == "cuda", int(side), int(size)
    overrides = [
        f"trainer.device={'gpu' if is_gpu else 'cpu'}",
        f"trainer.precision={'amp_bf16' if is_gpu else 'fp32'}",
    ]
    if not is_gpu:
        resolution, batch_size = resolution // 8, max(batch_size // 16, 2)
    architecture = "stable_diffusion_2" if is_gpu else "tiny"
    for option in options:
        if option == "modern":
            architecture = "transformer_l" if is_gpu else "tiny_transformer"
            overrides += MODERN
        else:
            overrides.append(OPTIONS.get(option, option))
    return {"architecture": architecture, "resolution": resolution, "batch_size": batch_size, "overrides": overrides}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, logs and compiled code")
    parser.add_argument("--wave", nargs="+", action="append", metavar="ROW", help="in place of the call's waves")
    parser.add_argument("--label", default="", help="last part of the names of rows, such as the version")
    parser.add_argument("--patience", type=float, default=240, help="seconds for the first steps of a wave")
    parser.add_argument("--minutes", type=float, default=5.5, help="no row begins to be timed later")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure the waves of a call, or, as a process of such a call, one row."""
    options = parse_arguments()
    options.out = options.out.resolve()
    if options.row is not None:
        measure_row(options)
        return
    deadline = time.monotonic() + 60 * options.minutes
    for wave in options.wave or CALLS[options.call]:
        measure_wave(options, wave, deadline)


def measure_wave(options: argparse.Namespace, names: list[str], deadline: float) -> None:
    """Let the rows of a wave compile side by side, then time them one after the other."""
    known = read_rows(options.out / "rows.jsonl")
    names = [name for name in names if "result" not in known.get(_labelled(name, options), {})]
    processes = {name: _start(options, name, len(names)) for name in names}
    late = min(time.monotonic() + options.patience, deadline)
    while time.monotonic() < late and any(
        process.poll() is None and not _turn(options, name, "ready").exists() for name, process in processes.items()
    ):
        time.sleep(0.1)
    for name, process in processes.items():
        if process.poll() is None and not _turn(options, name, "ready").exists():
            process.kill()
            print(f"{name}: not ready in time", flush=True)
    for name, process in processes.items():
        if time.monotonic() >= deadline:
            process.kill()
        elif process.poll() is None:
            _turn(options, name, "go").touch()
        while process.poll() is None and not _turn(options, name, "done").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    for name, process in processes.items():
        try:
            code = process.wait(max(deadline - time.monotonic(), 20))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            print(f"{name}: exit code {code}, see {_turn(options, _labelled(name, options), 'log')}", flush=True)


def _start(options: argparse.Namespace, name: str, num_together: int) -> subprocess.Popen:
    """Start the process of a row, with its share of the cores for compilation."""
    for word in TURN:
        _turn(options, name, word).unlink(missing_ok=True)
    log = _turn(options, _labelled(name, options), "log")
    log.parent.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(options.out / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(cores // num_together, 1)),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
    }
    command = [sys.executable, "-m", "benchmarks.quarter_hour", options.call, "--row", name, "--out", str(options.out)]
    command += ["--device", options.device, "--label", options.label]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def measure_row(options: argparse.Namespace) -> None:
    """Measure a row in this process, when its turn comes, and write it."""
    import torch

    from benchmarks.parts import describe_machine, measure_rates, measure_turn

    device, parameters = torch.device(options.device), {}
    measure = partial(measure_rates, device)
    if options.row != RATES:
        parameters = shape(options.row, options.device)
        turn = {word: str(_turn(options, options.row, word)) for word in TURN}
        measure = partial(measure_turn, turn=turn, num_steps=20 if parameters["resolution"] >= 512 else 30)
    row = Row(name=_labelled(options.row, options), measure=measure, parameters=parameters)
    attempt(row, describe_machine(device), options.out / "rows.jsonl")


def _labelled(name: str, options: argparse.Namespace) -> str:
    return f"{name}/{options.label}" if options.label else name


def _turn(options: argparse.Namespace, name: str, word: str) -> Path:
    """File that reports that a row is ready or done, or that it may go; its log."""
    return options.out / "logs" / f"{name.replace('/', '-').replace(' ', '-')}.{word}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
