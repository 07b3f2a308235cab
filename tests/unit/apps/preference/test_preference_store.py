import csv
import random
import runpy
import shutil
import sqlite3
import sys
from collections import Counter
from itertools import combinations

import pandas as pd
import pytest

from apps.preference import statistics
from apps.preference.images import collect
from apps.preference.report import make_report, rates_figure, to_csv, write_report
from apps.preference.store import ScreenKind, Store, schedule
from diffusion.errors import ConfigurationError, DataError
from tests.tools.preference_studies import (
    MODELS,
    SCRIPT,
    attentive,
    check,
    open_study,
    rate_all,
    vote,
    write_models,
)

SHOWN = [
    *[("pair", 3, 1, 0), ("pair", 4, 1, 0), ("pair", 0, 1, 0), ("pair", 8, 1, 0), ("pair", 6, 1, 0)],
    *[("check", -9, 0, -1), ("repeat", 0, 0, 1), ("pair", 2, 0, 1), ("pair", 10, 0, 1), ("repeat", 4, 0, 1)],
    *[("pair", 9, 1, 0), ("pair", 5, 0, 1), ("pair", 11, 1, 0), ("repeat", 3, 0, 1), ("check", -9, -1, 0)],
]


def test_a_vote_counts_once_and_the_first_stays(tmp_path):
    write_models(tmp_path)
    store, other = open_study(tmp_path), open_study(tmp_path)
    shown = store.next_presentation("r")
    assert other.next_presentation("r") == shown, "a second tab shows the same"
    assert store.vote("r", shown.id, quality="first", alignment="neither")
    assert not other.vote("r", shown.id, quality="second", alignment="second")
    [stored] = other.votes().itertuples()
    assert (stored.quality, stored.alignment) == ("first", "neither")
    with pytest.raises(KeyError):
        store.vote("s", shown.id, quality="first", alignment="first")


def test_sides_do_not_depend_on_when_and_are_exchanged_on_repeats(tmp_path):
    write_models(tmp_path)
    one, other = open_study(tmp_path, votes="a.sqlite"), open_study(tmp_path, votes="b.sqlite")
    for store in (one, other):
        rate_all(store, "r", lambda shown: max(shown.first, shown.second))
    shown, again = (store.votes()[["kind", "pair", "first", "second"]] for store in (one, other))
    assert shown.equals(again)
    assert Counter(shown["kind"]) == {"pair": 10, "repeat": 3, "check": 2}
    first = {pair: (a, b) for kind, pair, a, b in shown.itertuples(index=False) if kind == "pair"}
    assert len(first) == 10
    assert all(first[pair] == (b, a) for kind, pair, a, b in shown.itertuples(index=False) if kind == "repeat")


def test_a_study_of_an_earlier_version_is_continued_as_it_began(tmp_path):
    """The first pairs, sides and checks that version 0.1 showed: a change would break studies in progress."""
    write_models(tmp_path)
    store = open_study(tmp_path)
    rate_all(store, "r", lambda shown: max(shown.first, shown.second))
    shown = store.votes()[["kind", "pair", "first", "second"]].fillna(-9)
    assert list(shown.itertuples(index=False, name=None)) == SHOWN


def test_pairs_are_shown_equally_often_and_sides_fairly(tmp_path):
    write_models(tmp_path)
    store = open_study(tmp_path, num_pairs=6)
    for i in range(40):
        rate_all(store, f"r{i}", lambda shown: max(shown.first, shown.second))
    pairs = store.votes().query("kind == 'pair'")
    assert set(pairs["pair"].value_counts()) == {20}
    assert 90 < (pairs["first"] == 0).sum() < 150


def test_schedules_have_all_kinds_and_repeats_late():
    for rater in "abcdef":
        kinds = schedule(3, rater, 20, 50, 3)
        assert Counter(kinds) == {ScreenKind.pair: 20, ScreenKind.repeat: 10, ScreenKind.check: 3}
        assert kinds[: kinds.index(ScreenKind.repeat)].count(ScreenKind.pair) >= 10


def test_another_study_or_other_images_are_refused(tmp_path):
    write_models(tmp_path)
    open_study(tmp_path).close()
    with pytest.raises(ConfigurationError, match="other settings"):
        open_study(tmp_path, seed=4)
    image = tmp_path / MODELS[0] / "00000.png"
    image.write_bytes((tmp_path / MODELS[0] / "00001.png").read_bytes())
    with pytest.raises(DataError, match="00000"):
        open_study(tmp_path)


def test_a_study_begun_with_images_beside_wrong_prompts_is_refused(tmp_path):
    write_models(tmp_path)
    open_study(tmp_path).close()
    for name in MODELS[:2]:
        one, other = tmp_path / name / "00002.png", tmp_path / name / "00010.png"
        before = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(before)
    with pytest.raises(ConfigurationError, match="earlier version"):
        open_study(tmp_path)


def test_votes_of_a_deleted_study_do_not_come_into_a_new_one(tmp_path):
    write_models(tmp_path)
    store = open_study(tmp_path)
    shown = store.next_presentation("r")
    assert store.vote("r", shown.id, quality="first", alignment="first")
    (tmp_path / "votes.sqlite").unlink()  # As after a kill, which leaves the log.
    with pytest.raises(ConfigurationError, match=r"votes\.sqlite-wal has votes of a deleted"):
        open_study(tmp_path, seed=4)


def test_a_repeated_prompt_keeps_the_images_beside_their_prompts(tmp_path):
    folders = {name: tmp_path / name for name in MODELS[:2]}
    write_models(tmp_path, prompts=["a", "b", "a", "c"])
    for folder in folders.values():
        (folder / "metadata.jsonl").unlink()
    items = collect(folders, tmp_path / "prompts.txt").items
    assert [(item.prompt, item.images[0].stem) for item in items] == [
        *[("a", "00000"), ("a", "00002"), ("b", "00001"), ("c", "00003")]
    ]


def test_folders_that_do_not_fit_are_refused(tmp_path):
    write_models(tmp_path)
    prompts = tmp_path / "prompts.txt"
    one, two = (tmp_path / name for name in MODELS[:2])
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match=r"scripts/generate\.py"):
        collect({"a": one, "b": tmp_path / "run"}, prompts)
    (two / "metadata.jsonl").write_text((two / "metadata.jsonl").read_text().replace("number 3", "number x"))
    with pytest.raises(DataError, match="prompt number 3"):
        collect({"a": one, "b": two}, prompts)
    (two / "metadata.jsonl").unlink()
    assert len(collect({"a": one, "b": two}, prompts).items) == 12


def test_tables_of_prompts_have_categories(tmp_path):
    write_models(tmp_path, prompts=['a "cat"', "a car"])
    (tmp_path / "p.tsv").write_text('Prompt\tCategory\na "cat"\tAnimals\n a car \tVehicles\na car\tOther\n')
    images = collect({name: tmp_path / name for name in MODELS[:2]}, tmp_path / "p.tsv")
    assert [(item.prompt, item.category) for item in images.items] == [('a "cat"', "Animals"), ("a car", "Vehicles")]


def test_two_hundred_raters_through_the_store_give_their_preference(tmp_path):
    write_models(tmp_path, prompts=[f"prompt {i}" for i in range(40)])
    store = open_study(tmp_path, num_pairs=5, num_repeats=1, num_checks=1)
    draw = random.Random(17)
    for i in range(200):
        rate_all(store, f"r{i}", lambda shown: attentive(shown, 0.6, draw))
    report = make_report(store.votes(), store.models)
    assert (report.num_votes, report.num_raters) == (1000, 200)
    for row in report.rates.itertuples():
        assert 0.5 < row.low < 0.6 < row.high
    reliability = report.reliability.set_index(["measure", "question"])
    assert abs(reliability.at[("agreement", "quality"), "value"]) < 0.1
    assert reliability.at[("consistency", "quality"), "cases"] == 200
    assert reliability.at[("consistency", "quality"), "value"] == pytest.approx(0.52, abs=0.08)


def test_guesses_agree_by_chance_and_equal_answers_fully_with_any_number_of_models(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 10)
    draw = random.Random(0)
    guessed, same = [], []
    for pair, models in enumerate([*combinations(range(4), 2)] * 100):
        for rater, shown in (("a", models), ("b", models[::-1])):
            chosen = draw.choices(models, [(9, 1, 30, 3)[model] for model in models])[0]  # Better ones more often.
            guessed.append(vote(rater, pair, chosen, models=shown))
            same.append(vote(rater, pair, models[pair // 6 % 2], models=shown))
    for votes, agreement in ((guessed, 0), (same, 1)):
        reliability = make_report(pd.DataFrame(votes), list("klmn")).reliability.set_index(["measure", "question"])
        assert reliability.at[("agreement", "quality"), "value"] == pytest.approx(agreement, abs=0.1)


def test_inattentive_raters_are_excluded_unless_kept():
    votes = [vote("good", pair, 0) for pair in range(4)] + [check("good", 0)]
    votes += [vote("bad", pair, 1) for pair in range(4)] + [check("bad", -1), check("bad", 0)]
    votes = pd.DataFrame(votes)
    strict, lenient = make_report(votes, ["m", "n"]), make_report(votes, ["m", "n"], max_failed=1)
    assert list(strict.rates.loc[0, ["wins_a", "wins_b"]]) == [4, 0]
    assert list(lenient.rates.loc[0, ["wins_a", "wins_b"]]) == [4, 4]
    assert list(strict.raters["counts"]) == [True, False]
    assert strict.rates.loc[0, "low"] < 0.6, "few unanimous prompts are no certainty"


def test_ties_repeats_and_categories_by_hand():
    votes = [vote("r", 0, 0, category="x"), vote("r", 1, None, category="x"), vote("r", 2, 1, category="y")]
    votes += [
        vote("r", 0, 0, kind=ScreenKind.repeat, models=(1, 0)),
        vote("r", 2, 0, kind=ScreenKind.repeat, models=(1, 0)),
    ]
    votes = pd.DataFrame(votes)
    report = make_report(votes, ["m", "n"])
    assert list(report.rates.loc[0, ["wins_a", "wins_b", "ties", "share"]]) == [1, 1, 1, 0.5]
    reliability = report.reliability.set_index(["measure", "question"])
    for measure in ("consistency", "first side"):
        assert list(reliability.loc[(measure, "quality")]) == [0.5, 2]
    assert list(report.categories["category"]) == ["x", "x", "y", "y"]
    assert report.categories.loc[0, "votes"] == 2
    [axes] = rates_figure(report.rates).axes
    assert "2 votes" in axes.get_yticklabels()[0].get_text()
    assert min(axes.get_ylim()) < -0.2 and max(axes.get_ylim()) > len(report.rates) - 0.8
    head, first, tie = to_csv(votes, ["m", "n"]).splitlines()[:3]
    assert head.startswith("rater,position,kind,pair,prompt,category,first,second,quality,alignment,voted_at,")
    assert first == "r,0,pair,0,prompt 0,x,m,n,m,m,1970-01-01T00:01:44.000+00:00,4.0"
    assert tie.startswith("r,0,pair,1,prompt 1,x,m,n,,,")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_text_in_a_table_is_a_formula(text):
    _, row = to_csv(pd.DataFrame([vote(text, 0, 0)]), [text, "n"]).splitlines()
    cells = next(csv.reader([row]))
    assert cells.count(f"'{text}") >= 2 and text not in cells


def test_three_models_get_strengths_and_names_are_escaped(tmp_path):
    draw = random.Random(1)
    votes = []
    for pair in range(90):
        a, b = [(0, 1), (0, 2), (1, 2)][pair % 3]
        votes.append(vote("<i>r", pair, a if draw.random() < 0.75 else b, models=(a, b), category="<u>"))
    report = make_report(pd.DataFrame(votes), ["<script>x</script>", "n$", "_o"])
    strengths = report.strengths.query("question == 'quality'")["strength"]
    assert strengths.is_monotonic_decreasing
    assert report.strengths.eval("low < strength < high").all()
    write_report(report, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert not any(tag in page for tag in ("<script", "<i>", "<u>"))
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "preference.png", "report.json"}


def test_a_study_without_votes_has_a_report(tmp_path):
    write_models(tmp_path)
    store = open_study(tmp_path)
    report = make_report(store.votes(), store.models)
    assert (report.num_votes, report.num_raters) == (0, 0)
    write_report(report, tmp_path / "report")


def run_script(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["preference.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPT))["main"]()


def test_an_export_replaces_no_file_of_the_study(tmp_path, monkeypatch):
    write_models(tmp_path)
    store = open_study(tmp_path)
    store.read_secret()
    files = {path: path.read_bytes() for path in tmp_path.glob("votes.sqlite*") if path.suffix != ".sqlite-shm"}
    assert len(files) == 3
    (tmp_path / "link").symlink_to(tmp_path / "votes.sqlite")
    for out in (*files, tmp_path / "link"):
        with pytest.raises(ConfigurationError, match=out.name):
            run_script(monkeypatch, "export", tmp_path / "votes.sqlite", "--out", out)
    assert {path: path.read_bytes() for path in files} == files


def test_images_without_a_listing_are_in_the_order_of_their_numbers(tmp_path):
    write_models(tmp_path)
    folders = {name: tmp_path / name for name in MODELS[:2]}
    for folder in folders.values():
        (folder / "metadata.jsonl").unlink()
        for i in range(12):
            (folder / f"{i:05d}.png").rename(folder / f"{i}.png")
    items = collect(folders, tmp_path / "prompts.txt").items
    assert [(item.prompt, item.images[1].name) for item in items] == [
        (f"prompt number {i}", f"{i}.png") for i in range(12)
    ]


def test_a_database_that_is_no_study_stays_as_it_is(tmp_path):
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE mine (number INTEGER)")
    other.close()
    shutil.copy(tmp_path / "other.sqlite", tmp_path / "copy.sqlite")
    with pytest.raises(ConfigurationError, match="not a file of votes"):
        Store(tmp_path / "copy.sqlite")
    assert (tmp_path / "copy.sqlite").read_bytes() == (tmp_path / "other.sqlite").read_bytes()


def test_numbers_below_0_are_no_numbers_of_a_study(tmp_path, monkeypatch):
    serve = ["serve", "A=a", "B=b", "--prompts", "p.txt", "--votes", "votes.sqlite"]
    report = ["report", "votes.sqlite", "--out", "report"]
    for command, option in ((serve, "--repeats"), (serve, "--checks"), (serve, "--port"), (report, "--seed")):
        with pytest.raises(ConfigurationError, match=f"argument {option}: "):
            run_script(monkeypatch, *command, f"{option}=-1")
    with pytest.raises(ConfigurationError, match="argument --max-failed: 2"):
        run_script(monkeypatch, *report, "--max-failed=2")


def test_a_file_is_no_folder_of_images(tmp_path):
    write_models(tmp_path)
    with pytest.raises(DataError, match=r"prompts\.txt: no such folder"):
        collect({MODELS[0]: tmp_path / MODELS[0], "file": tmp_path / "prompts.txt"}, tmp_path / "prompts.txt")
