"""Pictures of results: hit ratio over budget per recorded trace, and the one that tells the story.

Needs matplotlib (evoke-core's extra `cli`).
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from bench.replay.results import Document
from bench.replay.targets import lru_budget
from evoke_core.replay import TraceResult
from evoke_core.replay.report import plot

STORY = "story.png"
_OURS = "#0b6e99"
_LOOKS: dict[str, tuple[str, dict[str, object]]] = {
    "min": ("MIN (knows the future)", {"color": "#222222", "ls": "--", "lw": 1.4}),
    "adaptive": ("EVOKE adaptive", {"color": _OURS, "marker": "o", "ms": 4.5, "lw": 2.6}),
    "arc": ("ARC", {"color": "#d1495b", "marker": "s", "ms": 3.5, "lw": 1.4}),
    "lru": ("LRU", {"color": "#8a8a8a", "marker": "D", "ms": 3.5, "lw": 1.6}),
    "wtinylfu": ("W-TinyLFU", {"color": "#e08e1b", "marker": "^", "ms": 4, "lw": 1.4}),
}
_DPI = 110


def draw(documents: Sequence[Document], folder: Path) -> list[Path]:
    """Draw all pictures into a folder and return their files."""
    drawn = []
    for document in documents:
        if document.kind == "recorded":
            path = folder / f"{document.slug}.png"
            plot([document.whole], path)
            drawn.append(path)
    told = [document for document in documents if document.curve is not None]
    if told:
        drawn.append(folder / STORY)
        _story(told, drawn[-1])
    return drawn


def _story(documents: Sequence[Document], path: Path) -> None:
    figure = Figure(figsize=(5.2 * len(documents), 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    for at, document in enumerate(documents):
        axes = figure.add_subplot(1, len(documents), at + 1)
        assert document.curve is not None
        _curves(axes, document.curve)
        axes.set_title(document.title, fontsize=11)
        if document.sweep is not None:
            _saving(axes, document.curve, document.sweep)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 3 * len(documents)),
        frameon=False,
    )
    figure.savefig(path, dpi=_DPI)


def _curves(axes: Axes, curve: TraceResult) -> None:
    budgets = {cell.capacity: cell.budget for cell in curve.cells}
    for policy, (label, look) in _LOOKS.items():
        cells = sorted(
            (cell.capacity, cell.block_hits) for cell in curve.cells if cell.policy == policy
        )
        axes.plot([x for x, _ in cells], [y for _, y in cells], label=label, **look)  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(budgets)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([budgets[size] for size in sorted(budgets)])
    axes.set_xlabel("tier size, % of the trace's different blocks")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("blocks found")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _saving(axes: Axes, curve: TraceResult, sweep: TraceResult) -> None:
    """Mark, where it is most, how much more memory LRU needs for the same hits."""
    times, size, height = 0.0, 0, 0.0
    for cell in curve.cells:
        needed = lru_budget(sweep, cell.block_hits) if cell.policy == "adaptive" else None
        if needed is not None and needed > times * cell.capacity:
            times, size, height = needed / cell.capacity, cell.capacity, cell.block_hits
    if times <= 1.0:
        return
    axes.annotate(
        "",
        xy=(times * size, height),
        xytext=(size, height),
        arrowprops={"arrowstyle": "<->", "color": _OURS, "lw": 1.4, "shrinkA": 3, "shrinkB": 0},
    )
    axes.annotate(
        f"LRU: {times:.1f}× the memory",
        xy=(times * size, height),
        xytext=(5, 0),
        textcoords="offset points",
        color=_OURS,
        fontsize=9,
        va="center",
        bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )
