"""What the demo refuses; that it works is shown by the demo itself."""

import json
import sys
from pathlib import Path

import pytest

from demo.__main__ import Demo
from diffusion.errors import UserError


def demo(out: Path, quick: bool = False) -> Demo:
    return Demo(out, quick)


@pytest.mark.parametrize(
    ("colour", "shape", "problem"),
    [(0.9, 0.7, None), (0.89, 1.0, "colour 0.890, not 0.9;"), (1.0, 0.69, "shape 0.690, not 0.7;")],
)
def test_too_few_right_images_are_an_error(colour: float, shape: float, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps({"single": {"colour": colour, "shape": shape, "relation": None}}))
    if problem is None:
        demo(tmp_path).check_scores()
        return
    with pytest.raises(UserError, match=problem):
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
