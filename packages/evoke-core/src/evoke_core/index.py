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

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from attrs import evolve, frozen

from evoke_core.config import EvokeConfig
from evoke_core.forest import NOTHING, Forest, tail_length
from evoke_core.ghosts import GhostMemory
from evoke_core.half_life import HalfLife
from evoke_core.history import History, Past
from evoke_core.order import Reason, Step
from evoke_core.pace import Pace
from evoke_core.policies import POLICIES, Policy
from evoke_core.promises import due_in
from evoke_core.requests import Chain, OpenRequest, claims_of
from evoke_core.runs import MAX_REUSE, Run, shared_length
from evoke_core.tags import UNTAGGED, RequestTags
from evoke_core.terms import NO_TERMS

MAX_OPEN_REQUESTS = 65_536
"""Beyond it the oldest open request is closed: an adapter that never closes must not leak."""

CAPACITY = "capacity"
"""The reason of evictions that make room; only these are remembered as ghosts."""

MAX_REUSES = 4_096
"""Uses of resident blocks kept for a reader; older ones are dropped when nobody drains them."""

Reuse = tuple[int, int, str | None]
"""Requests since the blocks' last touch, how many blocks, their source role until then."""

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
        self.clock = 0
        self._policy = policy or POLICIES[self.config.policy](self.config)
        self._forest = Forest(self._policy)
        self._runs = self._forest.runs
        self._window_groups = frozenset(window_groups)
        self._half_life = HalfLife.of(self.config.recency_half_life)
        self._ghosts = GhostMemory(self._forget_ghosts)
        self._capacity = capacity
        self._pace = Pace()
        self._reuses: deque[Reuse] = deque(maxlen=MAX_REUSES)
        self.times_ignored = 0
        self._peak = 0
        self._named = 0
        self._ever_full = False
        self._requests: dict[str, OpenRequest] = {}
        self._open_ticks: set[int] = set()

    # --- requests ---

    def open(self, request_id: str, tags: RequestTags = UNTAGGED, now: float | None = None) -> None:
        """Begin a request: the clock ticks. ``now`` is the time in seconds, stamped once.

        Without it, tags that speak of seconds are ignored, and counted in ``times_ignored``.
        """
        self.close(request_id)
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            self.close(next(iter(self._requests)))
        self.clock += 1
        if now is not None:
            self._pace.arrived(now)
            for run in self._forest.due(self._pace.now):
                self._forest.rerank(run, partial(self._pass_deadline, run))
        else:
            self.times_ignored += len(tags.in_seconds)
        whole, claims = claims_of(tags, self.config.source_floors, now, self._pace.per_second)
        self._requests[request_id] = OpenRequest(request_id, self.clock, tags, whole, claims)
        self._open_ticks.add(self.clock)
        rescored = self._policy.advance(self.clock, self._peak)
        self._forest.advance(self.clock, rescored=rescored)

    def close(self, request_id: str) -> None:
        """End a request. Its blocks stay; its own bookkeeping is released.

        If it was its session's last, what only that session used is the first to go from now on.
        """
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._open_ticks.discard(request.tick)
            if request.tags.end_of_session and request.tags.session is not None:
                for run in list(self._forest.sessions.runs(request.tags.session)):
                    self._forest.rerank(run, partial(self._expire, run))

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
        return self._file(request, self._draft(request, group, missing), hold=False)

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
            drafts = self._draft(request, group, missing)
            refused, evicted = self._compete(drafts, shortage, request_id)
        else:
            session = request.tags.session
            incoming = {session: sum(len(stretch) for _, stretch in missing)} if session else {}
            evicted = self._make_room(shortage, request_id, incoming)
            shortage -= sum(len(batch.keys) for batch in evicted)
            refused = _cut(missing, shortage)
            drafts = self._draft(request, group, missing)
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
            self._remember([key], run)
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
        self._forest.clear()
        self._ghosts.clear()
        self._policy.clear()
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
        return self._pace.now

    def beliefs(self) -> Mapping[str, float]:
        """Return a few figures that sum up what the policy has learned, by name."""
        return self._policy.beliefs()

    def drain_reuses(self) -> list[Reuse]:
        """Return the uses of resident blocks since the last call, at most the latest few."""
        found = list(self._reuses)
        self._reuses.clear()
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

    # --- history, run by run ---

    def _remember(self, keys: list[bytes], history: History) -> None:
        limit = int(self.config.ghost_factor * self._peak) + self._policy.ghosts_at_least
        self._ghosts.remember(keys, Past.of(history), limit)

    def _note_overflow(self) -> None:
        """Room is about to be made: a turnover may be complete, and the first time the policy
        learns how large the pool is."""
        if not self._ever_full:
            self._ever_full = True
            self._policy.begin(self._peak, self._named / max(1, self.clock))
            self._forest.advance(self.clock, rescored=True)
        self._half_life.note_eviction(len(self._runs), self.clock)

    def _count(self, run: Run, request: OpenRequest) -> None:
        """Add ``request`` to the history of all of ``run``."""

        claim = request.whole if run.windowed else request.claim(run.start)
        blocks = len(run.keys)

        def change() -> None:
            if run.owed:  # by the first use in time; the next promise may be this request's
                self._policy.settled(run, blocks, True)
            run.owed = self.now < claim.terms.holds_until >= run.terms.holds_until
            self._reuses.append((max(0, request.tick - run.last), blocks, run.role))
            run.gap = self._policy.used(run, request.tick, blocks)
            run.last = max(run.last, request.tick)
            run.reuse = min(run.reuse + 1, MAX_REUSE)
            run.reused = True
            if claim.floor >= run.floor or self._lapsed(run.floor_tick):
                run.floor, run.floor_tick, run.role = claim.floor, request.tick, claim.role
            if claim.priority >= run.priority or self._lapsed(run.priority_tick):
                run.priority, run.priority_tick = claim.priority, request.tick
            if run.terms is not NO_TERMS or claim.terms is not NO_TERMS:
                run.terms = run.terms.joined(claim.terms)
                self._judge(run)
            if request.tags.pinned and not run.expired:
                run.pinned = True
                self._forest.pin(run, request.tick)
            self._policy.entered(run, blocks)

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
            if len(request.claims) > 1:
                limit = int(min(limit, request.claim(at).end))
            same = min(shared_length(run.keys, chain.keys, at), limit - at)
            if same < len(run.keys):
                self._forest.split(run, same)
                run = self._runs[chain.keys[at]]
            self._count(run, request)
            chain.mark(at, at + same)
        if request.tags.pinned:
            self._trim_pins()

    def _lapsed(self, tick: int) -> bool:
        """Say whether the claim of the request with this tick is neither open nor recent."""
        return tick not in self._open_ticks and self.clock - tick > self._half_life.value

    # --- what clients declared ---

    def _judge(self, run: Run) -> None:
        """Say where a run stands by its terms."""
        run.holding = self.now < run.terms.holds_until
        run.due_in = due_in(run.terms, self.now) if run.holding else 0
        run.expired = self.now >= run.terms.expires
        if run.expired:
            self._expire(run)

    def _expire(self, run: Run) -> None:
        run.expired = True
        if run.pinned:
            run.pinned = False
            self._forest.pins.discard(run.keys)

    def _pass_deadline(self, run: Run) -> None:
        if self.now >= run.terms.holds_until:
            if run.owed:
                self._policy.settled(run, len(run.keys), False)
            run.holding = run.owed = False
            run.due_in = 0
        elif run.holding:
            run.due_in = due_in(run.terms, self.now)
        if self.now >= run.terms.expires:
            self._expire(run)

    @property
    def _slots(self) -> int:
        return self._peak if self._capacity is None else self._capacity

    @property
    def _pin_limit(self) -> int:
        return int(self.config.max_pinned_fraction * self._slots)

    def _trim_pins(self) -> None:
        """Let the oldest pins go that are beyond the limit."""
        dropped = self._forest.pins.surplus(self._pin_limit)
        at = 0
        while at < len(dropped):  # deepest first: mostly the end of a run, block after block
            run = self._forest.end_with(dropped[at])
            n = 1
            most = min(len(run.keys), len(dropped) - at)
            while n < most and run.keys[-n - 1] == dropped[at + n]:
                n += 1
            if n < len(run.keys):
                run = self._forest.split(run, len(run.keys) - n)
            self._forest.rerank(run, partial(setattr, run, "pinned", False))
            at += n

    def _forget_ghosts(self, past: Past, blocks: int) -> None:
        if past.owed and self.now >= past.terms.holds_until:
            self._policy.settled(past, blocks, False)
        self._policy.forget(past, blocks)

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

    def _draft(
        self, request: OpenRequest, group: int, missing: list[tuple[int, list[bytes]]]
    ) -> list[Run]:
        """Return runs for missing stretches, this request in their history, not filed yet.

        One run for each part that was evicted together, or never was resident.
        """
        drafts = []
        chain = request.chain(group)
        ends = {claim.end for claim in request.claims} if len(request.claims) > 1 else ()
        pins = 0  # so many more blocks arrive pinned
        if request.tags.pinned:
            pins = max(0, self._pin_limit - self._forest.pins.of(request.tick))
        for start, keys in missing:
            pasts = self._ghosts.recall(keys)
            counted = self._counted(request, group, start, keys)
            waiting = self._forest.has_orphans
            edges = [
                at
                for at in range(1, len(keys))
                if pasts[at] is not pasts[at - 1]
                or counted[at] != counted[at - 1]
                or (waiting and self._forest.awaited(keys[at - 1]))
                or start + at in ends
                or at == pins
            ]
            for begin, end in pairwise([0, *edges, len(keys)]):
                run = self._new_run(request, keys[begin:end], group, start + begin)
                run.pinned = end <= pins
                self._inherit(run, pasts[begin], counted[begin])
                drafts.append(run)
            pins -= min(pins, len(keys))
            # Counted even if they are refused: offering a block again is no second use.
            if group in request.windows:
                request.windows[group].update(dict.fromkeys(keys, True))
            else:
                chain.mark(start, start + len(keys))
        return drafts

    @staticmethod
    def _counted(request: OpenRequest, group: int, start: int, keys: list[bytes]) -> Sequence[bool]:
        """Say of each block whether it has the request in its history already."""
        if group in request.windows:
            return [request.windows[group][key] for key in keys]
        chain = request.chain(group)
        if chain.counted <= start and not chain.ahead:
            return [False] * len(keys)
        return [chain.has_counted(position) for position in range(start, start + len(keys))]

    def _new_run(self, request: OpenRequest, keys: list[bytes], group: int, start: int) -> Run:
        windowed = group in self._window_groups
        claim = request.whole if windowed else request.claim(start)
        return Run(
            keys=keys,
            group=group,
            start=start,
            parent_key=None if windowed or start == 0 else request.chain(group).keys[start - 1],
            last=request.tick,
            reuse=1,
            floor=claim.floor,
            floor_tick=request.tick,
            role=claim.role,
            priority=claim.priority,
            priority_tick=request.tick,
            serial=self._forest.next_serial(),
            windowed=windowed,
            terms=claim.terms,
        )

    def _inherit(self, run: Run, past: Past | None, counted: bool) -> None:
        """Give a new run the history that is remembered of its blocks."""
        if past is not None and run.terms.owner not in (None, past.terms.owner):
            run.terms = evolve(run.terms, owner=None)
        if past is not None and past.owed and not counted:
            kept = self.now < past.terms.holds_until
            self._policy.settled(past, len(run.keys), kept)
        if past is not None and counted:
            self._policy.forget(past, len(run.keys))  # the same use, filed under a new tick
            run.reuse, run.gap = past.reuse, past.gap
        elif past is not None:
            run.gap = self._policy.used(past, run.last, len(run.keys))
            run.reuse = min(past.reuse + 1, MAX_REUSE)
        if run.terms is not NO_TERMS:
            self._judge(run)
            run.owed = run.holding
        self._policy.entered(run, len(run.keys))

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
            self._remember(losing, draft)
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
        self._remember(keys, run)
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
        self._half_life.note_inserted(len(added))
        self._peak = max(self._peak, len(self._runs))
        if added and not drafts[0].windowed:  # a closed gap may have made more of the chain count
            chain = request.chain(drafts[0].group)
            self._advance(request, chain, drafts[-1].start + len(drafts[-1].keys))
        if request.tags.pinned:
            self._trim_pins()
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
                self._count(run, request)
                seen[key] = True
        if request.tags.pinned:
            self._trim_pins()
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
        share = None if fraction >= 1.0 else int(fraction * self._slots)
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
