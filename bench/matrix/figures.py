"""The figures that arms are compared by, computed from cells.

Every figure is a ratio of sums over requests. `restored`: prompt tokens restored from the tier, of
those not in the engine's pool (the question at a prompt's end counts as asked for, so 100% cannot
be reached). `cached`: prompt tokens not computed, wherever they were, of all. In an open loop
`restored` is known for the server as a whole: there a seed counts like one request.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.errors import BenchError
from bench.matrix.results import Result, Row
from bench.matrix.statistics import Difference, Estimate, Pair, compare, estimate

_Numbers = NDArray[np.float64]
Group = tuple[str, str]
Runs = Mapping[int, Result]
"""One arm's cells by seed."""


@dataclass(frozen=True)
class Figure:
    """`form` shows a value of the unit it is computed in; `points`: differences are in points."""

    key: str
    title: str
    top: Callable[[Row], float]
    under: Callable[[Row], float]
    kind: str | None = None
    points: bool = True
    more_is_better: bool = True

    def show(self, value: float) -> str:
        """Return a value in words."""
        return f"{100 * value:.1f}%" if self.points else f"{value:.2f} s"

    def show_difference(self, value: float) -> str:
        """Return a difference in words, with its sign."""
        return f"{100 * value:+.1f}" if self.points else f"{value:+.2f} s"


def _one(row: Row) -> float:
    return 1.0


def _restored(row: Row) -> float:
    return float(row.restored or 0)


def _outside(row: Row) -> float:
    return float(row.asked - (row.in_gpu or 0))


RESTORED = Figure("restored", "restore hits, all", _restored, _outside)
HOT_RESTORED = Figure("hot_restored", "restore hits, hot", _restored, _outside, "hot")
CACHED = Figure("cached", "tokens not computed", lambda r: r.cached, lambda r: r.asked)
TTFT = Figure("ttft", "mean TTFT", lambda r: r.ttft_s, _one, points=False, more_is_better=False)
HOT_TTFT = Figure(
    "hot_ttft", "hot TTFT", lambda r: r.ttft_s, _one, "hot", points=False, more_is_better=False
)
SCORE = Figure("score", "answers right", lambda r: r.score or 0.0, _one)
FIGURES = (RESTORED, HOT_RESTORED, CACHED, TTFT, HOT_TTFT, SCORE)


def by_group(cells: Iterable[Result]) -> dict[Group, dict[str, dict[int, Result]]]:
    """Return the cells by workload and budget, then by arm, then by seed."""
    found: dict[Group, dict[str, dict[int, Result]]] = {}
    for cell in cells:
        found.setdefault(cell.group, {}).setdefault(cell.arm, {})[cell.seed] = cell
    return found


def value(runs: Runs, figure: Figure) -> Estimate | None:
    """Return one arm's figure over its seeds; None where it has none."""
    return estimate([_sums(run, figure) for run in runs.values()])


def difference(first: Runs, second: Runs, figure: Figure) -> Difference | None:
    """Return first - second over the seeds that both have; None where there is nothing to compare.

    Raises BenchError where two cells of a seed did not ask the same.
    """
    pairs = []
    for seed in sorted(first.keys() & second.keys()):
        a, b = first[seed], second[seed]
        if [(r.context, r.asked) for r in a.rows] != [(r.context, r.asked) for r in b.rows]:
            raise BenchError(f"{a.cell} and {b.cell} did not ask the same")
        pairs.append(Pair(*_sums(a, figure), *_sums(b, figure)))
    return compare(pairs)


def _sums(run: Result, figure: Figure) -> tuple[_Numbers, _Numbers]:
    if run.open_loop and figure is RESTORED:
        metrics = run.metrics
        outside = metrics["asked"] - metrics["in_gpu"]
        return np.array([float(metrics["restored"])]), np.array([float(outside)])
    if run.open_loop and figure is HOT_RESTORED:
        return np.array([]), np.array([])
    if figure.key in (RESTORED.key, HOT_RESTORED.key) and not run.sizes["tier_blocks"]:
        return np.array([]), np.array([])
    rows = [row for row in run.rows if figure.kind is None or row.kind == figure.kind]
    if figure is SCORE:
        rows = [row for row in rows if row.score is not None]
    tops, unders = [figure.top(r) for r in rows], [figure.under(r) for r in rows]
    return np.array(tops, dtype=float), np.array(unders, dtype=float)


@dataclass(frozen=True)
class Overhead:
    """CPU time in manager calls, over all cells of one arm."""

    steps: int
    calls: int
    dearest: str
    per_step_us: float
    share: float
    worst_us: float


def overhead(cells: Sequence[Result]) -> Overhead | None:
    """Return what the cells' profiles add up to; None without one."""
    kept = [cell.scheduler for cell in cells if cell.scheduler.get("steps")]
    if not kept:
        return None
    steps = sum(each["steps"] for each in kept)
    manager = sum(each["manager_ns"] for each in kept)
    return Overhead(
        steps=steps,
        calls=sum(each["calls"] for each in kept),
        dearest=_dearest(kept),
        per_step_us=manager / steps / 1000,
        share=manager / sum(each["step_ns"] for each in kept),
        worst_us=max(each["worst_step_ns"] for each in kept) / 1000,
    )


def _dearest(kept: Sequence[Mapping[str, int]]) -> str:
    """Return the call that most time went into, with its share; empty where it is not known."""
    known = ("manager_ns", "step_ns", "worst_step_ns")
    totals = Counter[str]()
    for each in kept:
        totals.update({k: v for k, v in each.items() if k.endswith("_ns") and k not in known})
    if not totals.total():
        return "-"
    name, spent = totals.most_common(1)[0]
    return f"{name.removesuffix('_ns')}, {spent / totals.total():.0%}"


def overhead_ratio(cells: Sequence[Result], ours: str, rival: str) -> Difference | None:
    """Compare manager time per step of two arms, paired by workload, budget and seed."""
    found: list[tuple[Result, Result]] = []
    for arms in by_group(cells).values():
        first, second = arms.get(ours, {}), arms.get(rival, {})
        found += [(first[seed], second[seed]) for seed in first.keys() & second.keys()]
    kept = [
        (a.scheduler, b.scheduler)
        for a, b in found
        if a.scheduler.get("steps") and b.scheduler.get("steps")
    ]
    if not kept:
        return None
    tops = [np.array([float(pair[i]["manager_ns"]) for pair in kept]) for i in (0, 1)]
    unders = [np.array([float(pair[i]["steps"]) for pair in kept]) for i in (0, 1)]
    return compare([Pair(tops[0], unders[0], tops[1], unders[1])])
