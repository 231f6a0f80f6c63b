"""Results as tables and plots. Needs rich and matplotlib (the extra ``cli``)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from rich.table import Table

from evoke_core.replay.grid import BASELINE, CEILING, Cell, RecordedTier, TraceResult

_GIB = 1 << 30
_WIDTH, _HEIGHT = 6.4, 4.4  # inches a panel
_DPI = 150
_SPREAD = 8.0  # budgets further apart than this factor are drawn on a logarithmic axis
_CEILING_COLOUR, _BASELINE_COLOUR = "#222222", "#8a8a8a"
_COLOURS = ("#0b6e99", "#d1495b", "#3a7d44", "#b07aa1", "#e08e1b", "#5b5ea6", "#7f5539", "#00a6a6")
_MARKERS = "osD^vPXh"
_AXES = {
    "": "blocks",
    "%": "% of the trace's different blocks",
    "x": "multiples of the recorded one",
}


def heading(result: TraceResult) -> str:
    """Return one line that says what was replayed."""
    requests = result.cells[0].counts.requests if result.cells else 0
    counted = "" if requests == result.requests else f", {requests:,} of them counted"
    return (
        f"{result.name}: {result.requests:,} requests{counted},"
        f" {result.unique_blocks:,} different blocks of {result.tokens_per_block} tokens;"
        f" block hits if nothing were evicted: {result.ceiling:.4f}"
        f"{_as_recorded(result.recorded)}"
    )


def _as_recorded(tier: RecordedTier | None) -> str:
    if tier is None:
        return ""
    how = [tier.policy or "a policy that is not told"]
    if tier.capacity:
        how.append(f"{tier.capacity:,} blocks")
        if tier.bytes_per_block:
            how.append(f"{_gib(tier.capacity, tier.bytes_per_block)} GiB")
    return f"; recorded with {', '.join(how)}: tier hits {tier.tier_hits:.4f}"


def table(
    result: TraceResult, bytes_per_block: int | None = None, *, with_gpu: bool = False
) -> Table:
    """Return one trace's hit ratios: a row for each budget and policy.

    "gap closed" is the share of the way from ``lru`` to ``min`` in block hits. Where there is a GPU
    in front, "tier hits" are of what the tier was asked for.
    """
    recorded = result.recorded
    if recorded is not None:
        bytes_per_block = bytes_per_block or recorded.bytes_per_block
        with_gpu = True
    grid = Table()
    grid.add_column("budget")
    grid.add_column("blocks", justify="right")
    if bytes_per_block:
        grid.add_column("GiB", justify="right")
    grid.add_column("policy", no_wrap=True)
    for heading in (
        "block hits",
        "token hits",
        "request hits",
        *(["GPU hits", "tier hits"] * with_gpu),
    ):
        grid.add_column(heading, justify="right")
    grid.add_column("gap closed", justify="right")
    grid.add_column("seconds", justify="right")
    budget = ""
    for cell in result.cells:
        if budget and cell.budget != budget:
            grid.add_section()
        first = cell.budget != budget
        budget = cell.budget
        grid.add_row(
            budget if first else "",
            f"{cell.capacity:,}" if first else "",
            *([_gib(cell.capacity, bytes_per_block) if first else ""] if bytes_per_block else []),
            cell.policy,
            f"{cell.block_hits:.4f}",
            f"{cell.token_hits:.4f}",
            f"{cell.request_hits:.4f}",
            *([f"{cell.gpu_hits:.4f}", f"{cell.tier_hits:.4f}"] * with_gpu),
            "" if cell.gap_closed is None else f"{cell.gap_closed:+.3f}",
            f"{cell.counts.seconds:.1f}",
            style="bold" if cell.policy == CEILING else None,
        )
    return grid


def plot(results: Sequence[TraceResult], path: Path, bytes_per_block: int | None = None) -> None:
    """Write hit ratio over budget, a panel for each trace and a line for each policy.

    The file's ending names the format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        OSError, ValueError: the file cannot be written, or its format is unknown.
    """
    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    styles = _styles(results)
    for at, result in enumerate(results):
        axes = figure.add_subplot(rows, columns, at + 1)
        _panel(axes, result, styles, bytes_per_block)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 4 * columns),
        frameon=False,
    )
    figure.savefig(path, dpi=_DPI)


def _panel(
    axes: Axes,
    result: TraceResult,
    styles: dict[str, dict[str, object]],
    bytes_per_block: int | None,
) -> None:
    if result.recorded is not None:
        bytes_per_block = bytes_per_block or result.recorded.bytes_per_block
    lines: dict[str, list[Cell]] = {}
    for cell in result.cells:
        lines.setdefault(cell.policy, []).append(cell)
    for policy, cells in lines.items():
        cells = sorted(cells, key=lambda cell: cell.capacity)
        axes.plot(
            [cell.capacity for cell in cells],
            [cell.block_hits for cell in cells],
            label=policy,
            **styles[policy],  # type: ignore[arg-type]
        )
    sizes = {cell.capacity: cell.budget for cell in result.cells}
    if max(sizes) > _SPREAD * min(sizes):
        axes.set_xscale("log")
    ticks = sorted(sizes)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([_label(size, sizes[size], bytes_per_block) for size in ticks])
    kinds = {budget[-1:] if budget[-1:] in _AXES else "" for budget in sizes.values()}
    axes.set_xlabel(f"tier size, {_AXES[kinds.pop() if len(kinds) == 1 else '']}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("blocks found")
    axes.set_title(f"{result.name} ({result.requests:,} requests)", fontsize=10)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _label(size: int, budget: str, bytes_per_block: int | None) -> str:
    return f"{budget}\n{_gib(size, bytes_per_block)} GiB" if bytes_per_block else budget


def _gib(blocks: int, bytes_per_block: int) -> str:
    size = blocks * bytes_per_block / _GIB
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def _styles(results: Sequence[TraceResult]) -> dict[str, dict[str, object]]:
    """Give each policy the same look in every panel; the ceiling and the baseline stay quiet."""
    policies = list(dict.fromkeys(cell.policy for result in results for cell in result.cells))
    styles: dict[str, dict[str, object]] = {
        CEILING: {"color": _CEILING_COLOUR, "linestyle": "--", "linewidth": 1.4},
        BASELINE: {"color": _BASELINE_COLOUR, "marker": "o", "markersize": 4, "linewidth": 1.8},
    }
    others = [policy for policy in policies if policy not in styles]
    for at, policy in enumerate(others):
        styles[policy] = {
            "color": _COLOURS[at % len(_COLOURS)],
            "marker": _MARKERS[at % len(_MARKERS)],
            "markersize": 4,
            "linewidth": 1.6,
        }
    return styles
