from pathlib import Path

from PIL import Image

from benchmarks.held_out import Drawing, choose_cells, draw_grid, main, score
from diffusion.formats.marks import SOURCE_TYPE
from tests.tools.image_marks import read_mark


def drawing(concept: int, style: int, *, is_held_out: bool) -> Drawing:
    image = Image.new("RGB", (32, 32), (40 * style, 255 - 40 * style, 90))
    image.paste((0, 0, 0), (concept * 8, 0, concept * 8 + 8, 32))
    return Drawing(f"concept {concept}", f"style {style}", f"{concept} in {style}", image, is_held_out)


DRAWINGS = [drawing(i, j, is_held_out=i == j) for i in range(4) for j in range(4)]
HELD_OUT = [one for one in DRAWINGS if one.is_held_out]


def test_scores_tell_the_held_out_drawings_from_those_of_training() -> None:
    learned, nearest = score(DRAWINGS, [one.image for one in HELD_OUT])
    assert learned["nearest of all drawings is the held-out one, %"] == 100.0
    assert not any(DRAWINGS[number].is_held_out for number in nearest)
    twins = [*DRAWINGS, DRAWINGS[0]._replace(concept="twin")]
    learned, _ = score(twins, [one.image for one in twins if one.is_held_out])
    assert learned["nearest of all drawings is the held-out one, %"] == 100.0
    same_concept = [drawing(i, (i + 1) % 4, is_held_out=False).image for i in range(4)]
    remembered, _ = score(DRAWINGS, same_concept)
    assert list(remembered.values()) == [4, 0.0, 0.0, 100.0]
    same_style = [drawing((j + 1) % 4, j, is_held_out=False).image for j in range(4)]
    remembered, _ = score(DRAWINGS, same_style)
    assert list(remembered.values()) == [4, 0.0, 100.0, 0.0]


def test_the_grid_frames_what_was_held_out() -> None:
    cells = choose_cells(DRAWINGS)
    assert [len(row) for row in cells] == [4] * 4
    white = [Image.new("RGB", (32, 32), "white")] * 16
    framed = draw_grid(cells, white)
    plain = draw_grid([[one._replace(is_held_out=False) for one in row] for row in cells], white)
    corners = [(150 + 64 * j, 20 + 64 * i) for i in range(4) for j in range(4)]
    differs = [framed.getpixel(corner) != plain.getpixel(corner) for corner in corners]
    assert differs == [one.is_held_out for row in cells for one in row]


def test_the_grids_are_marked_as_generated(tmp_path: Path, monkeypatch) -> None:
    for name, drawings in (("images", HELD_OUT), ("cells", DRAWINGS)):
        (tmp_path / name).mkdir()
        for number, one in enumerate(drawings):
            one.image.save(tmp_path / name / f"{number:02d}.png")
    folders = ["train", "held-out", str(tmp_path / "images"), "--cells", str(tmp_path / "cells")]
    monkeypatch.setattr("sys.argv", ["held_out", "scores", *folders, "--out", str(tmp_path / "run")])
    drawn = [one for one in DRAWINGS if not one.is_held_out]
    monkeypatch.setattr("benchmarks.held_out.read", lambda _, *, is_held_out: HELD_OUT if is_held_out else drawn)
    main()
    marks = [read_mark(tmp_path / "run" / name) for name in ("grid.png", "pairs.png")]
    assert marks == [{"DigitalSourceType": SOURCE_TYPE, "AISystemUsed": "run"}] * 2
