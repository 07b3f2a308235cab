"""docs/your_own_data.md, followed word for word on a folder of images."""

import csv
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "your_own_data.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the repository's commands and a folder `images`."""
    from demo.shapes import write_data_set

    place = tmp_path_factory.mktemp("guide")
    for name in ("scripts", "yamls", "diffusion", "run.py"):
        (place / name).symlink_to(ROOT / name)
    write_data_set(place / "drawn", 144, seed=5)
    (place / "drawn" / "images").rename(place / "images")
    return place


def test_the_guide_word_for_word(server, place):
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 9
    script = place / "guide.sh"
    script.write_text("set -eux\n" + "\n".join(blocks), encoding="utf-8")
    path = f"{server.programs(place / 'bin')}:{os.environ['PATH']}"
    with (place / "output.txt").open("w") as output:
        command = ["bash", str(script)]
        options = {"cwd": place, "env": {**environment(), "PATH": path}, "stdout": output, "stderr": output}
        done = subprocess.run(command, **options, timeout=600, check=False)
    assert done.returncode == 0, (place / "output.txt").read_text()[-8000:]
    removed = (place / "taken-down.txt").read_text().strip()
    with (place / "seen.csv").open(encoding="utf-8") as file:
        seen = {row["key"]: int(row["times"]) for row in csv.DictReader(file)}
    assert sum(seen.values()) == 4 * 8, "steps x batch"
    assert all(key.startswith("images/") for key in seen)
    assert removed not in seen
    for run in ("first", "second"):
        assert (place / "runs" / run / "finished.json").is_file()
