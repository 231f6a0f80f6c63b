"""``evoke replay``: traces in, a table, JSON and a plot out. Needs the extra ``cli``.

Everything wrong with what was asked for ends the command with one line and exit code 2; a trace or
file that cannot be used, with one line and exit code 1.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from evoke_core.recording.command import explain_command
from evoke_core.replay.generate import SHAPES, concatenate, generate
from evoke_core.replay.grid import (
    Budget,
    Cell,
    ReplayError,
    TraceResult,
    known_policies,
    replay,
)
from evoke_core.replay.readers import DAY, ReaderOptions, read_trace
from evoke_core.replay.readers.agent_text import load_tokenizer
from evoke_core.replay.recorded import RecordedTrace
from evoke_core.replay.report import heading, plot, table
from evoke_core.replay.simulate import HALVES
from evoke_core.replay.tiers import recorded_tags, untagged
from evoke_core.replay.trace import Trace, TraceError

_PLAIN_WIDTH = 140  # of a table in a pipe or a log
_BAD_LINES_SHOWN = 10
_BUDGETS = "1%,3%,10%,30%"
_RECORDED_BUDGETS = "0.5x,1x,2x"


class _Failure(click.ClickException):
    exit_code = 1


class _Usage(click.ClickException):
    exit_code = 2


def _split(text: str) -> list[str]:
    """Read values separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("evoke-core"), message="evoke %(version)s")
def cli() -> None:
    """KV-cache retention: tools beside the library."""


cli.add_command(explain_command)


@cli.command("replay")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "--budget",
    "budgets",
    type=_split,
    metavar="LIST",
    help="Sizes of the tier: blocks, % of the trace's different blocks, or multiples of the tier it"
    f" was recorded on, such as 2x.  [default: {_BUDGETS}; of recordings {_RECORDED_BUDGETS}]",
)
@click.option(
    "--policy",
    "policies",
    type=_split,
    metavar="LIST",
    default="adaptive,scored,lru,arc,s3fifo,wtinylfu,min",
    show_default=True,
    help=f"Known: {', '.join(known_policies())}. The ledger's own lru is ledger-lru.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw hits over budget.")
@click.option(
    "--bytes-per-block", type=click.IntRange(1), help="Bytes of one block: sizes in GiB too."
)
@click.option(
    "--gpu-blocks",
    type=click.IntRange(0),
    default=0,
    help="An LRU GPU cache of this size in front, as in an engine.  [default: none; of a recording"
    " what it tells of the GPU]",
)
@click.option(
    "--chunk", type=click.IntRange(0), default=0, help="Offer prefill in chunks of so many blocks."
)
@click.option(
    "--half",
    type=click.Choice(HALVES),
    default="all",
    show_default=True,
    help="Count the first half of the requests, or the second with the tier warm from the first.",
)
@click.option(
    "--tags/--no-tags",
    default=None,
    help="Requests carry the roles and sessions the trace tells of; of a recording, all tags they"
    " carried.  [default: of recordings only]",
)
@click.option(
    "--jobs", type=click.IntRange(0), default=0, help="Processes.  [default: one for each core]"
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Size of a block.",
)
@click.option("--sessions", type=click.IntRange(1), help="Only the first N Claude Code sessions.")
@click.option(
    "--window",
    type=click.FloatRange(0),
    default=DAY,
    show_default=True,
    help="Seconds within which Claude Code sessions start.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of those starts.")
@click.option(
    "--chars-per-token",
    type=click.FloatRange(0, min_open=True),
    default=4.0,
    show_default=True,
    help="Of full-text traces.",
)
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json for full-text traces.")
@click.option("--skip-bad", is_flag=True, help="Leave lines out that cannot be used.")
def replay_command(
    traces: Sequence[str],
    budgets: list[str] | None,
    policies: list[str],
    json_path: Path | None,
    plot_path: Path | None,
    bytes_per_block: int | None,
    gpu_blocks: int,
    chunk: int,
    half: Any,
    tags: bool | None,
    jobs: int,
    block_tokens: int,
    sessions: int | None,
    window: float,
    seed: int,
    chars_per_token: float,
    tokenizer: str | None,
    skip_bad: bool,
) -> None:
    """Replay traces through a cache tier: which policy would have kept what was asked for again?

    TRACE is a file (a recording of a server, see record_trace; Mooncake JSON lines, Claude Code
    sessions, agents' calls with full text; plain or gzipped), or a generated shape such as w1 or
    w1s:rounds=20,seed=1. Several joined by + are played one after another.

    A request counts as a hit if at least half of its tokens were found. "gap closed" is the share
    of the way from lru to min, which knows the future, in block hits.
    """
    console, notes = _console(), Console(stderr=True, highlight=False)
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise _Usage(f"{path}: no such folder")
    try:
        for budget in budgets or ():
            Budget.parse(budget)
        options = ReaderOptions(
            tokens_per_block=block_tokens,
            sessions=sessions,
            window=window,
            seed=seed,
            chars_per_token=chars_per_token,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
            skip_bad=skip_bad,
        )
        loaded = [_load(text, options, notes) for text in traces]
        if budgets is None:
            recorded = all(isinstance(trace, RecordedTrace) and trace.capacity for trace in loaded)
            budgets = _split(_RECORDED_BUDGETS if recorded else _BUDGETS)
        cells = len(loaded) * len(set(budgets)) * len(set(policies))
        with _progress(notes, cells) as on_cell:
            results = replay(
                loaded,
                budgets,
                policies,
                gpu_blocks=gpu_blocks,
                chunk=chunk,
                half=half,
                tags=None if tags is None else recorded_tags if tags else untagged,
                jobs=jobs or None,
                on_cell=on_cell,
            )
    except TraceError as error:
        raise _Failure(str(error)) from None
    except ReplayError as error:
        raise _Usage(str(error)) from None
    settings = {
        "half": half,
        "gpu_blocks": gpu_blocks,
        "chunk": chunk,
        "tags": tags,
        "sessions": sessions,
        "window": window,
        "seed": seed,
        "chars_per_token": chars_per_token,
        "tokenizer": tokenizer,
    }
    _write(results, settings, json_path, plot_path, bytes_per_block)
    for result in results:
        console.print(heading(result), markup=False, soft_wrap=True)
        console.print(table(result, bytes_per_block, with_gpu=gpu_blocks > 0))


def _load(text: str, options: ReaderOptions, notes: Console) -> Trace:
    """Return the trace that an argument names: a file before a shape, a file before a +."""
    if Path(text).exists():
        shown = 0

        def on_bad(problem: str) -> None:
            nonlocal shown
            shown += 1
            if shown <= _BAD_LINES_SHOWN:
                notes.print(problem, markup=False, soft_wrap=True)

        trace = read_trace(text, options, on_bad=on_bad)
        if trace.skipped:
            notes.print(f"{text}: {trace.skipped} bad lines skipped", markup=False, soft_wrap=True)
        return trace
    if "+" in text:
        return concatenate([_load(part, options, notes) for part in text.split("+")])
    if text.partition(":")[0] in SHAPES:
        return generate(text)
    raise TraceError(f"{text}: no such file, and none of the shapes {', '.join(SHAPES)}")


def _write(
    results: list[TraceResult],
    settings: dict[str, Any],
    json_path: Path | None,
    plot_path: Path | None,
    bytes_per_block: int | None,
) -> None:
    try:
        if json_path is not None:
            document = {
                "version": 1,
                "evoke_core": version("evoke-core"),
                "settings": settings,
                "traces": [result.as_dict() for result in results],
            }
            json_path.write_text(json.dumps(document, indent=1) + "\n")
        if plot_path is not None:
            plot(results, plot_path, bytes_per_block)
    except OSError as error:
        raise _Failure(f"{error.filename}: cannot be written: {error.strerror}") from None
    except ValueError as error:  # matplotlib: a format it does not know
        raise _Usage(f"{plot_path}: {str(error).splitlines()[0]}") from None


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    return console


@contextmanager
def _progress(console: Console, cells: int) -> Iterator[Callable[[str, Cell], None] | None]:
    """Show a bar on a terminal, nothing in a pipe or a log; yield what to tell of each cell."""
    if not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(
        *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        bar = progress.add_task("replaying", total=cells)

        def advance(name: str, cell: Cell) -> None:
            text = escape(f"{name} {cell.budget} {cell.policy}")
            progress.update(bar, advance=1, description=text)

        yield advance
