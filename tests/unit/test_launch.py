"""Arguments of commands, and the environment of a rank."""

import argparse
import os
import runpy
import sys

import pytest

from diffusion import launch
from diffusion.cli import train_command
from diffusion.errors import ConfigurationError
from diffusion.launch import CommandParser, duration, named_score, positive_number
from tests.tools.training_runs import ROOT


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "1,5"])
@pytest.mark.parametrize("kind", [float, positive_number])
def test_numbers_are_finite_and_not_negative(text, kind):
    parser = CommandParser()
    commands = parser.add_subparsers()
    for one in (parser, commands.add_parser("command")):
        one.add_argument("--scale", type=kind)
    for words in ([], ["command"]):
        with pytest.raises(ConfigurationError, match="--scale: "):
            parser.parse_args([*words, f"--scale={text}"])
        assert parser.parse_args([*words, "--scale=2.5"]).scale == 2.5


def test_what_must_be_above_0():
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_number("0")


@pytest.mark.parametrize("text", ["aesthetic", "aesthetic=", "aesthetic=nan", "aesthetic=inf"])
def test_scores_are_finite(text):
    assert named_score("aesthetic=-1.5") == ("aesthetic", -1.5)
    with pytest.raises(argparse.ArgumentTypeError, match="no score"):
        named_score(text)


def run_script(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / name))["main"]()


def test_a_file_to_write_that_is_another_argument_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "seen.csv").touch()
    (tmp_path / "link").symlink_to(tmp_path / "seen.csv")
    for other in ("seen.csv", "link"):
        with pytest.raises(ConfigurationError, match=r"seen\.csv is given twice"):
            run_script(monkeypatch, "provenance.py", tmp_path / other, "--out", tmp_path / "seen.csv")


def test_a_folder_of_evaluations_that_does_not_exist_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="argument --evaluations: "):
        run_script(monkeypatch, "report.py", tmp_path, "--evaluations", tmp_path / "absent")


@pytest.mark.parametrize("path", ["", " ", "s3://bucket/prefix"])
def test_what_is_written_to_a_path_of_this_machine_is_written_there(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for name, *words in (
        ("generate.py", tmp_path, "--prompts", "x", "--out"),
        ("export.py", tmp_path),
        ("nearest.py", tmp_path, tmp_path, "--out"),
        ("sweep.py", __file__, "--out"),
        ("preference.py", "report", "votes.sqlite", "--out"),
        ("provenance.py", tmp_path, "--out"),
        ("runs.py", "prune"),
    ):
        with pytest.raises(ConfigurationError, match=r"argument (--)?(out|folders): "):
            run_script(monkeypatch, name, *words, path)
    assert not [*tmp_path.iterdir()]


def test_times_are_those_that_a_process_can_wait_for():
    assert duration("2h") == 7200
    with pytest.raises(argparse.ArgumentTypeError):
        duration("1e10d")


def test_a_path_of_an_unknown_user_is_named(tmp_path, monkeypatch):
    said = []
    toy = [str(ROOT / "tests/tools/toy.yaml"), "--dry-run", "trainer.checkpoint_folder=~no-such-user/checkpoints"]
    assert launch.run_command(lambda: train_command(toy, say=said.append), say=said.append) == 2
    report = [tmp_path, "--evaluations", "~no-such-user/evaluation"]
    assert launch.run_command(lambda: run_script(monkeypatch, "report.py", *report), say=said.append) == 2
    expected = "ConfigurationError: ~no-such-user/{}: there is no such user"
    assert [message.split(",")[0] for message in said] == [
        expected.format("checkpoints"),
        expected.format("evaluation"),
    ]


THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [(8, None, "24"), (1, None, "32"), (256, None, "1"), (8, "3", "3")]
)
def test_ranks_of_a_node_share_its_cores_for_compilation(monkeypatch, ranks, given, expected):
    monkeypatch.setattr(launch, "end_with_parent", lambda number: None)
    monkeypatch.setattr(launch, "num_cores", lambda: 192)
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": str(ranks), THREADS: given or ""}.items():
        monkeypatch.setenv(name, value)
    if given is None:
        monkeypatch.delenv(THREADS)
    found = []
    assert launch.run_command(lambda: found.append(os.environ[THREADS])) == 0
    assert found == [expected]
