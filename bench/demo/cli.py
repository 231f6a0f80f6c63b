"""The command `python -m bench demo`: options, and what is printed around a run."""

from pathlib import Path

import click
from rich.table import Table as RichTable

from bench import ROOT
from bench.demo.report import Table, answers_line, make_table, role_lines
from bench.demo.results import Run
from bench.demo.run import Plan, run_plan
from bench.demo.trace import ORDERS, load_trace
from bench.demo.workload import HOT_COLD, TIE, Encode, Workload, make_workload
from bench.errors import UsageProblem
from bench.progress import Reporter, make_console
from bench.serving.arms import ARMS, Arm
from bench.serving.model import check_model_folder, prepare_model
from bench.serving.server import check_port

_PATH = click.Path(path_type=Path)


def _parse_arms(ctx: click.Context, param: click.Parameter, value: str) -> list[Arm]:
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in ARMS:
            raise UsageProblem(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    return [ARMS[name] for name in dict.fromkeys(names)]


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.option("--tie", is_flag=True, help="The shape in which no policy can be better.")
@click.option("--trace", type=_PATH, help="Replay a recorded agent trace (JSON lines).")
@click.option("--max-calls", type=click.IntRange(1), default=40, show_default=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(64),
    default=2048,
    show_default=True,
    help="Longest call of a trace that is replayed.",
)
@click.option("--trace-order", type=click.Choice(ORDERS), default=ORDERS[0], show_default=True)
@click.option("--tags/--no-tags", default=True, help="Say whose text is whose.  [default: tags]")
@click.option(
    "--arms", callback=_parse_arms, default=",".join(ARMS), show_default=True, help="In order."
)
@click.option("--model", type=_PATH, help="A Hugging Face model folder instead of SmolLM2.")
@click.option("--cache", type=_PATH, default=ROOT / ".cache", help="Where the model is kept.")
@click.option("--results", type=_PATH, default=ROOT / "results" / "demo", help="Where JSON goes.")
@click.option("--port", type=click.IntRange(1, 65535), help="Fixed port; default: a free one.")
def main(
    seeds: int,
    tie: bool,
    trace: Path | None,
    max_calls: int,
    max_tokens: int,
    trace_order: str,
    tags: bool,
    arms: list[Arm],
    model: Path | None,
    cache: Path,
    results: Path,
    port: int | None,
) -> None:
    """See a real vLLM server keep its hot contexts under memory pressure.

    Arms run one after the other with the same small GPU pool and the same tier budget, except
    the reference, which has room for everything. Results go to JSON files, one per arm and seed.
    """
    if trace is not None and (tie or not tags or seeds > 1):
        raise UsageProblem("--trace replays one recording: it takes no --tie, --no-tags, --seeds")
    if trace is not None and not trace.is_file():
        raise UsageProblem(f"--trace: file not found: {trace}")
    if port is not None:
        check_port(port)
    reporter = Reporter(make_console())
    if model is not None:
        check_model_folder(model)
    _make_folder(results, "--results")
    if model is None:
        _make_folder(cache, "--cache")
        model = prepare_model(cache, reporter.say)
    encode = load_encoder(model)

    workloads: list[Workload]
    if trace is not None:
        workloads = [
            load_trace(trace, encode, max_calls=max_calls, max_tokens=max_tokens, order=trace_order)
        ]
    else:
        shape = TIE if tie else HOT_COLD
        workloads = [make_workload(shape, seed, encode, tags=tags) for seed in range(seeds)]
    _announce(workloads, reporter)
    runs = run_plan(Plan(arms, workloads, model, results, port), reporter)
    _conclude(runs, workloads[0], results, reporter)


def load_encoder(model: Path) -> Encode:
    """Return the model's tokenizer as a function from text to token ids, none added."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"{option}: cannot create {folder}: {error.strerror}") from None


def _announce(workloads: list[Workload], reporter: Reporter) -> None:
    first = workloads[0]
    reporter.say(
        f"workload {first.name}: {len(first.calls)} requests a seed, {len(workloads)} seed(s); "
        f"pool {first.gpu_blocks} GPU blocks, tier {first.tier_blocks} blocks"
    )
    for note in first.notes:
        reporter.say(note)


def _conclude(runs: list[Run], workload: Workload, results: Path, reporter: Reporter) -> None:
    titles = {name: arm.title for name, arm in ARMS.items()}
    table = make_table(runs, titles)
    (results / f"{workload.name}.md").write_text(table.markdown() + "\n")
    reporter.console.print(_rich(table))
    for line in role_lines(runs, titles):
        reporter.say(line)
    reporter.say(answers_line(runs))
    reporter.say(f"results: {results}")
    for recording in (results / run.recording_name for run in runs):
        if recording.exists():
            reporter.say(f"recorded, for evoke replay and evoke explain: {recording}")


def _rich(table: Table) -> RichTable:
    rich = RichTable()
    for number, header in enumerate(table.headers):
        rich.add_column(header, justify="right" if number else "left", no_wrap=not number)
    for line in table.lines:
        rich.add_row(*line)
    return rich
