"""What the kernel's log says about GPUs: Xid errors of NVIDIA's driver."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.operations.checks.verdicts import Verdict, ok, problem, warning

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")

FAULTS = {
    48: "memory error that could not be corrected",
    62: "fault of its controller",
    64: "damaged memory could not be replaced",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "many memory errors that were corrected",
    95: "memory error that was not contained",
    119: "its system processor does not answer",
    120: "its system processor has failed",
}
"""Numbers that mean a defect of the machine, by NVIDIA's list of Xid errors."""

PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
"""Numbers that programs cause as well, which say nothing about the machine."""


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One error."""

    gpu: str
    """PCI address."""

    number: int
    text: str


def parse_xids(log: str) -> list[Xid]:
    """Errors in a kernel log, in order."""
    return [Xid(gpu=m[1], number=int(m[2]), text=m[3].strip()) for m in _XID.finditer(log)]


def read_kernel_log() -> str | None:
    """The kernel's log since the machine was started; None where this user or container may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def check_xids(xids: Sequence[Xid] | None) -> Verdict:
    """Has the driver reported a defect of a GPU since the machine was started?

    Args:
        xids: None where the kernel's log cannot be read.
    """
    if xids is None:
        return ok("Xid errors", "not known: the kernel's log cannot be read here")
    faults = [xid for xid in xids if xid.number in FAULTS]
    others = sorted({xid.number for xid in xids} - FAULTS.keys() - PROGRAMS)
    if faults:
        found = sorted({f"{xid.gpu} (Xid {xid.number}, {FAULTS[xid.number]})" for xid in faults})
        remedy = "take the machine out of the job and restart it; if it comes back, have the GPU exchanged"
        return problem("Xid errors", f"since its start the driver reported {', '.join(found)}", remedy)
    if others:
        what = f"since its start the driver reported Xid {', '.join(map(str, others))}"
        return warning(
            "Xid errors", what, "look the numbers up in NVIDIA's list; restart the machine if training fails"
        )
    return ok("Xid errors", "no defect of a GPU in the kernel's log")
