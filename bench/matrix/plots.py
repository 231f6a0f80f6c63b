"""Pictures of one workload, as SVG to be put into a page: hits and TTFT over budgets, by arm."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench.matrix.arms import ARMS
from bench.matrix.figures import CACHED, HOT_RESTORED, HOT_TTFT, RESTORED, TTFT, Figure, value
from bench.matrix.results import Planned, Result

_COLOURS = {
    "A0": "#8a8f98",
    "A1": "#d08a2e",
    "A1a": "#b5651d",
    "A1t": "#e8b878",
    "A2": "#2f6fde",
    "A2p": "#8b5fbf",
    "A2t": "#8fb3f0",
    "A3": "#2a9d8f",
    "A4": "#c0504d",
}
Arms = Mapping[str, Mapping[int, Result]]


def draw(planned: Sequence[Planned], measured: Mapping[str, Arms]) -> str:
    """Return an SVG: bars with intervals by budget; diamonds are what was predicted."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    hot = any(
        value(runs, HOT_TTFT) is not None for arms in measured.values() for runs in arms.values()
    )
    open_loop = any(
        r.open_loop for arms in measured.values() for x in arms.values() for r in x.values()
    )
    hits = CACHED if open_loop else HOT_RESTORED if hot else RESTORED
    settings: Any = {
        "font.family": "sans-serif",
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "evoke",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained")
        tiers = {budget: arms for budget, arms in measured.items() if budget}
        _bars(axes[0], hits, planned, tiers or measured, scale=100.0)
        _bars(axes[1], HOT_TTFT if hot else TTFT, planned, measured, scale=1.0)
        axes[0].set_ylabel(f"{hits.title}, %")
        axes[1].set_ylabel(f"{(HOT_TTFT if hot else TTFT).title}, s")
        handles, labels = axes[1].get_legend_handles_labels()
        if labels:
            place: Any = {"loc": "outside lower center", "ncols": 4}
            figure.legend(handles, labels, frameon=False, **place)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)


def _bars(
    axis: Any,
    figure: Figure,
    planned: Sequence[Planned],
    measured: Mapping[str, Arms],
    *,
    scale: float,
) -> None:
    names = [name for name in ARMS if any(name in arms for arms in measured.values())]
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        xs, heights, below, above = [], [], [], []
        for position, arms in enumerate(measured.values()):
            found = value(arms[name], figure) if name in arms else None
            if found is None:
                continue
            xs.append(position + (place - (len(names) - 1) / 2) * width)
            heights.append(scale * found.value)
            below.append(scale * max(0.0, found.value - found.low))
            above.append(scale * max(0.0, found.high - found.value))
        if xs:
            axis.bar(
                xs,
                heights,
                width * 0.92,
                yerr=(below, above),
                color=_COLOURS[name],
                label=f"{name}: {ARMS[name].title}",
                error_kw={"elinewidth": 1, "ecolor": "#555"},
            )
        if figure in (RESTORED, HOT_RESTORED):
            _foreseen(axis, figure, planned, list(measured), name, (place, len(names)), width)
    axis.set_xticks(range(len(measured)), [f"tier {b}" if b else "no tier" for b in measured])
    axis.set_ylim(bottom=0)


def _foreseen(
    axis: Any,
    figure: Figure,
    planned: Sequence[Planned],
    budgets: Sequence[str],
    name: str,
    place: tuple[int, int],
    width: float,
) -> None:
    for position, budget in enumerate(budgets):
        members = [p for p in planned if p.arm == name and p.budget == budget]
        rates = [p.predicted_hot if figure is HOT_RESTORED else p.predicted for p in members]
        known = [rate for rate in rates if rate is not None]
        if known:
            x = position + (place[0] - (place[1] - 1) / 2) * width
            axis.plot(
                [x], [100 * sum(known) / len(known)], "D", ms=4, mfc="white", mec="#222", mew=1
            )
