"""Readers of recorded traces: line-delimited JSON, plain or gzipped, and recordings of a server.

The format is told from the first good line. A line that cannot be used adds nothing at all to the
trace; it is reported with file and line number and counted. Unless ``skip_bad`` is set, a file
with bad lines is an error, raised when all of them have been counted.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from attrs import field, frozen, validators

from evoke_core.recording.reader import is_recording
from evoke_core.replay.readers import agent_text, claude_code, mooncake, recorded
from evoke_core.replay.readers.common import BadLineError, Tokenizer
from evoke_core.replay.trace import Trace, TraceBuilder, TraceError

DAY = 86_400.0


@frozen(kw_only=True)
class ReaderOptions:
    """How to turn a file into requests.

    Attributes:
        tokens_per_block: size of a block. Claude Code's blocks of 64 are grouped to it. Of a
            Mooncake file it says what one id stands for; a server's recording says it itself.
        sessions: use only the first so many sessions of a Claude Code file; None for all.
        window: Claude Code sessions start at times uniform over so many seconds, ...
        seed: ... drawn with this seed.
        chars_per_token: of text without a tokenizer.
        tokenizer: turns text into token ids; None takes ``chars_per_token``.
        skip_bad: leave bad lines out instead of failing.
    """

    tokens_per_block: int = field(default=512, validator=validators.ge(1))
    sessions: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    window: float = field(default=DAY, validator=validators.ge(0))
    seed: int = 0
    chars_per_token: float = field(default=4.0, validator=validators.gt(0))
    tokenizer: Tokenizer | None = None
    skip_bad: bool = False


def read_trace(
    path: str | Path,
    options: ReaderOptions | None = None,
    *,
    on_bad: Callable[[str], None] | None = None,
    **settings: Any,
) -> Trace:
    """Read a trace. ``settings`` are those of :class:`ReaderOptions`, where none are given.

    ``on_bad`` is told of every bad line: ``"FILE:LINE: reason"``.

    Raises:
        TraceError: with one line: the file cannot be read, is of no known format, has bad lines
            (and ``skip_bad`` is not set), or no request with a full block.
    """
    options = ReaderOptions(**settings) if options is None else options
    path = Path(path)
    if is_recording(path):
        return recorded.read(path, skip_bad=options.skip_bad, on_bad=on_bad)
    builder = TraceBuilder(_short_name(path), options.tokens_per_block)
    add: Callable[[Any], None] | None = None
    first_bad = ""
    for number, line in _lines(path):
        try:
            record = _record(line)
            if add is None:
                add = _reader(record, builder, options)
            add(record)
        except BadLineError as error:
            problem = f"{path}:{number}: {error}"
            first_bad = first_bad or problem
            builder.skipped += 1
            if on_bad is not None:
                on_bad(problem)
    if builder.skipped and not options.skip_bad:
        lines = "1 bad line" if builder.skipped == 1 else f"{builder.skipped} bad lines, first"
        raise TraceError(f"{lines}: {first_bad} (bad lines can be skipped, if asked to)")
    if add is None:
        raise TraceError(f"{path}: no line in it could be used" if first_bad else f"{path}: empty")
    return builder.build()


def _reader(
    record: Mapping[str, Any], builder: TraceBuilder, options: ReaderOptions
) -> Callable[[Any], None]:
    """Return the function that adds records like this one."""
    if "hash_ids" in record:
        return mooncake.reader(builder)
    if "requests" in record:
        return claude_code.reader(
            builder, sessions=options.sessions, window=options.window, seed=options.seed
        )
    if "input" in record:
        return agent_text.reader(builder, options.chars_per_token, options.tokenizer)
    raise BadLineError("none of hash_ids, requests or input in it: format unknown")


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # bytes that are no UTF-8 too
        raise BadLineError(f"no JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadLineError("not a JSON object")
    return record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: cannot be read: {reason}") from None


def _open(path: Path) -> BinaryIO:
    """Open a file, unpacking it if it is gzipped, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]


def _short_name(path: Path) -> str:
    name = path.name
    for suffix in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    return name or path.name
