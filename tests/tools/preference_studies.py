"""Small studies, simulated raters, and the real server, for the tests of preferences."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from apps.preference.images import BLANK, NOISE, collect
from apps.preference.store import ScreenKind, Settings, Store
from tests.tools.training_runs import Job, TrainingServer

SCRIPT = Path(__file__).parents[2] / "scripts" / "preference.py"
MODELS = ("secretmodel-one", "secretmodel-two", "secretmodel-three")


def write_models(root: Path, num_models: int = 2, prompts: list[str] | None = None, size: int = 32) -> list[str]:
    """Folders as scripts/generate.py writes them, and prompts.txt; returns the arguments of `serve`."""
    prompts = prompts or [f"prompt number {i}" for i in range(12)]
    generator = np.random.default_rng(0)
    for name in MODELS[:num_models]:
        folder = root / name
        folder.mkdir(parents=True)
        rows = []
        for i, prompt in enumerate(prompts):
            info = PngInfo()
            info.add_text("model", name)
            pixels = np.full((size, size, 3), generator.integers(0, 256, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:05d}.png", pnginfo=info)
            rows.append(json.dumps({"file_name": f"{i:05d}.png", "prompt": prompt, "seed": i}))
        (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    (root / "prompts.txt").write_text("\n".join(prompts) + "\n")
    return [f"{name}={root / name}" for name in MODELS[:num_models]]


def open_study(root: Path, num_models: int = 2, *, votes: str = "votes.sqlite", **settings: int) -> Store:
    """A store of the models in a folder that `write_models` has written."""
    folders = {name: root / name for name in MODELS[:num_models]}
    images = collect(folders, root / "prompts.txt")
    defaults = {"seed": 17, "num_pairs": 10, "num_repeats": 3, "num_checks": 2}
    return Store.create_or_continue(root / votes, images, Settings(**{**defaults, **settings}))


def rate_all(store: Store, rater: str, choose) -> None:
    """Answer all presentations; `choose(presentation)` gives the model preferred, None for no difference."""
    while (shown := store.next_presentation(rater)) is not None:
        model = choose(shown)
        answer = {shown.first: "first", shown.second: "second", None: "neither"}[model]
        store.vote(rater, shown.id, quality=answer, alignment=answer)


def attentive(shown, preference: float, draw: random.Random) -> int:
    """Pass the checks; else prefer model 0 to model 1 with a probability."""
    if shown.kind == ScreenKind.check:
        return max(shown.first, shown.second)
    return 0 if draw.random() < preference else 1


def vote(
    rater="r", pair=0, chosen: int | None = 0, *, kind=ScreenKind.pair, models=(0, 1), category=""
) -> dict[str, Any]:
    """A vote that answers both questions alike."""
    answer = "neither" if chosen is None else ("first", "second")[models.index(chosen)]
    return {
        "rater": rater,
        "position": 0,
        "kind": kind.value,
        "pair": None if kind == ScreenKind.check else pair,
        "prompt": f"prompt {pair}",
        "category": category,
        "first": models[0],
        "second": models[1],
        "quality": answer,
        "alignment": answer,
        "shown_at": 100.0,
        "voted_at": 104.0,
    }


def check(rater: str, chosen: int | None) -> dict[str, Any]:
    """An answered attention check: 0 is the image."""
    return vote(rater, chosen=chosen, kind=ScreenKind.check, models=(0, BLANK if chosen == BLANK else NOISE))


@contextmanager
def serving(
    server: TrainingServer, root: Path, models: list[str], *options: str, links: dict[str, str] | None = None
) -> Iterator[tuple[str, Job]]:
    """The real command; yields its address and its process, which is killed at the end.

    Personal links are put into `links`, by name.
    """
    command = [str(SCRIPT), "serve", *models, "--prompts", str(root / "prompts.txt")]
    command += ["--votes", str(root / "votes.sqlite"), *options]
    if "--port" not in options:
        command += ["--port", "0"]
    job = server.start(0, command)
    try:
        job.wait_for(lambda: re.search(r"listening on http://\S+\s", job.output) is not None)
        if links is not None:
            links.update(re.findall(r"link for (\w+): (https?://\S+)", job.output))
        yield re.findall(r"listening on (http://\S+)", job.output)[0], job
    finally:
        job.kill()
