"""Mistakes that the demo rejects; that it works is shown by the demo itself."""

import json
import sys
from pathlib import Path

import pytest

from demo.__main__ import MIN_RIGHT, check_scores
from demo.steps import Steps
from diffusion.errors import UserError


@pytest.mark.parametrize(
    ("kind", "name", "share"), [("single", "colour", 0.89), ("single", "shape", 0.79), ("pairs", "relation", 0.49)]
)
def test_too_few_right_images_are_an_error(kind: str, name: str, share: float, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(MIN_RIGHT))
    check_scores(tmp_path)
    (tmp_path / "scores.json").write_text(json.dumps({**MIN_RIGHT, kind: {**MIN_RIGHT[kind], name: share}}))
    with pytest.raises(UserError, match=rf"too few.*: {kind} {name} {share:.3f}, not {MIN_RIGHT[kind][name]};"):
        check_scores(tmp_path)


def test_a_step_is_done_once_and_never_taken_for_another(tmp_path: Path) -> None:
    append = [sys.executable, "-c", f"open({str(tmp_path / 'done')!r}, 'a').write('x')"]
    for _ in range(2):
        Steps(tmp_path).run("step", append)
    assert (tmp_path / "done").read_text() == "x"
    with pytest.raises(UserError, match="step 'step'"):
        Steps(tmp_path).run("step", [*append, "more"])
    with pytest.raises(UserError, match="'failing'"):
        Steps(tmp_path).run("failing", [sys.executable, "-c", "raise SystemExit(3)"])
