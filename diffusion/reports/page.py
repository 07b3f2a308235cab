"""Self-contained HTML pages from jinja2 templates: images are embedded, nothing is fetched, text is escaped."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from diffusion.errors import explained_writes
from diffusion.files import write_atomically

TEMPLATES = Path(__file__).parent / "templates"
"""Templates of the package's reports; `page.html` is the base of all, `macros.html` has tables and figures."""


def write_page(path: Path, template: Path, values: Mapping[str, Any]) -> None:
    """Render a template as `render_page` does and write the page atomically; a MachineError if that fails."""
    page = render_page(template, values)
    with explained_writes(path):
        write_atomically(path, page)


def render_page(template: Path, values: Mapping[str, Any]) -> str:
    """Render a template, which extends `page.html` and may lie in any folder, to HTML."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(values)


def image_uri(image: Image.Image | Path, *, jpeg_quality: int | None = None) -> str:
    """Image in memory, or a PNG file, as a data URI.

    An image in memory keeps every pixel, as PNG, unless it gets a quality as JPEG, 1 to 95.
    """
    if isinstance(image, Path):
        return data_uri(image.read_bytes(), "image/png")
    buffer = io.BytesIO()
    if jpeg_quality is None:
        image.save(buffer, "PNG")
        return data_uri(buffer.getvalue(), "image/png")
    image.save(buffer, "JPEG", quality=jpeg_quality)
    return data_uri(buffer.getvalue(), "image/jpeg")


def data_uri(content: bytes, media_type: str) -> str:
    """Content of a file as a data URI."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
