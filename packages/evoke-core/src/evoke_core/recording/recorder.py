"""The flight recorder: writes what a tier was asked for and what it did, without being in the way.

The caller's part of every call is to put a tuple into a queue; naming blocks, JSON and files are a
background thread's work, which lets other threads run at least every millisecond or so.

Guarantees:
- Nothing here raises into the caller or makes it wait. A queue that is full, a disk that is full, a
  path that is gone: what cannot be kept is counted (``lost``, and in the file), warned of once, and
  writing is tried again every few seconds.
- Content-free: no text, no tokens; blocks are keyed hashes whose key is thrown away. Request ids,
  sessions and roles are written as clients gave them.
- Bounded: memory by the queue's limits, the files by ``max_bytes``; the oldest file goes first, and
  every file can be read without those before it.
- A clean stop loses nothing. A kill loses at most the last second: lines are handed to the
  operating system every quarter of one, and the reader copes with one that was cut off.
"""

import atexit
import json
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define

from evoke_core.ledger import Decision
from evoke_core.recording.coding import MAGIC, RESET, VERSION, BlockWriter
from evoke_core.recording.segments import SegmentWriter
from evoke_core.tags import UNTAGGED, RequestTags

logger = logging.getLogger(__name__)

MAX_QUEUED = 65_536
"""Calls waiting to be written; further ones are lost."""

MAX_QUEUED_BLOCKS = 1 << 20
"""Blocks that those calls name, together."""

_MAX_OPEN = 65_536  # requests; an engine that never closes must not leak
_PAUSE = 0.25  # seconds between two looks at the queue
_BATCH_BYTES = 1 << 16
_TURN = 0.0005  # seconds of work before other threads get a turn of as long
_RETRY = 5.0  # seconds after which a file that failed is tried again
_PART = 16  # where this part of what may be queued is, turns are ...
_LONGER = 10  # ... so many times as long
_CHECK = 1.0  # seconds between two looks whether the file is still there


class Recorder:
    """Records one tier. See the module's docstring for the guarantees.

    All calls but :meth:`close` must come from one thread at a time; their order is the file's.

    Args:
        path: the file to write; missing folders are made.
        header: what a reader has to know: ``tokens_per_block``, ``capacity`` in blocks, ``policy``,
            and where known ``bytes_per_block``, ``window_groups``, ``store_threshold``, ``config``,
            ``runtime``, ``versions``. What JSON cannot hold is written as text.
        max_bytes: limit of all files together, at least 64 KiB.
        clock: seconds, the same clock as the ``now`` of :meth:`opened`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        header: Mapping[str, Any],
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._queue: deque[_Call] = deque()
        self._put = 0  # blocks queued so far; the thread counts those taken
        self._refused = 0
        self._polled: dict[str, dict[int, tuple[int, int, int, int]]] = {}
        self._owner = os.getpid()  # the process that has the thread
        self._writer = _Writer(Path(path), dict(header), max(max_bytes, 1 << 16), clock)
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evoke-recorder", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread to be had: everything is lost, and counted
            self._closed = True
            self._owner = 0
            logger.warning("%s: cannot be recorded to: no thread can be started", path)
        _close_at_exit(self)

    # --- what the caller tells ---

    def opened(self, request_id: str, now: float | None, tags: RequestTags = UNTAGGED) -> None:
        """Note that a request arrived; ``now`` as handed to the ledger."""
        self._polled.pop(request_id, None)
        self._append("open", 0, request_id, now, tags)

    def prompt(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        start: int = 0,
        tier_start: int,
        found: int,
        tokens: int | None = None,
    ) -> None:
        """Note what a request asked for and what it found.

        An engine may ask again and again while the request waits. Repetitions are not written, and
        the last one before the request's first offer, or its end, is the one that counts.

        Args:
            keys: its blocks, head first, from position ``start`` on.
            tier_start: position from which on it asked the tier; what precedes it, the device had.
            found: blocks that the tier had from there on.
            tokens: length of the prompt, the block included that is not full.
        """
        said = (len(keys), start, tier_start, found)
        groups = self._polled.get(request_id)
        if groups is None:
            if len(self._polled) >= _MAX_OPEN:
                self._polled.clear()
            groups = self._polled[request_id] = {}
        if groups.get(group) == said:
            return
        groups[group] = said
        self._append(
            *("prompt", len(keys), request_id, tuple(keys), group, start),
            *(tier_start, found, tokens),
        )

    def offered(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> None:
        """Note that a request offered consecutive blocks for storing, generated ones too."""
        self._append("offer", len(keys), request_id, tuple(keys), group, start)

    def decisions(self, decisions: Iterable[Decision], request_id: str | None = None) -> None:
        """Note what a ledger decided since the last call, for the request whose call it was."""
        batch = tuple(decisions)
        if batch:
            blocks = sum(len(decision.keys) for decision in batch)
            self._append("decide", blocks, request_id, batch)

    def closed(self, request_id: str) -> None:
        """Note that a request ended."""
        self._polled.pop(request_id, None)
        self._append("close", 0, request_id)

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued and stop; wait for that at most ``timeout`` seconds."""
        self._closed = True
        self._closing.set()
        if os.getpid() == self._owner and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def lost(self) -> int:
        """Calls that are not in the file: the queue or the disk was full, or the path gone."""
        return self._refused + self._writer.lost

    @property
    def path(self) -> Path:
        """The file that is written. Not the one asked for if another process writes to that."""
        return self._writer.path

    # --- internals ---

    def _append(self, kind: str, blocks: int, *said: Any) -> None:
        if (
            self._closed
            or len(self._queue) >= MAX_QUEUED
            or self._put - self._writer.taken + blocks > MAX_QUEUED_BLOCKS
        ):
            self._refused += 1
            return
        self._put += blocks
        self._queue.append((kind, self._clock(), blocks, *said))

    def _run(self) -> None:
        writer, queue = self._writer, self._queue
        closing = False
        while True:
            try:
                writer.refused = self._refused
                writer.take(queue, self._turn)
                while not closing and writer.tidy() and not queue:
                    closing = self._closing.wait(_TURN)
                if closing and not queue:
                    writer.finish()
                    return
            except Exception:  # a defect here must cost a recording, never a server
                writer.lost += len(queue) + 1
                queue.clear()
                logger.warning("recording goes on with a gap", exc_info=True)
                if closing:
                    return
            closing = self._closing.wait(0.0 if queue else _PAUSE)

    def _turn(self) -> float:
        """Return for how long the thread may work before it lets others.

        A thread that sleeps gets the interpreter back only when a busy one has had it for a while,
        so where the queue grows, turns have to be longer.
        """
        if self._closing.is_set():
            return float("inf")
        waiting = self._put - self._writer.taken
        pressing = len(self._queue) > MAX_QUEUED // _PART or waiting > MAX_QUEUED_BLOCKS // _PART
        return _TURN * _LONGER if pressing else _TURN


_to_json = json.JSONEncoder(separators=(",", ":"), default=str, skipkeys=True).encode

_Call = tuple[Any, ...]
"""Kind, time, number of blocks named, and what the kind needs."""


def _close_at_exit(recorder: Recorder) -> None:
    """Have the recorder closed when the process ends, a child of multiprocessing too."""
    reference = weakref.ref(recorder)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    multiprocessing.util.Finalize(None, close, exitpriority=0)


@define(eq=False)
class _Open:
    """A request, as a segment has to introduce it."""

    number: int
    line: dict[str, Any]
    segment: int


class _Writer:
    """The thread's part: turns calls into lines and lines into files.

    ``refused``, what could not be queued, is told by the caller; it reads ``taken``, the blocks
    that wait no longer.
    """

    def __init__(
        self, path: Path, header: dict[str, Any], max_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.lost = 0
        self.refused = 0
        self.taken = 0
        self._header = header
        self._clock = clock
        self._wall = time.time()
        self._start = clock()
        self._run = os.urandom(6).hex()
        self._files = SegmentWriter(path, max_bytes)
        self._blocks = BlockWriter()
        self._open: dict[str, _Open] = {}
        self._numbers = 0
        self._segment = 0
        self._lines: list[bytes] = []
        self._pending = 0  # bytes of those
        self._reported = 0
        self._try_at = -float("inf")
        self._check_at = -float("inf")
        self._warned = False
        self._kinds: Mapping[str, Callable[..., None]] = {
            "open": self._opened,
            "prompt": self._prompt,
            "offer": self._offered,
            "decide": self._decided,
            "close": self._ended,
        }

    @property
    def path(self) -> Path:
        return self._files.path

    def take(self, queue: deque[_Call], turn: Callable[[], float]) -> None:
        """Write the calls in the queue, for a second at most.

        ``turn`` says how many seconds to work before other threads get one.
        """
        self._prepare()
        began = written = paused = time.perf_counter()
        while queue and paused - began < 1.0:
            call = queue.popleft()
            try:
                self._call(call)
            except OSError as error:
                self._fail(error)
            except Exception:
                self.lost += 1
                self._warn("a call could not be written", exc_info=True)
            at = time.perf_counter()
            if self._pending >= _BATCH_BYTES or at - written > _PAUSE:
                self._flush()
                written = at
            if at - paused > turn():
                time.sleep(_TURN)
                paused = time.perf_counter()
        lost = self.lost + self.refused
        if lost > self._reported and self._files.ready:
            self._line({"t": self._time(self._clock()), "k": "lost", "n": lost - self._reported})
            self._reported = lost
        self._flush()

    def tidy(self) -> bool:
        """Pack a little of what is full; False when there is nothing more to do."""
        try:
            return self._files.ready and self._files.pack()
        except OSError as error:
            self._warn(f"{error.filename}: cannot be packed: {error.strerror}")
            return False

    def finish(self) -> None:
        """Close the file."""
        if self._files.ready:
            self._line({"t": self._time(self._clock()), "k": "end"})
            self._flush()
        self._files.leave()

    # --- files ---

    def _prepare(self) -> None:
        """See that a file is open and where it should be."""
        now = self._clock()
        try:
            if self._files.ready and now >= self._check_at:
                self._check_at = now + _CHECK
                self._files.check()
        except OSError as error:
            self._fail(error)
            self._try_at = now
        if not self._files.ready and now >= self._try_at:
            try:
                self._files.begin()
                self._begin_segment()
            except OSError as error:
                self._fail(error)

    def _begin_segment(self) -> None:
        self._segment += 1
        self._blocks.restart()
        head = {
            MAGIC: VERSION,
            "run": self._run,
            "part": self._segment,
            "wall": self._wall,
            "clock": self._start,
            **self._header,
        }
        self._line(head)

    def _flush(self) -> None:
        lines, self._lines, self._pending = self._lines, [], 0
        if not lines:
            return
        if not self._files.ready:
            self.lost += len(lines)
            return
        try:
            self._files.write(b"".join(lines))
        except OSError as error:
            self.lost += len(lines)
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._files.leave()
        self._try_at = self._clock() + _RETRY
        self._warn(
            f"{error.filename or self.path}: cannot be recorded to: {error.strerror or error};"
            f" tried again every {_RETRY:g} seconds, what happens meanwhile is not recorded"
        )

    def _warn(self, message: str, *, exc_info: bool = False) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s (counted, not reported again)", message, exc_info=exc_info)

    # --- lines ---

    def _call(self, call: _Call) -> None:
        kind, at, blocks, *said = call
        self.taken += blocks
        if self._files.ready and self._files.size + self._pending >= self._files.limit:
            self._flush()
            if self._files.ready:
                self._files.rotate()
                self._begin_segment()
        if not self._files.ready and blocks:
            self.lost += 1
            return
        self._kinds[kind](self._time(at), *said)

    def _opened(self, at: float, request_id: str, now: float | None, tags: RequestTags) -> None:
        said: dict[str, Any] = {"id": request_id}
        if now is not None:
            said["now"] = now
        if given := tags.given():
            said["tags"] = given
        self._open.pop(request_id, None)
        request = self._introduce(request_id, {"t": at, **said})
        request.segment = self._segment
        self._line({"t": at, "k": "open", "r": request.number, **said})

    def _prompt(
        self,
        at: float,
        request_id: str,
        keys: Sequence[bytes],
        group: int,
        start: int,
        tier_start: int,
        found: int,
        tokens: int | None,
    ) -> None:
        line = {"t": at, "k": "prompt", "r": self._number(request_id), **_place(group, start)}
        line |= {"tier": tier_start, "found": found}
        if tokens is not None:
            line["tokens"] = tokens
        self._line(line | self._blocks.write(keys))

    def _offered(
        self, at: float, request_id: str, keys: Sequence[bytes], group: int, start: int
    ) -> None:
        line = {"t": at, "k": "offer", "r": self._number(request_id), **_place(group, start)}
        self._line(line | self._blocks.write(keys))

    def _decided(self, at: float, request_id: str | None, decisions: Sequence[Decision]) -> None:
        number = None if request_id is None else self._number(request_id)
        for decision in decisions:
            if decision.reason == RESET:  # everything went: no use in naming it all
                self._line({"t": at, "k": RESET})
                continue
            line: dict[str, Any] = {"t": at, "k": decision.kind}
            if number is not None:
                line["r"] = number
            line |= _place(decision.group, 0)
            if decision.reason:
                line["why"] = decision.reason
            if decision.kind == "evicted":
                line |= {"age": decision.age, "reused": decision.reused}
            if decision.role is not None:
                line["role"] = decision.role
            keys = decision.keys
            if decision.kind == "evicted":  # deepest first; head first is shorter to write
                keys = keys[::-1]
            self._line(line | self._blocks.write(keys))

    def _ended(self, at: float, request_id: str) -> None:
        number = self._number(request_id)
        del self._open[request_id]
        self._line({"t": at, "k": "close", "r": number})

    def _number(self, request_id: str) -> int:
        """Return a request's number, introducing it where this segment has not heard of it."""
        request = self._open.get(request_id) or self._introduce(request_id, {"id": request_id})
        if request.segment != self._segment:
            request.segment = self._segment
            self._line({"k": "again", "r": request.number, **request.line})
        return request.number

    def _introduce(self, request_id: str, line: dict[str, Any]) -> _Open:
        if len(self._open) >= _MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._numbers += 1
        request = self._open[request_id] = _Open(self._numbers, line, segment=0)
        return request

    def _line(self, line: Mapping[str, Any]) -> None:
        data = _to_json(line).encode() + b"\n"
        self._lines.append(data)
        self._pending += len(data)

    def _time(self, at: float) -> float:
        return round(at - self._start, 4)


def _place(group: int, start: int) -> dict[str, int]:
    place = {"g": group} if group else {}
    return place | {"at": start} if start else place
