"""Write docs/configuration.md, the reference of all keys: `python scripts/document.py`."""

from pathlib import Path

from diffusion.config.documentation import reference
from diffusion.config.resumption import effect_of
from diffusion.config.schema import Config
from diffusion.evaluation.config import EvaluationConfig
from diffusion.preparation.config import PrepareConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration

Written by `python scripts/document.py` from the dataclasses; do not edit.

A YAML file may extend another (`extends: phase1.yaml`). On the command line `a.b=1` sets a key, `a.0.b=1` a key of an
element of a list, and `overrides={a.b: 1, c: 2}` several. `${a.b}` is the value of another key, `${oc.env:NAME}` of an
environment variable. `N` stands for the number (or name) of an element. Times are `10ba` (optimizer steps), `1000sp`
(samples), `1ep` (epochs) and `0.94dur` (a share of the run).
What is often asked: [faq.md](faq.md).

For a run that is started again with another value of a key, the last column of [run.py](#runpy) says whether the new
value takes effect, is refused, or has no effect, so that records keep that of the checkpoint. A refused change needs
another run, which may begin with the weights (`init_from.checkpoint`). Keys that a task does not use may change.
"""


def page() -> str:
    """The page."""
    commands = {"run.py": Config, "evaluate.py": EvaluationConfig, "scripts/prepare.py": PrepareConfig}
    return _HEAD + reference(commands, {"run.py": lambda key: effect_of(key).value})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
