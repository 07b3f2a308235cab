import runpy
from pathlib import Path

from diffusion.config.documentation import schema_keys
from diffusion.config.schema import Config


def test_the_reference_is_up_to_date_and_has_every_key():
    page = Path("docs/configuration.md").read_text(encoding="utf-8")
    assert page == runpy.run_path("scripts/document.py")["page"](), "run `python scripts/document.py`"
    training = page[page.index("\n## run.py\n") : page.index("\n## evaluate.py\n")]
    top, *groups = training.split("\n### ")
    tables = {"": top} | {part.partition("\n")[0].replace(".N", ".0"): part for part in groups}
    for key in schema_keys(Config):
        group, _, name = key.rpartition(".")
        assert f"| `{name}` |" in tables[group], key
    assert "| `lr` | a number | `0.0001` |" in tables["optimizer"]
