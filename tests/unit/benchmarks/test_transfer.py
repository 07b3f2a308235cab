"""The search for the best learning rate, and its table."""

import json

import pytest

from benchmarks import transfer


@pytest.mark.parametrize("first", [-9, -7, -3])
def test_the_search_ends_with_both_neighbours_of_the_best(first):
    measured = []

    def measure(exponent):
        measured.append(exponent)
        return abs(exponent + 7)

    assert transfer.search(measure, first) == -7
    assert {-8, -7, -6} <= set(measured)
    assert len(set(measured)) == len(measured)


def test_the_optimum_is_the_vertex_of_the_parabola():
    losses = {exponent: 0.1 * (exponent + 7.3) ** 2 + 2 for exponent in range(-9, -4)}
    assert transfer.optimum(losses) == pytest.approx(-7.3)
    assert transfer.optimum({-7: 1.0, -8: 2.0}) is None


def test_a_table_of_the_finished_searches(tmp_path, monkeypatch):
    page, rows = tmp_path / "page.md", tmp_path / "rows.jsonl"
    page.write_text("a\n<!-- transfer -->\nold\n<!-- /transfer -->\nb\n")
    monkeypatch.setattr(transfer, "PAGE", page)
    for base, losses in ((64, {-8: 2.0, -7: 1.0, -6: 2.0}), (None, {-8: 2.0, -7: 3.0})):
        for exponent, loss in losses.items():
            row = {"optimizer": "adamw", "seed": 17, "width": 128, "base_width": base, "exponent": exponent}
            with rows.open("a") as file:
                file.write(json.dumps({"name": f"{base}/{exponent}", **row, "loss": loss}) + "\n")
    transfer.write_table(rows)
    text = page.read_text()
    assert "old" not in text
    assert "2^-7.0" in text
    assert text.count("| adamw ") == 1
