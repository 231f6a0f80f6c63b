"""Recordings of a real server, see :mod:`evoke_core.recording`: a trace with everything in it.

A recording is told from its first line; its full segments, which lie beside it, are read too. Of a
model with several groups of blocks (hybrid attention), the first one with full attention is
replayed, and the recorded capacity is that group's share of what was offered: the groups share the
tier's slots.
"""

from array import array
from collections.abc import Callable
from pathlib import Path

from attrs import define, field

from evoke_core.recording import reader as recording
from evoke_core.recording.coding import RESET as EMPTIED
from evoke_core.recording.reader import NOBODY, Event, Recording, RecordingError, read_recording
from evoke_core.replay.recorded import CLOSE, OFFER, OPEN, RESET, SERVE, RecordedTrace
from evoke_core.replay.trace import HEAD, TraceBuilder, TraceError


def read(
    path: Path, *, skip_bad: bool, on_bad: Callable[[str], None] | None = None
) -> RecordedTrace:
    """Return the trace that a recording tells.

    Raises:
        TraceError: with one line, as of every reader.
    """
    try:
        read_ = read_recording(path, on_bad=on_bad)
    except RecordingError as error:
        raise TraceError(str(error)) from None
    if read_.bad and not skip_bad:
        lines = "1 bad line" if len(read_.bad) == 1 else f"{len(read_.bad)} bad lines, first"
        raise TraceError(f"{lines}: {read_.bad[0]} (bad lines can be skipped, if asked to)")
    return as_trace(read_)


def as_trace(recording: Recording) -> RecordedTrace:
    """Return the trace that a recording tells.

    Raises:
        TraceError: nobody asked for a block in it, or its header lacks the size of one.
    """
    return _Builder(recording).build()


@define
class _Request:
    """One request of the replayed group, as far as the events have told.

    ``blocks`` are the recording's numbers of its blocks, ``chain`` the trace's, ``length`` its
    prompt's part of them.
    """

    order: int = NOBODY
    blocks: "array[int]" = field(factory=lambda: array("i"))
    chain: list[int] = field(factory=list)
    length: int = 0
    served: bool = False


class _Builder:
    def __init__(self, recording: Recording) -> None:
        size = recording.number("tokens_per_block")
        if size is None:
            raise TraceError(f"{recording.name}: its header does not tell tokens_per_block")
        self._recording = recording
        self._group = _group(recording)
        self._builder = TraceBuilder(recording.name, size, len(recording.bad))
        self._requests = [_Request() for _ in recording.requests]
        self._served: list[int] = []
        self._device, self._found = array("i"), array("i")
        self._tokens: list[int | None] = []
        self._times = array("d")
        self._events: list[tuple[int, int, int, int]] = []
        self._placed = array("i", [HEAD]) * recording.blocks  # recorded block -> the trace's
        self._asked: set[int] = set()
        self._returning = 0

    def build(self) -> RecordedTrace:
        for event in self._recording.events:
            self._add(event)
        if not self._asked:
            raise TraceError(f"{self._recording.name}: no request with a full block of text in it")
        return self._trace()

    def _add(self, event: Event) -> None:
        if event.kind == EMPTIED:
            self._events.append((RESET, 0, 0, 0))
        elif event.request == NOBODY:
            return
        elif event.kind == recording.OPEN:
            self._events.append((OPEN, event.request, 0, 0))
        elif event.kind == recording.CLOSE:
            self._events.append((CLOSE, event.request, 0, 0))
        elif event.group != self._group:
            return
        elif event.kind == recording.PROMPT and event.counts:
            self._serve(event)
        elif event.kind == recording.OFFER:
            self._offer(event)

    def _serve(self, event: Event) -> None:
        request = self._requests[event.request]
        if request.served or event.start:  # a prompt without its head cannot be placed
            return
        request.served = True
        request.blocks = event.blocks[:]
        before = self._builder.blocks
        request.chain = chain = self._place(HEAD, event.blocks)
        request.length = len(chain)
        self._returning += len(chain) - (self._builder.blocks - before)
        self._asked.update(chain)
        self._served.append(event.request)
        device = min(event.tier_start, len(chain))
        self._device.append(device)
        self._found.append(min(event.found, len(chain) - device))
        self._tokens.append(event.tokens)
        self._times.append(event.time)
        self._events.append((SERVE, event.request, 0, 0))

    def _offer(self, event: Event) -> None:
        request = self._requests[event.request]
        known, start = len(request.chain), event.start
        if not request.served or start > known or not event.blocks:
            return  # nothing says what comes before these blocks
        overlap = min(known - start, len(event.blocks))
        if request.blocks[start : start + overlap] != event.blocks[:overlap]:
            return  # not its prompt's blocks: an engine that corrects itself
        beyond = event.blocks[overlap:]
        if beyond:
            request.blocks += beyond
            request.chain += self._place(request.chain[-1] if request.chain else HEAD, beyond)
        self._events.append((OFFER, event.request, start, start + len(event.blocks)))

    def _place(self, parent: int, blocks: "array[int]") -> list[int]:
        """Return the trace's numbers of recorded blocks behind ``parent``, making what is new."""
        placed, parents = self._placed, self._builder.parents
        known = [placed[block] for block in blocks]
        end = known.index(HEAD) if HEAD in known else len(known)
        chain = known[:end]
        # A recorded block stands for all that precedes it: what is known has its place. See to it.
        if [parent, *chain[:-1]][:end] != [parents[number] for number in chain]:
            chain, end = [], 0
        fresh = blocks[end:]
        chain += self._builder.extend(chain[-1] if chain else parent, fresh)
        for block, number in zip(fresh, chain[end:], strict=True):
            placed[block] = number
        return chain

    def _trace(self) -> RecordedTrace:
        """Number the requests in the order in which they were served, the others behind them."""
        recorded, requests = self._recording.requests, self._requests
        others = [at for at, request in enumerate(requests) if not request.served]
        order = [*self._served, *others]
        for number, at in enumerate(order):
            requests[at].order = number
        served = [requests[at] for at in self._served]
        size = self._builder.tokens_per_block
        tags = [recorded[at].tags for at in order]
        return RecordedTrace(
            name=self._recording.name,
            tokens_per_block=size,
            parents=self._builder.parents,
            tails=array("i", (r.chain[r.length - 1] if r.length else HEAD for r in served)),
            lengths=array("i", (r.length for r in served)),
            tokens=array("i", map(_tokens, served, self._tokens, [size] * len(served))),
            times=self._times,
            ids=[recorded[at].id for at in self._served],
            sessions=[each.session for each in tags[: len(served)]],
            roles=[each.source_type for each in tags[: len(served)]],
            skipped=self._builder.skipped,
            paths=array("i", (r.chain[-1] if r.chain else HEAD for r in served)),
            device=self._device,
            found=self._found,
            tags=tags,
            nows=[recorded[at].now for at in order],
            events=[
                (kind, requests[at].order if kind != RESET else 0, begin, end)
                for kind, at, begin, end in self._events
            ],
            header=self._header(),
            referenced=len(self._asked),
            returning=self._returning,
        )

    def _header(self) -> dict[str, object]:
        """Return the header, its capacity being the replayed group's share of it."""
        header = dict(self._recording.header)
        offered: dict[int, int] = {}
        for event in self._recording.events:
            if event.kind == recording.OFFER:
                offered[event.group] = offered.get(event.group, 0) + len(event.blocks)
        capacity = self._recording.number("capacity")
        if capacity is not None and len(offered) > 1:
            share = offered.get(self._group, 0) / sum(offered.values())
            header["capacity"] = max(1, round(capacity * share))
        return header


def _tokens(request: _Request, given: int | None, size: int) -> int:
    full = request.length * size
    return full if given is None else min(max(given, full), full + size - 1)


def _group(recorded: Recording) -> int:
    """Return the group to replay: the first with full attention that was asked for."""
    windows = recorded.header.get("window_groups") or ()
    groups = {event.group for event in recorded.events if event.counts}
    full = groups.difference(windows if isinstance(windows, list) else ())
    return min(full or groups or {0})
