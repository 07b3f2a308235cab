"""One self-contained HTML page: images are embedded, nothing is fetched."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from diffusion.files import write_atomically

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; } caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border: 1px solid #d0d7de; padding: .25rem .6rem; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th { background: #f6f8fa; } img { max-width: 100%; height: auto; image-rendering: auto; }
.scroll { overflow-x: auto; }
figure { margin: .8rem 0; } figcaption { color: #57606a; font-size: .9rem; } .note { color: #57606a; }
nav { margin: 1rem 0; font-size: .9rem; } nav a { margin-right: 1rem; white-space: nowrap; } a { color: #0b5cad; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.facts div { border: 1px solid #d0d7de; border-radius: 6px; padding: .5rem .8rem; break-inside: avoid; }
.facts b { display: block; font-size: 1.25rem; overflow-wrap: anywhere; }
.facts span { color: #57606a; font-size: .85rem; }
pre { background: #f6f8fa; padding: .8rem; font-size: .8rem; line-height: 1.35; overflow-x: auto; }
summary { cursor: pointer; }
@media (max-width: 600px) { body { margin: 1rem auto; } .facts { grid-template-columns: 1fr 1fr; }
  .drawing { overflow-x: auto; } .drawing img { min-width: 640px; } }
@media print {
  body { margin: 0; max-width: none; font-size: 12px; } nav { display: none; }
  figure, table, .facts { break-inside: avoid; } h2 { break-after: avoid; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; } .scroll { overflow: visible; }
}
"""


@dataclass
class Page:
    """A page that is built from top to bottom."""

    title: str
    has_contents: bool = False
    """Whether links to the sections come below the title."""

    _parts: list[str] = field(default_factory=list)
    _headings: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._headings.append(text)
        self._parts.append(f'<h2 id="section-{len(self._headings)}">{html.escape(text)}</h2>')

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def note(self, text: str) -> None:
        """Add a paragraph that may be passed over."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>')

    def facts(self, facts: Sequence[tuple[str, str, str]]) -> None:
        """Add the numbers that a reader looks for first: name, value, and what it is compared with."""
        boxes = "".join(
            f"<div><span>{html.escape(name)}</span><b>{html.escape(value)}</b><span>{html.escape(beside)}</span></div>"
            for name, value, beside in facts
        )
        self._parts.append(f'<div class="facts">{boxes}</div>')

    def preformatted(self, text: str, summary: str) -> None:
        """Add lines of text as they are, opened and closed by a click on the summary."""
        self._parts.append(
            f"<details open><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"
        )

    def table(self, caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; numbers should be formatted already."""
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table><caption>{html.escape(caption)}</caption>'
            f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def image(
        self, image: Image.Image | Path, caption: str, width: int | None = None, *, jpeg_quality: int | None = None
    ) -> None:
        """Add an image with a caption.

        Args:
            image: in memory, or a PNG file.
            caption: below it.
            width: CSS pixels that it is shown at, at most the window's.
            jpeg_quality: of an image in memory that may lose a little, from 1 to 95; None keeps every pixel.
        """
        if isinstance(image, Path):
            self._figure(image.read_bytes(), "png", caption, width)
            return
        kind = "png" if jpeg_quality is None else "jpeg"
        buffer = io.BytesIO()
        options = {} if jpeg_quality is None else {"quality": jpeg_quality}
        image.save(buffer, format=kind, **options)
        self._figure(buffer.getvalue(), kind, caption, width)

    def drawing(self, svg: bytes, caption: str, width: int | None = None) -> None:
        """Add a drawing, sharp at any size; on a phone it is wider than the window, and moved."""
        self._figure(svg, "svg+xml", caption, width, "drawing")

    def _figure(self, content: bytes, kind: str, caption: str, width: int | None, style: str = "image") -> None:
        data = base64.b64encode(content).decode("ascii")
        size = f' width="{width}"' if width else ""
        self._parts.append(
            f'<figure class="{style}"><img alt="{html.escape(caption)}"{size} src="data:image/{kind};base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def write(self, path: Path) -> None:
        """Write the page, atomically."""
        title = html.escape(self.title)
        links = " ".join(f'<a href="#section-{i}">{html.escape(text)}</a>' for i, text in enumerate(self._headings, 1))
        contents = f"<nav>{links}</nav>" if self.has_contents else ""
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
            f"<body><h1>{title}</h1>{contents}{''.join(self._parts)}</body></html>"
        )
        write_atomically(path, page)
