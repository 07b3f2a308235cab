"""The speedrun by its one command, on a few drawings."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from tests.tools.evaluation_toys import write_clip
from tests.tools.image_files import write_tar
from tests.tools.training_runs import ROOT

pytestmark = pytest.mark.slow

STYLES = ("red", "green", "blue")
NUM_CONCEPTS = 16


def write_drawings(folder: Path) -> None:
    """Concepts (the place of a square) in styles (its colour); of every second concept, one style is held out."""
    members: dict[str, list[tuple[str, bytes]]] = {"train": [], "heldout": []}
    for concept in range(NUM_CONCEPTS):
        for number, style in enumerate(STYLES):
            image, at = Image.new("RGB", (32, 32), "white"), (concept % 4 * 8, concept // 4 * 8)
            ImageDraw.Draw(image).rectangle((*at, at[0] + 7, at[1] + 7), fill=style)
            content, key = io.BytesIO(), f"{style}-{concept}"
            image.save(content, "PNG")
            about = {"concept": f"square {concept}", "style": style}
            chosen = members["heldout" if concept % 2 and number == concept // 2 % 3 else "train"]
            chosen += [(f"{key}.png", content.getvalue()), (f"{key}.txt", f"square {concept}, {style}".encode())]
            chosen.append((f"{key}.json", json.dumps(about).encode()))
    folder.mkdir()
    for name, files in members.items():
        write_tar(folder / f"{name}-00000.tar", files)


def test_one_command_makes_scores_and_grids(tmp_path: Path) -> None:
    write_drawings(tmp_path / "styles")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    earlier = tmp_path / "out" / "evaluation" / "images" / "ep0-ba5-ema-cfg2" / "prompts"  # Of a shorter training.
    earlier.mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(earlier / "000000.png")
    (tmp_path / "out" / "seconds.txt").write_text("scores 9\n")
    command = ["bash", "benchmarks/speedrun.sh", str(tmp_path / "styles"), str(tmp_path / "out"), "cpu"]
    clip = str(write_clip(tmp_path / "clip"))
    lengths = {"VAE_STEPS": "10", "STEPS": "10", "OMP_NUM_THREADS": "1", "PATH": path, "CLIP": clip}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | lengths, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "out"
    result = json.loads((out / "held_out.json").read_text())
    assert result["images"] == NUM_CONCEPTS // 2
    steps = [line.split()[0] for line in (out / "seconds.txt").read_text().splitlines()]
    assert steps == ["scores", "prepare", "autoencoder", "encode", "transformer", "evaluate", "scores"]
    assert Image.open(out / "grid.png").size == (150 + 3 * 64, 20 + 8 * 64)
    table = (out / "evaluation" / "table.md").read_text().splitlines()
    assert len(table) == 3
    assert "CMMD" in table[0].upper()
