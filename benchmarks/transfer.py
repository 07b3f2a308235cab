"""Best learning rates by width, with and without `optimizer.base_width`, of short trainings on the task `shapes`.

    python benchmarks/transfer.py --vae VAE                  # AdamW; --optimizer muon
    python benchmarks/transfer.py --tables                   # docs/recipes.md from the rows

Learning rates are powers of 2. The search at a width begins at the best one of the width below, and ends when both
neighbours of the best one are worse. The loss is that of validation. Data, order and noise of a seed are the same at
all widths. A row that is there is not measured again.
"""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # As a file, for the imports of this repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.leaderboard import Task
from benchmarks.rows import append, read_rows
from benchmarks.tables import replace_between
from demo.steps import ROOT
from diffusion.config.loading import load
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.launch import CommandParser, run_command
from diffusion.reports.tables import markdown_table

YAML = "yamls/tiny/transformer.yaml"
ROWS = ROOT / "docs" / "transfer.jsonl"
PAGE = ROOT / "docs" / "recipes.md"
FIRST = -7
"""Exponent of the learning rate at which the search begins."""

STEPS = 200
SETTINGS = (
    "data.global_batch_size=16",
    "data.num_workers=0",
    "validation.num_samples=null",
    f"trainer.max_duration={STEPS}ba",
)


def configure(row: Mapping[str, Any], vae: Path, latents: Path) -> Config:
    """Load the configuration of a training."""
    width = row["width"]
    own = [
        f"model.network={{hidden_size: {width}, num_heads: {width // 32}, depth: 2}}",
        f"model.vae={vae}",
        f"data.local={latents}/train",
        f"validation.local={latents}/validation",
        f"optimizer.name={row['optimizer']}",
        f"optimizer.lr={2.0 ** row['exponent']}",
        f"optimizer.base_width={row['base_width'] or 'null'}",
        f"seed={row['seed']}",
    ]
    return load(Config, YAML, [*SETTINGS, *own])


def train(config: Config) -> float:
    """Train in this process, without the Trainer, and return the loss of validation; infinity if it diverges."""
    import torch

    from diffusion.composer_models import LatentDiffusionTraining
    from diffusion.models.latent_diffusion import squared_error
    from diffusion.optimizers import warmup_stable_decay
    from diffusion.train import build_evaluator, build_optimizer, build_train_data, build_training_model

    model, data = build_training_model(config, Device.cpu), build_train_data(config)
    assert isinstance(model, LatentDiffusionTraining)
    evaluator, optimizer = build_evaluator(config, model), build_optimizer(config, model)
    assert evaluator is not None
    schedule = partial(warmup_stable_decay, warmup=0.1 * STEPS, cooldown=0.3 * STEPS, total=STEPS, final=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    autocast = torch.autocast("cpu", torch.bfloat16)
    for batch in islice(data.dataloader, STEPS):
        with autocast:
            loss = model.loss(model(batch), batch)
        assert isinstance(loss, torch.Tensor)
        if not loss.isfinite():
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad(), autocast:
        errors = [squared_error(model.eval_forward(batch)) for batch in evaluator.dataloader.dataloader]
    return torch.cat(errors).mean().item()


def search(measure: Callable[[int], float], first: int) -> int:
    """Find the whole number with the least value, whose neighbours both have larger ones."""
    values: dict[int, float] = {first: measure(first)}
    while True:
        best = min(values, key=values.__getitem__)
        missing = [one for one in (best - 1, best + 1) if one not in values]
        if not missing:
            return best
        values[missing[0]] = measure(missing[0])


def sweep(path: Path, widths: Sequence[int], optimizer: str, seed: int, vae: Path, latents: Path) -> None:
    """Search at each width, with the first one as the base width and without; at the first itself both are the same."""

    def measure(width: int, base_width: int | None, exponent: int) -> float:
        row = {"optimizer": optimizer, "seed": seed, "width": width, "base_width": base_width, "exponent": exponent}
        name = "/".join(map(str, row.values()))
        if (found := read_rows(path).get(name)) is None:
            start = time.process_time()
            loss = train(configure(row, vae, latents))
            cost = {"cpu_seconds": time.process_time() - start, "date": datetime.date.today().isoformat()}
            append(path, found := {"name": name, **row, "loss": loss, **cost})
            print(name, f"{loss:.4f}", f"{cost['cpu_seconds']:.0f} s", flush=True)
        return found["loss"]

    best = dict.fromkeys((widths[0], None), search(partial(measure, widths[0], None), FIRST))
    for width in widths[1:]:
        best = {base: search(partial(measure, width, base), first) for base, first in best.items()}


def optimum(losses: Mapping[int, float]) -> float | None:
    """Estimate the exponent of the best learning rate by a parabola through its neighbours, if they are known."""
    best = min(losses, key=losses.__getitem__)
    below, least, above = (losses.get(best + step, math.nan) for step in (-1, 0, 1))
    found = best + (below - above) / (2 * (below - 2 * least + above))
    return found if math.isfinite(found) else None


def write_table(path: Path) -> None:
    """Write the table of the finished searches into the page."""
    searches: dict[tuple[str, int, str, int], dict[int, float]] = {}
    for row in read_rows(path).values():
        key = (row["optimizer"], row["seed"], str(row["base_width"] or "none"), row["width"])
        searches.setdefault(key, {})[row["exponent"]] = row["loss"]
    lines = []
    for key, losses in sorted(searches.items()):
        if (found := optimum(losses)) is not None:
            others = "; ".join(f"2^{exponent}: {loss:.3f}" for exponent, loss in sorted(losses.items()))
            lines.append([*map(str, key), f"2^{found:.1f}", others])
    table = markdown_table(["optimizer", "seed", "`base_width`", "width", "best `lr`", "loss at `lr`"], lines)
    PAGE.write_text(replace_between(PAGE.read_text(encoding="utf-8"), "transfer", table), encoding="utf-8")


def main() -> None:
    """Train, and write rows or the table."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="the first is the base")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"), help="data")
    parser.add_argument("--vae", type=Path, help="folder of a VAE (default: trained for the task)")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows")
    parser.add_argument("--tables", action="store_true", help="only write the page")
    options = parser.parse_args()
    if options.tables:
        write_table(options.rows)
        return

    import torch

    torch.set_num_threads(1)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    vae, latents = Task(out, options.vae and options.vae.resolve(), None, quick=False).prepare(YAML, load(Config, YAML))
    assert vae is not None
    sweep(options.rows, options.widths, options.optimizer, options.seed, vae, latents)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
