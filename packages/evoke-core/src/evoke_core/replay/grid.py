"""A replay: traces by policies by budgets, cell by cell, side by side in processes.

Guarantees: results are in the order of traces, budgets and policies as given, and the same for any
number of processes.
"""

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from decimal import Decimal, InvalidOperation
from typing import Any

from attrs import asdict, evolve, field, frozen

from evoke_core.config import ConfigError, EvokeConfig
from evoke_core.ledger import BlockLedger
from evoke_core.policies import POLICIES
from evoke_core.replay.recorded import RecordedTrace
from evoke_core.replay.rivals import RIVALS
from evoke_core.replay.rivals.belady import Min
from evoke_core.replay.simulate import HALVES, Counts, Half, simulate
from evoke_core.replay.tiers import BlockTier, LedgerTier, TagChooser, Tier
from evoke_core.replay.trace import Trace

CEILING = "min"
BASELINE = "lru"
_LEDGER = {"ledger-lru": "lru"}  # the ledger's policies whose name a rival has
_NO_GAP = 1e-4  # baseline and ceiling closer than this: a share of the gap would be noise


class ReplayError(ValueError):
    """A replay that was asked for cannot be done. The message is one line."""


@frozen
class Budget:
    """Size of the tier: blocks, a percentage of the trace's different blocks, or a multiple of the
    tier that the trace was recorded on."""

    value: Decimal
    percent: bool
    times: bool = False

    @classmethod
    def parse(cls, text: "str | int | Budget") -> "Budget":
        """Read ``"10%"``, ``"2x"`` or a number of blocks.

        Raises:
            ReplayError: anything else, and what is not above 0.
        """
        if isinstance(text, Budget):
            return text
        given = str(text).strip()
        try:
            value = Decimal(given[:-1] if given.endswith(("%", "x")) else given)
        except InvalidOperation:
            value = Decimal(0)
        percent, times = given.endswith("%"), given.endswith("x")
        whole = value.is_finite() and (percent or times or value == value.to_integral_value())
        if not whole or value <= 0:
            raise ReplayError(
                f"budget {given!r} is not allowed; allowed: a number of blocks, a percentage of"
                " the trace's different blocks such as 10%, or a multiple of the recorded tier"
                " such as 2x"
            )
        return cls(value, percent, times)

    def __str__(self) -> str:
        return f"{self.value.normalize():f}{'%' * self.percent}{'x' * self.times}"

    def blocks(self, trace: Trace) -> int:
        """Return the capacity for ``trace``, at least 1 block.

        Raises:
            ReplayError: a multiple, and the trace does not tell of a tier.
        """
        if self.times:
            capacity = trace.capacity if isinstance(trace, RecordedTrace) else None
            if capacity is None:
                raise ReplayError(
                    f"budget {self}: {trace.name} is no recording that tells its tier's size"
                )
            return max(1, int(self.value * capacity))
        if self.percent:
            return max(1, int(self.value * trace.unique_blocks / 100))
        return int(self.value)


@frozen
class Cell:
    """What one policy found in one trace with one budget.

    ``gap_closed`` is the share of the way from ``lru`` to ``min``, in block hits, that the policy
    went at this budget; None unless both were replayed and are apart.
    """

    policy: str
    budget: str
    capacity: int
    counts: Counts
    gap_closed: float | None = None

    @property
    def block_hits(self) -> float:
        """Share of the blocks that were found."""
        return self.counts.hit_blocks / max(1, self.counts.blocks)

    @property
    def token_hits(self) -> float:
        """Share of the prompts' tokens that were found, not-full blocks included in the whole."""
        return self.counts.hit_tokens / max(1, self.counts.tokens)

    @property
    def request_hits(self) -> float:
        """Share of the requests of which at least half the tokens were found."""
        return self.counts.hit_requests / max(1, self.counts.requests)

    @property
    def gpu_hits(self) -> float:
        """Share of the blocks that the GPU cache in front served."""
        return self.counts.gpu_blocks / max(1, self.counts.blocks)

    @property
    def tier_hits(self) -> float:
        """Share of the blocks that the tier was asked for, the GPU's taken off, that it had.

        What a server reports as external hits over external queries, in blocks.
        """
        counts = self.counts
        asked = counts.blocks - counts.gpu_blocks
        return (counts.hit_blocks - counts.gpu_blocks) / max(1, asked)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "policy": self.policy,
            "budget": self.budget,
            "capacity": self.capacity,
            "block_hits": self.block_hits,
            "token_hits": self.token_hits,
            "request_hits": self.request_hits,
            "gpu_hits": self.gpu_hits,
            "tier_hits": self.tier_hits,
            "gap_closed": self.gap_closed,
            "counts": asdict(self.counts),
        }


@frozen
class RecordedTier:
    """The tier that a trace was recorded on; None where the recording does not tell.

    ``tier_hits`` is its :attr:`Cell.tier_hits`, ``ceiling`` see :class:`TraceResult`.
    """

    policy: str | None
    capacity: int | None
    bytes_per_block: int | None
    tier_hits: float
    ceiling: float

    @classmethod
    def of(cls, trace: Trace) -> "RecordedTier | None":
        if not isinstance(trace, RecordedTrace):
            return None
        return cls(
            policy=trace.policy,
            capacity=trace.capacity,
            bytes_per_block=trace.bytes_per_block,
            tier_hits=trace.tier_hits,
            ceiling=trace.ceiling,
        )


@frozen
class TraceResult:
    """All cells of one trace, by budget and then policy, in the order asked for.

    ``ceiling`` is the block hit ratio of a cache that never evicts, over all requests.
    ``recorded`` is what a recording tells of the tier it was made on.
    """

    name: str
    requests: int
    references: int
    unique_blocks: int
    tokens_per_block: int
    skipped: int
    cells: list[Cell] = field(factory=list)
    recorded: RecordedTier | None = None

    @property
    def ceiling(self) -> float:
        if self.recorded is not None:
            return self.recorded.ceiling
        return 1.0 - self.unique_blocks / max(1, self.references)

    def cell(self, policy: str, budget: "str | int | Budget") -> Cell:
        """Return one cell.

        Raises:
            KeyError: it was not replayed.
        """
        wanted = str(Budget.parse(budget))
        for cell in self.cells:
            if cell.policy == policy and cell.budget == wanted:
                return cell
        raise KeyError((policy, wanted))

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "name": self.name,
            "requests": self.requests,
            "references": self.references,
            "unique_blocks": self.unique_blocks,
            "tokens_per_block": self.tokens_per_block,
            "skipped": self.skipped,
            "ceiling": self.ceiling,
            "recorded": None if self.recorded is None else asdict(self.recorded),
            "cells": [cell.as_dict() for cell in self.cells],
        }


@frozen(kw_only=True)
class _Plan:
    """What all cells share; sent to every process once."""

    traces: list[Trace]
    gpu_blocks: int
    chunk: int
    half: Half
    config: EvokeConfig | None
    tags: TagChooser | None


def known_policies() -> list[str]:
    """Return the names that can be replayed: the ledger's policies, the rivals, and MIN.

    ``lru`` is the plain one over an ordered dictionary, ``ledger-lru`` the ledger's.
    """
    renamed = {policy: name for name, policy in _LEDGER.items()}
    return [*(renamed.get(name, name) for name in POLICIES), *RIVALS, CEILING]


def make_tier(
    policy: str,
    capacity: int,
    trace: Trace,
    *,
    config: EvokeConfig | None = None,
    tags: TagChooser | None = None,
    keys: list[bytes] | None = None,
) -> Tier:
    """Return an empty tier of ``capacity`` blocks under a policy, to replay ``trace`` through.

    A name that is none of the rivals' goes to the ledger, as ``EvokeConfig.policy``; ``config``
    holds its other settings, by default those that the trace was recorded with.

    Raises:
        ReplayError: the policy is unknown.
    """
    if policy == CEILING:
        return Min(capacity, trace)
    if policy in RIVALS:
        rival = RIVALS[policy]
        return BlockTier(rival(capacity), renew=lambda: rival(capacity))
    recorded = trace if isinstance(trace, RecordedTrace) else None
    if config is None and recorded is not None:
        config = recorded.config
    ledger = BlockLedger(
        capacity,
        config=_settings(policy, config),
        tokens_per_block=trace.tokens_per_block,
        store_threshold=recorded.store_threshold if recorded is not None else 0,
    )
    return LedgerTier(ledger, trace, keys=keys, tags=tags)


def replay(
    traces: Trace | Iterable[Trace],
    budgets: Sequence[str | int | Budget],
    policies: Sequence[str],
    *,
    gpu_blocks: int = 0,
    chunk: int = 0,
    half: Half = "all",
    config: EvokeConfig | None = None,
    tags: TagChooser | None = None,
    jobs: int | None = None,
    on_cell: Callable[[str, Cell], None] | None = None,
) -> list[TraceResult]:
    """Replay every trace under every policy and budget.

    Args:
        traces: from a reader, or generated.
        budgets: numbers of blocks, percentages of each *whole* trace's different blocks
            (``"10%"``), whichever half counts, or multiples of the recorded tier (``"2x"``).
        policies: names, see :func:`known_policies`.
        gpu_blocks, chunk, half: see :func:`~evoke_core.replay.simulate.simulate`.
        config: settings of the ledger's policies, by default those recorded; its ``policy`` is
            replaced by the cell's.
        tags: what requests carry (the ledger's policies only), by default what was recorded; a
            function that processes can be given, so one of a module.
        jobs: processes; by default one for each core.
        on_cell: told the trace's name and each cell as it ends, in any order; ``gap_closed`` is
            not known yet then.

    Raises:
        ReplayError: a policy, budget or number that is not allowed.
    """
    plan = _Plan(
        traces=[traces] if isinstance(traces, Trace) else list(traces),
        gpu_blocks=_natural("gpu_blocks", gpu_blocks),
        chunk=_natural("chunk", chunk),
        half=half,
        config=config,
        tags=tags,
    )
    if half not in HALVES:
        raise ReplayError(f"half = {half!r} is not allowed; allowed: {', '.join(HALVES)}")
    sizes = list(dict.fromkeys(map(Budget.parse, budgets)))
    names = list(dict.fromkeys(policies))
    for what, given in (("trace", plan.traces), ("budget", sizes), ("policy", names)):
        if not given:
            raise ReplayError(f"nothing to replay: no {what}")
    for name in names:
        if name not in RIVALS and name != CEILING:
            _settings(name, config)
    for trace in plan.traces:
        for size in sizes:
            size.blocks(trace)
    tasks = [(at, name, size) for at in range(len(plan.traces)) for size in sizes for name in names]
    cells: dict[tuple[int, str, Budget], Cell] = {}

    def note(task: tuple[int, str, Budget], cell: Cell) -> None:
        cells[task] = cell
        if on_cell is not None:
            on_cell(plan.traces[task[0]].name, cell)

    workers = min(_natural("jobs", jobs or 0) or os.cpu_count() or 1, len(tasks))
    if workers == 1:
        worker = _Worker(plan)
        for task in tasks:
            note(task, worker.run(*task))
    else:
        with ProcessPoolExecutor(workers, initializer=_begin, initargs=(plan,)) as pool:
            futures = {pool.submit(_run, *task): task for task in tasks}
            try:
                for future in as_completed(futures):
                    note(futures[future], future.result())
            except BrokenProcessPool:
                raise ReplayError(
                    "a process ended before its cell did, out of memory perhaps; try fewer jobs"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [
        _result(trace, [_with_gap(cells, at, name, size) for size in sizes for name in names])
        for at, trace in enumerate(plan.traces)
    ]


class _Worker:
    """Runs cells in one process, making each trace's keys once."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._keys: dict[int, list[bytes]] = {}

    def run(self, at: int, policy: str, budget: Budget) -> Cell:
        plan = self._plan
        trace = plan.traces[at]
        if at not in self._keys:
            self._keys = {at: trace.keys()}
        capacity = budget.blocks(trace)
        tier = make_tier(
            policy, capacity, trace, config=plan.config, tags=plan.tags, keys=self._keys[at]
        )
        counts = simulate(trace, tier, gpu_blocks=plan.gpu_blocks, chunk=plan.chunk, half=plan.half)
        return Cell(policy, str(budget), capacity, counts)


_worker: _Worker | None = None


def _begin(plan: _Plan) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # interrupted: end, without a traceback
    _worker = _Worker(plan)


def _run(at: int, policy: str, budget: Budget) -> Cell:
    assert _worker is not None
    return _worker.run(at, policy, budget)


def _with_gap(cells: dict[tuple[int, str, Budget], Cell], at: int, name: str, size: Budget) -> Cell:
    cell = cells[at, name, size]
    low, high = cells.get((at, BASELINE, size)), cells.get((at, CEILING, size))
    if low is None or high is None or high.block_hits - low.block_hits < _NO_GAP:
        return cell
    share = (cell.block_hits - low.block_hits) / (high.block_hits - low.block_hits)
    return evolve(cell, gap_closed=share)


def _result(trace: Trace, cells: list[Cell]) -> TraceResult:
    return TraceResult(
        name=trace.name,
        requests=len(trace),
        references=trace.references,
        unique_blocks=trace.unique_blocks,
        tokens_per_block=trace.tokens_per_block,
        skipped=trace.skipped,
        cells=cells,
        recorded=RecordedTier.of(trace),
    )


def _settings(policy: str, config: EvokeConfig | None) -> EvokeConfig:
    try:
        return evolve(
            EvokeConfig() if config is None else config, policy=_LEDGER.get(policy, policy)
        )
    except ConfigError as error:
        if _LEDGER.get(policy, policy) in POLICIES:
            raise ReplayError(f"policy {policy}: {error}") from None
        known = ", ".join(known_policies())
        raise ReplayError(f"unknown policy {policy!r}; known: {known}") from None


def _natural(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ReplayError(f"{name} = {value!r} is not allowed; allowed: whole numbers >= 0")
    return value
