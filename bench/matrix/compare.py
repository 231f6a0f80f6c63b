"""Which differences are significant: between two arms, or between two folders of cells."""

from collections.abc import Sequence

from bench.matrix.arms import ARMS
from bench.matrix.figures import FIGURES, Figure, Runs, by_group, difference
from bench.matrix.results import Result
from bench.matrix.statistics import Difference

Line = tuple[str, str, str, str, str, str, str]


def compare_arms(cells: Sequence[Result], first: str, second: str) -> list[Line]:
    """Return a line for each workload, budget and figure that both arms have.

    An arm without a tier has no budget: it is compared with every budget of its workload.
    """
    groups = by_group(cells)
    lines = []
    for label, budget in groups:
        a = _runs(groups, label, budget, first)
        b = _runs(groups, label, budget, second)
        if a and b and a is not b and (budget or _has_no_budget(first, second)):
            lines += _lines(f"{label} {budget}".strip(), a, b)
    return lines


def compare_folders(first: Sequence[Result], second: Sequence[Result]) -> list[Line]:
    """Return a line for each workload, budget, arm and figure that both folders have."""
    a, b = by_group(first), by_group(second)
    lines = []
    for (label, budget), arms in a.items():
        for arm, runs in arms.items():
            if other := b.get((label, budget), {}).get(arm):
                lines += _lines(f"{label} {budget} {arm}", runs, other)
    return lines


def _has_no_budget(first: str, second: str) -> bool:
    return not (ARMS[first].has_tier or ARMS[second].has_tier)


def _runs(
    groups: dict[tuple[str, str], dict[str, dict[int, Result]]], label: str, budget: str, arm: str
) -> Runs | None:
    return groups[label, budget].get(arm) or groups.get((label, ""), {}).get(arm)


def _lines(where: str, a: Runs, b: Runs) -> list[Line]:
    found = []
    for figure in FIGURES:
        answer = difference(a, b, figure)
        if answer is not None:
            found.append(_line(where, figure, answer))
    return found


def _line(where: str, figure: Figure, answer: Difference) -> Line:
    show = figure.show_difference
    return (
        where,
        figure.title,
        figure.show(answer.a),
        figure.show(answer.b),
        show(answer.difference),
        f"{show(answer.low)} to {show(answer.high)}",
        _word(figure, answer),
    )


def _word(figure: Figure, answer: Difference) -> str:
    if not answer.significant:
        return "not significant"
    better = (answer.difference > 0) == figure.more_is_better
    return "better" if better else "worse"
