"""Each command answers --help at once: it has imported nothing that takes long."""

import json
import subprocess
import sys

from tests.tools.training_runs import ROOT, environment

SCRIPTS = sorted(path.name for path in ROOT.glob("scripts/*.py"))
COMMANDS = [["run.py"], ["evaluate.py"], *([f"scripts/{name}"] for name in SCRIPTS)]
MODULES = ("benchmarks", "benchmarks.leaderboard", "benchmarks.quarter_hour", "demo", "verification.verify_elastic")
COMMANDS += [["-m", module] for module in MODULES]

PROGRAM = """
import contextlib, io, json, os, sys
from tests.tools.forking import end_as_program, run_as_main

SLOW = set("torch composer diffusers transformers streaming duckdb pyarrow pandas matplotlib scipy".split())

def report(words):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run_as_main([*words, "--help"])
    print(json.dumps([words, said.getvalue()[:6], sorted(SLOW & sys.modules.keys())]))

for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        end_as_program(lambda: report(words))
    os.wait()
"""


def test_nothing_slow_is_imported():
    command = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    found = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True, timeout=300)
    assert [json.loads(line) for line in found.stdout.splitlines()] == [[one, "usage:", []] for one in COMMANDS]
