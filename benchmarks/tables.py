"""Tables of measured rows, in pages between `<!-- benchmark:NAME -->` and `<!-- /benchmark:NAME -->`."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import finished, format_line, read_rows
from diffusion.errors import ConfigurationError
from diffusion.reports.tables import markdown_table

Line = dict[str, Any]

MLPERF_IMAGES_PER_SECOND = 149.5
"""Of one H200 at 512 px, text and latents computed beforehand: the best of MLPerf Training 5.0."""

COMMAND = "`python -m benchmarks plan --out runs/benchmark`"

CPU_TABLE = (
    (
        "bytes/",
        "ratio",
        "bytes of everything but convolutions, matrix products and attention, per image, ours / stock",
        "0.75",
    ),
    ("ratio/", "ratio", "the Trainer's step / a plain loop's on the same U-Net, CPU time, in turns", "1.03"),
    (
        "save",
        "ratio_sharded",
        "sharded checkpoint with checksums / raw write and fsync of the same bytes, by the clock",
        "0.8",
    ),
    ("save", "ratio_single", "one `.pt` file (ddp), likewise: torch's CRC of each tensor", ""),
)
"""Beginning of the row's name, key of its result, what it is, and what it should be."""


def write_tables(files: Sequence[Path], pages: Sequence[Path]) -> None:
    """Write the tables of files of rows into pages.

    Args:
        files: Files of rows; a later one replaces rows of the same name and device.
        pages: Markdown with markers.

    Raises:
        ConfigurationError: a file is not there.
    """
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{file} is no file of rows: give what {COMMAND} wrote")
    lines = [line for file in files for line in finished(read_rows(file)).values()]
    for page in pages:
        page.write_text(fill(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def fill(page: str, lines: Iterable[Line]) -> str:
    """Replace what stands between the markers of a page by the tables of finished rows."""
    kinds: dict[str, list[Line]] = {"cuda": [], "cpu": []}
    for line in {(line["machine"]["device"], line["name"]): line for line in lines}.values():
        kinds[line["machine"]["type"]].append(line)
    gpu, cpu = kinds["cuda"], kinds["cpu"]
    for name, make in {"gpu": lambda: _gpu(gpu), "cpu": lambda: _cpu(cpu), "summary": lambda: _summary(gpu)}.items():
        page = _between(page, name, make)
    return page


def _between(page: str, name: str, make: Callable[[], str]) -> str:
    pattern = rf"(<!-- benchmark:{name} -->\n).*?(<!-- /benchmark:{name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{make()}\n{found[2]}", page, flags=re.DOTALL)


def _gpu(lines: list[Line]) -> str:
    """Everything that was measured on GPUs."""
    if not lines:
        return f"Not measured yet. On a machine with one GPU: {COMMAND}."
    return "\n\n".join(text for machine in _machines(lines) for text in _of_machine(machine))


def _of_machine(lines: list[Line]) -> list[str]:
    rates = next((line["result"] for line in lines if line["kind"] == "rates" and "result" in line), {})
    steps = [line for line in lines if line["kind"] in ("step", "trainer")]
    parts = [line for line in lines if line["kind"] == "parts" and "result" in line]
    others = [line for line in lines if line["kind"] not in ("step", "trainer", "parts", "losses")]
    texts = [_source(lines)]
    if steps:
        texts.append(_speeds(steps, rates))
    if parts:
        names = parts[0]["result"]["parts"]
        head = ["ms of the Trainer's step", *names]
        texts.append(
            markdown_table(head, ([line["name"], *_milliseconds(line["result"]["parts"], names)] for line in parts))
        )
    texts += _losses([line for line in lines if line["kind"] == "losses"])
    found = (format_line(line).partition(": ")[::2] for line in others)
    return [*texts, markdown_table(["row", "found"], (list(pair) for pair in found))] if others else texts


def _speeds(lines: list[Line], rates: dict[str, Any]) -> str:
    head = ["step", "px", "microbatch", "images/s", f"of MLPerf's {MLPERF_IMAGES_PER_SECOND}", "TFLOP/s", "MFU"]
    head += ["of the measured matrix product", "ms", "±", "peak GB"]
    return markdown_table(head, (_speed(line, rates) for line in lines))


def _speed(line: Line, rates: dict[str, Any]) -> list[str]:
    """Cells of one way to make a step."""
    kind, side, size, *name = line["name"].split("/")
    cells = [", ".join(["bare" if kind == "step" else kind, *name]), side, size]
    if "error" in line:
        return [*cells, _error(line), *[""] * 7]
    found = line["result"]
    rate, flops = found["images_per_second"] / found["num_gpus"], found["tflops"] * 1e12
    is_comparable = side == "512" and line["parameters"]["architecture"] == "stable_diffusion_2"
    return [
        *cells,
        f"{found['images_per_second']:,.1f}",
        f"{rate / MLPERF_IMAGES_PER_SECOND:.0%}" if is_comparable else "",
        f"{found['tflops']:,.3g}",
        _share(flops, rates.get("datasheet_flops")),
        _share(flops, rates.get("matmul_flops")),
        f"{1000 * found['seconds']:,.1f}",
        f"{found['deviation']:.1%}",
        f"{found['peak_bytes'] / 1e9:,.1f}" if "peak_bytes" in found else "",
    ]


def _losses(lines: list[Line]) -> list[str]:
    """The table of losses beside stock fp32; none without that."""
    stock = "/fp32 stock"
    references = {line["name"].removesuffix(stock): line for line in lines if line["name"].endswith(stock)}
    rows = []
    for line in lines:
        reference = references.get(line["name"].rsplit("/", 1)[0], {}).get("result")
        if reference is None:
            continue
        cells = [_error(line), ""]
        if "result" in line:
            pairs = zip(line["result"]["losses"], reference["losses"], strict=True)
            differences = [abs(found - expected) / abs(expected) for found, expected in pairs]
            cells = [f"{max(differences):.1e}", f"{differences[-1]:.1e}"]
        rows.append([line["name"], *cells])
    head = ["loss beside stock fp32 without TF32", "largest relative difference", "at the last step"]
    return [markdown_table(head, rows)] if rows else []


def _cpu(lines: list[Line]) -> str:
    """Counts and ratios that a CPU shows."""
    rows = []
    for start, key, text, aim in CPU_TABLE:
        for line in lines:
            if not line["name"].startswith(start) or "error" in line:
                continue
            [value] = [value for name, value in line["result"].items() if name.split()[0] == key]
            where = [*line["name"].split("/")[1:], *map(str, line["parameters"].get("overrides", []))]
            rows.append([f"{text} ({', '.join(where)})" if where else text, f"{value:.3g}", aim])
    return "\n\n".join(
        [_source(lines), markdown_table(["count or ratio", "found", "aim"], rows), *_losses(_of_kind(lines, "losses"))]
    )


def _summary(lines: list[Line]) -> str:
    """The rows that a reader looks for first: stock diffusers, ours, and the Trainer, each at its best."""
    if not lines:
        return f"Not measured on a GPU yet: {COMMAND} does it in 40 minutes."
    texts = []
    for machine in _machines(lines):
        steps = [line for line in machine if line["kind"] in ("step", "trainer") and "result" in line]
        rates = next((line["result"] for line in _of_kind(machine, "rates") if "result" in line), {})
        best: dict[tuple[str, str, bool], Line] = {}
        for line in sorted(steps, key=lambda line: line["result"]["images_per_second"]):
            kind, side, _, *name = line["name"].split("/")
            best[side, kind, bool(name) and name[0].endswith("stock")] = line
        texts += [
            _source(machine),
            _speeds([best[key] for key in sorted(best, key=lambda key: (int(key[0]), *key[1:]))], rates),
        ]
    return "\n\n".join(texts)


def _of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _machines(lines: list[Line]) -> list[list[Line]]:
    """Rows of each device."""
    names = dict.fromkeys(line["machine"]["device"] for line in lines)
    return [[line for line in lines if line["machine"]["device"] == name] for name in names]


def _source(lines: list[Line]) -> str:
    """Hardware, versions and dates of rows."""
    if not lines:
        return "Not measured yet."
    machine, dates = lines[-1]["machine"], sorted({line["date"][:10] for line in lines})
    versions = (
        f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn", "driver") if machine.get(name)
    )
    return f"{', '.join([machine['device'], *versions])}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}:"


def _error(line: Line) -> str:
    """What went wrong, in a cell; nothing for a row with a result."""
    error = line.get("error", "")
    return "out of memory" if "out of memory" in error else error[:80].replace("\n", " ")


def _share(flops: float, limit: float | None) -> str:
    return f"{flops / limit:.1%}" if limit else ""


def _milliseconds(parts: dict[str, float], names: Iterable[str]) -> list[str]:
    return [f"{1000 * parts[name]:,.1f}" for name in names]
