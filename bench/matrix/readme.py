"""The README's headline table, rendered from the published cells between two markers."""

from collections.abc import Sequence

from bench.errors import BenchError
from bench.matrix.arms import ARMS
from bench.matrix.figures import FIGURES, Figure, by_group, value
from bench.matrix.report import Table, markdown
from bench.matrix.results import Plan, Result

BEGIN, END = "<!-- bench:headline -->", "<!-- /bench:headline -->"
_ARMS = ("A1", "A2p", "A2")
_FIGURES = tuple(f for f in FIGURES if f.key in ("hot_restored", "restored", "hot_ttft", "score"))


def headline(plan: Plan, cells: Sequence[Result]) -> str:
    """Return the headline: every workload and budget of the primary grid, LRU beside EVOKE."""
    lines = []
    for (label, budget), arms in by_group(_primary(plan, cells)).items():
        if "A1" not in arms or "A2" not in arms:
            continue
        for name in _ARMS:
            if name in arms:
                shown = [_show(arms[name], figure) for figure in _FIGURES]
                lines.append([f"{label.upper()}, {budget}", ARMS[name].title, *shown])
    if not lines:
        return "Not measured yet."
    headers = ["workload, tier", "policy", *(figure.title for figure in _FIGURES)]
    return markdown(Table(headers, lines, left=2))


def fill(text: str, plan: Plan, cells: Sequence[Result]) -> str:
    """Return the README's text with the headline between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BenchError(f"the README needs the markers {BEGIN} and {END}, once each")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{headline(plan, cells)}\n{END}{after}"


def _primary(plan: Plan, cells: Sequence[Result]) -> list[Result]:
    order = {each.cell: n for n, each in enumerate(plan.cells) if each.part == "primary"}
    return sorted((c for c in cells if c.cell in order), key=lambda c: order[c.cell])


def _show(runs: dict[int, Result], figure: Figure) -> str:
    found = value(runs, figure)
    if found is None:
        return "-"
    return figure.show(found.value)
