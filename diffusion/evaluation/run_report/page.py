"""The page of a run's report."""

from collections.abc import Sequence
from pathlib import Path

from diffusion.errors import MachineError
from diffusion.evaluation.run_report import sections, summary
from diffusion.evaluation.run_report.evaluations import add_evaluations
from diffusion.evaluation.run_report.run_folder import Run
from diffusion.html_page import Page


def write_report(runs: Sequence[Run], path: Path, evaluations: Sequence[Path] = ()) -> None:
    """Write the report of a run, or of phases that follow one another, as one page that needs nothing else.

    Args:
        runs: the phases, first to last.
        path: the HTML file.
        evaluations: output folders of evaluate.py that are not in the run folders.

    Raises:
        MachineError: the file cannot be written.
    """
    names = " and ".join([", ".join(run.name for run in runs[:-1]), runs[-1].name] if len(runs) > 1 else [runs[0].name])
    page = Page(f"Run {names}" if len(runs) == 1 else f"Phases {names}", has_contents=True)
    page.note(str(runs[-1].folder))
    summary.add_facts(page, runs)
    summary.add_plan(page, runs, [summary.plan_of(run) for run in runs])
    sections.add_loss(page, runs)
    sections.add_validation(page, runs)
    add_evaluations(page, runs, evaluations)
    sections.add_samples(page, runs)
    sections.add_data(page, runs)
    sections.add_machines(page, runs)
    summary.add_starts(page, runs)
    summary.add_happenings(page, runs)
    sections.add_configurations(page, runs)
    try:
        page.write(path)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}. Choose another place with --out") from error
