"""Reads a recording: all of its files, or one, finished or still growing, whole or cut off.

    recording = read_recording("trace.jsonl")
    for event in recording.events: ...

Guarantees: what a file can still tell is read. The last line of a file may be cut off (a kill, a
full disk): it is left out and counted. A line in the middle that cannot be used costs itself and
the lines that name the blocks it brought; each is reported. Files that had to go to make room are
noticed (``cut``): what was before is unknown, not absent.
"""

import contextlib
import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from attrs import define, field, frozen

from evoke_core.recording.coding import MAGIC, RESET, VERSION, BlockReader, read_tags
from evoke_core.recording.segments import FIRST_BYTES, full_segments
from evoke_core.tags import UNTAGGED, RequestTags

OPEN = "open"
PROMPT = "prompt"
OFFER = "offer"
CLOSE = "close"
OUTCOMES = ("stored", "refused", "evicted", "aborted")
"""Kinds of events that are a ledger's decisions."""

NOBODY = -1
"""Request of an event that is no request's."""


class RecordingError(ValueError):
    """A recording that cannot be read. The message is one line."""


@frozen
class RecordedRequest:
    """A request, as it was opened.

    Attributes:
        id: the engine's.
        time: seconds since 1970.
        now: the time that the ledger was told; None if it was told none.
    """

    id: str
    time: float
    now: float | None
    tags: RequestTags


@define(eq=False)
class Event:
    """One thing that happened, in order.

    Attributes:
        kind: open, prompt, offer, close, reset, or one of ``OUTCOMES``.
        time: seconds since 1970.
        request: number in :attr:`Recording.requests`, or ``NOBODY``. Of an eviction: the request
            that the room was for. Where the recorder was not told, of an eviction or a refusal,
            the last one to offer blocks.
        blocks: numbers; equal numbers are equal blocks, all that precedes them included.
        start: position of the first block in the request's chain.
        tier_start, found, tokens: of a prompt, see ``Recorder.prompt``.
        counts: of a prompt: it is the one that was served, not an earlier poll or a resumption.
        reason, age, role, reused: of an outcome, see :class:`~evoke_core.ledger.Decision`.
    """

    kind: str
    time: float
    request: int = NOBODY
    blocks: "array[int]" = field(factory=lambda: array("i"))
    group: int = 0
    start: int = 0
    tier_start: int = 0
    found: int = 0
    tokens: int | None = None
    counts: bool = False
    reason: str = ""
    age: int = 0
    role: str | None = None
    reused: bool | None = None


@frozen(eq=False)
class Recording:
    """What a recording tells.

    Attributes:
        name: what reports call it.
        header: the latest run's.
        blocks: so many different ones.
        runs: starts of the server.
        cut: its beginning is missing, having been deleted to make room.
        lost: calls that the recorder could not write.
        cut_off: files whose last line is incomplete.
        bad: lines that could not be used, ``FILE:LINE: reason``.
    """

    name: str
    header: Mapping[str, Any]
    requests: list[RecordedRequest]
    events: list[Event]
    blocks: int
    runs: int
    cut: bool
    lost: int
    cut_off: int
    bad: list[str]

    def number(self, name: str) -> int | None:
        """Return a size or count of the header, None where it has none above 0."""
        value = self.header.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if whole else None

    @property
    def asked_and_found(self) -> tuple[int, int]:
        """Blocks asked of the tier, and found in it, over all requests that were served."""
        served = [event for event in self.events if event.counts]
        asked = sum(event.start + len(event.blocks) - event.tier_start for event in served)
        return asked, sum(event.found for event in served)


def is_recording(path: str | Path) -> bool:
    """Say whether a file is a recording's, plain or packed. Never raises."""
    try:
        with Path(path).open("rb") as file:
            return _unpacked(file).read(len(FIRST_BYTES)) == FIRST_BYTES
    except (OSError, EOFError, zlib.error):
        return False


def read_recording(path: str | Path, *, on_bad: Callable[[str], None] | None = None) -> Recording:
    """Read the recording at a path, its full segments included; or one segment of one.

    Args:
        on_bad: told of each line that cannot be used: ``"FILE:LINE: reason"``.

    Raises:
        RecordingError: with one line: there is none, it cannot be read, is of a later version.
    """
    path = Path(path)
    reader = _Reader(on_bad)
    with contextlib.ExitStack() as stack:
        # Opened first: should it be full and set aside meanwhile, it is still this file.
        last = _open(path, stack)
        for segment in full_segments(path):
            file = _open(segment.path, stack)
            if file is None and not segment.packed:  # packed just now
                file = _open(segment.path.with_name(f"{segment.path.name}.gz"), stack)
            if file is not None:  # else it had to go just now
                reader.read(segment.path, file)
        if last is not None:
            reader.read(path, last)
    if not reader.headers:
        raise RecordingError(f"{path}: {'no such file' if last is None else 'not a recording'}")
    return reader.recording(path.name.removesuffix(".gz").removesuffix(".jsonl"))


class _Reader:
    """Collects what segments tell, in order."""

    def __init__(self, on_bad: Callable[[str], None] | None) -> None:
        self._on_bad = on_bad
        self.headers: list[dict[str, Any]] = []
        self._read: set[tuple[str, int]] = set()
        self._bad: list[str] = []
        self._cut_off = 0
        self._cut = False
        self._lost = 0
        self._runs = 0
        self._run = ""
        self._part = 0
        self._wall = 0.0
        self._now_shift = 0.0
        self._known: dict[tuple[str, bytes], int] = {}
        self._blocks = BlockReader(self._known, "")
        self._numbers: dict[int, int] = {}  # the run's number of a request -> ours
        self._requests: list[RecordedRequest] = []
        self._events: list[Event] = []
        self._offering = NOBODY

    def read(self, path: Path, file: BinaryIO) -> None:
        """Read one segment, unless it has been read already."""
        for number, line, whole in _lines(path, file):
            try:
                record = json.loads(line)
                if number == 1:
                    if not self._begin(path, record):
                        return
                else:
                    self._add(record)
            except RecordingError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                if not whole:
                    self._cut_off += 1
                elif number == 1:
                    raise RecordingError(f"{path}: not a recording") from None
                else:
                    self._report(f"{path}:{number}: {_reason(error)}")

    def recording(self, name: str) -> Recording:
        _mark_served(self._events)
        return Recording(
            name=name,
            header=self.headers[-1],
            requests=self._requests,
            events=self._events,
            blocks=len(self._known),
            runs=self._runs,
            cut=self._cut,
            lost=self._lost,
            cut_off=self._cut_off,
            bad=self._bad,
        )

    def _report(self, problem: str) -> None:
        self._bad.append(problem)
        if self._on_bad is not None:
            self._on_bad(problem)

    def _begin(self, path: Path, header: Any) -> bool:
        """Begin a segment; False if it has been read."""
        version = header[MAGIC]
        if version != VERSION:
            raise RecordingError(
                f"{path}: a recording of version {version!r:.20}; this reads version {VERSION}"
            )
        run, part, wall, clock = header["run"], header["part"], header["wall"], header["clock"]
        if (run, part) in self._read:
            return False
        self._read.add((run, part))
        if run != self._run:
            if self._runs:  # the server began anew, with an empty tier
                self._events.append(Event(RESET, wall))
                # Clocks of two runs have nothing in common but the time of day.
                first = self.headers[0]
                self._now_shift = (wall - first["wall"]) - (clock - first["clock"])
            self._runs += 1
            self._run, self._part = run, 0
            self._numbers = {}
        if part != self._part + 1:
            self._cut = True
        self._part = part
        self._wall = float(wall)
        self._blocks = BlockReader(self._known, run)
        self.headers.append(header)
        return True

    def _add(self, record: Any) -> None:
        kind = record["k"]
        if kind in ("open", "again"):
            self._open(record, again=kind == "again")
            return
        if kind == "lost":
            self._lost += record["n"]
            return
        if kind == "end":
            return
        event = Event(
            kind,
            self._wall + record["t"],
            self._numbers[record["r"]] if "r" in record else NOBODY,
            group=record.get("g", 0),
            start=record.get("at", 0),
        )
        if kind in (PROMPT, OFFER, *OUTCOMES):
            event.blocks = self._blocks.read(record)
        if kind == PROMPT:
            event.tier_start = _natural(record["tier"])
            event.found = _natural(record["found"])
            event.tokens = record.get("tokens")
        elif kind == OFFER:
            self._offering = event.request
        elif kind in OUTCOMES:
            event.reason = record.get("why", "")
            event.age = record.get("age", 0)
            event.role = record.get("role")
            event.reused = record.get("reused")
            if event.request == NOBODY and kind in ("evicted", "refused"):
                event.request = self._offering
        elif kind not in (CLOSE, RESET):
            return  # of a later version, and of no concern here
        self._events.append(event)

    def _open(self, record: Any, *, again: bool) -> None:
        number = record["r"]
        if again and number in self._numbers:
            return
        time = self._wall + record.get("t", 0.0)
        now = record.get("now")
        request = RecordedRequest(
            id=str(record["id"]),
            time=time,
            now=None if now is None else now + self._now_shift if self._now_shift else now,
            tags=read_tags(record["tags"]) if "tags" in record else UNTAGGED,
        )
        self._numbers[number] = len(self._requests)
        self._events.append(Event(OPEN, time, len(self._requests)))
        self._requests.append(request)


def _mark_served(events: list[Event]) -> None:
    """Mark, per request and group, the last prompt before its first offer or its end."""
    waiting: dict[tuple[int, int], Event] = {}
    served: set[tuple[int, int]] = set()
    for event in events:
        key = (event.request, event.group)
        if event.kind == PROMPT:
            if key not in served:
                waiting[key] = event
        elif event.kind == OFFER and key in waiting:
            waiting.pop(key).counts = True
            served.add(key)
        elif event.kind == CLOSE:
            for each in [each for each in waiting if each[0] == event.request]:
                waiting.pop(each).counts = True
    for event in waiting.values():
        event.counts = True


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error}"
    if isinstance(error, KeyError):
        return f"{error.args[0]!r:.40} is missing or unknown"
    return f"{error}"


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the lines with their numbers from 1, and whether they end where a line should."""
    try:
        for number, line in enumerate(_unpacked(file), 1):
            yield number, line, line.endswith(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _open(path: Path, stack: contextlib.ExitStack) -> BinaryIO | None:
    """Open a file until the stack unwinds; None if there is none."""
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unpacked(file: BinaryIO) -> BinaryIO:
    """Return what is in a file, unpacked if it is gzipped, whatever its name."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return gzip.open(file) if packed else file  # type: ignore[return-value]


def _unreadable(path: Path, error: Exception) -> RecordingError:
    reason = getattr(error, "strerror", None) or str(error)
    return RecordingError(f"{path}: cannot be read: {reason}")
