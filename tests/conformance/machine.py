# SPDX-License-Identifier: Apache-2.0
"""The one conformance machine: random engine behaviour, every invariant after every step.

Hypothesis opens, looks up, touches, stores, loads, finishes, aborts and resets on tree-shaped
workloads over tiny pools. Each operation goes to the implementation and to the brute-force
reference; afterwards both must show the same blocks in the same order of eviction, and the
invariants that need no reference must hold. Numbers in comments are those of the invariants
in the design.

What a block's slot really contains is modelled too: a slot holds a key's data only once the
transfer of the reservation in force has succeeded. A key that is readable without that is the
one failure a cache must never have.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evoke_core import BlockLedger, EvokeConfig, RetentionIndex
from evoke_core.adaptive import AdaptivePolicy
from tests.conformance.adapters import (
    IndexTier,
    LedgerTier,
    Offer,
    PolicyTier,
    SpanlessTier,
    Stored,
    Tier,
    VllmTier,
    group_of,
    key_of,
    keys_of,
    parent_of,
    snapshot,
)
from tests.conformance.reference import ReferenceIndex, ReferenceLedger, Rules

FULL, WINDOW, SECOND = 0, 1, 2
WINDOW_BLOCKS = 2
SESSIONS = ["s1", "s2", "s3"]

pieces = st.text("abc", min_size=1, max_size=6)
pick = st.integers(0, 2**16)  # an index into whatever list a rule chooses from
roles = st.sampled_from(["system", "user", "assistant", "tool"])
priorities = st.integers(-13, 13).map(lambda step: 2.0 ** (step / 4))
seconds = st.sampled_from([0.5, 4, 4.0, 30.0, 5_000.0])
rarely = st.sampled_from([False, False, False, True])


@st.composite
def span_lists(draw: st.DrawFn) -> list[dict[str, object]]:
    """Ranges of tokens, which are blocks here; they may overlap and reach beyond the prompt."""
    spans = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 9))
        optional = {"source_type": roles, "priority": priorities, "ttl_s": seconds}
        says = draw(st.fixed_dictionaries({}, optional=optional))
        spans.append({"start": start, "end": start + draw(st.integers(1, 7))} | says)
    return spans


old_tags = st.fixed_dictionaries(
    {},
    optional={
        "source_type": roles,
        "priority": priorities,
        "evoke_session": st.sampled_from(SESSIONS),
    },
)
new_tags = st.fixed_dictionaries(
    {"evoke_session": st.sampled_from([*SESSIONS, "s1", "s1"])},
    optional={
        "source_type": roles,
        "priority": priorities,
        "spans": span_lists(),
        "pinned": st.booleans(),
        "ttl_s": seconds,
        "expect_reuse_in_s": seconds,
        "end_of_session": rarely,
        "no_store": rarely,
    },
)
without_session = new_tags.map(
    lambda tags: {name: value for name, value in tags.items() if name != "evoke_session"}
)
tag_sets = old_tags | new_tags | without_session
malformed_tags: st.SearchStrategy[object] = st.sampled_from(
    [
        None,
        3,
        "user",
        [],
        {"priority": "high"},
        {"priority": float("nan")},
        {"source_type": []},
        {"spans": [{"start": 3}, 7, {"start": 2, "end": 1}], "pinned": "yes", "ttl_s": True},
        {"spans": "all", "end_of_session": True, "no_store": 1, "expect_reuse_in_s": -3},
    ]
)
# Time between two requests; backwards where clocks disagree, None where there is no clock.
steps: st.SearchStrategy[float | None] = st.sampled_from(
    [0.0, 0.0, 0.3, 1.0, 1.0, 6.0, 6.0, 40.0, 1e6, -5.0, None]
)


@dataclass(frozen=True)
class Setup:
    """One example's configuration, for the implementation and for the reference alike."""

    capacity: int
    groups: tuple[int, ...]
    config: EvokeConfig
    rules: Rules
    store_threshold: int
    plans_first: bool
    ghosts_at_least: int  # under "adaptive", on top of what the pool's size grants
    tells_capacity: bool  # whether an index alone is told its size

    def policy(self) -> AdaptivePolicy | None:
        """A learning policy, one for each side; None where the configuration's name is enough."""
        if self.config.policy != "adaptive":
            return None
        policy = AdaptivePolicy(self.config)
        policy.ghosts_at_least = self.ghosts_at_least
        return policy


@st.composite
def setups(draw: Any, *, admits: bool, signals: bool, small_memory: bool) -> Setup:
    groups = draw(st.sampled_from([(FULL,), (FULL,), (FULL, WINDOW), (FULL, WINDOW, SECOND)]))
    weights = draw(
        st.sampled_from(
            [(0.5, 0.5, 0.0, 0.0), (0.9, 0.1, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)]
            + [(0.25, 0.25, 0.25, 0.25)] * signals
        )
    )
    half_life = draw(st.sampled_from(["auto", "auto", 1.5, 16]))
    policy = draw(st.sampled_from(["scored", "scored", "adaptive", "adaptive", "lru"]))
    ghost_factor = draw(st.integers(0, 3))
    names = ("w_recency", "w_reuse", "w_attention", "w_coherence")
    shared = dict(zip(names, weights, strict=True)) | {
        "policy": policy,
        "ghost_factor": ghost_factor,
        "max_pinned_fraction": draw(st.sampled_from([0.25, 0.25, 0.0, 1.0])),
        "max_session_fraction": draw(st.sampled_from([1.0, 1.0, 0.5, 0.2])),
    }
    windows = frozenset(groups) & {WINDOW}
    return Setup(
        capacity=draw(st.integers(4, 16) | st.integers(4, 24)),
        groups=groups,
        config=EvokeConfig(recency_half_life=half_life, **shared),
        rules=Rules(
            half_life=None if half_life == "auto" else half_life, window_groups=windows, **shared
        ),
        store_threshold=draw(st.sampled_from([0, 0, 0, 2, 3])) if admits else 0,
        plans_first=draw(st.booleans()),
        ghosts_at_least=draw(st.sampled_from([0, 5, 1_024])) if small_memory else 1_024,
        tells_capacity=draw(st.booleans()),
    )


@dataclass
class Conversation:
    """A request as the engine knows it."""

    request_id: str
    path: str
    alive: bool = True
    offered: int = 0  # blocks offered for storing so far
    chain: int = 0  # so many leading blocks it has named so far, in full-attention groups
    windows: set[bytes] = field(default_factory=set)  # what it named in the window group
    loads: list[list[bytes]] = field(default_factory=list)
    since_reset: bool = True  # opened after the last one


@dataclass
class Writing:
    """A store in flight, or one that has come to its end."""

    request_id: str
    keys: list[bytes]
    serials: dict[bytes, int]
    tickets: dict[bytes, Any]


class ConformanceMachine(RuleBasedStateMachine):
    """Subclasses say what is tested by `make`; the rules ask the tier what it can do."""

    admits: ClassVar[bool]
    signals: ClassVar[bool]
    small_memory: ClassVar[bool] = True  # can be given a policy that remembers little

    def make(self, setup: Setup) -> tuple[Tier, Tier]:
        """The implementation under test and its reference, behind the same face."""
        raise NotImplementedError

    def knows_capacity(self) -> bool:
        """Whether shares of the pool are taken of its slots, or of the most it ever held."""
        return self.tier.owns_slots or self.setup.tells_capacity

    # --- setting up and the two sides ---------------------------------------------------------

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Conversation] = []
        self.in_flight: list[Writing] = []
        self.ended: list[Writing] = []
        self.past_loads: list[tuple[str, list[bytes]]] = []
        self.known: set[bytes] = set()
        self.slot_of: dict[bytes, int] = {}
        self.reservation: dict[bytes, int] = {}
        self.contents: dict[int, tuple[bytes, int]] = {}
        self.in_the_air: set[bytes] = set()  # blocks whose parent the engine took away
        self.announced: set[bytes] = set()  # what a consumer of events believes to be stored
        self.serial = 0
        self.opened = 0
        self.most_resident = 0
        self.now = 0.0

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        drawn = setups(admits=self.admits, signals=self.signals, small_memory=self.small_memory)
        self.setup = data.draw(drawn, label="setup")
        self.tier, self.model = self.make(self.setup)

    def both(self, operation: str, *args: Any) -> Any:
        """Do the same on both sides; their answers must be the same."""
        got = getattr(self.tier, operation)(*args)
        expected = getattr(self.model, operation)(*args)
        assert got == expected, f"{operation}: got {got}, the reference says {expected}"
        return got

    def seen(self) -> tuple[object, ...]:
        """Everything observable, to show that an operation changed nothing."""
        index = self.tier.index
        states = {key: self.tier.lookup("nobody", key) for key in self.known}
        order = index.candidates(self.setup.capacity)
        blocks = snapshot(self.tier, self.known)
        return states, blocks, order, index.clock, index.half_life, self.tier.counts()

    def alive(self) -> list[Conversation]:
        return [request for request in self.requests if request.alive]

    def ready(self, key: bytes) -> bool:
        return self.tier.lookup("nobody", key) == "READY"

    # --- requests -----------------------------------------------------------------------------

    @rule(fork=pick, keep=st.integers(0, 10), tail=pieces, tags=tag_sets, step=steps)
    def open_request(
        self, fork: int, keep: int, tail: str, tags: dict[str, object], step: float | None
    ) -> None:
        """A new request that shares a prefix with an earlier one and leaves it anywhere."""
        self._open(self._fork(fork, keep, tail), tags, step)

    def _fork(self, fork: int, keep: int, tail: str) -> str:
        if not self.requests:
            return tail
        return (self.requests[fork % len(self.requests)].path[:keep] + tail)[:12]

    @precondition(lambda self: self.requests)
    @rule(which=pick, tags=tag_sets | malformed_tags, step=steps)
    def repeat_request(self, which: int, tags: object, step: float | None) -> None:
        self._open(self.requests[which % len(self.requests)].path, tags, step)

    def _open(self, path: str, tags: object, step: float | None) -> None:
        self.opened += 1
        request = Conversation(f"r{self.opened}", path)
        self.both("open", request.request_id, tags, self._time(step))
        self.requests.append(request)
        self._learn(request)
        self._look(request)

    def _time(self, step: float | None) -> float | None:
        """The time of the next request. A step back is one clock's lag, and is made up for."""
        if step is None:
            return self.now if self.tier.own_clock else None
        self.now += max(0.0, step)
        return self.now + min(0.0, step)

    def _learn(self, request: Conversation) -> None:
        self.known |= {key for group in self.setup.groups for key in keys_of(request.path, group)}

    def _look(self, request: Conversation) -> int:
        """What a scheduler does with a waiting request: look up to the first miss, touch all."""
        hits = 0
        for key in keys_of(request.path):
            if self.both("lookup", request.request_id, key) != "READY":
                break
            hits += 1
        self._touch(request, hits)
        return hits

    def _touch(self, request: Conversation, hits: int) -> None:
        for group in self.setup.groups:
            start = max(0, hits - WINDOW_BLOCKS) if group == WINDOW else 0
            keys = keys_of(request.path, group)[start:]
            self.both("touch", request.request_id, keys, group, start)
            if group == WINDOW:
                request.windows |= set(keys)
        request.chain = len(request.path)

    @precondition(lambda self: self.alive())
    @rule(which=pick)
    def poll(self, which: int) -> None:
        """4: looking again, however often, is not reuse."""
        request = self.alive()[which % len(self.alive())]
        hits = self._look(request)
        before = self.seen()
        for _ in range(2):
            self._look(request)
            self._touch(request, hits)
        assert self.seen() == before

    @precondition(lambda self: self.alive())
    @rule(which=pick, tail=pieces)
    def grow(self, which: int, tail: str) -> None:
        """Decoding adds blocks that nobody has touched yet."""
        request = self.alive()[which % len(self.alive())]
        request.path = (request.path + tail)[:14]
        self._learn(request)

    @precondition(lambda self: self.alive())
    @rule(which=pick)
    def close_request(self, which: int) -> None:
        """The request ends, perhaps before its last transfers do."""
        self._close(self.alive()[which % len(self.alive())])

    def _close(self, request: Conversation) -> None:
        request.alive = False
        self.both("close", request.request_id)

    @precondition(lambda self: any(not request.alive for request in self.requests))
    @rule(which=pick, tags=tag_sets, step=steps)
    def reuse_request_id(self, which: int, tags: dict[str, object], step: float | None) -> None:
        """A client may name its next request like an earlier one."""
        gone = [request for request in self.requests if not request.alive]
        request = gone[which % len(gone)]
        request.alive, request.offered, request.chain = True, 0, 0
        request.since_reset = True
        request.windows.clear()
        self.both("open", request.request_id, tags, self._time(step))
        self._look(request)

    # --- stores -------------------------------------------------------------------------------

    @precondition(lambda self: self.alive())
    @rule(which=pick, size=st.integers(1, 12), skip=st.sampled_from([0, 0, 0, 0, 1, 3]), gap=pick)
    def store_chunk(self, which: int, size: int, skip: int, gap: int) -> None:
        """The next chunk of a prefill: several groups in one offer, window groups with gaps."""
        request = self.alive()[which % len(self.alive())]
        start = min(request.offered + skip, len(request.path))
        if not self.tier.positions:  # then engines offer nothing behind blocks they never named
            start = min(start, request.chain)
        self._offer(request, start, min(start + size, len(request.path)), gap)

    def _offer(self, request: Conversation, start: int, end: int, gap: int) -> None:
        request.offered = end
        offers = []
        for group in self.setup.groups:
            if group == WINDOW and not (request.since_reset or self.tier.trusts_windows):
                continue
            keys = keys_of(request.path, group)
            cut = start + gap % (end - start + 1) if group == WINDOW else start
            runs = [(start, cut - 1), (cut, end)] if cut > start else [(start, end)]
            offers += [Offer(group, a, keys[a:b]) for a, b in runs if a < b]
        if offers:
            self._store(request, offers)

    @rule(fork=pick, keep=st.integers(0, 10), tail=pieces, tags=tag_sets, step=steps, stays=rarely)
    def serve(
        self,
        fork: int,
        keep: int,
        tail: str,
        tags: dict[str, object],
        step: float | None,
        stays: bool,
    ) -> None:
        """A request from its beginning to its end, as most are; pools fill by these."""
        self._open(self._fork(fork, keep, tail), tags, step)
        request = self.requests[-1]
        self._offer(request, 0, len(request.path), fork)
        while self.in_flight and self.in_flight[-1].request_id == request.request_id:
            writing = self.in_flight.pop()
            self._finish(writing, writing.keys, ok=True)
        if not stays:
            self._close(request)

    @precondition(lambda self: self.requests)
    @rule(fork=pick, tags=tag_sets, step=steps)
    def serve_again(self, fork: int, tags: dict[str, object], step: float | None) -> None:
        self.serve(fork, 12, "", tags, step, False)

    @precondition(lambda self: self.alive())
    @rule(which=pick)
    def preempt(self, which: int) -> None:
        """The engine starts a request over: it offers again what it has offered before."""
        self.alive()[which % len(self.alive())].offered = 0

    def _store(self, request: Conversation, offers: list[Offer]) -> None:
        resident = set(self.slot_of)
        busy = {key for writing in self.in_flight for key in writing.keys}
        busy |= {key for other in self.requests for keys in other.loads for key in keys}
        if not self.tier.index.tags(request.request_id).pinned:  # else it may displace pins
            busy |= {key for key in resident if self.tier.index.describe(key).pinned}
        own = request.windows.union(
            *(keys_of(request.path[: request.chain], group) for group in (FULL, SECOND))
        )
        for group, start, keys in offers:
            if group == WINDOW:
                request.windows |= set(keys)
            elif start <= request.chain:
                request.chain = max(request.chain, start + len(keys))

        got: Stored = self.tier.store(request.request_id, offers)
        expected: Stored = self.model.store(request.request_id, offers)
        assert got.evicted == expected.evicted, (got, expected)  # 3, order included
        assert got.keys == expected.keys, (got, expected)
        if self.tier.explains:
            assert got.why == expected.why, (got, expected)

        assert len(got.slots) == len(got.keys) == len(set(got.keys))
        assert not set(got.keys) & (resident - set(got.evicted))
        assert not set(got.evicted) & busy  # 5
        assert not set(got.evicted) & own  # 2
        offered = [key for offer in offers for key in offer.keys]
        accepted = [key for key in offered if key in set(got.keys)]
        assert got.keys == accepted  # the scheduler pairs them with the slots by order
        self._assert_head_kept(offers, set(got.keys) | resident - set(got.evicted))

        for key in got.evicted:
            del self.slot_of[key]
            self.in_the_air.discard(key)
        for key, slot in zip(got.keys, got.slots, strict=True):
            assert 0 <= slot < self.setup.capacity
            assert slot not in self.slot_of.values()  # 5: a slot has one owner
            self.serial += 1
            self.slot_of[key], self.reservation[key] = slot, self.serial
            self._came(key)
        if got.keys:
            serials = {key: self.reservation[key] for key in got.keys}
            tickets = {key: (got.tickets.get(key), expected.tickets.get(key)) for key in got.keys}
            self.in_flight.append(Writing(request.request_id, got.keys, serials, tickets))
            self._touch(request, 0)

    def _assert_head_kept(self, offers: list[Offer], resident: set[bytes]) -> None:
        """2: of what was offered of a chain, only a tail may be missing.

        Under a policy that admits as well: a new block competes once those behind it have lost, so
        a refusal never leaves a gap, however little the head is worth. It may be the whole offer.
        """
        for group, _, keys in offers:
            if self.tier.admits and group != WINDOW and not self.in_the_air & set(keys):
                there = [key in resident for key in keys]
                assert there == sorted(there, reverse=True)

    def _came(self, key: bytes) -> None:
        """An engine that stores without asking for the parent hangs its block in the air."""
        parent = parent_of(key)
        if not self.tier.admits and parent is not None and parent not in self.slot_of:
            self.in_the_air.add(key)
        children = {child for child in self.slot_of if parent_of(child) == key}
        self.in_the_air -= {child for child in children if self.tier.index.parent(child) == key}

    def _gone(self, key: bytes) -> None:
        """The engine took `key` away: its children are in the air by no fault of ours."""
        del self.slot_of[key]
        self.in_the_air.discard(key)
        self.in_the_air |= {child for child in self.slot_of if parent_of(child) == key}

    @precondition(lambda self: self.in_flight)
    @rule(which=pick, ok=st.sampled_from([True, True, True, False]), part=st.booleans())
    def finish_store(self, which: int, ok: bool, part: bool) -> None:
        """A transfer ends, whole or in part."""
        writing = self.in_flight.pop(which % len(self.in_flight))
        keys = writing.keys[: max(1, len(writing.keys) // 2)] if part else writing.keys
        rest = writing.keys[len(keys) :]
        if rest:
            self.in_flight.append(
                Writing(writing.request_id, rest, writing.serials, writing.tickets)
            )
        self._finish(writing, keys, ok)
        self.ended.append(Writing(writing.request_id, keys, writing.serials, writing.tickets))

    def _finish(self, writing: Writing, keys: list[bytes], ok: bool) -> None:
        if ok:
            for key in keys:
                self.contents[self.slot_of[key]] = (key, writing.serials[key])
        self._deliver(writing, keys, ok)
        for key in keys:
            assert self.ready(key) == ok
            if not ok:
                self._gone(key)

    def _deliver(self, writing: Writing, keys: list[bytes], ok: bool) -> None:
        for side, tier in enumerate((self.tier, self.model)):
            tickets = {key: pair[side] for key, pair in writing.tickets.items()}
            tier.finish(writing.request_id, keys, tickets if tier.tickets else None, ok)

    # --- loads --------------------------------------------------------------------------------

    @precondition(lambda self: self.alive())
    @rule(which=pick, skip=st.sampled_from([0, 0, 1, 3]))
    def load(self, which: int, skip: int) -> None:
        """Load the readable prefix, or what follows a prefix that the engine still has."""
        request = self.alive()[which % len(self.alive())]
        keys = []
        for key in keys_of(request.path)[skip:]:
            if not self.ready(key):
                break
            keys.append(key)
        if not keys:
            return
        slots = self.tier.acquire(request.request_id, keys)
        assert self.model.acquire(request.request_id, keys) is not None
        assert slots == [self.slot_of[key] for key in keys]
        request.loads.append(keys)
        request.offered = max(request.offered, skip + len(keys))

    @precondition(lambda self: any(request.loads for request in self.requests))
    @rule(which=pick)
    def finish_load(self, which: int) -> None:
        loading = [request for request in self.requests if request.loads]
        request = loading[which % len(loading)]
        keys = request.loads.pop(0)
        self.both("release", request.request_id, keys)
        self.past_loads.append((request.request_id, keys))

    # --- the engine's own moves ---------------------------------------------------------------

    @rule()
    def reset(self) -> None:
        """All blocks go, with every transfer and hold; open requests and their tags stay."""
        self._read_events()
        self.both("reset")
        self.ended += self.in_flight
        self.in_flight = []
        for request in self.requests:
            self.past_loads += [(request.request_id, keys) for keys in request.loads]
            request.loads.clear()
            request.offered = 0
            request.since_reset = False
        self.tier.events()  # whether a reset announces what it drops is left to the tier
        for state in (self.slot_of, self.reservation, self.in_the_air, self.announced):
            state.clear()
        assert not snapshot(self.tier, self.known)

    @precondition(lambda self: not self.tier.owns_slots and self.slot_of)
    @rule(which=pick)
    def engine_drops(self, which: int) -> None:
        key = sorted(self.slot_of)[which % len(self.slot_of)]
        busy = {key for writing in self.in_flight for key in writing.keys}
        if key not in busy and not self.tier.index.describe(key).held:
            self.both("drop", key)
            self._gone(key)

    @precondition(lambda self: self.signals and self.slot_of)
    @rule(which=pick, attention=st.none() | st.floats(0, 1), coherence=st.none() | st.floats(0, 1))
    def signal(self, which: int, attention: float | None, coherence: float | None) -> None:
        key = sorted(self.slot_of)[which % len(self.slot_of)]
        for tier in (self.tier, self.model):
            assert tier.index.signal(key, attention=attention, coherence=coherence)

    # --- what must change nothing -------------------------------------------------------------

    @precondition(lambda self: self.tier.owns_slots and self.ended)
    @rule(which=pick, ok=st.booleans(), named=st.booleans())
    def completion_comes_again(self, which: int, ok: bool, named: bool) -> None:
        """8: late, after an abort, after a reset, after the key was reserved anew."""
        writing = self.ended[which % len(self.ended)]
        keys = writing.keys
        if not (named and self.tier.tickets):
            # Without a ticket nothing tells this request's old transfer from its new one.
            anew = {k for w in self.in_flight if w.request_id == writing.request_id for k in w.keys}
            keys = [key for key in keys if key not in anew]
            writing = Writing(writing.request_id, keys, {}, {})
        before = self.seen()
        for _ in range(2):
            tickets = {key: pair[0] for key, pair in writing.tickets.items()} or None
            self.tier.finish(writing.request_id, keys, tickets, ok)
        assert self.seen() == before

    @precondition(lambda self: self.tier.owns_slots and self.in_flight)
    @rule(which=pick, whose=pick, ok=st.booleans(), named=st.booleans())
    def completion_of_a_stranger(self, which: int, whose: int, ok: bool, named: bool) -> None:
        """8: a request ends what another one is still writing."""
        writing = self.in_flight[which % len(self.in_flight)]
        strangers = [r.request_id for r in self.requests if r.request_id != writing.request_id]
        stranger = [*strangers, "nobody"][whose % (len(strangers) + 1)]
        writing_too = {k for w in self.in_flight if w.request_id == stranger for k in w.keys}
        keys = [key for key in writing.keys if key not in writing_too]
        tickets = {key: writing.tickets[key][0] for key in keys} if named else None
        before = self.seen()
        self.tier.finish(stranger, keys, tickets, ok)
        assert self.seen() == before

    @precondition(lambda self: self.tier.owns_slots and self.past_loads)
    @rule(which=pick)
    def release_comes_again(self, which: int) -> None:
        """8: nobody's hold goes but the caller's own, and that once."""
        request_id, keys = self.past_loads[which % len(self.past_loads)]
        mine = [r.loads for r in self.requests if r.request_id == request_id]
        held = {key for loads in mine for load in loads for key in load}
        before = self.seen()
        self.tier.release(request_id, [key for key in keys if key not in held])
        assert self.seen() == before

    @precondition(lambda self: self.tier.owns_slots and any(r.loads for r in self.requests))
    @rule(which=pick, whose=pick)
    def release_of_a_stranger(self, which: int, whose: int) -> None:
        """8: a request, perhaps reading itself, ends what another one is still reading."""
        loading = [request for request in self.requests if request.loads]
        request = loading[which % len(loading)]
        others = sorted(self.requests, key=lambda other: not other.loads)  # readers first
        stranger = others[whose % len(others)]
        mine = {key for load in stranger.loads for key in load}
        before = self.seen()
        self.tier.release(stranger.request_id, [k for k in request.loads[0] if k not in mine])
        assert self.seen() == before

    @precondition(lambda self: self.tier.owns_slots)
    @rule(which=pick, ok=st.booleans())
    def nonsense(self, which: int, ok: bool) -> None:
        """8: names and keys that were never heard of."""
        unknown = [key_of("zz"), b"", b"\x00", b"short"]
        known = sorted(self.known)[which % (len(self.known) or 1) :][:2]
        before = self.seen()
        for keys in (unknown, [], known):
            if not self.tier.opens_strangers:
                self.tier.touch("nobody", keys, FULL, 0)
                assert self.tier.store("nobody", [Offer(FULL, 0, keys)]) == Stored()
            self.tier.finish("nobody", keys, None, ok)
            self.tier.release("nobody", keys)
        self.tier.close("nobody")
        assert self.seen() == before
        assert [self.tier.lookup("nobody", key) for key in unknown] == ["ABSENT"] * 4

    # --- after every step ---------------------------------------------------------------------

    @invariant()
    def same_blocks_and_order_as_the_reference(self) -> None:
        """3, and every field an operator can be shown."""
        tier, model = self.tier.index, self.model.index
        blocks, expected = snapshot(self.tier, self.known), snapshot(self.model, self.known)
        # Blocks of window groups stand alone: what is shown as their position means nothing.
        blocks, expected = map(_without_window_positions, (blocks, expected))
        wrong = {k: (blocks.get(k), expected.get(k)) for k in blocks | expected}
        wrong = {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}
        assert not wrong, f"shown and expected: {wrong}"
        assert (tier.clock, tier.half_life) == (model.clock, model.half_life)
        assert (tier.now, tier.pinned, tier.expired, tier.orphans) == (
            model.now,
            model.pinned,
            model.expired,
            model.orphans,
        )
        reuses = _by_block(model.drain_reuses())
        if not self.tier.own_clock:  # an adapter reads them for its own metrics
            assert _by_block(tier.drain_reuses()) == reuses
        assert len(tier) == len(model) == len(blocks)
        for key in blocks:
            assert tier.parent(key) == model.parent(key)

        everything = self.setup.capacity + 1
        assert tier.candidates(everything) == model.candidates(everything)
        for request in self.requests[-2:]:
            order = tier.candidates(everything, protect=request.request_id)
            assert order == model.candidates(everything, protect=request.request_id)
        odd = set(sorted(self.known)[::2])
        chosen = tier.candidates(3, odd.__contains__)
        assert chosen == model.candidates(3, odd.__contains__)

    @invariant()
    def looking_changes_nothing(self) -> None:
        """5: candidates is pure, lookup evicts nothing."""
        assert self.seen() == self.seen()

    @invariant()
    def no_orphan(self) -> None:
        """1"""
        for key in self.slot_of:
            parent = parent_of(key)
            if group_of(key) == WINDOW or parent is None or key in self.in_the_air:
                continue
            assert parent in self.tier.index, f"{key!r} is resident without its parent"

    @invariant()
    def pins_are_few(self) -> None:
        self.most_resident = max(self.most_resident, len(self.slot_of))
        size = self.setup.capacity if self.knows_capacity() else self.most_resident
        assert self.tier.index.pinned <= int(self.setup.rules.max_pinned_fraction * size)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        """5: nothing leaks, nothing is owned twice."""
        resident = {key for key in self.known if self.tier.lookup("nobody", key) != "ABSENT"}
        assert resident == set(self.slot_of)
        assert len(set(self.slot_of.values())) == len(self.slot_of)
        counts = self.tier.counts()
        assert counts["resident"] == len(resident)
        assert counts["free"] == self.setup.capacity - len(resident)

    @invariant()
    def readable_means_written(self) -> None:
        """8: whatever is READY lies in its slot, written under the reservation in force."""
        for key, slot in self.slot_of.items():
            if self.ready(key):
                assert self.contents.get(slot) == (key, self.reservation[key])

    @invariant()
    def bookkeeping_is_bounded(self) -> None:
        """7"""
        counts = self.tier.counts()
        if not self.tier.owns_slots:
            return
        model = self.model.ledger.index  # type: ignore[attr-defined]
        assert counts["ghosts"] == len(model.ghosts)
        assert counts["ghosts"] <= model.ghost_limit(self.setup.capacity)
        assert counts["open_requests"] == len(self.alive())
        assert counts["pending"] == sum(len(writing.keys) for writing in self.in_flight)
        assert counts["held"] == len({k for r in self.requests for load in r.loads for k in load})

    @invariant()
    def events_tell_what_is_readable(self) -> None:
        if not self.tier.owns_slots:
            return
        self._read_events()
        assert self.announced == {key for key in self.slot_of if self.ready(key)}

    def _read_events(self) -> None:
        for kind, keys in self.tier.events():
            if kind == "stored":
                assert not self.announced & set(keys)
                self.announced |= set(keys)
            elif kind == "evicted":
                assert self.announced >= set(keys)
                self.announced -= set(keys)

    def teardown(self) -> None:
        """7: with everything closed, finished and reset, nothing is left."""
        if not hasattr(self, "tier"):
            return
        for writing in self.in_flight:
            self._finish(writing, writing.keys, ok=True)
        for request in self.requests:
            for keys in request.loads:
                self.both("release", request.request_id, keys)
            if request.alive:
                self.both("close", request.request_id)
        self._assert_every_slot_can_be_had()
        self.tier.reset()
        empty = {"capacity": self.setup.capacity, "free": self.setup.capacity}
        assert self.tier.counts() == dict.fromkeys(self.tier.counts(), 0) | {
            name: value for name, value in empty.items() if name in self.tier.counts()
        }
        assert self.tier.index.candidates(self.setup.capacity) == []

    def _assert_every_slot_can_be_had(self) -> None:
        """5: a chain as long as the pool gets all of it; a slot that leaked would be missing.

        But for pinned blocks and what they hang on. A policy that admits may keep other residents.
        """
        residents = dict(self.slot_of)
        keys = keys_of("z" * self.setup.capacity)
        for n in range(max(1, self.setup.store_threshold)):
            self.both("open", f"fill{n}", None, self.now)
            pinned = self._pinned_and_above()
            self.tier.touch(f"fill{n}", keys, FULL, 0)
            got = self.tier.store(f"fill{n}", [Offer(FULL, 0, keys)])
            self.tier.finish(f"fill{n}", got.keys, got.tickets or None, False)
            self.tier.close(f"fill{n}")
            for key in got.evicted:
                del residents[key]
        if self.setup.config.policy != "adaptive":
            assert got.keys == keys[: self.setup.capacity - len(pinned)]
            assert set(residents) == pinned
        assert sorted([*got.slots, *residents.values()]) == list(range(self.setup.capacity))

    def _pinned_and_above(self) -> set[bytes]:
        index = self.model.index
        stay: set[bytes] = set()
        for block in index.pins():
            key: bytes | None = block.key
            while key is not None:
                stay.add(key)
                key = index.parent(key)
        return stay


def _by_block(reuses: list[tuple[int, int, str | None]]) -> list[tuple[int, str]]:
    """Uses of resident blocks, block by block; the order in which one call tells them is free."""
    return sorted((gap, role or "") for gap, blocks, role in reuses for _ in range(blocks))


def _without_window_positions(blocks: dict[bytes, Any]) -> dict[bytes, Any]:
    return {
        key: view._replace(position=0) if view.group == WINDOW else view
        for key, view in blocks.items()
    }


class IndexMachine(ConformanceMachine):
    admits, signals = False, True

    def make(self, setup: Setup) -> tuple[Tier, Tier]:
        windows = tuple(sorted(setup.rules.window_groups))
        capacity = setup.capacity if setup.tells_capacity else None
        index = RetentionIndex(
            setup.config, policy=setup.policy(), window_groups=windows, capacity=capacity
        )
        reference = ReferenceIndex(setup.rules, setup.policy(), capacity)
        return (
            IndexTier(index, setup.capacity, plans_first=setup.plans_first),
            IndexTier(reference, setup.capacity, plans_first=setup.plans_first),
        )


class LedgerMachine(ConformanceMachine):
    admits, signals = True, True

    def make(self, setup: Setup) -> tuple[Tier, Tier]:
        ledger = BlockLedger(
            setup.capacity,
            policy=setup.policy(),
            config=setup.config,
            store_threshold=setup.store_threshold,
            window_groups=tuple(sorted(setup.rules.window_groups)),
        )
        return LedgerTier(ledger), _reference_ledger(setup)


class VllmMachine(ConformanceMachine):
    admits, signals, small_memory = True, False, False

    def make(self, setup: Setup) -> tuple[Tier, Tier]:
        from evoke_vllm.manager import EvokeOffloadingManager

        manager = EvokeOffloadingManager(
            setup.capacity,
            enable_events=True,
            store_threshold=setup.store_threshold,
            config=setup.config,
            window_groups=tuple(sorted(setup.rules.window_groups)),
        )
        return VllmTier(manager), _reference_ledger(setup, at_once=True)


class PolicyMachine(ConformanceMachine):
    admits, signals, small_memory = False, False, False

    def make(self, setup: Setup) -> tuple[Tier, Tier]:
        from evoke_vllm.policy import EvokeCachePolicy

        windows = tuple(sorted(setup.rules.window_groups))
        policy = EvokeCachePolicy(setup.capacity, window_groups=windows, config=setup.config)
        reference = ReferenceIndex(setup.rules, setup.policy(), setup.capacity)
        model = SpanlessTier(reference, setup.capacity, plans_first=True)
        return PolicyTier(policy, setup.capacity), model

    def knows_capacity(self) -> bool:
        return True


def _reference_ledger(setup: Setup, *, at_once: bool = False) -> LedgerTier:
    ledger = ReferenceLedger(
        setup.capacity,
        setup.rules,
        store_threshold=setup.store_threshold,
        learner=setup.policy(),
    )
    return LedgerTier(ledger, at_once=at_once)
