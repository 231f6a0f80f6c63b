"""The demo's table and closing line, computed from saved runs and nothing else.

Pure functions: runs in, text out. Restore hit rate is tokens restored from the tier divided by
prompt tokens that were not in the GPU pool (the question at a prompt's end counts as asked for,
so 100% cannot be reached). Prefill tokens avoided were found in the GPU pool or restored.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.demo.results import Row, Run

WARM_LOOP = 3
"""The first loop in which a context can have shown that it returns."""

_NO_VALUE = "-"


@dataclass(frozen=True)
class Table:
    """A header line and one line of cells per arm."""

    headers: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, numbers aligned right."""
        rule = ("---", *["---:"] * (len(self.headers) - 1))
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.headers, rule, *self.lines))


def restore_rate(rows: Iterable[Row]) -> float | None:
    """Return restored tokens / tokens not in the GPU pool; None if no tier was ever asked."""
    kept = list(rows)
    if not any(row.queried for row in kept):
        return None
    return sum(r.restored for r in kept) / sum(r.asked - r.in_gpu for r in kept)


def mean_ttft(rows: Iterable[Row]) -> float | None:
    """Return the mean seconds to the first token, None without rows."""
    times = [row.ttft_s for row in rows]
    return fmean(times) if times else None


def hot(run: Run, *, from_loop: int = 1) -> list[Row]:
    """Return the hot requests' rows from a loop on."""
    return [row for row in run.rows if row.kind == "hot" and row.loop >= from_loop]


def last_loop(run: Run) -> int:
    """Return the number of the run's last loop."""
    return max(row.loop for row in run.rows)


@dataclass(frozen=True)
class _Column:
    """A figure of one run; `form` shows it without its `unit`."""

    header: str
    value: Callable[[Run], float | None]
    form: str
    unit: str


def _rate_column(header: str, rows: Callable[[Run], Iterable[Row]]) -> _Column:
    def value(run: Run) -> float | None:
        rate = restore_rate(rows(run))
        return None if rate is None else 100 * rate

    return _Column(header, value, ".0f", "%")


def _ttft_column(header: str, rows: Callable[[Run], Iterable[Row]]) -> _Column:
    return _Column(header, lambda run: mean_ttft(rows(run)), ".2f", " s")


_ALL_RESTORES = _rate_column("restore hits, all", lambda run: run.rows)
_HOT = (
    _rate_column("restore hits, hot", hot),
    _rate_column(f"hot from loop {WARM_LOOP}", lambda run: hot(run, from_loop=WARM_LOOP)),
    _ttft_column("hot TTFT", hot),
    _ttft_column("hot TTFT, last loop", lambda run: hot(run, from_loop=last_loop(run))),
)
_MEAN_TTFT = _ttft_column("mean TTFT", lambda run: run.rows)
_REST = (
    _Column("p50 TTFT", lambda run: median(row.ttft_s for row in run.rows), ".2f", " s"),
    _Column(
        "prefill tokens avoided",
        lambda run: sum(row.in_gpu + row.restored for row in run.rows),
        ",.0f",
        "",
    ),
    _Column("wall time", lambda run: run.wall_s, ".0f", " s"),
)


def make_table(runs: Sequence[Run], titles: dict[str, str]) -> Table:
    """Return one line per arm, in the order of `titles`: means over seeds, with their range.

    Columns about hot contexts appear only if the workload tells hot from cold.
    """
    about_hot = any(row.kind == "hot" for run in runs for row in run.rows)
    columns = (_ALL_RESTORES, *(_HOT if about_hot else (_MEAN_TTFT,)), *_REST)
    lines = []
    for arm, title in titles.items():
        if arm_runs := [run for run in runs if run.arm == arm]:
            lines.append((title, *(_cell(column, arm_runs) for column in columns)))
    return Table(("arm", *(column.header for column in columns)), tuple(lines))


def role_lines(runs: Sequence[Run], titles: Mapping[str, str]) -> list[str]:
    """Say for each arm whose tier tells it what the requests got by source role, all seeds."""
    lines = []
    for arm, title in titles.items():
        asked: Counter[str] = Counter()
        found: Counter[str] = Counter()
        for run in runs:
            if run.arm == arm:
                asked.update({role: counts[0] for role, counts in run.by_role.items()})
                found.update({role: counts[1] for role, counts in run.by_role.items()})
        shares = [
            f"{role} {found[role] / asked[role]:.0%} ({found[role]:,} of {asked[role]:,} blocks)"
            for role in sorted(asked)
            if asked[role]
        ]
        if shares:
            lines.append(f"{title}, restore hits by source role: {', '.join(shares)}")
    return lines


def answers_line(runs: Sequence[Run], reference: str = "reference") -> str:
    """Say whether every answer equals the reference arm's for the same seed, token for token."""
    truth = {run.seed: run for run in runs if run.arm == reference}
    compared = 0
    different = []
    for run in runs:
        if run.arm == reference or run.seed not in truth:
            continue
        pairs = zip(run.rows, truth[run.seed].rows, strict=True)
        for number, (row, true_row) in enumerate(pairs, 1):
            compared += 1
            if row.token_ids != true_row.token_ids:
                different.append(f"{run.arm} seed {run.seed} request {number} ({row.context})")
    if not compared:
        return "Answers: not compared (that takes the reference arm and another one)."
    if not different:
        return f"Answers: all {compared} equal the reference's, token for token."
    which = ", ".join(different)
    return f"Answers: {len(different)} of {compared} DIFFER from the reference's: {which}"


def _cell(column: _Column, runs: Sequence[Run]) -> str:
    values = [value for run in runs if (value := column.value(run)) is not None]
    if not values:
        return _NO_VALUE
    mean, least, most = (
        format(value, column.form) for value in (fmean(values), min(values), max(values))
    )
    span = f" ({least}-{most})" if len(values) > 1 else ""
    return f"{mean}{column.unit}{span}"
