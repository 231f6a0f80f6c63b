"""Runs cells: each with a server of its own, warmed up, measured, saved, and the server ended.

A policy keeps what it learned when caches are reset, so every cell boots a server. Cells that are
finished (same name, same digest, whole file) are skipped: a run that was broken off goes on where
it stopped. A cell that fails is said and the next one runs; the run then ends with an error.
"""

import json
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from bench.envelope import machine, now, versions
from bench.errors import BenchError
from bench.matrix.arms import ARMS
from bench.matrix.cells import Cell, Matrix
from bench.matrix.plan import make_plan
from bench.matrix.results import Result, finished
from bench.matrix.sending import Decode, send_closed, send_open
from bench.matrix.server import Sizes, measure, server_config
from bench.matrix.workloads import make_work
from bench.matrix.workloads.text import filler
from bench.matrix.workloads.work import Ask, Encode, Work
from bench.progress import Reporter
from bench.serving.client import CacheCounters, Client
from bench.serving.server import running

_WARM_UP = 3
_WARM_UP_TOKENS = 8
_BOOT_S = 25.0


@dataclass
class Bench:
    """A matrix made ready: the model's folder and tokenizer, the files that were pointed at."""

    matrix: Matrix
    model: Path
    encode: Encode
    decode: Decode
    files: Mapping[str, Path]
    _works: dict[str, Work] = field(default_factory=dict)

    def work(self, cell: Cell) -> Work:
        """Return a cell's requests; arms and budgets of a workload and seed share them."""
        key = json.dumps([cell.workload, dict(cell.options), cell.seed, cell.server["block_size"]])
        if key not in self._works:
            ask = Ask(cell.seed, self.encode, cell.options, cell.server["block_size"], self.files)
            self._works[key] = make_work(cell.workload, ask)
        return self._works[key]

    def sizes(self, cell: Cell) -> Sizes:
        """Return a cell's sizes."""
        return measure(cell, self.work(cell), self.model)


def waiting(cells: Sequence[Cell], results: Path, files: Container[str]) -> list[Cell]:
    """Return the cells that can run here, with these files, and are not finished, in order."""
    return [
        cell
        for cell in cells
        if cell.cannot_run(files) is None and not finished(results, cell.name, cell.digest)
    ]


def run_cells(bench: Bench, cells: Sequence[Cell], results: Path, reporter: Reporter) -> None:
    """Run what is not finished of `cells`; each is saved into `results` when it is done.

    Raises BenchError, at the end, where cells failed.
    """
    results.mkdir(parents=True, exist_ok=True)
    make_plan(bench, reporter).save(results)
    left = waiting(cells, results, bench.files)
    reasons = [reason for cell in cells if (reason := cell.cannot_run(bench.files))]
    skipped = len(cells) - len(reasons) - len(left)
    reporter.say(f"{len(left)} cells to run, {skipped} finished, {_said(reasons)}")
    pace = Pace(left)
    failed = []
    for number, cell in enumerate(left, 1):
        reporter.say(f"cell {number} of {len(left)}: {cell.name} ({pace.left(number - 1)} left)")
        started = time.monotonic()
        try:
            run_cell(bench, cell, results, reporter).save(results)
        except BenchError as error:
            failed.append(cell.name)
            reporter.say(f"cell {cell.name} failed: {error.format_message()}")
        pace.took(cell, time.monotonic() - started)
    if failed:
        raise BenchError(f"{len(failed)} cells failed, the first: {failed[0]}")


class Pace:
    """Estimates the time left: planned seconds, scaled by how long finished cells took."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._planned = [cell.seconds + _BOOT_S for cell in cells]
        self._spent = self._expected = 0.0

    def took(self, cell: Cell, seconds: float) -> None:
        """Note how long a cell took."""
        self._spent += seconds
        self._expected += cell.seconds + _BOOT_S

    def left(self, done: int) -> str:
        """Return the time left after `done` cells, in words."""
        scale = self._spent / self._expected if self._expected else 1.0
        return duration(scale * sum(self._planned[done:]))


def duration(seconds: float) -> str:
    """Return a time in words: '45 s', '12 min', '2 h 05 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def run_cell(bench: Bench, cell: Cell, results: Path, reporter: Reporter) -> Result:
    """Measure one cell; BenchError where its server fails. No server is left."""
    work, sizes = bench.work(cell), bench.sizes(cell)
    arm = ARMS[cell.arm]
    log = results / "logs" / f"{cell.name}.log"
    profile = (results / "logs" / f"{cell.name}.profile.json").absolute()
    profile.unlink(missing_ok=True)
    watched = profile if arm.spec is not None else None
    config = server_config(cell, sizes, bench.model, watched)
    with ExitStack() as stack:
        with reporter.waiting(f"{cell.name}: booting the server") as on_wait:
            server = stack.enter_context(running(config, log, on_wait=on_wait))
        many = len(work.requests) if work.open_loop else 4
        client = stack.enter_context(Client(server, connections=many))
        warm_up(client, bench.encode, max(len(each.prompt) for each in work.requests))
        before = client.counters()
        send = send_open if work.open_loop else send_closed
        with reporter.counting(f"{cell.name}: requests", len(work.requests)) as advance:
            started = time.perf_counter()
            rows = send(client, work.requests, bench.decode, advance)
            wall_s = time.perf_counter() - started
        counted = client.counters().since(before)
    return Result(
        matrix=cell.matrix,
        cell=cell.name,
        workload=cell.workload,
        label=cell.label,
        arm=cell.arm,
        budget=cell.budget,
        seed=cell.seed,
        digest=cell.digest,
        date=now(),
        machine=machine(),
        versions=versions(),
        configuration=cell.configuration(),
        sizes=_sizes(sizes, work),
        open_loop=work.open_loop,
        boot_s=round(server.boot_s, 1),
        wall_s=round(wall_s, 2),
        metrics=asdict(counted),
        scheduler=_read_profile(profile) if watched else {},
        notes=work.notes,
        rows=tuple(rows),
    )


def warm_up(client: Client, encode: Encode, tokens: int) -> CacheCounters:
    """Send requests of other text, so that what a server does first is not measured."""
    rng = Random("warm-up")
    prompt: list[int] = []
    while len(prompt) < tokens:
        prompt = encode(f"Warm-up {rng.random()}. {filler(rng, tokens, encode)}")
    for length in [tokens // 2] * (_WARM_UP - 1) + [tokens]:
        client.complete(prompt[:length], _WARM_UP_TOKENS)
    return client.counters()


def _sizes(sizes: Sizes, work: Work) -> dict[str, int]:
    return {
        **asdict(sizes),
        "tier_bytes": sizes.tier_bytes,
        "hot_blocks": work.hot_blocks,
        "all_blocks": work.all_blocks,
        "requests": len(work.requests),
        "prompt_tokens": sum(len(request.prompt) for request in work.requests),
    }


def _read_profile(path: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise BenchError("the tier's profile was not written") from None
    return found


def _said(reasons: Sequence[str]) -> str:
    told = f" ({'; '.join(sorted(set(reasons)))})" if reasons else ""
    return f"{len(reasons)} cannot run here{told}"
