"""``evoke explain``: why did a request miss, by a recording? Needs the extra ``cli``.

Everything wrong with what was asked for ends the command with one line and exit code 2; a recording
that cannot be used, or a request that is not in it, with one line and exit code 1.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoke_core.recording.explain import MEANINGS, Explanation, Stretch, explain, worst
from evoke_core.recording.reader import Recording, RecordingError, read_recording

_PLAIN_WIDTH = 140  # of a table in a pipe or a log
_BAD_LINES_SHOWN = 10
_WORST = 10
_STDOUT = "-"


class _Failure(click.ClickException):
    exit_code = 1


class _Usage(click.ClickException):
    exit_code = 2


@click.command("explain")
@click.argument("path", metavar="RECORDING", type=click.Path(path_type=Path))
@click.option(
    "--request",
    "request_id",
    metavar="ID",
    help="Explain this request; the beginning of its id is enough.",
)
@click.option(
    "--worst",
    "count",
    type=click.IntRange(1),
    metavar="N",
    help=f"List the N requests that missed most of what had been seen before.  [default: {_WORST}]",
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Write the explanation here; - for standard output."
)
def explain_command(
    path: Path, request_id: str | None, count: int | None, json_path: str | None
) -> None:
    """Say why a request missed: what had become of the blocks that it asked for.

    RECORDING is what a server wrote whose setting record_trace names a file. Its full segments
    (RECORDING.000001.gz, ...) are read too.
    """
    if request_id is not None and count is not None:
        raise _Usage("--request and --worst exclude each other")
    if json_path not in (None, _STDOUT) and not Path(json_path).absolute().parent.is_dir():
        raise _Usage(f"{json_path}: no such folder")
    notes = Console(stderr=True, highlight=False)
    try:
        recording = read_recording(path)
        if request_id is not None:
            found = [explain(recording, request_id)]
        else:
            found = worst(recording, count or _WORST)
    except RecordingError as error:
        raise _Failure(_printable(str(error))) from None
    for note in _notes(recording):
        notes.print(Text(_printable(note)), soft_wrap=True)
    if json_path is not None:
        _write(recording, found, json_path)
    if json_path != _STDOUT:
        _show(recording, found, whole=request_id is not None)


def _notes(recording: Recording) -> list[str]:
    """Say what the recording cannot tell."""
    notes = recording.bad[:_BAD_LINES_SHOWN]
    if recording.bad:
        notes.append(f"{recording.name}: {_count(len(recording.bad), 'bad line')} skipped")
    if recording.cut_off:
        files = _count(recording.cut_off, "file")
        notes.append(f"{recording.name}: cut off in the middle of a line: {files}")
    if recording.lost:
        calls = _count(recording.lost, "call")
        notes.append(f"{recording.name}: {calls} could not be written, and are missing")
    if recording.cut:
        notes.append(f"{recording.name}: its beginning was deleted to make room")
    return notes


def _write(recording: Recording, found: list[Explanation], json_path: str) -> None:
    document = {
        "version": 1,
        "recording": recording.name,
        "header": dict(recording.header),
        "cut": recording.cut,
        "lost": recording.lost,
        "requests": [each.as_dict() for each in found],
    }
    text = json.dumps(document, indent=1) + "\n"
    if json_path == _STDOUT:
        click.echo(text, nl=False)
        return
    try:
        Path(json_path).write_text(text)
    except OSError as error:
        raise _Failure(f"{error.filename}: cannot be written: {error.strerror}") from None


def _show(recording: Recording, found: list[Explanation], *, whole: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    if whole:
        console.print(Text(_heading(recording, found[0])), soft_wrap=True)
        console.print(_stretches(found[0]))
        return
    asked, hits = recording.asked_and_found
    console.print(
        Text(
            f"{_printable(recording.name)}: {len(recording.requests):,} requests, {asked:,} blocks"
            f" asked of the tier, {hits:,} found ({hits / max(1, asked):.4f})"
        ),
        soft_wrap=True,
    )
    console.print(_list(found))


def _heading(recording: Recording, found: Explanation) -> str:
    size = recording.number("tokens_per_block")
    of = f" of {size} tokens" if size else ""
    return (
        f"{_printable(found.request)}, {_when(found.time)}: {found.blocks:,} blocks{of},"
        f" {found.device:,} on the device, {found.found:,} found in the tier, {found.missed:,}"
        f" missed, {found.missed_again:,} of these seen before"
    )


def _stretches(found: Explanation) -> Table:
    grid = Table()
    grid.add_column("positions", no_wrap=True)
    grid.add_column("blocks", justify="right")
    grid.add_column("what became of them")
    grid.add_column("before", justify="right", no_wrap=True)
    grid.add_column("by request", overflow="fold")
    for each in found.stretches:
        before = "" if each.seconds_before is None else _duration(each.seconds_before)
        request = Text(_printable(each.request or ""))
        cells = f"{each.begin}–{each.end - 1}", f"{each.blocks:,}", Text(_fate(each))
        grid.add_row(*cells, before, request)
    return grid


def _fate(stretch: Stretch) -> str:
    text = MEANINGS[stretch.fate]
    if stretch.reason:
        text += f" ({_printable(stretch.reason)})"
    if stretch.age is not None:
        text += f", last used {_count(stretch.age, 'request')} earlier"
    if stretch.reused is False:
        text += ", never since it was stored"
    return text


def _list(found: list[Explanation]) -> Table:
    grid = Table()
    grid.add_column("request", overflow="fold")
    grid.add_column("served")
    for heading in ("blocks", "device", "found", "missed", "seen before"):
        grid.add_column(heading, justify="right")
    grid.add_column("mostly")
    for each in found:
        numbers = (each.blocks, each.device, each.found, each.missed, each.missed_again)
        grid.add_row(
            Text(_printable(each.request)),
            _when(each.time),
            *(f"{number:,}" for number in numbers),
            Text(_mostly(each)),
        )
    return grid


def _mostly(found: Explanation) -> str:
    """Return what became of most of the blocks that were missed."""
    sums: dict[str, int] = {}
    for each in found.stretches:
        if each.fate not in ("device", "found"):
            reason = f" ({_printable(each.reason)})" if each.reason else ""
            text = f"{MEANINGS[each.fate]}{reason}"
            sums[text] = sums.get(text, 0) + each.blocks
    return max(sums, key=lambda text: sums[text], default="")


def _when(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 3600 else f"{seconds / 3600:.3g} h"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _printable(text: str) -> str:
    """Return a text that cannot steer a terminal: ids and sessions are strangers' words."""
    return "".join(char if char.isprintable() else "?" for char in text)
