"""The page to try a model, as a browser uses it: the script, served with a model that a run has trained."""

import base64
import io
import json
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio
import numpy as np
import pytest
import requests
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from diffusion.config.loading import load_config
from diffusion.demo_page import MAX_BODY, MAX_PROMPT, MAX_WAITING, build_page, open_page, read_login
from diffusion.errors import ConfigurationError, MachineError
from diffusion.loading import load_model
from diffusion.models.build import build_model
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.sampling import image_grid
from tests.tools.devtools import CHROMIUM, Tab
from tests.tools.image_marks import read_mark
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


def fill_all(tab: Tab, fields: dict[str, str]) -> None:
    """Fill fields until each holds its text: a page that is still being built forgets what is typed."""
    wrong = fields
    while wrong:
        for selector, text in wrong.items():
            fill(tab, selector, text)
        values = {one: tab.value(f"document.querySelector({json.dumps(one)})?.value") for one in fields}
        wrong = {one: text for one, text in fields.items() if values[one] != text}


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


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Gradio gives up when the server's thread takes 3 s to answer: it asks again."""
    is_ok = gradio.networking.url_ok
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradio.networking, "url_ok", lambda url: any(is_ok(url) for _ in range(20)))
        yield


def use(page: gradio.Blocks, run: Path) -> None:
    """Ask for images of both weights, of one, and for what cannot be; nothing may come from another host."""
    with Tab() as tab:
        tab.open(page.local_url, until="document.querySelector('#generate')")
        fill_all(tab, FIELDS)
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
    server.train(1, [(YAML, [f"output_folder={run}", "trainer.max_duration=4ba"])])
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

    monkeypatch.setattr(gradio.Blocks, "block_thread", visit)
    monkeypatch.setattr(sys, "argv", ["demo_page.py", str(run), "--device", "cpu"])
    runpy.run_path(str(ROOT / "scripts" / "demo_page.py"))["main"]()
    assert len(visits) == 1


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    config = load_config(YAML, [])
    return build_model(config.model, config.objective, resolution=config.data.resolution, seed=0).eval()


@pytest.fixture(scope="module")
def address(model) -> Iterator[str]:
    """Address of a page of default limits."""
    page = build_page({"raw": model}, "a model")
    yield open_page(page, "127.0.0.1", None)
    page.close(verbose=False)


def client_of(address: str) -> Callable[..., Any]:
    """Ask a page for images: by default one of the default size in one step."""
    client = Client(address, verbose=False, httpx_kwargs={"timeout": 300})

    def ask(
        prompt: str = PROMPT,
        num_steps: int = 1,
        height: int | None = None,
        width: int | None = None,
        num_images: int = 1,
        chosen: Sequence[str] = ("raw",),
    ) -> Any:
        settings = (num_steps, 3, height, width, num_images, list(chosen))
        return client.predict(prompt, "", 5, *settings, api_name="/generate")

    return ask


def test_what_is_larger_than_the_fields_allow_is_refused(model, address):
    side, ask = model.resolution, client_of(address)
    assert ask(height=2 * side)[-1] == "5"
    for large in ({"height": 1000 * side}, {"width": 2 * side + 8}, {"num_images": 17}, {"num_steps": 1000}):
        with pytest.raises(AppError):
            ask(**large)
    with pytest.raises(AppError, match="width"):
        ask(width=9999)


def test_a_cap_holds_on_the_server(model, monkeypatch):
    side, calls = model.resolution, []
    generate = type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda *args, **options: calls.append(options) or generate(*args, **options)
    )
    page = build_page({"raw": model}, "a model", max_side=side - 8, max_steps=2, max_images=2)
    try:
        ask = client_of(open_page(page, "127.0.0.1", None))
        grid, seeds = ask(num_steps=2, height=side - 8, num_images=2)
        assert seeds == "5, 6"
        assert read_mark(grid["value"])["AISystemVersionUsed"] == model.mark.version
        ask(chosen=["raw"] * 20)
        assert [(one["height"], one["width"]) for one in calls] == [(side - 8, side - 8)] * 2, "each model once"
        for large in ({"height": side}, {"width": side}, {"num_images": 3}, {"num_steps": 3}):
            with pytest.raises(AppError):
                ask(**large)
        assert len(calls) == 2
    finally:
        page.close(verbose=False)


def test_requests_are_bounded_before_they_cost_anything(model, address, monkeypatch):
    release = threading.Event()
    images = [Image.new("RGB", (8, 8))]
    monkeypatch.setattr(type(model), "generate", lambda *args, **options: release.wait(300) and images)
    try:

        def ask(route: str, prompt: str = PROMPT) -> requests.Response:
            data = {"data": [prompt, "", 5, 1, 3, model.resolution, model.resolution, 1, ["raw"]]}
            return requests.post(f"{address}gradio_api/{route}/generate", json=data, timeout=300)

        assert ask("run").status_code == 404, "no way around the queue"
        assert ask("call", "a" * 2 * MAX_BODY).status_code == 413
        codes = [ask("call").status_code for _ in range(MAX_WAITING + 3)]
        assert codes[:MAX_WAITING] == [200] * MAX_WAITING
        assert codes[-1] == 503, "the queue is full"
        release.set()
        with pytest.raises(AppError, match="characters"):
            client_of(address)("a" * (MAX_PROMPT + 1))
    finally:
        release.set()


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example:7860"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]
)
def test_pages_of_other_sites_are_not_answered(address, headers):
    assert requests.get(f"{address}config", timeout=300).status_code == 200
    assert requests.get(f"{address}config", headers=headers, timeout=300).status_code == 403


def test_nothing_is_uploaded_and_images_are_closed_to_others(address):
    upload = requests.post(f"{address}gradio_api/upload", files={"files": ("a.html", b"x")}, timeout=300)
    assert upload.status_code == 403
    assert Path(gradio.utils.get_upload_folder()).stat().st_mode & 0o077 == 0


def test_an_address_that_others_can_reach_needs_a_login():
    with gradio.Blocks(analytics_enabled=False) as page:
        pass
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigurationError, match="--login-file"):
            open_page(page, host, None)


@pytest.mark.parametrize("options", [["--port", "70000"], ["--port=-1"], ["--host", "0.0.0.0"]])
def test_wrong_addresses_are_reported_before_weights_are_loaded(monkeypatch, options):
    monkeypatch.setattr("diffusion.loading.load_model", lambda *_, **__: pytest.fail("loaded before the error"))
    monkeypatch.setattr(sys, "argv", ["demo_page.py", "RUN", "--device", "cpu", *options])
    with pytest.raises(ConfigurationError, match=options[0].partition("=")[0]):
        runpy.run_path(str(ROOT / "scripts" / "demo_page.py"))["main"]()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_a_login_keeps_others_out(model, tmp_path, capfd, caplog):
    (tmp_path / "login").write_text("anna:correct horse: battery\n")
    login = read_login(tmp_path / "login")
    assert login == ("anna", "correct horse: battery")
    for wrong in ("anna", "anna:", ":a", "a:b\nc:d"):
        (tmp_path / "login").write_text(wrong)
        with pytest.raises(ConfigurationError):
            read_login(tmp_path / "login")
    page = build_page({"raw": model}, "a model")
    try:
        address = open_page(page, "127.0.0.1", None, login)
        call = f"{address}gradio_api/call/generate"
        data = {"data": [PROMPT, "", 5, 1, 3, model.resolution, model.resolution, 1, ["raw"]]}
        assert requests.post(call, json=data, timeout=300).status_code == 401
        assert requests.get(f"{address}config", timeout=300).status_code == 401
        session = requests.Session()
        for password, code in (("wrong", 400), (login[1], 200)):
            form = {"username": login[0], "password": password}
            assert session.post(f"{address}login", data=form, timeout=300).status_code == code
        assert session.post(call, json=data, timeout=300).status_code == 200
        with Tab() as tab:
            tab.open(address, until="document.querySelector('input[type=password]')")
            assert not tab.value("document.querySelector('#generate')")
            name = "label:nth-of-type(1) input:not([type=password]), input[type=text]"
            fill_all(tab, {name: login[0], "input[type=password]": login[1]})
            tab.value("[...document.querySelectorAll('button')].find(one => one.innerText.trim() == 'Login').click()")
            tab.wait("document.querySelector('#generate')")
    finally:
        page.close(verbose=False)
    assert "horse" not in "".join(capfd.readouterr()) + caplog.text
