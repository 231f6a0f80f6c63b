"""The commands `python -m bench plan`, `run`, `report` and `compare`."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bench import ROOT
from bench.errors import BenchError, UsageProblem
from bench.matrix.arms import ARMS
from bench.matrix.cells import Cell, Matrix, load_matrix
from bench.matrix.results import PLAN, Plan, load_cells
from bench.matrix.workloads.data import DATA
from bench.matrix.workloads.w3 import TRACE
from bench.matrix.workloads.w4 import ARRIVALS
from bench.progress import Reporter, make_console

RESULTS = ROOT / "results" / "bench"
PUBLISHED = ROOT / "bench" / "published"
REPORT = ROOT / "bench" / "REPORT.md"
README = ROOT / "README.md"
_TRACES = ROOT.parent / "shared" / "traces"
_DEFAULT_FILES = {
    TRACE: _TRACES / "agent-text" / "miniswe.jsonl.gz",
    ARRIVALS: _TRACES / "mooncake" / "conversation_trace.jsonl.gz",
}
_PATH = click.Path(path_type=Path)

_matrix = click.option(
    "--matrix", "name", default="cpu", show_default=True, help="A TOML file, or a name here."
)
_Command = Callable[..., Any]


def _chosen(command: _Command) -> _Command:
    """Add the options that choose cells."""
    for option in reversed(
        (
            click.option("--workloads", default="", help="Only these, with commas."),
            click.option("--arms", default="", help="Only these, with commas."),
            click.option("--seeds", default="", help="Only these, with commas."),
            click.option("--part", "parts", multiple=True, help="Which part; default: primary."),
            click.option("--all", "everything", is_flag=True, help="Every part."),
        )
    ):
        command = option(command)
    return command


def _prepared(command: _Command) -> _Command:
    """Add the options that say where a model and its texts come from."""
    for option in reversed(
        (
            click.option("--model", type=_PATH, help="The model's folder."),
            click.option("--cache", type=_PATH, default=ROOT / ".cache", help="Of models."),
            click.option(f"--{DATA}", type=_PATH, help="JSON lines: context, questions, answers."),
            click.option(f"--{TRACE}", type=_PATH, help="An agent trace with text, for w3."),
            click.option(f"--{ARRIVALS}", type=_PATH, help="A trace with timestamps, for w4."),
            click.option("--results", type=_PATH, help="Default: results/bench/MATRIX."),
        )
    ):
        command = option(command)
    return command


@click.command()
@_matrix
@_chosen
@_prepared
@click.option("--predict", is_flag=True, help="Simulate what each policy should restore.")
def plan(name: str, predict: bool, **options: Any) -> None:
    """Show what a matrix would run here, what is finished, and how long the rest takes."""
    from bench.matrix import plan as planning
    from bench.matrix.run import Pace, waiting

    matrix = load_matrix(name)
    cells = _select(matrix, options)
    reporter = Reporter(make_console())
    files = _files(options)
    left = waiting(cells, options["results"] or RESULTS / matrix.name, files)
    foreseen = {}
    if predict:
        made = planning.make_plan(_bench(matrix, options, reporter), reporter)
        foreseen = {each.cell: each for each in made.cells}
    table = Table(title=matrix.title)
    headings = ("one kind of server", "seeds", "finished", "to run", "predicted restore hits")
    for heading in headings[: 5 if predict else 4]:
        table.add_column(heading)
    waits = {cell.name for cell in left}
    for title, members in planning.groups(cells):
        todo = sum(cell.name in waits for cell in members)
        reason = members[0].cannot_run(files)
        done = "-" if reason else str(len(members) - todo)
        line = [
            title,
            str(len(members)),
            done,
            f"cannot run here: {reason}" if reason else str(todo),
        ]
        if predict:
            rates = [f.predicted for c in members if (f := foreseen[c.name]).predicted is not None]
            line.append(f"{sum(rates) / len(rates):.0%}" if rates else "-")
        table.add_row(*line)
    reporter.console.print(table)
    reporter.say(f"{len(left)} of {len(cells)} cells to run: about {Pace(left).left(0)}")


@click.command()
@_matrix
@_chosen
@_prepared
@click.option("--publish", is_flag=True, help="Copy the cells to bench/published/MATRIX.")
def run(name: str, publish: bool, **options: Any) -> None:
    """Run the cells of a matrix that are not finished; go on after an interruption.

    Ctrl-C ends the server and loses the cell that was running. Cells whose configuration
    changed are run again.
    """
    from bench.matrix.run import run_cells

    matrix = load_matrix(name)
    cells = _select(matrix, options)
    reporter = Reporter(make_console())
    folder = options["results"] or RESULTS / matrix.name
    try:
        run_cells(_bench(matrix, options, reporter), cells, folder, reporter)
    finally:
        if publish and folder.is_dir():
            reporter.say(f"published: {_publish(matrix, folder)} cells")
    reporter.say(f"cells: {folder}; `python -m bench report --results {folder}` renders them")


@click.command()
@_matrix
@click.option("--results", type=_PATH, help="A folder of cells; default: bench/published/MATRIX.")
@click.option("--out", type=_PATH, help="The report; default: bench/REPORT.md for published cells.")
@click.option("--readme", is_flag=True, help="Fill the README's headline table as well.")
def report(name: str, results: Path | None, out: Path | None, readme: bool) -> None:
    """Render the report, as Markdown and as one HTML page, from the cells' files alone."""
    from bench.matrix.page import render_page
    from bench.matrix.readme import fill
    from bench.matrix.report import render

    folder = results or PUBLISHED / Path(name).stem
    planned, cells = Plan.load(folder), load_cells(folder)
    if out is None:
        cpu = results is None and planned.matrix == "cpu"
        out = REPORT if cpu else folder / "REPORT.md"
    try:
        out.write_text(render(planned, cells))
        out.with_suffix(".html").write_text(render_page(planned, cells))
        if readme:
            README.write_text(fill(README.read_text(), planned, cells))
    except OSError as error:
        raise UsageProblem(f"cannot write {out}: {error.strerror}") from None
    click.echo(f"{len(cells)} cells: {out} and {out.with_suffix('.html')}")


@click.command()
@click.argument("first")
@click.argument("second")
@_matrix
@click.option("--results", type=_PATH, help="A folder of cells; default: bench/published/MATRIX.")
def compare(first: str, second: str, name: str, results: Path | None) -> None:
    """Say which differences between two arms, FIRST minus SECOND, are significant.

    FIRST and SECOND are arms of one matrix (A2 A1), or folders of cells: then each arm is compared
    with itself, one folder with the other.
    """
    from bench.matrix.compare import compare_arms, compare_folders

    if Path(first).is_dir() and Path(second).is_dir():
        lines = compare_folders(load_cells(Path(first)), load_cells(Path(second)))
    else:
        for arm in (first, second):
            if arm not in ARMS:
                raise UsageProblem(f"no arm or folder {arm!r}; arms are {', '.join(ARMS)}")
        folder = results or PUBLISHED / Path(name).stem
        lines = compare_arms(load_cells(folder), first, second)
    if not lines:
        raise BenchError("no two cells of the same workload, budget and seed to compare")
    console = make_console()
    table = Table()
    for heading in ("workload", "figure", "first", "second", "difference", "95% interval", ""):
        table.add_column(heading)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _select(matrix: Matrix, options: dict[str, Any]) -> list[Cell]:
    """Return the cells that the options choose; UsageProblem for a name that there is not."""
    parts = set(options["parts"]) or ({"primary"} & set(matrix.parts) or set(matrix.parts))
    wanted = {
        "workloads": _names(options["workloads"], {c.label for c in matrix.cells}, "workload"),
        "arms": _names(options["arms"], {c.arm for c in matrix.cells}, "arm"),
        "seeds": _names(options["seeds"], {str(c.seed) for c in matrix.cells}, "seed"),
    }
    for part in options["parts"]:
        _names(part, set(matrix.parts), "part")
    return [
        cell
        for cell in matrix.cells
        if (options["everything"] or cell.part in parts)
        and cell.label in wanted["workloads"]
        and cell.arm in wanted["arms"]
        and str(cell.seed) in wanted["seeds"]
    ]


def _names(text: str, known: set[str], what: str) -> set[str]:
    names = {name.strip() for name in text.split(",") if name.strip()}
    for name in sorted(names - known):
        raise UsageProblem(
            f"no {what} {name!r} in this matrix; there are {', '.join(sorted(known))}"
        )
    return names or known


def _bench(matrix: Matrix, options: dict[str, Any], reporter: Reporter) -> Any:
    from bench.matrix.models import find_model, load_tokenizer
    from bench.matrix.run import Bench

    model = find_model(matrix.model, options["model"], options["cache"], reporter.say)
    encode, decode = load_tokenizer(model)
    return Bench(matrix, model, encode, decode, _files(options))


def _files(options: dict[str, Any]) -> dict[str, Path]:
    """Return the files that were pointed at, and those that lie beside this repository."""
    files = {name: path for name, path in _DEFAULT_FILES.items() if path.is_file()}
    for name in (DATA, TRACE, ARRIVALS):
        given: Path | None = options[name]
        if given is not None:
            if not given.is_file():
                raise UsageProblem(f"--{name}: file not found: {given}")
            files[name] = given
    return files


def _publish(matrix: Matrix, folder: Path) -> int:
    """Copy the plan and its finished cells; nothing older stays beside them."""
    target = PUBLISHED / matrix.name
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.json"):
        old.unlink()
    names = {cell.name for cell in matrix.cells}
    found: Sequence[Path] = [p for p in folder.glob("*.json") if p.stem in names]
    for path in (*found, folder / PLAN):
        shutil.copyfile(path, target / path.name)
    return len(found)
