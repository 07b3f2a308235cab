"""One self-contained HTML page: pictures are embedded, nothing is fetched."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; } caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border: 1px solid #d0d7de; padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { background: #f6f8fa; } img { max-width: 100%; height: auto; image-rendering: auto; }
figure { margin: .8rem 0; } figcaption { color: #57606a; font-size: .9rem; } .note { color: #57606a; }
@media print { body { margin: 0; } figure, table { break-inside: avoid; } }
"""


@dataclass
class Page:
    """A page that is built from top to bottom."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; numbers should be formatted already."""
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(
            f"<table><caption>{html.escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        )

    def picture(self, picture: Image.Image | Path, caption: str, width: int | None = None) -> None:
        """Add a picture with a caption, shown so many CSS pixels wide."""
        if isinstance(picture, Path):
            content = picture.read_bytes()
        else:
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            content = buffer.getvalue()
        data = base64.b64encode(content).decode("ascii")
        size = f' width="{width}"' if width else ""
        self._parts.append(
            f'<figure><img alt="{html.escape(caption)}"{size} src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def write(self, path: Path) -> None:
        """Write the page, atomically."""
        title = html.escape(self.title)
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
            f"<body><h1>{title}</h1>{''.join(self._parts)}</body></html>"
        )
        partial = path.with_suffix(".partial")
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
