import base64
import io
import re

from PIL import Image

from diffusion.html_page import Page


def test_a_page_is_self_contained_and_escapes_what_it_is_given(tmp_path):
    page = Page("A <title>")
    page.heading("One & two")
    page.text("<script>alert(1)</script>")
    page.table("Numbers", ["a", "b"], [("x", 1), ("<y>", 2)])
    page.image(Image.new("RGB", (3, 2), "red"), 'a "red" image')
    page.write(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert "<script>" not in html
    assert "<y>" not in html
    assert not re.search(r'(src|href)="(?!data:)', html)
    [data] = re.findall(r"data:image/png;base64,([^\"]+)", html)
    assert Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) == (255, 0, 0)
