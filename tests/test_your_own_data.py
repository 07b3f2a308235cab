"""docs/your_own_data.md, followed word for word on a folder of pictures."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training_runs import ROOT, environment

GUIDE = ROOT / "docs" / "your_own_data.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the repository's commands and a folder `pictures`."""
    from diffusion.demo.shapes import write_data_set

    place = tmp_path_factory.mktemp("guide")
    for name in ("scripts", "yamls", "diffusion", "run.py"):
        (place / name).symlink_to(ROOT / name)
    write_data_set(place / "drawn", 144, seed=5)
    (place / "drawn" / "pictures").rename(place / "pictures")
    return place


def test_the_guide_word_for_word(place):
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 8
    script = place / "guide.sh"
    script.write_text("set -eux\n" + "\n".join(blocks), encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script)],
        cwd=place,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    withdrawn = (place / "taken-back.txt").read_text().strip()
    with (place / "seen.csv").open(encoding="utf-8") as file:
        seen = {row["key"]: int(row["times"]) for row in csv.DictReader(file)}
    assert sum(seen.values()) == 4 * 8, "steps x batch"
    assert all(key.startswith("pictures/") for key in seen)
    assert withdrawn not in seen
    for run in ("first", "second"):
        assert (place / "runs" / run / "loss.png").is_file()
