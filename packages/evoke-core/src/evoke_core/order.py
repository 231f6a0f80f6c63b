"""The leaves in the order in which they may go, without scanning the pool.

Each rank class keeps its leaf runs in a heap by ``(last, deepest, group, serial)``. Within a class
that is the order of the score (see ``policies.py``), so the overall victim is the lowest among the
classes' first entries. Classes are visited by the lower bound of their scores and only as far as
that bound does not exceed the best score found: exact, and independent of the pool's size.

``select`` plans evictions without changing anything that can be observed: entries it takes out of
the heaps come back through ``restore``. Entries of runs that moved on are left in place as stale
and skipped when they surface; a heap is rebuilt when stale entries outnumber live ones.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from attrs import define, field

from evoke_core.policies import Policy

if TYPE_CHECKING:
    from evoke_core.runs import Run

LeafEntry = tuple[int, int, int, int, int, "Run"]
"""(last, -position, group, serial, push number, run): sorts by rank within a class."""

# (score, entry, the class it heads or None, blocks that may go, blocks that stay)
_Candidate = tuple[float, LeafEntry, "RankClass | None", int, int]

_STALE_SLACK = 64

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

    def holds(self, entry: LeafEntry) -> bool:
        """Say whether an entry is its run's place, and not one that the run has left."""
        run = entry[-1]
        return run.entry is entry and run.rank_class is self


class LeafOrder:
    """All leaf runs, by rank."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
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
        self._place(entry, self._policy.class_key(run, self._clock))

    def _place(self, entry: LeafEntry, key: Hashable) -> None:
        """Put the current entry of its run into the class ``key``."""
        rank_class = self._classes.get(key)
        if rank_class is None:
            rank_class = RankClass(key, self._policy.bound(key))
            self._classes[key] = rank_class
            insort(self._by_bound, rank_class, key=_bound)
        entry[-1].rank_class = rank_class
        rank_class.live += 1
        heap = rank_class.heap
        heappush(heap, entry)
        next_move = self._policy.next_move(key, entry[0])
        if next_move is not None:
            due = self._due.get(next_move[0])
            if due is None:
                self._due[next_move[0]] = [(entry, next_move[1])]
            else:
                due.append((entry, next_move[1]))
        if len(heap) > 2 * rank_class.live + _STALE_SLACK:
            heap[:] = [entry for entry in heap if rank_class.holds(entry)]
            heapify(heap)

    def advance(self, clock: int) -> None:
        """Let time pass to ``clock``: leaves whose class changes by age alone move."""
        self._clock = clock
        for entry, key in self._due.pop(clock, ()):
            run = entry[-1]
            if run.entry is entry:
                assert run.rank_class is not None
                run.rank_class.live -= 1
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
    ) -> list[tuple["Run", int]]:
        """Plan ``n`` evictions: steps ``(run, count)``, each taking a run's last remaining blocks.

        Fewer than ``n`` blocks when no leaf is left. ``available`` says how many blocks at a run's
        end may go; the parent of a run that goes whole is considered next. ``challengers``
        are leaves that compete although they have no place. The caller applies the plan or not,
        then calls :meth:`restore`.
        """
        frontier: list[_Candidate] = []
        gone: dict[Run, int] = {}  # parent run -> children that this plan removes
        plan: list[tuple[Run, int]] = []
        opened = 0

        def offer(
            entry: LeafEntry | None, key: Hashable, source: RankClass | None, room: int
        ) -> None:
            if entry is not None:
                score = self._policy.score(key, self._clock - entry[0], half_life)
                heappush(frontier, (score, entry, source, room, len(entry[-1].keys) - room))

        for run in challengers:
            key = self._policy.class_key(run, self._clock)
            offer(self._entry(run), key, None, len(run.keys))
        while n > 0:
            while opened < len(self._by_bound) and (
                not frontier or self._by_bound[opened].bound <= frontier[0][0]
            ):
                rank_class = self._by_bound[opened]
                offer(rank_class.first(), rank_class.key, rank_class, 0)
                opened += 1
            if not frontier:
                break
            score, entry, source, room, kept = heappop(frontier)
            run = entry[-1]
            if source is not None:  # a class's first leaf: take it out and let the next one compete
                self._popped.append((source, heappop(source.heap)))
                offer(source.first(), source.key, source, 0)
                room = available(run)
                kept = len(run.keys) - room
                if room == 0:
                    continue
            take = min(n, room)
            if frontier and frontier[0][0] == score and frontier[0][1][0] == entry[0]:
                take = 1  # equal in score and age: the deeper block goes first, one by one
            plan.append((run, take))
            n -= take
            if take < room:
                shallower = (entry[0], entry[1] + take, *entry[2:])
                heappush(frontier, (score, shallower, None, room - take, kept))
            elif kept == 0 and (above := parent(run)) is not None:
                gone[above] = gone.get(above, 0) + 1
                if gone[above] == above.children and (room := available(above)):
                    key = self._policy.class_key(above, self._clock)
                    offer(self._entry(above), key, None, room)
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
