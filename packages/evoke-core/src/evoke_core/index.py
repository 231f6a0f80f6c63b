"""The retention index: which blocks are resident, who touched them, and which may go first.

No slots, no capacity, no I/O, no clock: an engine (or :class:`~evoke_core.ledger.BlockLedger`) owns
the memory, reports what happens and asks for candidates.

Guarantees:
- Only leaves are candidates: a block is never offered before the blocks that depend on it.
- The order is exact: lowest (score, last, -position, group, creation) first, leaf by leaf.
- Calls that repeat within a request change nothing; ``candidates`` changes nothing, ever.
- No call scans the pool. A call costs time in the keys it names and in the occupied rank classes.
- Unknown keys and requests are ignored: nothing raises on what an engine or a client says late.

Time is counted in requests: ``open`` ticks the clock, and all a request touches is as recent as its
tick. Full-attention groups form chains; blocks of ``window_groups`` (sliding window, Mamba) stand
alone, without parents.
"""

from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from evoke_core.config import EvokeConfig
from evoke_core.forest import Forest, tail_length
from evoke_core.ghosts import GhostMemory
from evoke_core.half_life import HalfLife
from evoke_core.policies import POLICIES, Policy
from evoke_core.requests import Chain, OpenRequest
from evoke_core.runs import MAX_REUSE, Run, shared_length
from evoke_core.tags import UNTAGGED, RequestTags

MAX_OPEN_REQUESTS = 65_536
"""Beyond it the oldest open request is closed: an adapter that never closes must not leak."""

CAPACITY = "capacity"
"""The reason of evictions that make room; only these are remembered as ghosts."""

_SIGNAL_STEPS = 64


@frozen
class Evicted:
    """Blocks that left together, in the order in which they went (deepest first)."""

    keys: list[bytes]
    last: int
    role: str | None
    group: int


@frozen
class BlockView:
    """A snapshot of one block, for tests and explanations."""

    key: bytes
    group: int
    position: int
    last: int
    reuse: int
    floor: float
    priority: float
    attention: float
    coherence: float
    role: str | None
    held: int
    leaf: bool


class RetentionIndex:
    """Knows the blocks and their order. See the module's docstring for what it guarantees.

    Args:
        config: the operator's settings.
        policy: the ranking; by default the one that ``config.policy`` names.
        window_groups: groups whose blocks have no parent.
    """

    def __init__(
        self,
        config: EvokeConfig | None = None,
        *,
        policy: Policy | None = None,
        window_groups: Iterable[int] = (),
    ) -> None:
        self.config = EvokeConfig() if config is None else config
        self.clock = 0
        self._forest = Forest(policy or POLICIES[self.config.policy](self.config))
        self._runs = self._forest.runs
        self._window_groups = frozenset(window_groups)
        self._half_life = HalfLife.of(self.config.recency_half_life)
        self._ghosts = GhostMemory()
        self._peak = 0
        self._requests: dict[str, OpenRequest] = {}
        self._open_ticks: set[int] = set()

    # --- requests ---

    def open(self, request_id: str, tags: RequestTags = UNTAGGED, now: float = 0.0) -> None:
        """Begin a request: the clock ticks. ``now`` is the time in seconds, stamped once."""
        self.close(request_id)
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            self.close(next(iter(self._requests)))
        self.clock += 1
        floor = self.config.source_floors.get(tags.source_type or "", 0.0)
        self._requests[request_id] = OpenRequest(request_id, self.clock, now, tags, floor)
        self._open_ticks.add(self.clock)

    def close(self, request_id: str) -> None:
        """End a request. Its blocks stay; its own bookkeeping is released."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._open_ticks.discard(request.tick)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    # --- history ---

    def touch(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> list[bytes]:
        """Note that a request uses ``keys``, head first, ``start`` the position of the first one.

        The request's chain, from where it was last counted to the end of ``keys`` or the first
        missing block, gains this request in its history; what lies behind a gap cannot be restored
        and is not counted. Returns the keys that the request had not named before: none on a
        repetition.
        """
        request = self._requests.get(request_id)
        if request is None or not keys:
            return []
        if group in self._window_groups:
            return self._touch_windows(request, keys, group)
        chain = request.chain(group)
        fresh = chain.record(keys if isinstance(keys, list) else list(keys), start)
        self._advance(request, chain, start + len(keys))
        return fresh

    def insert(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        start: int = 0,
        hold: bool = False,
    ) -> list[bytes]:
        """Note that ``keys`` are resident now; return those that were not before.

        The engine owns the slots, so anything is accepted, a block whose parent is missing too.
        ``hold`` holds each new block once.
        """
        self.touch(request_id, keys, group=group, start=start)
        request = self._requests.get(request_id)
        if request is None:
            return []
        if group in self._window_groups:
            added = []
            for position, key in enumerate(keys, start):
                if key not in self._runs:
                    counted = request.windows[group][key]
                    remembered = self._ghosts.recall([key])[0]
                    reuse = min(MAX_REUSE, max(1, remembered + (not counted)))
                    run = self._new_run(request, [key], group, position, None, reuse)
                    self._forest.add(run, hold=hold)
                    request.windows[group][key] = True
                    added.append(key)
        else:
            added = self._insert_chain(request, group, start, start + len(keys), hold)
        self._half_life.note_inserted(len(added))
        self._peak = max(self._peak, len(self._runs))
        return added

    def drop(self, key: bytes, reason: str = "engine") -> bool:
        """Note that a block is gone, whatever it was; False if it was not resident.

        Blocks behind it stay as orphans until they go or their parent returns. Only
        ``reason="capacity"`` leaves a memory of the block's reuse.
        """
        if key not in self._runs:
            return False
        if reason == CAPACITY:
            self._half_life.note_eviction(len(self._runs), self.clock)
        run = self._forest.remove(key)
        if reason == CAPACITY:
            self._remember([key], run.reuse)
        return True

    def signal(
        self, key: bytes, attention: float | None = None, coherence: float | None = None
    ) -> bool:
        """Set what a runtime knows of a block, each from 0 to 1; ``None`` leaves it as it is.

        Values are clamped and quantised to 1/64. False if the block is not resident or a value is
        not a number.
        """
        values = [value for value in (attention, coherence) if value is not None]
        if key not in self._runs or any(
            not isinstance(value, (int, float)) or value != value for value in values
        ):
            return False
        run = self._forest.end_with(key)
        if len(run.keys) > 1:
            run = self._forest.split(run, len(run.keys) - 1)

        def change() -> None:
            if attention is not None:
                run.attention = _quantise(attention)
            if coherence is not None:
                run.coherence = _quantise(coherence)

        self._forest.rerank(run, change)
        return True

    def clear(self) -> None:
        """Forget blocks, holds and ghosts; open requests stay and count anew."""
        self._forest.clear()
        self._ghosts.clear()
        self._half_life.restart(self.clock)
        for request in self._requests.values():
            for chain in request.chains.values():
                chain.recount()
            for window in request.windows.values():
                window.update(dict.fromkeys(window, False))

    # --- holds ---

    def hold(self, *keys: bytes) -> None:
        """Keep resident blocks from being candidates until as many ``unhold`` calls."""
        self._forest.hold(*keys)

    def unhold(self, *keys: bytes) -> None:
        """Take back one hold of each block that is held."""
        self._forest.unhold(*keys)

    # --- candidates ---

    def candidates(
        self,
        n: int,
        eligible: Callable[[bytes], bool] | None = None,
        *,
        protect: str | None = None,
    ) -> list[bytes]:
        """Return up to ``n`` keys in the order in which they should go. Changes nothing.

        Blocks that are not ``eligible``, held, or part of the own chain of the request
        ``protect`` are passed over, and with them all they depend on.
        """
        plan = self._select(n, protect, eligible)
        self._forest.restore()
        left: dict[Run, int] = {}
        keys: list[bytes] = []
        for run, count in plan:
            stop = left.get(run, len(run.keys))
            keys.extend(reversed(run.keys[stop - count : stop]))
            left[run] = stop - count
        return keys

    def evict(self, n: int, *, protect: str | None = None) -> list[Evicted]:
        """Drop up to ``n`` blocks, in the order of :meth:`candidates`, and remember their reuse."""
        if n <= 0:
            return []
        self._half_life.note_eviction(len(self._runs), self.clock)
        evicted = []
        for run, count in self._select(n, protect, None):
            keys = self._forest.remove_tail(run, count)
            self._remember(keys, run.reuse)
            evicted.append(Evicted(keys, run.last, run.role, run.group))
        self._forest.restore()
        return evicted

    # --- views ---

    def __contains__(self, key: object) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def half_life(self) -> float:
        """The half-life in force, in requests."""
        return self._half_life.value

    @property
    def ghosts(self) -> int:
        """How many evicted blocks are remembered."""
        return len(self._ghosts)

    @property
    def held(self) -> int:
        """How many blocks are held."""
        return len(self._forest.holds)

    def parent(self, key: bytes) -> bytes | None:
        """Return a block's resident parent; None for the head of a chain, an orphan, a stranger."""
        run = self._runs.get(key)
        if run is None:
            return None
        offset = run.keys.index(key)
        if offset:
            return run.keys[offset - 1]
        return run.parent_key if run.parent_key in self._runs else None

    def describe(self, key: bytes) -> BlockView | None:
        """Return a snapshot of a resident block."""
        run = self._runs.get(key)
        if run is None:
            return None
        offset = run.keys.index(key)
        return BlockView(
            key=key,
            group=run.group,
            position=run.start + offset,
            last=run.last,
            reuse=run.reuse,
            floor=run.floor,
            priority=run.priority,
            attention=run.attention,
            coherence=run.coherence,
            role=run.role,
            held=self._forest.holds.get(key, 0),
            leaf=run.children == 0 and offset + 1 == len(run.keys),
        )

    def role(self, request_id: str) -> str | None:
        """Return the source role of an open request."""
        request = self._requests.get(request_id)
        return None if request is None else request.tags.source_type

    def reachable(self, request_id: str, group: int, position: int) -> bool:
        """Say whether a block of the request at ``position`` would have its parent resident."""
        if position == 0 or group in self._window_groups:
            return True
        request = self._requests.get(request_id)
        chain = None if request is None else request.chains.get(group)
        return (
            chain is not None
            and position <= len(chain.keys)
            and chain.keys[position - 1] in self._runs
        )

    def locate(
        self, request_id: str, keys: list[bytes], *, group: int = 0
    ) -> list[tuple[int, list[bytes]]]:
        """Part ``keys`` into consecutive stretches of the request's chain, each with its position.

        For engines that offer blocks without saying where they stand. Keys not named before
        continue what comes before them.
        """
        request = self._requests.get(request_id)
        if request is None or group in self._window_groups or not keys:
            return [(0, keys)] if keys else []
        return request.chain(group).locate(keys)

    # --- history, run by run ---

    def _remember(self, keys: list[bytes], count: int) -> None:
        self._ghosts.remember(keys, count, int(self.config.ghost_factor * self._peak))

    def _count(self, run: Run, request: OpenRequest) -> None:
        """Add ``request`` to the history of all of ``run``."""

        def change() -> None:
            run.last = max(run.last, request.tick)
            run.reuse = min(run.reuse + 1, MAX_REUSE)
            if request.floor >= run.floor or self._lapsed(run.floor_tick):
                run.floor, run.floor_tick = request.floor, request.tick
                run.role = request.tags.source_type
            if request.tags.priority >= run.priority or self._lapsed(run.priority_tick):
                run.priority, run.priority_tick = request.tags.priority, request.tick

        self._forest.rerank(run, change)

    def _advance(self, request: OpenRequest, chain: Chain, end: int) -> None:
        """Count ``request`` for its chain's blocks up to ``end`` or the first missing one."""
        end = min(end, len(chain.keys))
        while chain.counted < end:
            at = chain.counted
            run = self._forest.at(chain.keys[at], at)
            if run is None:
                break
            if run.start < at:
                run = self._forest.split(run, at - run.start)
            limit = min(end, min(chain.ahead)) if chain.ahead else end
            same = min(shared_length(run.keys, chain.keys, at), limit - at)
            if same < len(run.keys):
                self._forest.split(run, same)
                run = self._runs[chain.keys[at]]
            self._count(run, request)
            chain.mark(at, at + same)

    def _lapsed(self, tick: int) -> bool:
        """Say whether the claim of the request with this tick is neither open nor recent."""
        return tick not in self._open_ticks and self.clock - tick > self._half_life.value

    # --- insertion ---

    def _insert_chain(
        self, request: OpenRequest, group: int, start: int, end: int, hold: bool
    ) -> list[bytes]:
        chain = request.chain(group)
        added: list[bytes] = []
        position = start
        end = min(end, len(chain.keys))
        while position < end:
            if chain.keys[position] in self._runs:
                run = self._forest.at(chain.keys[position], position)
                position += 1
                if run is not None:  # the run may branch off this chain before it ends
                    shared = shared_length(run.keys, chain.keys, run.start)
                    position = max(position, run.start + shared)
                continue
            stretch = chain.keys[position:end]
            if not self._runs.keys().isdisjoint(stretch):
                stretch = stretch[: next(i for i, key in enumerate(stretch) if key in self._runs)]
            if len(set(stretch)) < len(stretch):  # no chain: keep what precedes the repetition
                stretch = stretch[: next(i for i, key in enumerate(stretch) if key in stretch[:i])]
            self._insert_stretch(request, group, position, stretch, hold)
            added += stretch
            chain.mark(position, position + len(stretch))
            position += len(stretch)
        self._advance(request, chain, end)
        return added

    def _insert_stretch(
        self, request: OpenRequest, group: int, start: int, keys: list[bytes], hold: bool
    ) -> None:
        """Add consecutive missing blocks, one run for each stretch of equal remembered reuse."""
        chain = request.chain(group)
        parent_key = chain.keys[start - 1] if start else None
        counts = [min(MAX_REUSE, count + 1) for count in self._ghosts.recall(keys)]
        if chain.ahead or chain.counted > start:
            counts = [
                max(1, count - chain.has_counted(position))
                for position, count in enumerate(counts, start)
            ]
        begin = 0
        for at in range(1, len(keys) + 1):
            if at == len(keys) or counts[at] != counts[begin] or self._forest.awaited(keys[at - 1]):
                stretch = keys[begin:at]
                run = self._new_run(
                    request, stretch, group, start + begin, parent_key, counts[begin]
                )
                self._forest.add(run, hold=hold)
                parent_key = keys[at - 1]
                begin = at

    def _new_run(
        self,
        request: OpenRequest,
        keys: list[bytes],
        group: int,
        start: int,
        parent_key: bytes | None,
        reuse: int,
    ) -> Run:
        return Run(
            keys=keys,
            group=group,
            start=start,
            parent_key=parent_key,
            last=request.tick,
            reuse=reuse,
            floor=request.floor,
            floor_tick=request.tick,
            role=request.tags.source_type,
            priority=request.tags.priority,
            priority_tick=request.tick,
            serial=self._forest.next_serial(),
            windowed=group in self._window_groups,
        )

    # --- window groups and victims ---

    def _touch_windows(
        self, request: OpenRequest, keys: Sequence[bytes], group: int
    ) -> list[bytes]:
        seen = request.windows.setdefault(group, {})
        fresh = [key for key in keys if key not in seen]
        seen.update(dict.fromkeys(fresh, False))
        for key in keys:
            if not seen[key] and (run := self._runs.get(key)) is not None:
                self._count(run, request)
                seen[key] = True
        return fresh

    def _select(
        self, n: int, protect: str | None, eligible: Callable[[bytes], bool] | None
    ) -> list[tuple[Run, int]]:
        request = self._requests.get(protect) if protect is not None else None

        def limit(run: Run, room: int) -> int:
            if request is not None:
                room = min(room, len(run.keys) - _own_length(run, request))
            if eligible is not None:
                room = min(room, tail_length(run.keys, eligible))
            return room

        return self._forest.select(n, self.clock, self.half_life, limit)


def _own_length(run: Run, request: OpenRequest) -> int:
    """Return how many of ``run``'s leading blocks are on the request's own chain."""
    if run.windowed:
        return int(run.keys[0] in request.windows.get(run.group, ()))
    chain = request.chains.get(run.group)
    return 0 if chain is None else shared_length(run.keys, chain.keys, run.start)


def _quantise(value: float) -> float:
    return round(min(1.0, max(0.0, value)) * _SIGNAL_STEPS) / _SIGNAL_STEPS
