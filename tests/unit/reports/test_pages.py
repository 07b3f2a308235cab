"""Pages, tables and figures that all reports are made of."""

import base64
import io
import re

import pandas as pd
from PIL import Image

from diffusion.reports.figures import plot_profiles
from diffusion.reports.page import image_uri, write_page
from diffusion.reports.tables import markdown_table, text_table

TEMPLATE = """{% extends "page.html" %}{% from "macros.html" import facts, figure, table %}
{% block body %}<p>{{ text }}</p>{{ facts([("steps", 3, "of <4>")]) }}{{ table(rows, "Numbers <b>") }}
{{ figure(image, 'a "red" image', 32) }}{{ figure(drawing, "curves") }}{% endblock %}"""


def test_a_page_is_self_contained_reproducible_and_escapes_what_it_is_given(tmp_path):
    (tmp_path / "template.html").write_text(TEMPLATE)
    for name in ("one", "two"):
        drawing = plot_profiles({"$a": [(0, 1), (1, 2)], "_b": [(0, 2), (1, 1)]}, x="step", y="loss")
        values = {
            "title": "A <title>",
            "text": "<script>alert(1)</script>",
            "rows": pd.DataFrame([("x", 1), ("<y>", 2)], columns=["<a>", "b"]),
            "image": image_uri(Image.new("RGB", (3, 2), "red")),
            "drawing": drawing,
        }
        write_page(tmp_path / f"{name}.html", tmp_path / "template.html", values)
    page = (tmp_path / "one.html").read_text()
    assert (tmp_path / "two.html").read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "template.html", "two.html"]
    assert not any(tag in page for tag in ("<script", "<y>", "<a>", "<4>", "A <title>"))
    assert not re.search(r'(src|href)="(?!data:)', page)
    [data] = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) == (255, 0, 0)


def test_tables_of_text():
    assert text_table([("name", "n"), ("a", "10"), ("longer", "")]) == ["name     n", "a       10", "longer"]
    row = ["x|y\\|", "<img> &lt;"]
    assert markdown_table(["a", "b"], [row]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        r"| x\|y\\\| | &lt;img> &amp;lt; |",
    ]
