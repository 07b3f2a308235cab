"""Each command answers --help and mistakes of its arguments at once: it has imported nothing that takes long."""

import json
import subprocess
import sys

from tests.tools.training_runs import ROOT, environment

SCRIPTS = [[str(path.relative_to(ROOT))] for path in sorted(ROOT.glob("scripts/*.py"))]
MODULES = [
    ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")]
    for folder in ("benchmarks", "demo", "verification")
    for path in sorted((ROOT / folder).glob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
]
COMMANDS = [["run.py"], ["evaluate.py"], *SCRIPTS, *MODULES]
GENERATE = ["scripts/generate.py", "nowhere", "--prompts", "a", "--out", "nowhere"]
MISTAKES = [
    *([*words, "--no-such-option"] for words in COMMANDS),
    [*GENERATE, "--seed", "-1"],
    [*GENERATE, "--rewrite-model", "a"],
    ["scripts/plan.py", "yamls/phase1.yaml", "--fleets", "nowhere"],
    ["scripts/provenance.py", "nowhere"],
    ["scripts/report.py", "nowhere"],
    ["scripts/sweep.py", "nowhere.yaml"],
    ["scripts/ingest.py", "nowhere.yaml"],
]

PROGRAM = """
import contextlib, io, json, os, sys
from tests.tools.forking import end_as_program, run_as_main

SLOW = set("torch composer diffusers transformers streaming duckdb pyarrow pandas matplotlib scipy".split())

def report(words):
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run_as_main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([words, code, said.getvalue().split(":")[0], sorted(SLOW & sys.modules.keys())]))

for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        end_as_program(lambda: report(words))
    os.wait()
"""


def test_nothing_slow_is_imported():
    plan = [*([*words, "--help"] for words in COMMANDS), *MISTAKES]
    command = [sys.executable, "-c", PROGRAM, json.dumps(plan)]
    found = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True, timeout=300)
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert answers[: len(COMMANDS)] == [[words, 0, "usage", []] for words in plan[: len(COMMANDS)]]
    mistakes = [[words, code, slow] for words, code, _, slow in answers[len(COMMANDS) :]]
    assert mistakes == [[words, 2, []] for words in MISTAKES]
    assert not (ROOT / "nowhere").exists()
