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
tick. Seconds matter only where a client spoke of them, and pass only in ``open``. Full-attention
groups form chains; blocks of ``window_groups`` (sliding window, Mamba) stand alone, parentless.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from evoke_core.config import EvokeConfig
from evoke_core.forest import NOTHING, tail_length
from evoke_core.histories import Histories, Reuse
from evoke_core.order import Reason, Step
from evoke_core.policies import POLICIES, Policy
from evoke_core.requests import Chain, OpenRequest, claims_of
from evoke_core.runs import Run, shared_length
from evoke_core.tags import UNTAGGED, RequestTags

MAX_OPEN_REQUESTS = 65_536
"""Beyond it the oldest open request is closed: an adapter that never closes must not leak."""

CAPACITY = "capacity"
"""The reason of evictions that make room; only these are remembered as ghosts."""

_SIGNAL_STEPS = 64


@frozen
class Evicted:
    """Blocks that left together, in the order in which they went (deepest first).

    ``reused``: a request touched them again after they were stored.
    """

    keys: list[bytes]
    last: int
    role: str | None
    group: int
    reason: Reason
    reused: bool


@frozen
class Admission:
    """What :meth:`RetentionIndex.admit` decided."""

    added: list[bytes]
    refused: list[bytes]
    evicted: list[Evicted]


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
    session: str | None
    holding: bool
    expired: bool
    pinned: bool
    held: int
    leaf: bool


class RetentionIndex:
    """Knows the blocks and their order. See the module's docstring for what it guarantees.

    Args:
        config: the operator's settings.
        policy: the ranking; by default the one that ``config.policy`` names.
        window_groups: groups whose blocks have no parent.
        capacity: slots of the pool, where somebody knows; shares of it (pins, sessions) are else
            taken of the largest number of blocks that was ever resident.
    """

    def __init__(
        self,
        config: EvokeConfig | None = None,
        *,
        policy: Policy | None = None,
        window_groups: Iterable[int] = (),
        capacity: int | None = None,
    ) -> None:
        self.config = EvokeConfig() if config is None else config
        self.times_ignored = 0
        self._window_groups = frozenset(window_groups)
        self._policy = policy or POLICIES[self.config.policy](self.config)
        self._histories = Histories(self.config, self._policy, self._window_groups, capacity)
        self._forest = self._histories.forest
        self._runs = self._forest.runs
        self._named = 0
        self._ever_full = False
        self._requests: dict[str, OpenRequest] = {}

    # --- requests ---

    def open(self, request_id: str, tags: RequestTags = UNTAGGED, now: float | None = None) -> None:
        """Begin a request: the clock ticks. ``now`` is the time in seconds, stamped once.

        Without it, tags that speak of seconds are ignored, and counted in ``times_ignored``.
        """
        self.close(request_id)
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            self.close(next(iter(self._requests)))
        self._histories.tick(now)
        if now is None:
            self.times_ignored += len(tags.in_seconds)
        per_second = self._histories.pace.per_second
        whole, claims = claims_of(tags, self.config.source_floors, now, per_second)
        self._requests[request_id] = OpenRequest(request_id, self.clock, tags, whole, claims)
        rescored = self._policy.advance(self.clock, self._histories.peak)
        self._forest.advance(self.clock, rescored=rescored)

    def close(self, request_id: str) -> None:
        """End a request. Its blocks stay; its own bookkeeping is released.

        If it was its session's last, what only that session used is the first to go from now on.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._histories.closed(request)

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
        self._named += len(fresh)
        self._advance(request, chain, start + len(keys))
        return fresh

    def insert(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> list[bytes]:
        """Note that ``keys`` are resident now; return those that were not before.

        The engine owns the slots, so anything is accepted, a block whose parent is missing too.
        """
        self.touch(request_id, keys, group=group, start=start)
        request = self._requests.get(request_id)
        if request is None:
            return []
        missing = self._missing(request, keys, group, start)
        return self._file(request, self._histories.draft(request, group, missing), hold=False)

    def admit(
        self, request_id: str, keys: Sequence[bytes], room: int, *, group: int = 0, start: int = 0
    ) -> Admission:
        """Make those of ``keys`` resident, and held, that deserve it; ``room`` blocks are free.

        Where room is short, the lowest-ranked leaves go. Under a policy that admits, the new blocks
        compete; under any other they are refused only when nothing is left to evict. Refusals come
        from the tail of the chain, and the request's own chain stays. The request must have touched
        ``keys`` before: what it never named is neither added nor refused.
        """
        request = self._requests.get(request_id)
        if request is None or request.tags.no_store:
            return Admission([], [key for key in keys if key not in self._runs], [])
        missing = self._missing(request, keys, group, start)
        shortage = sum(len(stretch) for _, stretch in missing) - room
        if self._policy.admits:
            if shortage > 0:
                self._note_overflow()
            drafts = self._histories.draft(request, group, missing)
            refused, evicted = self._compete(drafts, shortage, request_id)
        else:
            session = request.tags.session
            incoming = {session: sum(len(stretch) for _, stretch in missing)} if session else {}
            evicted = self._make_room(shortage, request_id, incoming)
            shortage -= sum(len(batch.keys) for batch in evicted)
            refused = _cut(missing, shortage)
            drafts = self._histories.draft(request, group, missing)
        return Admission(self._file(request, drafts, hold=True), refused, evicted)

    def drop(self, key: bytes, reason: str = "engine") -> bool:
        """Note that a block is gone, whatever it was; False if it was not resident.

        Blocks behind it stay as orphans until they go or their parent returns. Only
        ``reason="capacity"`` leaves a memory of the block's reuse.
        """
        if key not in self._runs:
            return False
        if reason == CAPACITY:
            self._note_overflow()
        run = self._forest.remove(key)
        if reason == CAPACITY:
            self._histories.remember([key], run)
        else:
            self._policy.forget(run, 1)
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
        self._histories.clear()
        self._policy.clear()
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
        for run, count, _ in plan:
            stop = left.get(run, len(run.keys))
            keys.extend(reversed(run.keys[stop - count : stop]))
            left[run] = stop - count
        return keys

    def evict(self, n: int, *, protect: str | None = None) -> list[Evicted]:
        """Drop up to ``n`` blocks, in the order of :meth:`candidates`, and remember their reuse."""
        return self._make_room(n, protect, NOTHING)

    # --- views ---

    def __contains__(self, key: object) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def clock(self) -> int:
        """The number of requests opened so far."""
        return self._histories.clock

    @property
    def half_life(self) -> float:
        """The half-life in force, in requests."""
        return self._histories.half_life.value

    @property
    def ghosts(self) -> int:
        """How many evicted blocks are remembered."""
        return len(self._histories.ghosts)

    @property
    def held(self) -> int:
        """How many blocks are held."""
        return len(self._forest.holds)

    @property
    def pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._forest.pins)

    @property
    def expired(self) -> int:
        """How many resident blocks are the first to go, because their time or session is over."""
        return self._forest.expired

    @property
    def orphans(self) -> int:
        """How many stretches of blocks wait for a parent that is missing."""
        return self._forest.orphans

    @property
    def now(self) -> float:
        """The latest time handed in, in seconds; minus infinity before that."""
        return self._histories.now

    def beliefs(self) -> Mapping[str, float]:
        """Return a few figures that sum up what the policy has learned, by name."""
        return self._policy.beliefs()

    def drain_reuses(self) -> list[Reuse]:
        """Return the uses of resident blocks since the last call, at most the latest few."""
        found = list(self._histories.reuses)
        self._histories.reuses.clear()
        return found

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
            session=run.terms.owner,
            holding=run.holding,
            expired=run.expired,
            pinned=run.pinned,
            held=self._forest.holds.get(key, 0),
            leaf=run.children == 0 and offset + 1 == len(run.keys),
        )

    def tags(self, request_id: str) -> RequestTags | None:
        """Return the tags of an open request."""
        request = self._requests.get(request_id)
        return None if request is None else request.tags

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
            if len(request.claims) > 1:
                limit = int(min(limit, request.claim(at).end))
            same = min(shared_length(run.keys, chain.keys, at), limit - at)
            if same < len(run.keys):
                self._forest.split(run, same)
                run = self._runs[chain.keys[at]]
            self._histories.count(run, request)
            chain.mark(at, at + same)
        if request.tags.pinned:
            self._histories.trim_pins()

    # --- insertion ---

    def _missing(
        self, request: OpenRequest, keys: Sequence[bytes], group: int, start: int
    ) -> list[tuple[int, list[bytes]]]:
        """Return the stretches of ``keys`` that are not resident, each with its position.

        A stretch of a window group is a single block.
        """
        if group in self._window_groups:
            first: dict[bytes, int] = {}
            for position, key in enumerate(keys, start):
                first.setdefault(key, position)
            return [(first[key], [key]) for key in first if key not in self._runs]
        missing: list[tuple[int, list[bytes]]] = []
        taken: set[bytes] = set()
        chain = request.chain(group).keys
        position = start
        end = min(start + len(keys), len(chain))
        while position < end:
            if chain[position] in self._runs:
                run = self._forest.at(chain[position], position)
                position += 1
                if run is not None:  # the run may branch off this chain before it ends
                    position = max(position, run.start + shared_length(run.keys, chain, run.start))
                continue
            stretch = chain[position:end]
            if not self._runs.keys().isdisjoint(stretch):
                stretch = stretch[: next(i for i, key in enumerate(stretch) if key in self._runs)]
            taken.update(stretch)
            if len(taken) < sum(len(part) for _, part in missing) + len(stretch):
                break  # a key twice: this is no chain, and nothing more is promised
            missing.append((position, stretch))
            position += len(stretch)
        return missing

    def _compete(
        self, drafts: list[Run], shortage: int, request_id: str
    ) -> tuple[list[bytes], list[Evicted]]:
        """Let new runs and resident leaves compete; shorten the drafts that lose."""
        refused: list[bytes] = []
        evicted: list[Evicted] = []
        if shortage <= 0:
            return refused, evicted
        drafted = set(drafts)

        def refuse(draft: Run, count: int) -> None:
            losing = draft.keys[-count:]
            del draft.keys[-count:]
            losing.reverse()
            self._histories.remember(losing, draft)
            refused.extend(losing)

        incoming: dict[str, int] = {}
        for draft in drafts:
            if draft.terms.owner is not None:
                incoming[draft.terms.owner] = incoming.get(draft.terms.owner, 0) + len(draft.keys)
        for run, count, reason in self._select(shortage, request_id, None, drafts, incoming):
            shortage -= count
            if run in drafted:
                refuse(run, count)
            else:
                evicted.append(self._evict(run, count, reason))
        self._forest.restore()
        for draft in reversed(drafts):  # pinned ones, if nothing else can go
            if shortage > 0 and draft.keys:
                count = min(shortage, len(draft.keys))
                shortage -= count
                refuse(draft, count)
        refused.reverse()
        return refused, evicted

    def _note_overflow(self) -> None:
        """Room is about to be made: a turnover may be complete, and the first time the policy
        learns how large the pool is."""
        if not self._ever_full:
            self._ever_full = True
            self._policy.begin(self._histories.peak, self._named / max(1, self.clock))
            self._forest.advance(self.clock, rescored=True)
        self._histories.half_life.note_eviction(len(self._runs), self.clock)

    def _make_room(self, n: int, protect: str | None, incoming: Mapping[str, int]) -> list[Evicted]:
        if n <= 0:
            return []
        self._note_overflow()
        evicted = [self._evict(*step) for step in self._select(n, protect, None, (), incoming)]
        self._forest.restore()
        return evicted

    def _evict(self, run: Run, count: int, reason: Reason) -> Evicted:
        last, role, group, reused = run.last, run.role, run.group, run.reused
        keys = self._forest.remove_tail(run, count)
        self._histories.remember(keys, run)
        return Evicted(keys, last, role, group, reason, reused)

    def _file(self, request: OpenRequest, drafts: list[Run], *, hold: bool) -> list[bytes]:
        """Make what is left of the drafts resident; return the keys."""
        added: list[bytes] = []
        for run in drafts:
            if not run.keys:
                continue
            added += run.keys
            if run.pinned:
                self._forest.pin(run, request.tick)
            self._forest.add(run, hold=hold)
        self._histories.note_inserted(len(added))
        if added and not drafts[0].windowed:  # a closed gap may have made more of the chain count
            chain = request.chain(drafts[0].group)
            self._advance(request, chain, drafts[-1].start + len(drafts[-1].keys))
        if request.tags.pinned:
            self._histories.trim_pins()
        return added

    # --- window groups and victims ---

    def _touch_windows(
        self, request: OpenRequest, keys: Sequence[bytes], group: int
    ) -> list[bytes]:
        seen = request.windows.setdefault(group, {})
        fresh = [key for key in keys if key not in seen]
        seen.update(dict.fromkeys(fresh, False))
        for key in keys:
            if not seen[key] and (run := self._runs.get(key)) is not None:
                self._histories.count(run, request)
                seen[key] = True
        if request.tags.pinned:
            self._histories.trim_pins()
        return fresh

    def _select(
        self,
        n: int,
        protect: str | None,
        eligible: Callable[[bytes], bool] | None,
        drafts: Sequence[Run] = (),
        incoming: Mapping[str, int] = NOTHING,
    ) -> list[Step]:
        request = self._requests.get(protect) if protect is not None else None

        def limit(run: Run, room: int) -> int:
            if request is not None:
                room = min(room, len(run.keys) - _own_length(run, request))
            if eligible is not None:
                room = min(room, tail_length(run.keys, eligible))
            return room

        fraction = self.config.max_session_fraction
        share = None if fraction >= 1.0 else int(fraction * self._histories.slots)
        return self._forest.select(n, self.half_life, limit, drafts, share, incoming)


def _cut(missing: list[tuple[int, list[bytes]]], n: int) -> list[bytes]:
    """Take the last ``n`` blocks out of the stretches; return them, head first."""
    refused: list[bytes] = []
    while n > 0 and missing:
        start, keys = missing.pop()
        kept = max(0, len(keys) - n)
        refused = keys[kept:] + refused
        n -= len(keys) - kept
        if kept:
            missing.append((start, keys[:kept]))
    return refused


def _own_length(run: Run, request: OpenRequest) -> int:
    """Return how many of ``run``'s leading blocks are on the request's own chain."""
    if run.windowed:
        return int(run.keys[0] in request.windows.get(run.group, ()))
    chain = request.chains.get(run.group)
    return 0 if chain is None else shared_length(run.keys, chain.keys, run.start)


def _quantise(value: float) -> float:
    return round(min(1.0, max(0.0, value)) * _SIGNAL_STEPS) / _SIGNAL_STEPS
