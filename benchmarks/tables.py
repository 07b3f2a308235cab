"""Tables of rows measured on GPUs, in pages between `<!-- benchmark:NAME -->` and `<!-- /benchmark:NAME -->`."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import format_line, read_rows
from diffusion.errors import ConfigurationError
from diffusion.reports.tables import markdown_table

Line = dict[str, Any]

MLPERF_IMAGES_PER_SECOND = 149.5
"""Rate of one H200 at 512 px, text and latents computed beforehand: the best of MLPerf Training 5.0."""

ADDED = ("peak_bytes", "reserved_bytes", "tf32_at_the_end")
"""Entries of a row that its table leaves out."""

NOT_MEASURED = "Not measured on a GPU yet: `python -m benchmarks.quarter_hour first --out runs/benchmark`."


def write_tables(files: Sequence[Path], pages: Sequence[Path]) -> None:
    """Write the tables of files of rows into pages of Markdown with markers.

    Of rows of one name and device, that of the last file counts.
    """
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{file} does not exist: give FOLDER/rows.jsonl of a benchmark with --out FOLDER")
    lines = [line for file in files for line in read_rows(file).values()]
    for page in pages:
        page.write_text(fill(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def fill(page: str, lines: Iterable[Line]) -> str:
    """Replace what stands between the markers of a page by the tables of finished rows."""
    machines: dict[str, dict[str, Line]] = {}
    for line in lines:
        machines.setdefault(line["machine"]["device"], {})[line["name"]] = line
    for name, make in {"gpu": _all, "summary": _summary}.items():
        texts = [text for rows in machines.values() for text in make(list(rows.values()))] or [NOT_MEASURED]
        page = replace_between(page, f"benchmark:{name}", "\n\n".join(texts))
    return page


def replace_between(page: str, name: str, content: str) -> str:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", page, flags=re.DOTALL)


def _all(lines: list[Line]) -> list[str]:
    """Everything that was measured on a machine."""
    texts = [_source(lines)]
    if steps := _of_kind(lines, "step", "trainer"):
        texts.append(_speeds(steps, lines))
    if parts := [line for line in _of_kind(lines, "parts") if "result" in line]:
        rows = [[line["name"], *(f"{1000 * each:,.1f}" for each in line["result"]["parts"].values())] for line in parts]
        texts.append(markdown_table(["ms of the Trainer's step", *parts[0]["result"]["parts"]], rows))
    if profiled := [line for line in _of_kind(lines, "trainer") if "classes" in line.get("result", {})]:
        texts.append(_classes(profiled))
    shown = {id(line) for line in _of_kind(lines, "step", "trainer", "parts")}
    others = []
    for line in (line for line in lines if id(line) not in shown):
        result = {key: value for key, value in line.get("result", {}).items() if key not in ADDED}
        others.append(format_line({**line, "result": result}).partition(": ")[::2])
    return [*texts, markdown_table(["row", "found"], others)] if others else texts


def _summary(lines: list[Line]) -> list[str]:
    """The rows that a reader looks for first: stock diffusers, ours, and the Trainer, each at its best."""
    best: dict[tuple[int, str, bool], Line] = {}
    steps = [line for line in _of_kind(lines, "step", "trainer") if "result" in line]
    for line in sorted(steps, key=lambda line: line["result"]["images_per_second"]):
        kind, side, _, *name = line["name"].split("/")
        best[int(side), kind, bool(name) and name[0].endswith("stock")] = line
    return [_source(lines), _speeds([best[key] for key in sorted(best)], lines)]


def _speeds(steps: list[Line], lines: list[Line]) -> str:
    rates = next((line["result"] for line in _of_kind(lines, "rates") if "result" in line), {})
    head = ["step", "px", "microbatch", "images/s", f"of MLPerf's {MLPERF_IMAGES_PER_SECOND}", "TFLOP/s", "MFU"]
    head += ["of the measured matrix product", "ms", "±", "peak GB"]
    return markdown_table(head, (_speed(line, rates) for line in steps))


def _speed(line: Line, rates: dict[str, Any]) -> list[str]:
    """Cells of one way to make a step."""
    kind, side, size, *name = line["name"].split("/")
    cells = [", ".join(["loop" if kind == "step" else kind, *name]), side, size]
    if error := line.get("error"):
        return [*cells, "out of memory" if "out of memory" in error else error[:80].replace("\n", " "), *[""] * 7]
    found = line["result"]
    rate, flops = found["images_per_second"] / found["num_gpus"], found["tflops"] * 1e12
    is_comparable = side == "512" and line["parameters"]["architecture"] == "stable_diffusion_2"
    return [
        *cells,
        f"{found['images_per_second']:,.1f}",
        f"{rate / MLPERF_IMAGES_PER_SECOND:.0%}" if is_comparable else "",
        f"{found['tflops']:,.3g}",
        *(f"{flops / rates[key]:.1%}" if rates.get(key) else "" for key in ("datasheet_flops", "matmul_flops")),
        f"{1000 * found['seconds']:,.1f}",
        f"{found['deviation']:.1%}",
        f"{found['peak_bytes'] / 1e9:,.1f}" if "peak_bytes" in found else "",
    ]


def _classes(lines: list[Line]) -> str:
    """Table of the GPU's milliseconds in a step, by class of kernels."""
    names = list(dict.fromkeys(name for line in lines for name in line["result"]["classes"]))
    rows = []
    for line in lines:
        found = line["result"]
        milliseconds = (found["classes"].get(name, [0.0])[0] for name in names)
        cells = (1000 * found["seconds"], found["busy_ms"], *milliseconds)
        rows.append([line["name"], *(f"{cell:,.1f}" for cell in cells), f"{found['num_kernels']:,.0f}"])
    return markdown_table(["ms of the Trainer's step", "step", "GPU is busy", *names, "kernels"], rows)


def _of_kind(lines: list[Line], *kinds: str) -> list[Line]:
    return [line for line in lines if line["kind"] in kinds]


def _source(lines: list[Line]) -> str:
    """Hardware, versions and dates of rows."""
    machine, dates = lines[-1]["machine"], sorted({line["date"][:10] for line in lines})
    names = ("torch", "triton", "cuda", "cudnn", "driver")
    versions = (f"{name} {machine[name]}" for name in names if machine.get(name))
    return f"{', '.join([machine['device'], *versions])}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}:"
