import dataclasses
import runpy
from pathlib import Path

from diffusion.config.keys import field_docs, find_field, schema_keys
from diffusion.config.schema import Config
from diffusion.config.training import OptimizerConfig


def test_every_key_has_a_meaning():
    keys = schema_keys(Config)
    assert {"data.streams.0.name", "algorithms.ema.start", "plugins.callbacks.0.arguments"} <= keys.keys()
    assert [key for key, (_, doc) in keys.items() if not doc] == []
    assert find_field(Config, "optimizer.weight_decay")[1] == "Decoupled weight decay."
    assert list(field_docs(OptimizerConfig)) == [field.name for field in dataclasses.fields(OptimizerConfig)]


def test_the_reference_is_up_to_date_and_has_every_key():
    page = Path("docs/configuration.md").read_text(encoding="utf-8")
    assert page == runpy.run_path("scripts/document.py")["page"](), "run `python scripts/document.py`"
    training = page[page.index("\n## run.py\n") : page.index("\n## evaluate.py\n")]
    top, *groups = training.split("\n### ")
    tables = {"": top} | {part.partition("\n")[0].replace(".N", ".0"): part for part in groups}
    for key in schema_keys(Config):
        group, _, name = key.rpartition(".")
        assert f"| `{name}` |" in tables[group], key
    assert "| `lr` | a number, at least 0 | `0.0001` |" in tables["optimizer"]
