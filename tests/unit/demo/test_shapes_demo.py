"""What the demo refuses; that it works is shown by the demo itself."""

import json
import sys
from pathlib import Path

import pytest

from demo.__main__ import MIN_RIGHT, Demo
from diffusion.errors import UserError


def demo(out: Path, quick: bool = False) -> Demo:
    return Demo(out, quick)


@pytest.mark.parametrize(
    ("kind", "name", "share"), [("single", "colour", 0.89), ("single", "shape", 0.79), ("pairs", "relation", 0.49)]
)
def test_too_few_right_images_are_an_error(kind: str, name: str, share: float, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(MIN_RIGHT))
    demo(tmp_path).check_scores()
    (tmp_path / "scores.json").write_text(json.dumps({**MIN_RIGHT, kind: {**MIN_RIGHT[kind], name: share}}))
    with pytest.raises(UserError, match=rf"too few.*: {kind} {name} {share:.3f}, not {MIN_RIGHT[kind][name]};"):
        demo(tmp_path).check_scores()


def test_a_step_is_done_once_and_never_taken_for_another(tmp_path: Path) -> None:
    append = [sys.executable, "-c", f"open({str(tmp_path / 'done')!r}, 'a').write('x')"]
    demo(tmp_path).run("step", append)
    demo(tmp_path).run("step", append)
    assert (tmp_path / "done").read_text() == "x"
    with pytest.raises(UserError, match="step 'step'"):
        demo(tmp_path, quick=True).run("step", [*append, "more"])
    with pytest.raises(UserError, match="'failing'"):
        demo(tmp_path).run("failing", [sys.executable, "-c", "raise SystemExit(3)"])
