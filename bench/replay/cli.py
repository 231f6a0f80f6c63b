"""The command `python -m bench replay`."""

from pathlib import Path

import click
from rich.table import Table

from bench import ROOT
from bench.errors import UsageProblem
from bench.progress import Reporter, make_console
from bench.replay.plots import draw
from bench.replay.report import render
from bench.replay.results import Document, load_all
from bench.replay.run import cells, run
from bench.replay.targets import verdicts
from bench.replay.workloads import Workload, find_traces, workloads

TRACES = ROOT.parent / "shared" / "traces"
PUBLISHED = ROOT / "bench" / "published" / "replay"
REPORT = ROOT / "bench" / "REPLAY.md"
_QUICK = ROOT / "results" / "replay"


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes.  [one for each core]")
@click.option(
    "--quick",
    is_flag=True,
    help="Only whole traces, no curves, no hints on them, not the longest; two minutes."
    " Writes to results/replay instead of bench/published/replay and bench/REPLAY.md.",
)
@click.option("--render", "only_render", is_flag=True, help="Render from the JSON files there are.")
def main(paths: tuple[Path, ...], jobs: int, quick: bool, only_render: bool) -> None:
    """Replay every trace found in ../shared/traces, or those given, and all generated shapes.

    Writes bench/published/replay/*.json, plots beside them, and bench/REPLAY.md.
    """
    reporter = Reporter(make_console())
    folder = _QUICK if quick else PUBLISHED
    if not only_render:
        for path in paths:
            if not path.exists():
                raise UsageProblem(f"no such trace or folder: {path}")
        _replay(_chosen(paths, reporter), folder, jobs, quick, reporter)
    documents = load_all(folder)
    if not documents:
        raise UsageProblem(f"no results to render in {folder}")
    _publish(documents, folder, _QUICK / "REPLAY.md" if quick else REPORT)
    table = Table()
    for heading in ("target", "found", "holds"):
        table.add_column(heading)
    answers = {True: "yes", False: "no", None: "not known"}
    for verdict in verdicts(documents):
        table.add_row(verdict.target, verdict.found, answers[verdict.holds])
    reporter.console.print(table)


def _chosen(paths: tuple[Path, ...], reporter: Reporter) -> list[Workload]:
    files: list[Path] = []
    for path in paths or (TRACES,):
        files += find_traces(path) if path.is_dir() else [path] if path.exists() else []
    if not files:
        reporter.say("no recorded traces found: shapes only")
    return workloads(files)


def _replay(
    chosen: list[Workload], folder: Path, jobs: int, quick: bool, reporter: Reporter
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if quick:
        chosen = [each for each in chosen if each.settings.get("sessions") != "all"]
    for workload in chosen:
        with reporter.counting(workload.title, cells(workload, quick=quick)) as advance:
            document = run(workload, jobs=jobs, quick=quick, on_cell=advance)
        document.save(folder)


def _publish(documents: list[Document], folder: Path, report: Path) -> None:
    draw(documents, folder)
    pictures = folder.relative_to(report.parent).as_posix()
    report.write_text(render(documents, pictures))
