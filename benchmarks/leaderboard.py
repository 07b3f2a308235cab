"""Recipes at equal compute: train a YAML on the task `shapes`, score it, and write a row of the leaderboard.

    python benchmarks/leaderboard.py yamls/tiny/transformer.yaml [key=value ...]
    python benchmarks/leaderboard.py --tables                   # docs/leaderboard.md and its figure from the rows

Each recipe trains for the same CPU-seconds of the training process: their cost per step is measured before its first
row. Each seed is a row, for other weights, order, noise and images, on the same data; a seed with a row is skipped. The
score is that of the oracle (`demo.shape_checks`) on 512 scenes that the training data does not hold.
"""

import datetime
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # As a file, for the imports of this repository.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import replace_between
from demo.scenes import caption, task
from demo.steps import QUICK, ROOT, Steps
from diffusion.config.loading import load
from diffusion.config.schema import Config
from diffusion.errors import UserError
from diffusion.launch import CommandParser, run_command
from diffusion.reports.tables import markdown_table

ROWS = ROOT / "docs" / "leaderboard.jsonl"
PAGE = ROOT / "docs" / "leaderboard.md"
BASELINE = "phase1"
NUM_IMAGES = 12_000
SHARES = ("0.3", "0.35", "0.35")
RESOLUTION = 32
CPU_SECONDS = 600.0
CALIBRATION = (20, 80)
"""Steps between which the cost of a step is measured."""

VAE_SETTINGS = [
    "trainer.max_duration=8000ba",
    "optimizer.name=adamw",
    "optimizer.lr=1.6e-3",
    "autoencoder.kl_weight=1e-2",
]

SAMPLING: Mapping[str, Any] = {"guidance_scale": 3.0, "num_inference_steps": 25, "batch_size": 64}
SETTINGS = (
    "samples.prompts=[]",
    "trainer.progress_bar=false",
    "algorithms.ema={start: 0.5dur, decays: [0.99]}",
    "schedule.warmup=0.02dur",
)
"""Overrides of every recipe. The averaged weights are scored."""

COLUMNS = {
    "one": ("colour", "shape", "position"),
    "two": ("colour", "shape", "relation"),
    "group": ("count", "colour", "shape", "position"),
}
"""Numbers of each kind of scene that the table shows."""


class Task(Steps):
    """Data of the task, and runs on it.

    Without the folder of a VAE, one is trained. `settings` is the YAML of another preparation of the images.
    """

    def __init__(self, out: Path, vae: Path | None, settings: Path | None, *, quick: bool) -> None:
        super().__init__(out)
        self.vae, self.settings, self.quick = vae, settings, quick
        self.calibration = (2, 6) if quick else CALIBRATION

    def prepare(self, yaml: str, config: Config) -> tuple[Path | None, Path]:
        """Draw and prepare the images, train the VAE and encode for a recipe, unless it was done.

        Returns:
            The folder of the VAE, and that of the latents; None and that of the images for a recipe on pixels.
        """
        layouts, prepared = self.draw(300 if self.quick else NUM_IMAGES, SHARES)
        autoencoder = self.out / "autoencoder"
        data = [f"data.local={prepared}/train", f"validation.local={prepared}/validation"]
        if self.settings:
            prepared = self.out / self.settings.stem
            sources = [f"sources=[{','.join(layouts)}]", f"out={prepared}", "workers=2"]
            self.run(prepared.name, [sys.executable, "scripts/prepare.py", "--config", str(self.settings), *sources])
        if config.model.architecture.is_pixel:
            return None, prepared
        if self.vae is None:
            train = ["run.py", "yamls/tiny/autoencoder.yaml", f"output_folder={autoencoder}", *data, *VAE_SETTINGS]
            self.run("autoencoder", [sys.executable, *train, *(QUICK if self.quick else [])])
        vae = self.vae or autoencoder / "vae"
        options = ["--resolution", str(RESOLUTION), "--vae", str(vae), "--mean-only", *_model_options(yaml, config)]
        encode = ["scripts/encode.py", str(prepared), *options]
        latents = self.out / f"latents-{hashlib.sha256(shlex.join(encode).encode()).hexdigest()[:8]}"
        self.run(latents.name, [sys.executable, *encode, str(latents)])
        return vae, latents

    def train(self, yaml: str, overrides: Sequence[str], folder: Path, steps: int, seed: int) -> dict[str, Any]:
        """Train and return what `benchmarks.runs.Meter` wrote."""
        vae, encoded = self.prepare(yaml, load(Config, yaml, overrides))
        meter = folder.with_suffix(".json")
        arguments = f"{{path: '{meter}', calibration: {list(self.calibration)}}}"
        settings = [
            f"output_folder={folder}",
            f"model.vae={vae or 'null'}",
            f"data.local={encoded}/train",
            f"validation.local={encoded}/validation",
            f"trainer.max_duration={steps}ba",
            f"trainer.eval_interval={steps}ba",
            f"trainer.save_interval={steps}ba",
            f"seed={seed}",
            f"plugins.callbacks=[{{path: benchmarks.runs.Meter, arguments: {arguments}}}]",
        ]
        if not meter.is_file():
            command = [sys.executable, "run.py", yaml, *SETTINGS, *settings, *overrides]
            if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
                raise UserError(f"training ended with exit code {code}: {shlex.join(command)}")
        return json.loads(meter.read_text())


def _model_options(yaml: str, config: Config) -> list[str]:
    """Options of `encode.py` for a recipe's text encoder and scores."""
    if config.model.score_conditioning:  # Read from the file: overrides do not count.
        return ["--config", yaml]
    text = config.model.text_encoder
    options = ["--chunks", str(text.chunks)]
    if text.path is not None:
        options = ["--text-encoder", text.path, "--max-tokens", str(text.max_tokens)]
    return ["--architecture", "tiny", *options, *(["--text-embeddings"] if config.data.text_embeddings else [])]


def score_run(folder: Path, seed: int, **sampling: Any) -> dict[str, Any]:
    """Scores of a run's averaged weights on the task, by kind of scene; `sampling` replaces some of `SAMPLING`."""
    from demo.score import rates
    from diffusion.loading import load_model

    scenes = task()
    model = load_model(folder, weights="ema")
    images = model.generate([caption(scene) for scene in scenes], seed=seed * len(scenes), **{**SAMPLING, **sampling})
    assert isinstance(images, list)
    found = {}
    for kind, num in zip(COLUMNS, (1, 2, 3), strict=True):
        chosen = [i for i, scene in enumerate(scenes) if min(len(scene.things), 3) == num]
        found[kind] = rates([images[i] for i in chosen], [scenes[i] for i in chosen])
    return found


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of the leaderboard; none if there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def write_tables(file: Path, page: Path = PAGE) -> None:
    """Write the table of the rows in a file into a page: the baseline, then recipes with the best relations first.

    A figure of each seed's relation is written to `images/leaderboard.png` beside the page.
    """
    recipes: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(file):
        recipes.setdefault(row["name"], []).append(row)
    relations = {name: [row["scores"]["two"]["relation"] for row in rows] for name, rows in recipes.items()}
    order = sorted(recipes, key=lambda name: (name != BASELINE, -statistics.fmean(relations[name])))
    _draw({name: relations[name] for name in order}, page.parent / "images" / "leaderboard.png")
    head = ["recipe", "seeds", "steps", "CPU-s", "PFLOPs", "M parameters"]
    head += [f"{kind}: {name}" for kind, names in COLUMNS.items() for name in names]
    lines = []
    for name in order:
        of = recipes[name]
        first = of[0]  # Later seeds take its steps, and more CPU-seconds beside other work.
        steps, seconds, flops, parameters = (first[key] for key in ("steps", "cpu_seconds", "flops", "parameters"))
        cells = [name, str(len(of)), f"{steps:.0f}", f"{seconds:.0f}", f"{flops / 1e15:.2f}", f"{parameters / 1e6:.1f}"]
        lines.append(cells + [_interval(of, kind, score) for kind, scores in COLUMNS.items() for score in scores])
    source = "- {name}: `{command}` (commit {commit}, {date}, {hardware})"
    sources = [source.format_map(recipes[name][-1]) for name in order]
    content = "\n".join([markdown_table(head, lines), "", *sources])
    page.write_text(replace_between(page.read_text(encoding="utf-8"), "leaderboard", content), encoding="utf-8")


def _draw(relations: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw a line per recipe, with a dot for each seed and a mark at their mean."""
    from diffusion.reports.figures import COLOURS, DARK, save_png, subplots

    figure, axes = subplots(height=0.6 + 0.27 * len(relations))
    for line, (name, values) in enumerate(relations.items()):
        axes.plot(values, [line] * len(values), "o", color=COLOURS[0 if name != BASELINE else 1], alpha=0.8)
        axes.plot(statistics.fmean(values), line, "|", color=DARK, markersize=14)
    axes.set(xlim=(-0.01, 1.01), xlabel="images of two objects with the right relation, by seed; mean")
    axes.set_yticks(range(len(relations)), relations)
    axes.invert_yaxis()
    axes.grid(alpha=0.25, linewidth=0.6)
    save_png(figure, path)


def _interval(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> str:
    """Mean of the seeds; of several, least and most, too."""
    values = [row["scores"][kind][name] for row in rows]
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def main() -> None:
    """Train, score, write."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("recipe", nargs="*", metavar="YAML [key=value ...]", help="recipe, and what it changes")
    parser.add_argument("--name", help="of the row (default: that of the YAML)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--cpu-seconds", type=float, default=CPU_SECONDS, help="of each training process")
    parser.add_argument("--steps", type=int, help="steps (default: measured); those of a recipe of the same cost")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"), help="data and runs")
    parser.add_argument("--vae", type=Path, help="folder of another VAE (default: trained for the task)")
    parser.add_argument("--prepare", type=Path, metavar="YAML", help="settings of another preparation of the images")
    parser.add_argument("--quick", action="store_true", help="few images, a VAE of a few steps: shows that it runs")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows")
    parser.add_argument("--tables", action="store_true", help="only write the page")
    options = parser.parse_intermixed_args()
    if options.tables:
        write_tables(options.rows)
        return
    if not options.recipe:
        parser.error("give a YAML")
    yaml, *overrides = options.recipe
    name = options.name or Path(yaml).stem
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work = Task(out, options.vae and options.vae.resolve(), options.prepare, quick=options.quick)
    sampling: dict[str, Any] = {"scores": load(Config, yaml, overrides).samples.scores}
    if options.quick:
        sampling["num_inference_steps"] = 1
    earlier = {row["seed"]: row for row in read_rows(options.rows) if row["name"] == name}
    steps = options.steps or next((row["steps"] for row in earlier.values()), None)
    if steps is None:
        cost = work.train(yaml, overrides, out / f"{name}-calibration", work.calibration[1], options.seeds[0])
        steps = max(1, round(options.cpu_seconds / cost["cpu_seconds_per_step"]))
    own = [
        word
        for flag in ("name", "vae", "prepare", "steps")
        if (value := getattr(options, flag)) is not None
        for word in (f"--{flag}", str(value))
    ]
    if options.steps is None and options.cpu_seconds != CPU_SECONDS:
        own += ["--cpu-seconds", f"{options.cpu_seconds:g}"]
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for seed in sorted({*options.seeds} - earlier.keys()):
        folder = out / f"{name}-{seed}"
        cost = work.train(yaml, overrides, folder, steps, seed)
        row = {
            "name": name,
            "seed": seed,
            **{key: cost[key] for key in ("steps", "cpu_seconds", "flops", "parameters")},
            "scores": score_run(folder, seed, **sampling),
            "command": shlex.join(["python", "benchmarks/leaderboard.py", yaml, *overrides, *own]),
            "commit": revision.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "hardware": f"{os.cpu_count()} CPU cores",
        }
        with options.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(name, seed, *(f"{kind} {row['scores'][kind]}" for kind in COLUMNS), sep="\n")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
