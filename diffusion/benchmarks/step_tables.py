"""Measured steps as tables."""

from typing import Any

from diffusion.tables import align


def format_steps(measured: dict[str, Any]) -> str:
    """Write what `measure_steps` found for a terminal."""
    head = ["step", "px", "microbatch", "ms", "+-", "images/s", "TFLOP/s", "MFU", "of matmul", "of limit", "peak GB"]
    rows = [
        [
            row["name"],
            str(row["resolution"]),
            str(row["microbatch_size"]),
            f"{1000 * row['seconds']:,.1f}",
            f"{row['deviation']:.1%}",
            f"{row['images_per_second']:,.1f}",
            f"{row['tflops']:,.3g}",
            f"{row['mfu']:.1%}" if row["mfu"] is not None else "-",
            f"{row['matmul_share']:.1%}",
            f"{row['limit_share']:.1%}",
            f"{row['peak_bytes'] / 1e9:,.1f}" if row["peak_bytes"] is not None else "-",
        ]
        for row in measured["rows"]
    ]
    parts = [
        [where, *(f"{1000 * seconds:,.1f}" for seconds in found["parts"].values())]
        for where, found in measured["parts"].items()
    ]
    names = next(iter(measured["parts"].values()))["parts"]
    return "\n".join([*align([head, *rows]), "", *align([["ms of the Trainer's step", *names], *parts])])


def format_parity(measured: dict[str, Any]) -> str:
    """Write what `measure_parity` found for a terminal."""
    rows = [[name, f"{value:.1e}", f"{measured['last'][name]:.1e}"] for name, value in measured["largest"].items()]
    head = [f"loss beside fp32 over {measured['num_steps']} steps", "largest difference", "last"]
    return "\n".join(align([head, *rows]))
