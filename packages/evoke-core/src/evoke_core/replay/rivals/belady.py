"""MIN (Belady 1966), with bypass: keep the blocks whose next use is soonest. The ceiling.

Along a chain the next use never comes sooner than at the block before, and equal next uses go
deepest first, so what MIN keeps is always closed under parents: it is the most block hits that any
policy can have, prefixes only or not. (It is a ceiling for whole traces and a single tier. Counted
over the second half only, some policy that neglected the first could beat it by up to a cache full
of blocks; and behind a GPU cache it still minds blocks that the GPU would have served.)

Two observations make it fast. All resident blocks of a request's chain have that request as their
next use, whatever happened before: they were used by no request in between. So the residents can be
kept as *numbers per next request*, and the number for a request, when its turn comes, is its hits.
And the block to go is the deepest of those with the furthest next use, so evicting means lowering
that one number. Blocks that are never used again are not kept at all.
"""

from array import array
from heapq import heappop, heappush

from evoke_core.replay.trace import Trace


class Min:
    """Knows the whole trace; a :class:`~evoke_core.replay.tiers.Tier`."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self._capacity = capacity
        self._resident = 0
        self._kept: dict[int, int] = {}  # next request -> resident blocks waiting for it
        self._furthest: list[int] = []  # the same requests, negated, as a heap
        self._ends, self._next, self._counts = _next_uses(trace)

    def begin(self, request: int, chain: list[int], start: int) -> int:
        kept = self._kept.pop(request, 0)
        self._resident -= kept
        hits = min(kept, len(chain))  # beyond its prompt a request asks for nothing
        for i in range(self._ends[request], self._ends[request + 1]):
            self._keep(self._next[i], self._counts[i])
        while self._resident > self._capacity:
            furthest = -self._furthest[0]
            waiting = self._kept.get(furthest, 0)
            gone = min(waiting, self._resident - self._capacity)
            self._resident -= gone
            if gone < waiting:
                self._kept[furthest] = waiting - gone
            else:
                self._kept.pop(furthest, None)
                heappop(self._furthest)
        return max(0, hits - start)

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        """Nothing to do: what to keep was decided when the request began."""

    def end(self) -> None:
        pass

    def open(self, request: int) -> None:
        pass

    def resume(self, request: int) -> None:
        pass

    def reset(self) -> None:
        self._kept.clear()
        self._furthest.clear()
        self._resident = 0

    def _keep(self, request: int, count: int) -> None:
        self._resident += count
        if request in self._kept:
            self._kept[request] += count
        else:
            self._kept[request] = count
            heappush(self._furthest, -request)


def _next_uses(trace: Trace) -> "tuple[array[int], array[int], array[int]]":
    """Return, per request, how many of its blocks each later request uses next.

    Row ``r`` is ``ends[r]:ends[r + 1]`` of the two other arrays (request, blocks). Blocks that are
    never used again are in no row.
    """
    parents, tails = trace.parents, trace.last_blocks
    next_user = [-1] * len(parents)
    rows: list[list[int]] = []
    for request in range(len(trace) - 1, -1, -1):
        row: list[int] = []
        user, count = -1, 0
        block = tails[request]
        while block >= 0:
            later = next_user[block]
            next_user[block] = request
            if later != user:
                if user >= 0:
                    row += (user, count)
                user, count = later, 0
            count += 1
            block = parents[block]
        if user >= 0:
            row += (user, count)
        rows.append(row)
    ends = array("q", [0])
    users, counts = array("i"), array("i")
    for row in reversed(rows):
        users.extend(row[::2])
        counts.extend(row[1::2])
        ends.append(len(users))
    return ends, users, counts
