"""The page to try a model, as a browser uses it: the script, served with a model that a run has trained."""

import base64
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import gradio
import numpy as np
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from diffusion.config.loading import load_config
from diffusion.demo_page import build_page, open_page
from diffusion.errors import MachineError
from diffusion.loading import load_model
from diffusion.models.build import build_model
from diffusion.models.sampling import image_grid
from tests.tools.devtools import CHROMIUM, Tab
from tests.tools.training_runs import ROOT

YAML = str(ROOT / "tests/tools/toy.yaml")
PROMPT, NEGATIVE = "a red circle", "a blue star"
FIELDS = {
    "#prompt :is(textarea, input)": PROMPT,
    "#negative-prompt :is(textarea, input)": NEGATIVE,
    "#seed input": "5",
    "#steps input[type=number]": "2",
    "#guidance input[type=number]": "4",
    "#height input": "40",
    "#width input": "32",
    "#images input[type=number]": "3",
}


def fill(tab: Tab, selector: str, text: str) -> None:
    """Type into a field as a person does: select what is there, replace it, leave the field."""
    field = f"document.querySelector({json.dumps(selector)})"
    tab.wait(field)
    tab.value(f"{field}.focus(), {field}.select()")
    tab.call("Input.insertText", text=text)
    tab.value(f"{field}.blur()")


def shown(tab: Tab, name: str) -> np.ndarray:
    """Pixels of the grid of a model, as the browser received them."""
    tab.value(
        "window.image = null; "
        f"fetch(document.querySelector('#grid-{name} img').src).then(answer => answer.blob()).then(blob => {{ "
        "const reader = new FileReader(); reader.onload = () => { window.image = reader.result }; "
        "reader.readAsDataURL(blob) }); 0"
    )
    tab.wait("window.image")
    data = base64.b64decode(tab.value("window.image").partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def generated(run: Path, name: str) -> np.ndarray:
    """The grid that the page must show."""
    images = load_model(run, weights=name).generate(
        PROMPT,
        NEGATIVE,
        height=40,
        width=32,
        num_inference_steps=2,
        guidance_scale=4.0,
        seed=5,
        num_images_per_prompt=3,
        progress=False,
    )
    assert isinstance(images, list)
    return np.asarray(image_grid(images, 2))


def use(page: gradio.Blocks, run: Path) -> None:
    """Ask for images of both weights, of one, and for what cannot be; nothing may come from another host."""
    with Tab() as tab:
        tab.open(page.local_url, until="document.querySelector('#generate')")
        for selector, text in FIELDS.items():
            fill(tab, selector, text)
        for selector, text in FIELDS.items():  # A page that is still being built forgets what is typed.
            if tab.value(f"document.querySelector({json.dumps(selector)}).value") != text:
                fill(tab, selector, text)
        tab.click("#generate")
        tab.wait("document.querySelector('#grid-raw img') && document.querySelector('#grid-ema img')")
        raw, ema = shown(tab, "raw"), shown(tab, "ema")
        np.testing.assert_array_equal(raw, generated(run, "raw"))
        np.testing.assert_array_equal(ema, generated(run, "ema"))
        assert (raw != ema).any()
        assert tab.value("document.querySelector('#seeds :is(textarea, input)').value") == "5, 6, 7"

        tab.click("#weights input[type=checkbox]")
        tab.click("#generate")
        tab.wait("!document.querySelector('#grid-raw img') && document.querySelector('#grid-ema img')")

        fill(tab, "#height input", "33")
        tab.click("#generate")
        tab.wait("document.body.innerText.includes('both must be multiples of')")

        loaded = "performance.getEntriesByType('resource').map(entry => new URL(entry.name))"
        elsewhere = f"{loaded}.filter(url => url.protocol.startsWith('http') && url.host != location.host)"
        assert tab.value(f"{elsewhere}.map(String)") == []
        tab.value(
            "window.refused = null; addEventListener('securitypolicyviolation', e => {"
            "window.refused = e.blockedURI }); "
            "document.head.insertAdjacentHTML('beforeend', "
            "'<link rel=stylesheet href=http://127.0.0.2:9/font.css>')"
        )
        tab.wait("window.refused == 'http://127.0.0.2:9/font.css'")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_the_page_shows_what_the_model_generates(tmp_path, server, monkeypatch):
    run = tmp_path / "run"
    server.train(1, [(YAML, [f"output_folder={run}", "trainer.max_duration=4ba", "samples.interval=100ba"])])
    visits = []

    def visit(page: gradio.Blocks) -> None:
        try:
            use(page, run)
            with gradio.Blocks(analytics_enabled=False) as another:
                pass
            with pytest.raises(MachineError, match=f"--port {page.server_port}"):
                open_page(another, "127.0.0.1", page.server_port)
        finally:
            page.close(verbose=False)
        visits.append(page)

    is_ok = gradio.networking.url_ok  # Gives up when the server's thread takes 3 s to answer.
    monkeypatch.setattr(gradio.networking, "url_ok", lambda url: any(is_ok(url) for _ in range(20)))
    monkeypatch.setattr(gradio.Blocks, "block_thread", visit)
    monkeypatch.setattr(sys, "argv", ["demo_page.py", str(run), "--device", "cpu"])
    runpy.run_path(str(ROOT / "scripts" / "demo_page.py"))["main"]()
    assert len(visits) == 1


def test_what_is_larger_than_the_fields_allow_is_refused():
    config = load_config(YAML, [])
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=0).eval()
    side = model.resolution
    page = build_page({"raw": model}, "a model")
    try:
        client = Client(open_page(page, "127.0.0.1", None), verbose=False)

        def ask(num_steps: int = 1, height: int = side, width: int = side, num_images: int = 1) -> Any:
            return client.predict(PROMPT, "", 5, num_steps, 3, height, width, num_images, ["raw"], api_name="/generate")

        assert ask(height=2 * side)[-1] == "5"
        for large in ({"height": 1000 * side}, {"width": 2 * side + 8}, {"num_images": 17}, {"num_steps": 1000}):
            with pytest.raises(AppError):
                ask(**large)
    finally:
        page.close(verbose=False)
