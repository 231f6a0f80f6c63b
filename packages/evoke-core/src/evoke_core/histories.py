"""What is known of each block: who touched it, what they declared, and what outlives its eviction.

The retention index walks chains and chooses victims; here the runs it meets gain and lose history.

Guarantees: a history is a function of the requests counted in it, whatever the order of calls
within a request; what was declared in seconds passes only with the time that was handed in; of a
block that leaves for want of room a memory stays, of bounded number.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

from attrs import evolve

from evoke_core.config import EvokeConfig
from evoke_core.forest import Forest
from evoke_core.ghosts import GhostMemory
from evoke_core.half_life import HalfLife
from evoke_core.history import Past
from evoke_core.pace import Pace
from evoke_core.policies import Policy
from evoke_core.promises import due_in
from evoke_core.requests import OpenRequest
from evoke_core.runs import MAX_REUSE, Run
from evoke_core.terms import NO_TERMS

MAX_REUSES = 4_096
"""Uses of resident blocks kept for a reader; older ones are dropped when nobody drains them."""

Reuse = tuple[int, int, str | None]
"""Requests since the blocks' last touch, how many blocks, their source role until then."""


class Histories:
    """Resident runs with their histories, and the memory of those that went.

    Args:
        config: the operator's settings.
        policy: told of every history that begins, changes or is forgotten.
        window_groups: groups whose blocks have no parent.
        capacity: slots of the pool, where somebody knows.
    """

    def __init__(
        self,
        config: EvokeConfig,
        policy: Policy,
        window_groups: Iterable[int],
        capacity: int | None,
    ) -> None:
        self.forest = Forest(policy)
        self.ghosts = GhostMemory(self._forget)
        self.half_life = HalfLife.of(config.recency_half_life)
        self.pace = Pace()
        self.clock = 0
        self._open_ticks: set[int] = set()
        self._window_groups = frozenset(window_groups)
        self.reuses: deque[Reuse] = deque(maxlen=MAX_REUSES)
        self._config = config
        self._policy = policy
        self._capacity = capacity
        self._peak = 0

    @property
    def now(self) -> float:
        """The latest time handed in, in seconds."""
        return self.pace.now

    @property
    def peak(self) -> int:
        """The largest number of blocks that was ever resident."""
        return self._peak

    @property
    def slots(self) -> int:
        """What shares of the pool are taken of."""
        return self._peak if self._capacity is None else self._capacity

    # --- time and requests ---

    def tick(self, now: float | None) -> None:
        """A request is opened: its tick is the clock from now on; the time passes to ``now``."""
        self.clock += 1
        self._open_ticks.add(self.clock)
        if now is not None:
            self.pace.arrived(now)
            for run in self.forest.due(self.now):
                self.forest.rerank(run, partial(self._pass_deadline, run))

    def closed(self, request: OpenRequest) -> None:
        """A request is closed. If its session is over with it, so are that session's own blocks."""
        self._open_ticks.discard(request.tick)
        if request.tags.end_of_session and request.tags.session is not None:
            for run in list(self.forest.sessions.runs(request.tags.session)):
                self.forest.rerank(run, partial(self._expire, run))

    def note_inserted(self, blocks: int) -> None:
        """So many blocks have become resident."""
        self.half_life.note_inserted(blocks)
        self._peak = max(self._peak, len(self.forest.runs))

    def clear(self) -> None:
        """Forget blocks and ghosts."""
        self.forest.clear()
        self.ghosts.clear()
        self.half_life.restart(self.clock)

    # --- a request touches blocks ---

    def count(self, run: Run, request: OpenRequest) -> None:
        """Add ``request`` to the history of all of ``run``."""
        claim = request.whole if run.windowed else request.claim(run.start)
        blocks = len(run.keys)

        def change() -> None:
            if run.owed:  # by the first use in time; the next promise may be this request's
                self._policy.settled(run, blocks, True)
            run.owed = self.now < claim.terms.holds_until >= run.terms.holds_until
            self.reuses.append((max(0, request.tick - run.last), blocks, run.role))
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
                self.forest.pin(run, request.tick)
            self._policy.entered(run, blocks)

        self.forest.rerank(run, change)

    def _lapsed(self, tick: int) -> bool:
        """Say whether the claim of the request with this tick is neither open nor recent."""
        return tick not in self._open_ticks and self.clock - tick > self.half_life.value

    # --- blocks come ---

    def draft(
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
            pins = max(0, self._pin_limit - self.forest.pins.of(request.tick))
        for start, keys in missing:
            pasts = self.ghosts.recall(keys)
            counted = self._counted(request, group, start, keys)
            waiting = self.forest.has_orphans
            edges = [
                at
                for at in range(1, len(keys))
                if pasts[at] is not pasts[at - 1]
                or counted[at] != counted[at - 1]
                or (waiting and self.forest.awaited(keys[at - 1]))
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
            serial=self.forest.next_serial(),
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

    # --- blocks go ---

    def remember(self, keys: list[bytes], run: Run) -> None:
        """Keep the history of blocks that leave together, or were refused."""
        limit = int(self._config.ghost_factor * self._peak) + self._policy.ghosts_at_least
        self.ghosts.remember(keys, Past.of(run), limit)

    def _forget(self, past: Past, blocks: int) -> None:
        if past.owed and self.now >= past.terms.holds_until:
            self._policy.settled(past, blocks, False)
        self._policy.forget(past, blocks)

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
            self.forest.pins.discard(run.keys)

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
    def _pin_limit(self) -> int:
        return int(self._config.max_pinned_fraction * self.slots)

    def trim_pins(self) -> None:
        """Let the oldest pins go that are beyond the limit."""
        dropped = self.forest.pins.surplus(self._pin_limit)
        at = 0
        while at < len(dropped):  # deepest first: mostly the end of a run, block after block
            run = self.forest.end_with(dropped[at])
            n = 1
            most = min(len(run.keys), len(dropped) - at)
            while n < most and run.keys[-n - 1] == dropped[at + n]:
                n += 1
            if n < len(run.keys):
                run = self.forest.split(run, len(run.keys) - n)
            self.forest.rerank(run, partial(setattr, run, "pinned", False))
            at += n
