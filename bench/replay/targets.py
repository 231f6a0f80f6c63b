"""What the policy must reach, computed from results: nothing here is typed in by hand.

A *point* is .01 of the block hit ratio. Recorded traces and generated ones are never averaged
together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from statistics import fmean

from bench.replay.results import Document
from evoke_core.replay import TraceResult

OURS = "adaptive"
RIVALS = ("lru", "arc", "s3fifo", "wtinylfu", "wtinylfu20")
CEILING = "min"

_MADE = ("phase", "shape")
_ROUNDING = 1e-9  # of floats: a bound that is met exactly holds
_TOLERANCE = {"recorded": 0.005, "generated": 0.010}
_AHEAD_IN = 2 / 3
_GAP_RECORDED = 0.15
_GAP_LOOPS = 0.90
_LOSS_TRUTHFUL = 0.002
_LOSS = 0.010
_SECONDS = 120.0
_LRU_TIMES = 3.0


@dataclass(frozen=True)
class Duel:
    """One cell: ours against the best rival, in block hits."""

    title: str
    budget: str
    capacity: int
    ours: float
    rival: str
    best: float
    ceiling: float
    gap_closed: float | None

    @property
    def margin(self) -> float:
        return self.ours - self.best


@dataclass(frozen=True)
class Verdict:
    """One target: what was asked for, what was found, whether it holds (None: not measured)."""

    target: str
    found: str
    holds: bool | None


def duels(title: str, result: TraceResult) -> list[Duel]:
    """Return a duel for every budget."""
    found = []
    for budget in dict.fromkeys(cell.budget for cell in result.cells):
        ours = result.cell(OURS, budget)
        rival = max(RIVALS, key=lambda name: result.cell(name, budget).block_hits)
        found.append(
            Duel(
                title=title,
                budget=budget,
                capacity=ours.capacity,
                ours=ours.block_hits,
                rival=rival,
                best=result.cell(rival, budget).block_hits,
                ceiling=result.cell(CEILING, budget).block_hits,
                gap_closed=ours.gap_closed,
            )
        )
    return found


def verdicts(documents: Sequence[Document]) -> list[Verdict]:
    """Return every target, in the order of the report."""
    found = []
    for named, which in ((True, ""), (False, ", fresh workloads")):
        recorded = [each for each in documents if each.kind == "recorded" and each.named == named]
        generated = [each for each in documents if each.kind in _MADE and each.named == named]
        for group, cells in (
            (f"recorded{which}, whole", _whole(recorded)),
            (f"recorded{which}, second half", _second(recorded)),
            (f"shapes and phases{which}", _whole(generated)),
        ):
            kind = "recorded" if group.startswith("recorded") else "generated"
            found.append(_never_below(group, cells, _TOLERANCE[kind]))
            if named:
                found.append(_ahead(group, cells))
        if named:
            loops = [each for each in generated if each.loops]
            found += [
                _gap("recorded, whole", _whole(recorded), _GAP_RECORDED),
                _gap("recorded, second half", _second(recorded), _GAP_RECORDED),
                _gap("W1 and W1S", _whole(loops), _GAP_LOOPS),
            ]
    watched = [each for each in documents if each.kind == "watched"]
    found += [
        _never_below("shapes watched meanwhile", _whole(watched), _TOLERANCE["generated"]),
        _hints(documents, "truthful", lambda claim: claim.startswith("truthful"), _LOSS_TRUTHFUL),
        _hints(
            documents,
            "shuffled, at maximum, greedy",
            lambda claim: not claim.startswith("truthful"),
            _LOSS,
        ),
        _time(documents),
        _lru_time(documents),
    ]
    return found


def lru_budget(sweep: TraceResult, hits: float) -> float | None:
    """Return the blocks with which LRU has this block hit ratio; None if it never does.

    Interpolated between the sweep's budgets, on a logarithmic scale of sizes.
    """
    points = sorted((cell.capacity, cell.block_hits) for cell in sweep.cells)
    if hits < points[0][1]:
        return None
    for (small, low), (large, high) in pairwise(points):
        if low <= hits <= high:
            part = 0.0 if high == low else (hits - low) / (high - low)
            return float(2 ** (log2(small) + part * (log2(large) - log2(small))))
    return None


def losses(document: Document, claim: str, policy: str = OURS) -> list[tuple[str, float]]:
    """Return, per budget, what a policy loses against no tags; negative where it gains."""
    tagged = document.hints[claim]
    return [
        (cell.budget, document.whole.cell(policy, cell.budget).block_hits - cell.block_hits)
        for cell in tagged.cells
        if cell.policy == policy
    ]


def points(difference: float) -> str:
    """Write a difference of hit ratios in points."""
    return f"{round(100 * difference, 2) + 0.0:+.2f}"  # no negative zero


def _whole(documents: Iterable[Document]) -> list[Duel]:
    return [duel for each in documents for duel in duels(each.title, each.whole)]


def _second(documents: Iterable[Document]) -> list[Duel]:
    return [
        duel
        for each in documents
        if each.second is not None
        for duel in duels(each.title, each.second)
    ]


def _never_below(group: str, cells: list[Duel], tolerance: float) -> Verdict:
    target = f"{group}: never more than {100 * tolerance:.1f} point below the best rival"
    if not cells:
        return Verdict(target, "not replayed", None)
    worst = min(cells, key=lambda cell: cell.margin)
    below = sum(cell.margin < -tolerance - _ROUNDING for cell in cells)
    found = f"worst {points(worst.margin)} ({worst.title}, {worst.budget}, {worst.rival})"
    return Verdict(target, f"{found}; {below} of {len(cells)} cells fail", below == 0)


def _ahead(group: str, cells: list[Duel]) -> Verdict:
    target = f"{group}: above the best rival in two cells of three"
    if not cells:
        return Verdict(target, "not replayed", None)
    ahead = sum(cell.margin > 0.0 for cell in cells)
    return Verdict(target, f"{ahead} of {len(cells)}", ahead >= _AHEAD_IN * len(cells))


def _gap(group: str, cells: list[Duel], least: float) -> Verdict:
    target = f"{group}: mean share of the gap from LRU to MIN closed at least {least:.2f}"
    shares = [cell.gap_closed for cell in cells if cell.gap_closed is not None]
    if not shares:
        return Verdict(target, "not replayed", None)
    mean = fmean(shares)
    return Verdict(target, f"{mean:.3f} over {len(shares)} cells", mean >= least - _ROUNDING)


def _hints(
    documents: Sequence[Document], name: str, counts: Callable[[str], bool], most: float
) -> Verdict:
    target = f"hints ({name}): no cell loses more than {100 * most:.1f} point"
    lost = [
        (loss, document.title, budget, claim)
        for document in documents
        for claim in document.hints
        if counts(claim)
        for budget, loss in losses(document, claim)
    ]
    if not lost:
        return Verdict(target, "not replayed", None)
    loss, title, budget, claim = max(lost)
    found = f"largest loss {100 * loss:.2f} ({title}, {budget}, {claim}), {len(lost)} cells"
    return Verdict(target, found, loss <= most + _ROUNDING)


def _time(documents: Sequence[Document]) -> Verdict:
    target = f"a cell of recorded traces takes less than {_SECONDS / 60:.0f} minutes"
    taken = [
        (cell.counts.seconds, document.title, cell.policy)
        for document in documents
        if document.kind == "recorded"
        for cell in document.whole.cells
    ]
    if not taken:
        return Verdict(target, "not replayed", None)
    seconds, title, policy = max(taken)
    return Verdict(target, f"longest {seconds:.0f} s ({title}, {policy})", seconds < _SECONDS)


def _lru_time(documents: Sequence[Document]) -> Verdict:
    target = f"`lru` takes at most {_LRU_TIMES:.0f} times a bare loop over an ordered dictionary"
    measured = [
        (pace.times, document.title, pace.budget)
        for document in documents
        for pace in document.pace
    ]
    if not measured:
        return Verdict(target, "not measured", None)
    times, title, budget = max(measured)
    found = f"worst {times:.2f} times ({title}, {budget}), {len(measured)} cells"
    return Verdict(target, found, times <= _LRU_TIMES)
