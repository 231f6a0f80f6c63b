"""Replays one workload with everything the report needs of it, and returns the document."""

import os
from collections.abc import Callable

from bench.envelope import machine, now, versions
from bench.replay import pace
from bench.replay.hints import CLAIMS
from bench.replay.results import Document
from bench.replay.targets import CEILING, OURS, RIVALS
from bench.replay.workloads import Workload
from evoke_core.replay import Cell, TraceResult, replay

POLICIES = (OURS, "scored", *RIVALS, CEILING)
_HINTED = (OURS, "scored")
_CURVE = (OURS, "lru", "arc", "wtinylfu", CEILING)
_SWEEP = "0.2 0.5 0.7 1 1.5 2 3 4 5 6 8 10 12 15 20 25 30 40 50 60 80 100".split()
_DISTRIBUTIONS = ("evoke-core", "numpy")


def cells(workload: Workload, *, quick: bool) -> int:
    """Return how often a workload reports: cells, and budgets at which the pace is measured."""
    budgets = len(workload.budgets)
    count = budgets * len(POLICIES)
    if not quick:
        if workload.kind == "recorded":
            count += budgets * len(POLICIES) + len(_SWEEP) + budgets  # the last: pace
        count += len(workload.curve) * len(_CURVE)
    if workload.hinted and not (quick and workload.kind == "recorded"):
        count += budgets * len(CLAIMS) * len(_HINTED)
    return count


def run(workload: Workload, *, jobs: int, quick: bool, on_cell: Callable[[], None]) -> Document:
    """Replay a workload; `quick` leaves out halves, curves, and hints on recorded traces."""
    trace = workload.load()
    budgets = workload.budgets
    recorded = workload.kind == "recorded"
    cores = jobs or os.cpu_count() or 1

    def note(name: str, cell: Cell) -> None:
        on_cell()

    def grid(budgets: tuple[str, ...], policies: tuple[str, ...], **options: object) -> TraceResult:
        [result] = replay(trace, budgets, policies, jobs=cores, on_cell=note, **options)  # type: ignore[arg-type]
        return result

    whole = grid(budgets, POLICIES)
    second = sweep = curve = None
    if recorded and not quick:
        second = grid(budgets, POLICIES, half="second")
        sweep = grid(tuple(f"{each}%" for each in _SWEEP), ("lru",))
    if workload.curve and not quick:
        curve = grid(workload.curve, _CURVE)
    hints = {}
    if workload.hinted and not (quick and recorded):
        hints = {name: grid(budgets, _HINTED, tags=tags) for name, tags in CLAIMS.items()}
    return Document(
        slug=workload.slug,
        title=workload.title,
        kind=workload.kind,
        named=workload.named,
        loops=workload.loops,
        date=now()[:10],
        machine=machine(),
        versions=versions(_DISTRIBUTIONS),
        settings=workload.settings,
        whole=whole,
        second=second,
        hints=hints,
        sweep=sweep,
        curve=curve,
        # Last, when no other process of this replay is left to disturb it.
        pace=pace.measure(trace, budgets, on_budget=on_cell) if recorded and not quick else [],
    )
