# SPDX-License-Identifier: Apache-2.0
"""A second, deliberately naive implementation of EVOKE's retention rules.

The package under test keeps runs, heaps and counters so that its cost does not grow with the
pool. This file keeps one plain record per block and, whenever a victim is wanted, looks at every
block. It is meant to be checked by reading, so it prefers the wording of the rules to speed:

* `ReferenceIndex`: chains, claims, reuse, ghosts, half-life, what requests asked for (pins, times,
  sessions), and the order of eviction.
* `ReferenceLedger`: slots, transfers, holds and admission on top of it.

Both have the public methods of `evoke_core.RetentionIndex` and `evoke_core.BlockLedger`, so a
test can drive an implementation and its reference with the same calls. The reference never
imports the package under test; the one thing it may be handed is a `Learner`, which turns the
history of one block into a number and is told of every block on its own.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

REUSE_CAP = 53  # 1 - 2**-53 is the last value below one
UNKNOWN = b""  # fills a chain where a request has not said what stands there
HALF_LIFE_START, HALF_LIFE_MIN, HALF_LIFE_MAX = 64, 16, 65_536
SIGNAL_STEPS = 64
PINNED_PRIORITY = 4.0  # a pin that is no more leaves at least this
SLACK = 1.25  # a promised return may be this much later than promised
EXPIRED, OVER_SHARE, ORDINARY = range(3)  # who goes first
REASONS = ("expired", "session share", "capacity")


@dataclass(frozen=True)
class Rules:
    """The knobs of the score, in the units of the configuration."""

    policy: str = "scored"
    w_recency: float = 0.5
    w_reuse: float = 0.5
    w_attention: float = 0.0
    w_coherence: float = 0.0
    half_life: float | None = None  # None: follow the pool's turnover
    floors: tuple[tuple[str, float], ...] = (("system", 0.6), ("user", 0.6), ("assistant", 0.5))
    ghost_factor: int = 4
    window_groups: frozenset[int] = frozenset()
    max_pinned_fraction: float = 0.25
    max_session_fraction: float = 1.0  # 1: sessions are not looked at

    def floor_of(self, role: str | None) -> float:
        return dict(self.floors).get(role or "", 0.0)


class SpanTags(Protocol):
    """What a request says of its blocks from `start` to `end`; None: as of all its blocks."""

    start: int
    end: int
    source_type: str | None
    priority: float | None
    ttl_s: float | None


class Tags(Protocol):
    """What the reference needs to know of a request's tags, already clamped and quantised."""

    source_type: str | None
    priority: float
    session: str | None
    spans: Sequence[Any]
    pinned: bool
    ttl_s: float | None
    expect_reuse_in_s: float | None
    end_of_session: bool
    no_store: bool


class Terms(NamedTuple):
    """What requests declared of a block, as far as a learner asks."""

    promise: float = 0.0  # requests within which a return was promised
    holds_until: float = -math.inf
    due: float = math.inf  # when the return was promised; infinity where only until when
    pace: float = 1.0  # requests per second when it was promised

    def left(self, now: float) -> int:
        """How far the promised return is away: 0 for 2 requests at most, 1 for 4, 2 for 8, ..."""
        requests = min(self.promise, (self.due - now) * self.pace)
        return next((n for n in range(13) if requests <= 2 ** (n + 1)), 13)


NO_TERMS = Terms()


class Said(NamedTuple):
    """What a request says of one block, with the times as points in time."""

    role: str | None
    priority: float
    expires: float
    terms: Terms


class History(NamedTuple):
    """All that a learner knows of a block, resident or remembered."""

    reuse: int
    last: int
    gap: int  # requests between the last two touches
    role: str | None
    priority: float
    terms: Terms
    holding: bool
    owed: bool  # the promise in `terms` is neither kept nor broken yet
    due_in: int


class Learner(Protocol):
    """The policy's learning side; the reference hands it blocks one by one."""

    ghosts_at_least: int

    def class_key(self, run: Any, clock: int) -> Any: ...
    def score(self, key: Any, age: int, half_life: float) -> float: ...
    def begin(self, capacity: int, chain_length: float) -> None: ...
    def advance(self, clock: int, capacity: int) -> bool: ...
    def used(self, past: Any, tick: int, blocks: int) -> int: ...
    def entered(self, history: Any, blocks: int) -> None: ...
    def settled(self, past: Any, blocks: int, kept: bool) -> None: ...
    def forget(self, past: Any, blocks: int) -> None: ...
    def clear(self) -> None: ...


@dataclass
class Claim:
    """A value that a request lent to a block, and when that request was opened."""

    value: float
    tick: int


@dataclass
class Block:
    key: bytes
    group: int
    position: int
    parent: bytes | None
    serial: int  # order of insertion
    last: int
    reuse: int
    floor: Claim
    priority: Claim
    role: str | None
    attention: float = 0.0
    coherence: float = 0.0
    holds: int = 0
    gap: int = 0
    owner: str | None = None  # the session that all who touched the block named
    expires: float = math.inf
    expired: bool = False
    terms: Terms = NO_TERMS
    holding: bool = False
    owed: bool = False
    due_in: int = 0
    pin: int = 0  # tick of the youngest request that pinned it; 0: not pinned
    reused: bool = False  # counted again since it became resident

    @property
    def history(self) -> History:
        return History(
            self.reuse,
            self.last,
            self.gap,
            self.role,
            self.priority.value,
            self.terms,
            self.holding,
            self.owed,
            self.due_in,
        )


class View(NamedTuple):
    """All that can be seen of a resident block."""

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


@dataclass
class Ghost:
    history: History
    serial: int  # which entry of the FIFO speaks for it
    owner: str | None


class Batch(NamedTuple):
    """Blocks evicted together, and why; here always one."""

    keys: list[bytes]
    last: int
    role: str | None
    group: int
    reason: str
    reused: bool


@dataclass
class Request:
    """An open request, and per group what it named and what it has been counted for."""

    tick: int
    tags: Tags
    now: float | None
    pace: float  # requests per second when it was opened
    chains: dict[int, list[bytes]] = field(default_factory=dict)  # head first
    named: set[tuple[int, bytes]] = field(default_factory=set)
    counted: set[bytes] = field(default_factory=set)


class ReferenceIndex:
    """What is resident, how it ranks, what is remembered. No slots, no capacity.

    With a `learner`, policy "adaptive": the learner gives the scores, is told of every block that
    is used, enters or is forgotten, and new blocks compete for their places (`compete`).
    """

    def __init__(
        self, rules: Rules, learner: Learner | None = None, capacity: int | None = None
    ) -> None:
        self.rules = rules
        self.learner = learner
        self.capacity = capacity
        self.clock = 0
        self.now = -math.inf
        self._arrivals = self._seconds = 0.0  # what the pace is made of
        self.half_life = HALF_LIFE_START if rules.half_life is None else rules.half_life
        self.blocks: dict[bytes, Block] = {}
        self.requests: dict[str, Request] = {}
        self.ghosts: dict[bytes, Ghost] = {}
        self._ghost_fifo: deque[tuple[bytes, int]] = deque()
        self._reuses: list[tuple[int, int, str | None]] = []
        self._most_resident = 0
        self._ever_full = False
        self._named = 0
        self._serial = 0
        self._mark = 0
        self._inserted_since_mark = 0

    # --- requests -----------------------------------------------------------------------------

    def open(self, request_id: str, tags: Tags, now: float | None = None) -> None:
        """Time moves here and nowhere else, and whose time has come is expired."""
        self.close(request_id)
        self.clock += 1
        if now is not None:
            self._measure_pace(now - self.now)
            self.now = max(self.now, now)
        for block in self.blocks.values():
            self._judge(block)
        self.requests[request_id] = Request(self.clock, tags, now, self.pace())
        if self.learner is not None:
            self.learner.advance(self.clock, self._most_resident)

    def close(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is None or not request.tags.end_of_session or request.tags.session is None:
            return
        for block in self.blocks.values():
            if block.owner == request.tags.session:
                self._expire(block)

    @staticmethod
    def _expire(block: Block) -> None:
        block.expired, block.pin = True, 0

    def _judge(self, block: Block) -> None:
        """Where does the block stand by now? A promise that was not kept is broken."""
        if self.now >= block.expires:
            self._expire(block)
        block.holding = self.now < block.terms.holds_until
        block.due_in = block.terms.left(self.now) if block.holding else 0
        if block.owed and not block.holding:
            self._settle(block.history, kept=False)
            block.owed = False

    def _settle(self, history: History, *, kept: bool) -> None:
        if history.owed and self.learner is not None:
            self.learner.settled(history, 1, kept)

    def _measure_pace(self, passed: float) -> None:
        """Requests and seconds count less the longer ago: 1/e after 256 requests."""
        if math.isinf(passed):
            return  # the first request that had a time
        self._arrivals = self._arrivals * math.exp(-1.0 / 256) + 1.0
        self._seconds = self._seconds * math.exp(-1.0 / 256) + max(0.0, passed)

    def pace(self) -> float:
        return self._arrivals / self._seconds if self._seconds > 0 else 1.0

    def _says(self, request: Request, group: int, position: int) -> Said:
        """What a request says of its block at `position`; a window group's have no position."""
        tags = request.tags
        role, priority, ttl_s = tags.source_type, tags.priority, tags.ttl_s
        for span in tags.spans:
            if span.start <= position < span.end and group not in self.rules.window_groups:
                role = role if span.source_type is None else span.source_type
                priority = priority if span.priority is None else span.priority
                ttl_s = ttl_s if span.ttl_s is None else span.ttl_s
        if tags.pinned:
            priority = max(priority, PINNED_PRIORITY)
        expires, terms = math.inf, NO_TERMS
        if request.now is not None and ttl_s is not None:
            expires = request.now + ttl_s
        promises = []  # how long the block is to hold, what was promised, when it is due
        if request.now is not None and tags.expect_reuse_in_s is not None:
            back = tags.expect_reuse_in_s
            promises.append((SLACK * back, back, request.now + back))
        if request.now is not None and ttl_s is not None:
            promises.append((ttl_s, ttl_s, math.inf))
        if request.now is not None and promises:
            holds, promised, due = max(promises)
            terms = Terms(promised * request.pace, request.now + holds, due, request.pace)
        return Said(role, priority, expires, terms)

    def _is_open(self, tick: int) -> bool:
        return any(request.tick == tick for request in self.requests.values())

    # --- touches and insertions ---------------------------------------------------------------

    def touch(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> list[bytes]:
        """Count the request for its chain, from where counting stopped, as far as `keys` goes.

        Counting stops at a gap. Returns the keys that the request had not named before.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        windowed = group in self.rules.window_groups
        if windowed:
            walk = list(keys)
        else:
            chain = request.chains.setdefault(group, [])
            chain.extend([UNKNOWN] * (start - len(chain)))
            chain[start : start + len(keys)] = keys
            walk = chain[: start + len(keys)]
        fresh = [key for key in keys if (group, key) not in request.named]
        self._named += 0 if windowed else len(fresh)
        request.named |= {(group, key) for key in keys}
        for position, key in enumerate(walk):
            block = self.blocks.get(key)
            if key in request.counted:
                continue
            if block is not None:
                self._count(request, block, position)
            elif not windowed:
                break  # what lies behind a gap cannot be restored
        self._displace_pins()
        return fresh

    def _count(self, request: Request, block: Block, position: int) -> None:
        request.counted.add(block.key)
        said = self._says(request, block.group, position)
        self._settle(block.history, kept=True)
        block.owed = False
        self._reuses.append((max(0, request.tick - block.last), 1, block.role))
        if self.learner is not None:
            block.gap = self.learner.used(block.history, request.tick, 1)
        block.reuse = min(REUSE_CAP, block.reuse + 1)
        block.last = max(block.last, request.tick)
        floor = self.rules.floor_of(said.role)
        if self._takes_over(block.floor, floor):
            block.floor, block.role = Claim(floor, request.tick), said.role
        if self._takes_over(block.priority, said.priority):
            block.priority = Claim(said.priority, request.tick)
        block.owner = _owner_after(block.owner, request)
        block.expires = max(block.expires, said.expires)
        if said.terms.holds_until >= block.terms.holds_until:
            block.owed = self.now < said.terms.holds_until
        block.terms = max(block.terms, said.terms, key=lambda terms: terms.holds_until)
        block.expired = False
        block.reused = True
        if request.tags.pinned:
            block.pin = max(block.pin, request.tick)
        self._judge(block)
        if self.learner is not None:
            self.learner.entered(block.history, 1)

    def pins(self) -> list[Block]:
        """The pinned blocks, the oldest pin first, of one request's the deepest first."""
        pinned = [block for block in self.blocks.values() if block.pin]
        return sorted(pinned, key=lambda b: (b.pin, -self._depth(b), b.group, b.key))

    def pin_limit(self) -> int:
        return int(self.rules.max_pinned_fraction * self._size())

    def _size(self) -> int:
        return self._most_resident if self.capacity is None else self.capacity

    def pins_to_come(self, request: Request) -> int:
        """So many more blocks of a request arrive pinned, the first ones."""
        mine = sum(block.pin == request.tick for block in self.blocks.values())
        return max(0, self.pin_limit() - mine) if request.tags.pinned else 0

    def _displace_pins(self) -> None:
        pins = self.pins()
        for block in pins[: max(0, len(pins) - self.pin_limit())]:
            block.pin = 0

    def _takes_over(self, claim: Claim, value: float) -> bool:
        """The highest living claim stands; a claim dies a half-life after its request closed."""
        if value >= claim.value:
            return True
        return not self._is_open(claim.tick) and self.clock - claim.tick > self.half_life

    def insert(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> list[bytes]:
        self.touch(request_id, keys, group=group, start=start)
        request = self.requests.get(request_id)
        if request is None:
            return []
        inserted: list[bytes] = []
        parent = self.parent_in_chain(request, group, start)
        pins = self.pins_to_come(request)
        for position, key in enumerate(keys, start):
            if key not in self.blocks:
                pin = len(inserted) < pins
                self._file(self.draft(request, key, group, position, parent, pin=pin))
                inserted.append(key)
            parent = None if group in self.rules.window_groups else key
        self.touch(request_id, keys, group=group, start=start)  # a gap may be filled now
        return inserted

    def draft(
        self,
        request: Request,
        key: bytes,
        group: int,
        position: int,
        parent: bytes | None,
        *,
        pin: bool,
    ) -> Block:
        """A block with the history it would be resident with: this request on top of its ghost.

        The request counts for it now, even if the block is refused: offering it again is no reuse.
        """
        ghost = self.ghosts.pop(key, None)  # its place in the FIFO stays taken
        before = key in request.counted
        request.counted.add(key)
        remembered = 0 if ghost is None else ghost.history.reuse
        said = self._says(request, group, position)
        self._serial += 1
        block = Block(
            key=key,
            group=group,
            position=position,
            parent=parent,
            serial=self._serial,
            last=request.tick,
            reuse=max(1, min(REUSE_CAP, remembered + (not before))),
            floor=Claim(self.rules.floor_of(said.role), request.tick),
            priority=Claim(said.priority, request.tick),
            role=said.role,
            owner=request.tags.session if ghost is None else _owner_after(ghost.owner, request),
            expires=said.expires,
            terms=said.terms,
            owed=self.now < said.terms.holds_until,
            pin=request.tick if pin else 0,
        )
        if ghost is not None and not before:
            self._settle(ghost.history, kept=self.now < ghost.history.terms.holds_until)
        self._judge(block)
        if self.learner is not None:
            if ghost is not None and before:
                block.gap = ghost.history.gap
                self.learner.forget(ghost.history, 1)  # the same use, filed under a new tick
            elif ghost is not None:
                block.gap = self.learner.used(ghost.history, request.tick, 1)
            self.learner.entered(block.history, 1)
        return block

    def _file(self, block: Block) -> None:
        self.blocks[block.key] = block
        self._inserted_since_mark += 1
        self._most_resident = max(self._most_resident, len(self.blocks))

    def compete(
        self, request_id: str, drafts: list[Block], room: int
    ) -> tuple[list[bytes], list[Batch]]:
        """File the drafts that beat what would have to go for them: (filed, evicted).

        Drafts of a chain lose from its tail. Who loses is remembered, as if evicted. Pinned ones do
        not compete: they are refused, from the tail, if nothing else can go.
        """
        losers: list[tuple[bytes, str]] = []
        shortage = len(drafts) - room
        if shortage > 0:
            self._measure_turnover()
            losers = self._plan(shortage, protect=request_id, drafts=drafts)
            lost = {key for key, _ in losers}
            rest = [(draft.key, "") for draft in reversed(drafts) if draft.key not in lost]
            losers += rest[: shortage - len(losers)]
        winners = {draft.key: draft for draft in drafts}
        evicted = []
        for key, reason in losers:
            if key in winners:
                self._remember(winners.pop(key))
            else:
                evicted.append(self._evict(key, reason))
        for draft in winners.values():
            self._file(draft)
        return list(winners), evicted

    def _evict(self, key: bytes, reason: str) -> Batch:
        block = self.blocks.pop(key)
        self._remember(block)
        return Batch([key], block.last, block.role, block.group, reason, block.reused)

    def note_full(self) -> None:
        """Blocks must go for the first time: the learner hears of the pool's size."""
        if not self._ever_full and self.learner is not None:
            self.learner.begin(self._most_resident, self._named / max(1, self.clock))
        self._ever_full = True

    def parent_in_chain(self, request: Request, group: int, position: int) -> bytes | None:
        chain = request.chains.get(group, [])
        if group in self.rules.window_groups or not 0 < position <= len(chain):
            return None
        return chain[position - 1]

    # --- leaving ------------------------------------------------------------------------------

    def drop(self, key: bytes, reason: str = "engine") -> bool:
        block = self.blocks.get(key)
        if block is None:
            return False
        if reason == "capacity":
            self.note_full()
            self._measure_turnover()
            self._remember(block)
        elif self.learner is not None:
            self.learner.forget(block.history, 1)
        del self.blocks[key]
        return True

    def evict(self, n: int, *, protect: str | None = None, incoming: int = 0) -> list[Batch]:
        """Measure the turnover once, then drop the candidates and remember them.

        So many blocks of the request `protect` wait to come in for them.
        """
        if n <= 0:
            return []
        self.note_full()
        self._measure_turnover()
        plan = self._plan(n, protect=protect, incoming=incoming)
        return [self._evict(key, reason) for key, reason in plan]

    def _measure_turnover(self) -> None:
        if self._inserted_since_mark < len(self.blocks):
            return
        if self.rules.half_life is None:
            elapsed = self.clock - self._mark
            self.half_life = min(HALF_LIFE_MAX, max(HALF_LIFE_MIN, elapsed))
        self._mark, self._inserted_since_mark = self.clock, 0

    def _remember(self, block: Block) -> None:
        self._serial += 1
        self.ghosts[block.key] = Ghost(block.history, self._serial, block.owner)
        self._ghost_fifo.append((block.key, self._serial))
        while len(self._ghost_fifo) > self.ghost_limit(self._most_resident):
            key, serial = self._ghost_fifo.popleft()
            if key in self.ghosts and self.ghosts[key].serial == serial:
                past = self.ghosts.pop(key).history
                if self.now >= past.terms.holds_until:
                    self._settle(past, kept=False)
                if self.learner is not None:
                    self.learner.forget(past, 1)

    def ghost_limit(self, most_resident: int) -> int:
        at_least = 0 if self.learner is None else self.learner.ghosts_at_least
        return self.rules.ghost_factor * most_resident + at_least

    def clear(self) -> None:
        self.blocks.clear()
        self.ghosts.clear()
        self._ghost_fifo.clear()
        self._mark, self._inserted_since_mark = self.clock, 0
        if self.learner is not None:
            self.learner.clear()
        for request in self.requests.values():
            request.counted.clear()

    def hold(self, key: bytes) -> None:
        if key in self.blocks:
            self.blocks[key].holds += 1

    def unhold(self, key: bytes) -> None:
        if key in self.blocks and self.blocks[key].holds:
            self.blocks[key].holds -= 1

    def signal(
        self, key: bytes, attention: float | None = None, coherence: float | None = None
    ) -> bool:
        block = self.blocks.get(key)
        if block is None:
            return False
        if attention is not None:
            block.attention = _quantise_signal(attention)
        if coherence is not None:
            block.coherence = _quantise_signal(coherence)
        return True

    # --- order --------------------------------------------------------------------------------

    def score(self, block: Block) -> float:
        rules = self.rules
        if rules.policy == "lru":
            return float(block.last)
        if self.learner is not None:
            rank_class = self.learner.class_key(block.history, self.clock)
            return self.learner.score(rank_class, self.clock - block.last, self.half_life)
        age = 0 if block.holding else self.clock - block.last
        recency = 2.0 ** (-age / self.half_life)
        reuse = 1.0 - 2.0**-block.reuse
        signal = (
            rules.w_recency * recency
            + rules.w_reuse * reuse
            + rules.w_attention * block.attention
            + rules.w_coherence * block.coherence
        )
        floor = block.floor.value
        return block.priority.value * (floor + (1 - floor) * signal)

    def _owned(self, block: Block, request_id: str | None) -> bool:
        """Is the block part of this request's own chain?"""
        request = self.requests.get(request_id) if request_id is not None else None
        if request is None:
            return False
        if block.group in self.rules.window_groups:
            return (block.group, block.key) in request.named
        chain = request.chains.get(block.group, [])
        return block.position < len(chain) and chain[block.position] == block.key

    def _depth(self, block: Block) -> int:
        return 0 if block.group in self.rules.window_groups else block.position

    def _rank(self, block: Block, owned: "Counter[str | None]") -> tuple[float, ...]:
        """Lowest goes first. What an expired block was worth does not matter any more."""
        if block.expired:
            turn = EXPIRED
        elif block.owner is not None and owned[block.owner] > self.share():
            turn = OVER_SHARE
        else:
            turn = ORDINARY
        score = 0.0 if block.expired else self.score(block)
        return (turn, score, block.last, -self._depth(block), block.group, block.serial)

    def share(self) -> float:
        """How many blocks a session may own before its own go first."""
        fraction = self.rules.max_session_fraction
        return math.inf if fraction == 1.0 else int(fraction * self._size())

    def candidates(
        self,
        n: int,
        eligible: Callable[[bytes], bool] | None = None,
        *,
        protect: str | None = None,
    ) -> list[bytes]:
        return [key for key, _ in self._plan(n, eligible, protect=protect)]

    def _plan(
        self,
        n: int,
        eligible: Callable[[bytes], bool] | None = None,
        *,
        protect: str | None = None,
        drafts: Sequence[Block] = (),
        incoming: int = 0,
    ) -> list[tuple[bytes, str]]:
        """Take the lowest leaf out of a copy of the pool, n times; say why it was the lowest.

        Of `drafts`, new blocks of one offer, the deepest left is a leaf too; in a window group all.
        Pinned ones do not compete, nor does what they hang on.
        """
        left = dict(self.blocks)
        offered = list(drafts)
        request = self.requests.get(protect) if protect is not None else None
        to_come = [None if request is None else request.tags.session] * incoming
        chosen: list[tuple[bytes, str]] = []
        while len(chosen) < n:
            windowed = any(draft.group in self.rules.window_groups for draft in offered)
            competing = offered if windowed else offered[-1:]
            parents = {block.parent for block in left.values()}
            evictable = [
                block
                for block in left.values()
                if block.key not in parents
                and not block.holds
                and not block.pin
                and not self._owned(block, protect)
                and (eligible is None or eligible(block.key))
            ] + [draft for draft in competing if not draft.pin]
            if not evictable:
                break
            owned = Counter([b.owner for b in [*left.values(), *offered]] + to_come)
            ranked = {block.key: self._rank(block, owned) for block in evictable}
            victim = min(evictable, key=lambda block: ranked[block.key])
            if victim in offered:
                offered.remove(victim)
            else:
                del left[victim.key]
            chosen.append((victim.key, REASONS[int(ranked[victim.key][0])]))
        return chosen

    # --- looking ------------------------------------------------------------------------------

    @property
    def pinned(self) -> int:
        return len(self.pins())

    @property
    def expired(self) -> int:
        return sum(block.expired for block in self.blocks.values())

    @property
    def orphans(self) -> int:
        """Blocks that wait for a parent; what hangs on them waits too, and is not counted."""
        parents = [block.parent for block in self.blocks.values() if block.parent is not None]
        return sum(parent not in self.blocks for parent in parents)

    def drain_reuses(self) -> list[tuple[int, int, str | None]]:
        reuses, self._reuses = self._reuses, []
        return reuses

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def parent(self, key: bytes) -> bytes | None:
        block = self.blocks.get(key)
        return block.parent if block is not None and block.parent in self.blocks else None

    def is_leaf(self, key: bytes) -> bool:
        return all(block.parent != key for block in self.blocks.values())

    def describe(self, key: bytes) -> View | None:
        block = self.blocks.get(key)
        if block is None:
            return None
        return View(
            key=key,
            group=block.group,
            position=block.position,
            last=block.last,
            reuse=block.reuse,
            floor=block.floor.value,
            priority=block.priority.value,
            attention=block.attention,
            coherence=block.coherence,
            role=block.role,
            session=block.owner,
            holding=block.holding,
            expired=block.expired,
            pinned=bool(block.pin),
            held=block.holds,
            leaf=self.is_leaf(key),
        )


def _owner_after(owner: str | None, request: Request) -> str | None:
    """A block is a session's as long as nobody else, and nobody without one, has touched it."""
    return owner if owner == request.tags.session else None


def _quantise_signal(value: float) -> float:
    return round(min(1.0, max(0.0, value)) * SIGNAL_STEPS) / SIGNAL_STEPS


@dataclass
class Transfer:
    """Who is writing a pending block, and under which reservation."""

    request_id: str
    ticket: int


@dataclass(frozen=True)
class ReferenceReservation:
    keys: list[bytes]
    slots: list[int]
    evicted: list[bytes]
    ticket: int


class ReferenceLedger:
    """Slots, transfers, holds and admission over a `ReferenceIndex`."""

    def __init__(
        self,
        capacity: int,
        rules: Rules,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        learner: Learner | None = None,
    ) -> None:
        self.index = ReferenceIndex(rules, learner, capacity)
        self.capacity = capacity
        self.slots: dict[bytes, int] = {}
        self.pending: dict[bytes, Transfer] = {}
        self.loads: dict[tuple[str, bytes], int] = {}
        self._threshold = store_threshold
        self._max_tracker_size = max_tracker_size
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._ticket = 0
        self.evictions: list[Batch] = []

    def open(self, request_id: str, tags: Tags, now: float | None = None) -> None:
        self.index.open(request_id, tags, now)

    def close(self, request_id: str) -> None:
        self.index.close(request_id)

    def lookup(self, request_id: str, key: bytes) -> str:
        if key not in self.index:
            return "ABSENT"
        return "PENDING" if key in self.pending else "READY"

    def touch(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> None:
        """Where the tracker is too small, the tails of chains are forgotten first."""
        for key in reversed(self.index.touch(request_id, keys, group=group, start=start)):
            self._seen[key] = self._seen.get(key, 0) + 1
            self._seen.move_to_end(key)
        while len(self._seen) > self._max_tracker_size:
            self._seen.popitem(last=False)

    def reserve(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> ReferenceReservation:
        self._ticket += 1
        request = self.index.requests.get(request_id)
        if request is None:
            return ReferenceReservation([], [], [], self._ticket)
        self.touch(request_id, keys, group=group, start=start)
        if request.tags.no_store:
            return ReferenceReservation([], [], [], self._ticket)
        wanted = self._admissible(request, keys, group, start)

        free = self.capacity - len(self.index)
        if self.index.learner is not None:
            names, batches = self._compete(request_id, wanted, group, free)
        else:
            n = len(wanted) - free
            batches = self.index.evict(n, protect=request_id, incoming=len(wanted))
            admitted = wanted[: self.capacity - len(self.index)]
            for position, key in admitted:
                self.index.insert(request_id, [key], group=group, start=position)
            names = [key for _, key in admitted]
        self.evictions += batches
        evicted = [key for batch in batches for key in batch.keys]
        for key in evicted:
            del self.slots[key]
        for key in names:
            self.index.hold(key)
            self.pending[key] = Transfer(request_id, self._ticket)
            self.slots[key] = min(set(range(self.capacity)) - set(self.slots.values()))
        return ReferenceReservation(names, [self.slots[k] for k in names], evicted, self._ticket)

    def _compete(
        self, request_id: str, wanted: list[tuple[int, bytes]], group: int, free: int
    ) -> tuple[list[bytes], list[Batch]]:
        """Under a policy that admits, new blocks must beat what would go for them."""
        request = self.index.requests[request_id]
        if len(wanted) > free:
            self.index.note_full()
        pins = self.index.pins_to_come(request)
        drafts: list[Block] = []
        for position, key in wanted:
            parent = self.index.parent_in_chain(request, group, position)
            pin = len(drafts) < pins
            drafts.append(self.index.draft(request, key, group, position, parent, pin=pin))
        filed, evicted = self.index.compete(request_id, drafts, free)
        for position, key in wanted:  # a gap may be filled now
            self.touch(request_id, [key] if key in filed else [], group=group, start=position)
        return filed, evicted

    def _admissible(
        self, request: Request, keys: Sequence[bytes], group: int, start: int
    ) -> list[tuple[int, bytes]]:
        """Absent, named often enough, and behind something resident (or about to be).

        Behind a refused block of a chain everything is refused: it could not be restored.
        """
        windowed = group in self.index.rules.window_groups
        wanted: list[tuple[int, bytes]] = []
        there = set(self.index.blocks)
        for position, key in enumerate(keys, start):
            parent = self.index.parent_in_chain(request, group, position)
            cold = self._threshold >= 2 and self._seen.get(key, 0) < self._threshold
            hanging = not windowed and position > 0 and parent not in there
            if key not in there and not cold and not hanging:
                wanted.append((position, key))
                there.add(key)
            elif key not in there and not windowed:
                break
        return wanted

    def commit(
        self, request_id: str, keys: Iterable[bytes], *, ticket: int | None = None
    ) -> list[bytes]:
        return self._finish(request_id, keys, ticket)

    def abort(
        self, request_id: str, keys: Iterable[bytes], *, ticket: int | None = None
    ) -> list[bytes]:
        removed = self._finish(request_id, keys, ticket)
        for key in removed:
            self.index.drop(key, "abort")
            del self.slots[key]
        return removed

    def _finish(self, request_id: str, keys: Iterable[bytes], ticket: int | None) -> list[bytes]:
        done = []
        for key in keys:
            transfer = self.pending.get(key)
            if transfer is None or transfer.request_id != request_id:
                continue
            if ticket is not None and transfer.ticket != ticket:
                continue
            del self.pending[key]
            self.index.unhold(key)
            done.append(key)
        return done

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        if any(self.lookup(request_id, key) != "READY" for key in keys):
            return None
        for key in keys:
            self.index.hold(key)
            self.loads[request_id, key] = self.loads.get((request_id, key), 0) + 1
        return [self.slots[key] for key in keys]

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            held = self.loads.get((request_id, key), 0)
            if not held:
                continue
            self.index.unhold(key)
            if held == 1:
                del self.loads[request_id, key]
            else:
                self.loads[request_id, key] = held - 1

    def reset(self) -> None:
        self.index.clear()
        self.slots.clear()
        self.pending.clear()
        self.loads.clear()
