"""What the CPU matrix must show, each judged from the cells alone: met, missed, or not measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.matrix.arms import BASELINE, NO_TIER, OURS
from bench.matrix.figures import (
    CACHED,
    HOT_RESTORED,
    HOT_TTFT,
    RESTORED,
    SCORE,
    Figure,
    by_group,
    difference,
    overhead,
    overhead_ratio,
)
from bench.matrix.results import Result
from bench.matrix.statistics import Difference

HOT_GAIN, UNIFORM_GAIN, TTFT_RATIO = 0.30, 0.20, 0.5
OVERHEAD_RATIO, OVERHEAD_SHARE = 2.0, 0.01
_UNIFORM_BUDGET = "55%"
_Judge = Callable[[Difference], bool]


@dataclass(frozen=True)
class Verdict:
    """One target at one budget; `holds` is None where it was not measured."""

    target: str
    where: str
    found: str
    holds: bool | None


def verdicts(cells: Sequence[Result]) -> list[Verdict]:
    """Return every target's verdict, those of W1S first."""
    found = [
        *_each(
            cells,
            "w1s",
            HOT_RESTORED,
            "hot restore hits at least 30 points above LRU's",
            lambda d: d.difference >= HOT_GAIN,
        ),
        *_each(
            cells,
            "w1s",
            RESTORED,
            "all requests' restore hits above LRU's",
            lambda d: d.difference > 0,
        ),
        *_each(
            cells,
            "w1s",
            HOT_TTFT,
            "hot mean TTFT at most half of LRU's",
            lambda d: d.ratio is not None and d.ratio <= TTFT_RATIO,
        ),
        *_each(
            cells,
            "w1",
            RESTORED,
            "restore hits at least 20 points above LRU's at 55% of the working set",
            lambda d: d.difference >= UNIFORM_GAIN,
            budget=_UNIFORM_BUDGET,
        ),
    ]
    for workload in ("w1", "w3", "w4", "w5", "w6"):
        figure = CACHED if workload == "w4" else RESTORED
        found += _each(cells, workload, figure, "no loss against LRU", lambda d: d.non_inferior)
    return [*found, *_quality(cells), *_scheduler(cells)]


def _each(
    cells: Sequence[Result],
    workload: str,
    figure: Figure,
    target: str,
    holds: _Judge,
    budget: str | None = None,
) -> list[Verdict]:
    """Judge a target at every budget that was measured, or at one."""
    found = []
    for (label, at), arms in by_group(cells).items():
        if label != workload or (budget is not None and at != budget):
            continue
        if BASELINE not in arms or OURS not in arms:
            continue
        answer = difference(arms[OURS], arms[BASELINE], figure)
        if answer is not None:
            said = describe(answer, figure)
            found.append(Verdict(target, f"{workload}, {at}", said, holds(answer)))
    where = f"{workload}, {budget}" if budget else workload
    return found or [Verdict(target, where, "not measured", None)]


def _quality(cells: Sequence[Result]) -> list[Verdict]:
    """Judge answers with the tier against answers without it, and against LRU's."""
    target = "answers with the tier score like answers without it"
    groups = by_group(cells)
    plain = {label: arms[NO_TIER] for (label, _), arms in groups.items() if NO_TIER in arms}
    found = []
    for (label, at), arms in groups.items():
        if OURS in arms and label in plain:
            answer = difference(arms[OURS], plain[label], SCORE)
            if answer is not None:
                same, all_ = same_answers(arms[OURS], plain[label])
                said = f"{describe(answer, SCORE)}; {same} of {all_} answers are the same"
                found.append(Verdict(target, f"{label}, {at}", said, answer.non_inferior))
    return found or [Verdict(target, "w1s", "not measured", None)]


def same_answers(first: dict[int, Result], second: dict[int, Result]) -> tuple[int, int]:
    """Return how many answers of two arms are equal to the letter, and of how many."""
    pairs = [
        (a.answer, b.answer)
        for seed in first.keys() & second.keys()
        for a, b in zip(first[seed].rows, second[seed].rows, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def _scheduler(cells: Sequence[Result]) -> list[Verdict]:
    ratio = overhead_ratio(cells, OURS, BASELINE)
    spent = overhead([cell for cell in cells if cell.arm == OURS])
    targets = ("manager time per step at most twice LRU's", "manager time below 1% of the step")
    if ratio is None or ratio.ratio is None or spent is None:
        return [Verdict(target, "all", "not measured", None) for target in targets]
    said = f"{ratio.ratio:.2f} times ({ratio.ratio_low:.2f} to {ratio.ratio_high:.2f})"
    return [
        Verdict(targets[0], "all", said, ratio.ratio <= OVERHEAD_RATIO),
        Verdict(targets[1], "all", f"{spent.share:.3%}", spent.share < OVERHEAD_SHARE),
    ]


def describe(answer: Difference, figure: Figure) -> str:
    """Return a difference in words: both values, the difference, its interval."""
    text = f"{figure.show(answer.a)} against {figure.show(answer.b)}"
    if figure.points:
        low, high = figure.show_difference(answer.low), figure.show_difference(answer.high)
        return f"{text}: {figure.show_difference(answer.difference)} points ({low} to {high})"
    if answer.ratio is None:
        return text
    return f"{text}: {answer.ratio:.2f} times ({answer.ratio_low:.2f} to {answer.ratio_high:.2f})"
