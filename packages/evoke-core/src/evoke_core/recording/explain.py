"""Why did a request miss? What became of its blocks before it asked for them, by the recording.

    for stretch in explain(read_recording("trace.jsonl"), "chatcmpl-4711").stretches:
        print(stretch.begin, stretch.end, stretch.fate)

Every block of a prompt has one fate, as of the moment at which the request was served: the device
had it, the tier had it, or the last thing that happened to it says why not. Consecutive blocks that
share a fate, and the event behind it, are one stretch.

Guarantee: one pass over the recording, in time that depends on its length alone; memory for the
blocks in it, one entry each.
"""

import difflib
import heapq
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from attrs import asdict, field, frozen

from evoke_core.recording.coding import RESET
from evoke_core.recording.reader import (
    NOBODY,
    OFFER,
    OUTCOMES,
    PROMPT,
    Event,
    Recording,
    RecordingError,
)

Fate = Literal[
    "device",
    "found",
    "new",
    "unknown",
    "not offered",
    "in transfer",
    "refused",
    "aborted",
    "evicted",
    "emptied",
    "not restored",
]

MEANINGS: dict[Fate, str] = {
    "device": "on the device",
    "found": "found in the tier",
    "new": "never seen before",
    "unknown": "not seen before, but the recording's beginning is missing",
    "not offered": "seen before, never offered for storing",
    "in transfer": "being stored at that moment, or its storing was not recorded",
    "refused": "refused",
    "aborted": "its transfer was aborted",
    "evicted": "evicted",
    "emptied": "the tier was emptied",
    "not restored": "in the tier, but not restored",
}
"""What each fate means, for people."""

_NOT_MISSED_AGAIN: frozenset[Fate] = frozenset(["device", "found", "new", "unknown"])

_NEAR = 3  # ids suggested for one that is not there


@frozen
class Stretch:
    """Consecutive blocks of a request with one fate.

    Attributes:
        begin, end: positions in the request's chain; the end is behind the last.
        reason: of a refusal or eviction, as the ledger gave it.
        seconds_before: how long before the request was served that happened; None if nothing did.
        request: id of the request behind it: which offered what was refused or aborted, needed the
            room of what was evicted, or was the last to name what was not offered.
        age: of an eviction: requests since the blocks' last use.
        reused: of an eviction: the blocks had been used again after they were stored.
    """

    begin: int
    end: int
    fate: Fate
    reason: str = ""
    seconds_before: float | None = None
    request: str | None = None
    age: int | None = None
    reused: bool | None = None

    @property
    def blocks(self) -> int:
        return self.end - self.begin


@frozen
class Explanation:
    """What became of one request's blocks.

    Attributes:
        request: its id.
        time: seconds since 1970 at which it was served.
        blocks, device, found: of its prompt; those that the device had; those that the tier had.
        missed_again: blocks that neither had although they had been seen before: what a larger
            tier, or another policy, might have had.
        stretches: in order; they cover the prompt.
    """

    request: str
    time: float
    blocks: int
    device: int
    found: int
    missed_again: int
    stretches: list[Stretch] = field(factory=list)

    @property
    def missed(self) -> int:
        """Blocks that neither the device nor the tier had."""
        return self.blocks - self.device - self.found

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "missed": self.missed}


def explain(recording: Recording, request: str) -> Explanation:
    """Explain one request; of several with this id, the last one.

    The beginning of an id is enough if there is only one that begins so: engines add to the id that
    a client was told.

    Raises:
        RecordingError: it is not in the recording, or asked for nothing. The message is one line.
    """
    ids = {each.id for each in recording.requests}
    begins = [] if request in ids else sorted(each for each in ids if each.startswith(request))
    if len(begins) == 1:
        [request] = begins
    elif request not in ids:
        near = begins[:_NEAR] or difflib.get_close_matches(request, ids, n=_NEAR, cutoff=0.5)
        hint = f"; near: {', '.join(near)}" if near else f"; it has {len(ids):,} others"
        raise RecordingError(f"{recording.name}: no request {request!r:.80}{hint}")
    found = list(_explanations(recording, request))
    if not found:
        raise RecordingError(
            f"{recording.name}: request {request!r:.80} was opened, and never looked blocks up"
        )
    return found[-1]


def worst(recording: Recording, n: int) -> list[Explanation]:
    """Return the requests that missed most of what had been seen before, worst first."""
    found = _explanations(recording, None)
    return heapq.nlargest(n, found, key=lambda each: (each.missed_again, each.missed, -each.time))


def _explanations(recording: Recording, request: str | None) -> Iterator[Explanation]:
    """Yield the served requests in order: all, or those with an id."""
    last: dict[int, Event] = {}  # block -> the last event that decides its fate
    requests = recording.requests
    for event in recording.events:
        if event.kind == PROMPT and event.counts:
            if request is None or requests[event.request].id == request:
                yield _explained(recording, event, last)
            for block in event.blocks:
                last.setdefault(block, event)
        elif event.kind == OFFER:
            for block in event.blocks:
                if _is_news(event, last.get(block)):
                    last[block] = event
        elif event.kind in OUTCOMES:
            last.update(dict.fromkeys(event.blocks, event))
        elif event.kind == RESET:
            last = {
                block: event if before.kind in (OFFER, "stored") else before
                for block, before in last.items()
            }


def _is_news(offer: Event, before: Event | None) -> bool:
    """Say whether an offer changes a block's fate.

    Not if the block is there already or on its way, nor if its refusal was noted before the offer.
    """
    if before is None:
        return True
    if before.kind == "refused":
        return before.request != offer.request
    return before.kind not in (OFFER, "stored")


def _explained(recording: Recording, served: Event, last: dict[int, Event]) -> Explanation:
    length = served.start + len(served.blocks)
    device = min(served.tier_start, length)
    found = min(served.found, length - device)
    causes: list[tuple[Fate, Event | None]] = []
    for position, block in enumerate(served.blocks, served.start):
        if position < device:
            causes.append(("device", None))
        elif position < device + found:
            causes.append(("found", None))
        else:
            before = last.get(block)
            causes.append((_fate(recording, before), before))
    stretches = []
    begin = served.start
    for (fate, cause), same in groupby(causes, key=lambda each: (each[0], each[1])):
        end = begin + len(list(same))
        stretches.append(_stretch(recording, served, begin, end, fate, cause))
        begin = end
    return Explanation(
        request=recording.requests[served.request].id,
        time=served.time,
        blocks=length,
        device=device,
        found=found,
        missed_again=sum(s.blocks for s in stretches if s.fate not in _NOT_MISSED_AGAIN),
        stretches=stretches,
    )


def _fate(recording: Recording, before: Event | None) -> Fate:
    if before is None:
        return "unknown" if recording.cut else "new"
    fates: dict[str, Fate] = {
        PROMPT: "not offered",
        OFFER: "in transfer",
        "stored": "not restored",
        "refused": "refused",
        "aborted": "aborted",
        "evicted": "evicted",
        RESET: "emptied",
    }
    return fates[before.kind]


def _stretch(
    recording: Recording, served: Event, begin: int, end: int, fate: Fate, cause: Event | None
) -> Stretch:
    if cause is None:
        return Stretch(begin, end, fate)
    evicted = cause.kind == "evicted"
    return Stretch(
        begin,
        end,
        fate,
        reason=cause.reason,
        seconds_before=round(served.time - cause.time, 4),
        request=None if cause.request == NOBODY else recording.requests[cause.request].id,
        age=cause.age if evicted else None,
        reused=cause.reused if evicted else None,
    )
