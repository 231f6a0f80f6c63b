"""How fast `lru` replays, beside the least that LRU can cost in Python.

That least is a bare loop over an ordered dictionary: it is given every chain as a list, counts
block hits and nothing else. Both run in this process, one job, in turns, so that a noisy machine
disturbs both alike: compare the ratios. What is timed of the replay is the whole public call.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from bench.errors import BenchError
from bench.replay.results import Pace
from evoke_core.replay import Budget, Trace, replay

ROUNDS = 5


def measure(trace: Trace, budgets: Sequence[str], *, on_budget: Callable[[], None]) -> list[Pace]:
    """Time both at every budget, `ROUNDS` times. BenchError unless both find the same blocks."""
    chains = [trace.chain(request) for request in range(len(trace))]
    paces = []
    for budget in budgets:
        capacity = Budget.parse(budget).blocks(trace)
        pace = Pace(budget, [], [])
        for _ in range(ROUNDS):
            found = _timed(pace.replayed, partial(_replay, trace, budget))
            hits = _timed(pace.looped, partial(_loop, chains, capacity))
            if found != hits:
                raise BenchError(
                    f"{trace.name}, {budget}: the replay of lru found {found:,} blocks,"
                    f" a bare loop {hits:,}"
                )
        paces.append(pace)
        on_budget()
    return paces


def _timed(seconds: list[float], call: Callable[[], int]) -> int:
    started = time.perf_counter()
    answer = call()
    seconds.append(time.perf_counter() - started)
    return answer


def _replay(trace: Trace, budget: str) -> int:
    [result] = replay(trace, [budget], ["lru"], jobs=1)
    return result.cell("lru", budget).counts.hit_blocks


def _loop(chains: list[list[int]], capacity: int) -> int:
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        for block in chain:
            if block not in resident:
                break
            hits += 1
        for block in reversed(chain):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits
