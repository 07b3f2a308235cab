"""A page to try one model: prompts, seeds, sampling, and training weights beside their average."""

import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import iTXt

from diffusion.errors import ConfigurationError, MachineError
from diffusion.formats.marks import PNG_XMP
from diffusion.launch import LOOPBACK
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.sampling import image_grid, image_seeds

try:
    import gradio as gr
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse
except ImportError as error:
    raise MachineError("the page needs the package gradio; uv pip install -e '.[page]'") from error

MAX_IMAGES, MAX_STEPS = 16, 200

MAX_STRETCH = 2
"""Largest height and width, in resolutions of the model: attention memory grows with the fourth power of a side."""

MAX_PROMPT = 4000
"""Largest number of characters of a prompt. Text encoders read 77 to 512 tokens."""

MAX_WAITING = 20
"""Largest number of requests in the queue; further ones are rejected."""

MAX_BODY = 2**18
"""Largest body of a request, in bytes."""

_FILES = tempfile.TemporaryDirectory(prefix="demo-page-")
"""Folder of the generated images, closed to other users (0700)."""

os.environ.setdefault("GRADIO_TEMP_DIR", _FILES.name)

_DELETE_CACHE = (600, 3600)
"""Seconds between removals of generated images, and their age."""

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; frame-ancestors 'none'"
)
"""Browsers load nothing from other hosts, which Gradio's pages name."""


def build_page(
    models: Mapping[str, LatentDiffusion],
    title: str,
    *,
    max_side: int | None = None,
    max_steps: int = MAX_STEPS,
    max_images: int = MAX_IMAGES,
) -> gr.Blocks:
    """Build the page, not served yet.

    Each model gives a grid of images from the same prompt, seeds and settings. Sizes and numbers beyond the bounds of
    the fields are rejected by the server, with a message on the page.

    Args:
        models: by name, such as `raw` and `ema`; at least one, of one resolution.
        title: heading.
        max_side: largest height and width, in pixels; None: MAX_STRETCH times the resolution.
        max_steps: largest number of sampling steps.
        max_images: largest number of images of each model.
    """
    names = list(models)
    max_side = max_side or MAX_STRETCH * models[names[0]].resolution
    side = min(models[names[0]].resolution, max_side)
    marks = {name: model.mark for name, model in models.items()}

    def generate(
        prompt: str,
        negative_prompt: str,
        seed: int | None,
        num_steps: int,
        guidance_scale: float,
        height: int | None,
        width: int | None,
        num_images: int,
        chosen: list[str],
    ) -> list[Any]:
        used = [name for name in names if name in chosen]
        if not used:
            raise gr.Error("choose at least one of the weights", print_exception=False)
        if max(len(prompt), len(negative_prompt)) > MAX_PROMPT:
            raise gr.Error(f"a prompt has at most {MAX_PROMPT} characters", print_exception=False)
        for name, pixels in (("height", height), ("width", width)):
            if pixels is not None and not 1 <= pixels <= max_side:
                raise gr.Error(f"the {name} is 1 to {max_side} pixels, not {pixels}", print_exception=False)
        grids: dict[str, Image.Image] = {}
        try:
            seeds = image_seeds(image_seeds(seed, 1)[0], num_images)
            for name in used:
                images = models[name].generate(
                    prompt,
                    negative_prompt or None,
                    height=side if height is None else height,
                    width=side if width is None else width,
                    num_inference_steps=num_steps,
                    guidance_scale=guidance_scale,
                    seed=seeds,
                    num_images_per_prompt=num_images,
                    progress=False,
                )
                assert isinstance(images, list)
                grids[name] = image_grid(images, math.ceil(math.sqrt(num_images)))
                grids[name].info[PNG_XMP] = iTXt(marks[name].xmp)  # Gradio writes texts of `info` into the PNG.
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from error
        shown = [gr.update(value=grids.get(name), visible=name in grids) for name in names]
        return [*shown, ", ".join(map(str, seeds))]

    with gr.Blocks(analytics_enabled=False, title=title, delete_cache=_DELETE_CACHE) as page:
        gr.Markdown(f"# {title}")
        prompt = gr.Textbox(label="Prompt", max_length=MAX_PROMPT, elem_id="prompt")
        negative_prompt = gr.Textbox(
            label="Negative prompt (none: the empty caption)", max_length=MAX_PROMPT, elem_id="negative-prompt"
        )
        with gr.Row():
            seed = gr.Number(0, label="Seed (none: random); image i gets seed + i", precision=0, elem_id="seed")
            num_steps = gr.Slider(1, max_steps, min(50, max_steps), step=1, label="Steps", elem_id="steps")
            guidance_scale = gr.Slider(1, 20, 3, step=0.1, label="Guidance scale (1: none)", elem_id="guidance")
        with gr.Row():
            height = gr.Number(side, label="Height, pixels", precision=0, elem_id="height")
            width = gr.Number(side, label="Width, pixels", precision=0, elem_id="width")
            num_images = gr.Slider(
                1, max_images, min(4, max_images), step=1, label="Images in the grid", elem_id="images"
            )
            chosen = gr.CheckboxGroup(names, value=names, label="Weights", elem_id="weights")
        button = gr.Button("Generate", variant="primary", elem_id="generate")
        with gr.Row():
            grids = [
                gr.Image(label=name, format="png", buttons=["download", "fullscreen"], elem_id=f"grid-{name}")
                for name in names
            ]
        seeds = gr.Textbox(label="Seeds of the images, row by row", interactive=False, elem_id="seeds")
        gr.on(
            [button.click, prompt.submit],
            generate,
            [prompt, negative_prompt, seed, num_steps, guidance_scale, height, width, num_images, chosen],
            [*grids, seeds],
        )
    return page.queue(api_open=False, max_size=MAX_WAITING)  # No route of the API leads around the queue.


def read_login(path: Path) -> tuple[str, str]:
    """Read the name and the password of a login from a file with a line `NAME:PASSWORD`.

    Raises:
        ConfigurationError: the file cannot be read, or has no such line.
    """
    try:
        name, _, password = path.read_text(encoding="utf-8").strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--login-file {path} cannot be read ({type(error).__name__})") from error
    if not name or not password or "\n" in password:
        raise ConfigurationError(f"--login-file {path} must hold one line NAME:PASSWORD")
    return name, password


def check_host(host: str, login: tuple[str, str] | None) -> None:
    """Raise a ConfigurationError if other machines can reach the address, and there is no login."""
    if host not in LOOPBACK and login is None:
        raise ConfigurationError(f"--host {host}: a page that others can reach needs --login-file")


def open_page(page: gr.Blocks, host: str, port: int | None, login: tuple[str, str] | None = None) -> str:
    """Serve the page from a thread, to be ended with `page.close()`, and return its address.

    Without a port, it is the first free one from 7860 on. With a login, every visitor has to give its name and
    password; without one, only requests to loopback names are answered, and none of pages of other sites.

    Raises:
        ConfigurationError: other machines can reach the address, and there is no login.
        MachineError: the port is not available.
    """
    check_host(host, login)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            auth=login,
            prevent_thread_lock=True,
            share=False,
            inbrowser=False,
            ssr_mode=False,
            quiet=True,
            app_kwargs={"middleware": [Middleware(_Bounds, has_login=login is not None)]},
        )
    except OSError as error:
        where = f"--host {host}" if port is None else f"--host {host} --port {port}"
        raise MachineError(f"{where}: not available ({error}); choose another port or address") from error
    return address


class _Bounds:
    """ASGI middleware that restricts browsers to content of this server, and the bodies of requests to MAX_BODY.

    Uploads are refused, and without a login requests of other sites' pages, whose names may lead here (DNS rebinding).
    """

    def __init__(self, app: Any, has_login: bool) -> None:
        self.app, self.has_login = app, has_login

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        host, origin = headers.get("host", "localhost"), headers.get("origin")
        is_local = re.fullmatch(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", host) and origin in (None, f"http://{host}")
        app = self.app
        if scope.get("path", "").rstrip("/").endswith("/upload"):
            app = PlainTextResponse("uploads are refused", 403)
        elif not (self.has_login or is_local):
            app = PlainTextResponse("refused; another address than loopback needs --login-file", 403)
        num_bytes = 0

        async def receive_bounded() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY:
                raise HTTPException(413)
            return message

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = _POLICY
            await send(message)

        await app(scope, receive_bounded, send_with_policy)
