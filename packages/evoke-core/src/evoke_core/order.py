"""The leaves in the order in which they may go, without scanning the pool.

Each rank class keeps its leaf runs in a heap by ``(last, deepest, group, serial)``. Within a class
that is the order of the score (see ``policies.py``), so the overall victim is the lowest among the
classes' first entries. Classes are visited by the lower bound of their scores and only as far as
that bound does not exceed the best score found: exact, and independent of the pool's size.

Three tiers come before and behind one another whatever the policy says: runs that have expired,
leaves of sessions over their share, all others.

``select`` plans evictions without changing anything that can be observed: entries it takes out of
the heaps come back through ``restore``. Entries of runs that moved on are left in place as stale
and skipped when they surface; a heap is rebuilt when stale entries outnumber live ones.
"""

import math
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from attrs import define, field, frozen

from evoke_core.policies import Policy

if TYPE_CHECKING:
    from evoke_core.runs import Run

Reason = Literal["expired", "session share", "capacity"]

LeafEntry = tuple[int, int, int, int, int, "Run"]
"""(last, -position, group, serial, push number, run): sorts by rank within a class."""

# (tier, score, entry, the class it heads or None, blocks that may go, blocks that stay)
_Candidate = tuple[int, float, LeafEntry, "RankClass | None", int, int]

_EXPIRED, _OVER_SHARE, _ORDINARY = range(3)

_REASONS: tuple[Reason, ...] = ("expired", "session share", "capacity")

Step = tuple["Run", int, Reason]
"""(run, how many of its last remaining blocks go, why)."""

_STALE_SLACK = 64

_GIVING = 256
"""Leaf runs that are compared at a time when sessions over their share give way.

So a flood of tiny prompts costs no more than a few conversations: those used least recently.
"""

_bound = attrgetter("bound")


@define(eq=False)
class RankClass:
    """Leaf runs of equal static worth."""

    key: Hashable
    bound: float
    heap: list[LeafEntry] = field(factory=list)
    live: int = 0

    def first(self) -> LeafEntry | None:
        """Return the entry that goes first, discarding stale ones in front of it."""
        heap = self.heap
        while heap and not self.holds(heap[0]):
            heappop(heap)
        return heap[0] if heap else None

    def file(self, entry: LeafEntry) -> None:
        """Take in the current entry of a run whose class this is."""
        self.live += 1
        heap = self.heap
        heappush(heap, entry)
        if len(heap) > 2 * self.live + _STALE_SLACK:
            heap[:] = [entry for entry in heap if self.holds(entry)]
            heapify(heap)

    def holds(self, entry: LeafEntry) -> bool:
        """Say whether an entry is its run's place, and not one that the run has left."""
        run = entry[-1]
        return run.entry is entry and run.rank_class is self


@frozen
class OverShare:
    """The sessions that must give way: their runs, and by how many blocks each is over.

    The runs come least recently used first, session by session.
    """

    runs: Iterator["Run"]
    excess: dict[str | None, int]


class LeafOrder:
    """All leaf runs, by rank."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._expired = RankClass(None, -math.inf)
        self._classes: dict[Hashable, RankClass] = {}
        self._by_bound: list[RankClass] = []
        self._clock = 0
        self._due: dict[int, list[tuple[LeafEntry, Hashable]]] = {}  # tick -> leaves that move
        self._pushes = 0
        self._popped: list[tuple[RankClass, LeafEntry]] = []

    def add(self, run: "Run") -> None:
        """Give ``run``, a leaf without a place, its place."""
        entry = self._entry(run)
        run.entry = entry
        if run.expired:
            run.rank_class = self._expired
            self._expired.file(entry)
        else:
            self._place(entry, self._policy.class_key(run, self._clock))

    def _place(self, entry: LeafEntry, key: Hashable) -> None:
        """Put the current entry of its run into the class ``key``."""
        rank_class = self._classes.get(key)
        if rank_class is None:
            rank_class = RankClass(key, self._policy.bound(key))
            self._classes[key] = rank_class
            insort(self._by_bound, rank_class, key=_bound)
        entry[-1].rank_class = rank_class
        rank_class.file(entry)
        next_move = self._policy.next_move(key, entry[0])
        if next_move is not None:
            due = self._due.get(next_move[0])
            if due is None:
                self._due[next_move[0]] = [(entry, next_move[1])]
            else:
                due.append((entry, next_move[1]))

    def advance(self, clock: int) -> None:
        """Let time pass to ``clock``: leaves whose class changes by age alone move."""
        self._clock = clock
        for entry, key in self._due.pop(clock, ()):
            run = entry[-1]
            if run.entry is entry:
                left = run.rank_class
                assert left is not None
                left.live -= 1
                if left.heap[0] is entry:  # the oldest of a class moves on first
                    heappop(left.heap)
                self._place(entry, key)

    def rescore(self) -> None:
        """The policy's scores have changed: sort the classes anew."""
        for rank_class in self._by_bound:
            rank_class.bound = self._policy.bound(rank_class.key)
        self._by_bound.sort(key=_bound)

    def discard(self, run: "Run") -> None:
        """Take ``run``'s place away, if it has one."""
        if run.entry is not None:
            assert run.rank_class is not None
            run.rank_class.live -= 1
            run.entry = run.rank_class = None

    def select(
        self,
        n: int,
        half_life: float,
        available: Callable[["Run"], int],
        parent: Callable[["Run"], "Run | None"],
        challengers: Sequence["Run"] = (),
        over: "OverShare | None" = None,
    ) -> list[Step]:
        """Plan ``n`` evictions: steps that each take a run's last remaining blocks.

        Fewer than ``n`` blocks when no leaf is left. ``available`` says how many blocks at a run's
        end may go; the parent of a run that goes whole is considered next. ``challengers``
        are leaves that compete although they have no place. ``over`` names the runs of sessions
        over their share. The caller applies the plan or not, then calls :meth:`restore`.
        """
        frontier: list[_Candidate] = []
        gone: dict[Run, int] = {}  # parent run -> children that this plan removes
        plan: list[Step] = []
        opened = 0
        excess = over.excess if over is not None else {}

        def offer(entry: LeafEntry, key: Hashable, source: RankClass | None, room: int) -> None:
            run = entry[-1]
            if run.expired:
                tier, score = _EXPIRED, -math.inf
            else:
                tier = _OVER_SHARE if excess.get(run.terms.owner, 0) > 0 else _ORDINARY
                score = self._policy.score(key, self._clock - entry[0], half_life)
            heappush(frontier, (tier, score, entry, source, room, len(run.keys) - room))

        def offer_first(source: RankClass) -> None:
            while (entry := source.first()) is not None and entry[-1] in early:
                self._popped.append((source, heappop(source.heap)))
            if entry is not None:
                offer(entry, source.key, source, 0)

        def offer_run(run: "Run", room: int) -> None:
            offer(self._entry(run), self._policy.class_key(run, self._clock), None, room)

        early: set[Run] = set()
        giving: set[Run] = set()  # those of them that still wait
        more = over.runs if over is not None else iter(())

        def offer_giving() -> None:
            """Let the next runs of sessions over their share compete, if there still are any."""
            if any(blocks > 0 for blocks in excess.values()):
                for run in more:
                    if run.entry is not None and not run.expired and (room := available(run)):
                        giving.add(run)
                        offer(run.entry, self._policy.class_key(run, self._clock), None, room)
                        if len(giving) == _GIVING:
                            break
                early.update(giving)

        for run in challengers:
            offer_run(run, len(run.keys))
        offer_first(self._expired)
        while n > 0:
            if excess and not giving:
                offer_giving()
            while opened < len(self._by_bound) and (
                not frontier
                or (frontier[0][0] == _ORDINARY and self._by_bound[opened].bound <= frontier[0][1])
            ):
                offer_first(self._by_bound[opened])
                opened += 1
            if not frontier:
                break
            tier, score, entry, source, room, kept = heappop(frontier)
            run = entry[-1]
            if source is not None:  # a class's first leaf: take it out and let the next one compete
                self._popped.append((source, heappop(source.heap)))
                offer_first(source)
                room = available(run)
                kept = len(run.keys) - room
                if room == 0:
                    continue
            owner = run.terms.owner
            most = n
            if tier == _OVER_SHARE:
                if excess[owner] <= 0:  # back within its share: an ordinary leaf from here on
                    giving.discard(run)
                    heappush(frontier, (_ORDINARY, score, entry, None, room, kept))
                    continue
                most = min(n, excess[owner])
            take = min(most, room)
            if frontier and frontier[0][:2] == (tier, score) and frontier[0][2][0] == entry[0]:
                take = 1  # equal in score and age: the deeper block goes first, one by one
            plan.append((run, take, _REASONS[tier]))
            n -= take
            if owner in excess:
                excess[owner] -= take
            if take == room:
                giving.discard(run)
            if take < room:
                shallower = (entry[0], entry[1] + take, *entry[2:])
                heappush(frontier, (tier, score, shallower, None, room - take, kept))
            elif kept == 0 and (above := parent(run)) is not None:
                gone[above] = gone.get(above, 0) + 1
                if gone[above] == above.children and (room := available(above)):
                    offer_run(above, room)
        self._forget_empty(opened)
        return plan

    def restore(self) -> None:
        """Put back the entries that the last ``select`` took out and that are still valid."""
        for rank_class, entry in self._popped:
            if rank_class.holds(entry):
                heappush(rank_class.heap, entry)
        self._popped.clear()

    def clear(self) -> None:
        """Forget all leaves. The runs' own ``entry`` is left as it is: they are forgotten too."""
        self._expired = RankClass(None, -math.inf)
        self._classes.clear()
        self._by_bound.clear()
        self._due.clear()

    def _entry(self, run: "Run") -> LeafEntry:
        self._pushes += 1
        return (run.last, -run.tie_position, run.group, run.serial, self._pushes, run)

    def _forget_empty(self, opened: int) -> None:
        if any(rank_class.live == 0 for rank_class in self._by_bound[:opened]):
            self._by_bound = [c for c in self._by_bound if c.live]
            self._classes = {c.key: c for c in self._by_bound}
