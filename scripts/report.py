"""Write one page about a run: plan and actual, losses, samples, data, machines, interruptions, configuration.

    python scripts/report.py runs/phase1                       # writes runs/phase1/report.html
    python scripts/report.py runs/phase1 --phases runs/phase2  # one page for consecutive phases

The run may be in progress. The page needs no network.
"""

from diffusion.launch import CommandParser, existing_folder, output_file, run_command


def main() -> None:
    """Read and write."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", type=existing_folder, help="run folder")
    parser.add_argument(
        "--phases", type=existing_folder, nargs="+", default=[], help="run folders of later phases, in order"
    )
    parser.add_argument(
        "--evaluations", type=existing_folder, nargs="+", default=[], help="other output folders of evaluate.py"
    )
    parser.add_argument("--out", type=output_file, help="page to write (default: report.html in the last run folder)")
    options = parser.parse_args()

    from diffusion.formats.run_folder import REPORT
    from diffusion.reports.run import read_phases
    from diffusion.reports.run_page import write_report

    folders = [options.run, *options.phases]
    runs = read_phases(folders)
    out = options.out or output_file(str(folders[-1] / REPORT))
    write_report(runs, out, options.evaluations)
    print(f"wrote {out}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
