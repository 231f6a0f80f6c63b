"""Runs whose standing changes at a certain time: a promise nears or runs out, a block expires.

Guarantees: only runs that wait for a time are kept; a run is returned once per deadline; memory
stays proportional to the waiting runs.
"""

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from evoke_core.promises import next_step

if TYPE_CHECKING:
    from evoke_core.runs import Run

_STALE_SLACK = 64


class Deadlines:
    """A queue of runs by their next deadline; ``Run.alarm`` is a run's place in it."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Run]] = []
        self._pushes = 0
        self._live = 0

    def watch(self, run: "Run") -> None:
        """Wait for the next deadline of ``run``, if it has one; it must not be watched yet."""
        when = math.inf
        if run.holding:
            when = min(run.terms.holds_until, next_step(run.terms, run.due_in))
        if not run.expired:
            when = min(when, run.terms.expires)
        if when < math.inf:
            self._pushes += 1
            run.alarm = (when, self._pushes, run)
            self._live += 1
            heappush(self._queue, run.alarm)
            if len(self._queue) > 2 * self._live + _STALE_SLACK:
                self._queue = [each for each in self._queue if each[2].alarm is each]
                heapify(self._queue)

    def unwatch(self, run: "Run") -> None:
        if run.alarm is not None:
            run.alarm = None
            self._live -= 1

    def due(self, now: float) -> list["Run"]:
        """Return the runs whose deadline is reached, no longer watched, earliest first."""
        found = []
        while self._queue and self._queue[0][0] <= now:
            entry = heappop(self._queue)
            if entry[2].alarm is entry:
                self.unwatch(entry[2])
                found.append(entry[2])
        return found

    def clear(self) -> None:
        self._queue.clear()
        self._live = 0
