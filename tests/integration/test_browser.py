"""Pages as a browser shows them."""

import contextlib
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from diffusion.reports.page import image_uri, write_page

CHROMIUM = shutil.which("chromium")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
OPTIONS += ["--disable-checker-imaging", "--run-all-compositor-stages-before-draw"]  # Images are decoded before.

TEMPLATE = """{% extends "page.html" %}{% from "macros.html" import figure %}
{% block body %}<p>Some words.</p>{{ figure(image, "wider than the window") }}{% endblock %}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]


def screenshot(page, folder, size: tuple[int, int]) -> np.ndarray:
    """What the browser shows of a page, uint8 [height, width, 3]."""
    image = folder / "screenshot.png"
    command = [str(CHROMIUM), *OPTIONS, f"--screenshot={image}", f"--window-size={size[0]},{size[1]}", page.as_uri()]
    for profile in ("first", "second", "third"):  # Chromium hangs now and then at its start.
        with contextlib.suppress(subprocess.TimeoutExpired):
            profile_folder = f"--user-data-dir={folder / profile}"
            subprocess.run([*command, profile_folder], check=True, capture_output=True, timeout=150)
            break
    return np.asarray(Image.open(image).convert("RGB"))


@pytest.mark.parametrize("width", [1000, 500])
def test_a_page_shows_its_images_and_fits_the_window(tmp_path, width):
    (tmp_path / "template.html").write_text(TEMPLATE)
    values = {"title": "Report", "image": image_uri(Image.new("RGB", (1600, 400), (255, 0, 0)))}
    write_page(tmp_path / "page.html", tmp_path / "template.html", values)
    shown = screenshot(tmp_path / "page.html", tmp_path, (width, 700)).astype(int)
    red = (np.abs(shown - (255, 0, 0)).max(axis=-1) < 8).any(axis=0)
    columns = np.flatnonzero(red)
    assert len(columns) > 0.8 * width or len(columns) > 800
    assert columns[0] > 2
    assert columns[-1] < width - 2
    assert (shown.max(axis=-1) < 60).sum() > 100, "no dark text"
