"""What the fault gates share: contexts with known answers, servers, and what to look at.

A scene knows the right answer to every one of its prompts, from a server that never evicts. A
stage is one server with EVOKE's tier behind the slow worker; what it answers is compared at once,
and what it holds can be read.
"""

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.progress import Reporter
from bench.serving.server import MeasuredConfig, Server, running
from gates.client import GateClient, Reply, Unanswered
from gates.faults import FAULTS_KEY

BLOCK = 32
CONTEXT_TOKENS = 330  # ten full blocks and a bit
ANSWER_TOKENS = 8
TOLERANCE = 1e-3
POOL_BLOCKS = 65
MAX_MODEL_LEN = 1024
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK  # of the tiny model: layers, K and V, heads, size, bytes
_REQUEST_S = 120.0  # a request that takes longer hangs
_QUIET_S = 20.0
_IN_TRANSFER = "vllm:kv_offload_cpu_cache_usage_perc"
_ORPHANS = "vllm:kv_offload_evoke_orphan_blocks"
_RESIDENT = "vllm:kv_offload_evoke_resident_blocks"
_CAPACITY = "vllm:kv_offload_evoke_capacity_blocks"


@dataclass
class Outcome:
    """What one fault came to: `pass`, `fail`, or `upstream` for the engine's own known defect."""

    name: str
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    upstream: str | None = None
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """Return the word for it."""
        if self.problems:
            return "fail"
        return "upstream" if self.upstream else "pass"

    def expect(self, condition: bool, problem: str) -> None:
        """Note a problem unless `condition` holds."""
        if not condition:
            self.problems.append(problem)


@dataclass(frozen=True)
class Scene:
    """The tiny model's folder, contexts and their right answers, and where logs go."""

    model: Path
    contexts: tuple[tuple[int, ...], ...]
    expected: Mapping[tuple[int, ...], Reply]
    folder: Path
    reporter: Reporter

    @classmethod
    def prepare(cls, model: Path, count: int, folder: Path, reporter: Reporter) -> "Scene":
        """Make `count` contexts, and ask a server that never evicts for the answers."""
        rng = random.Random(11)
        contexts = tuple(
            tuple(rng.randrange(256) for _ in range(CONTEXT_TOKENS)) for _ in range(count)
        )
        blocks = count * (CONTEXT_TOKENS // BLOCK + 2) + 8
        config = _config(model, gpu_blocks=blocks)
        expected = {}
        with ExitStack() as stack:
            with reporter.waiting("right answers: booting a server that never evicts") as on_wait:
                log = folder / "logs" / "baseline.log"
                server = stack.enter_context(running(config, log, on_wait=on_wait))
            client = stack.enter_context(GateClient(server))
            with reporter.counting("right answers", count) as advance:
                for context in contexts:
                    expected[context] = client.ask(context, ANSWER_TOKENS)
                    advance()
        return cls(model, contexts, expected, folder, reporter)

    @contextmanager
    def stage(
        self,
        name: str,
        *,
        tier_blocks: int,
        load_s: float = 0.0,
        store_s: float = 0.0,
        evoke: Mapping[str, Any] | None = None,
    ) -> Iterator["Stage"]:
        """Serve with a tier of `tier_blocks` behind a worker that is late by these seconds."""
        journal = self.folder / "logs" / f"{name}.journal"
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.unlink(missing_ok=True)
        extra: dict[str, Any] = {
            "spec_name": "FaultySpec",
            "spec_module_path": "gates.faults.worker",
            "cpu_bytes_to_use": tier_blocks * BLOCK_BYTES,
            FAULTS_KEY: {"journal": str(journal.resolve()), "load_s": load_s, "store_s": store_s},
        }
        if evoke:
            extra["evoke"] = dict(evoke)
        config = _config(self.model, gpu_blocks=POOL_BLOCKS, extra=extra)
        log = self.folder / "logs" / f"{name}.log"
        with ExitStack() as stack:
            with self.reporter.waiting(f"{name}: booting the server") as on_wait:
                server = stack.enter_context(running(config, log, on_wait=on_wait))
            client = stack.enter_context(GateClient(server, timeout_s=_REQUEST_S, connections=128))
            yield Stage(self, server, client, journal)


@dataclass(frozen=True)
class Stage:
    """One server under a fault."""

    scene: Scene
    server: Server
    client: GateClient
    journal: Path

    def check(
        self,
        context: tuple[int, ...],
        outcome: Outcome,
        tags: Mapping[str, Any] | None = None,
    ) -> bool:
        """Ask for a context; note a wrong or missing answer. Tells whether it was right."""
        params = None if tags is None else {"evoke": dict(tags)}
        try:
            reply = self.client.ask(context, ANSWER_TOKENS, params)
        except Unanswered as error:
            outcome.problems.append(f"no answer: {error}")
            return False
        if (difference := differs(self.scene.expected[context], reply)) is not None:
            outcome.problems.append(f"wrong answer: {difference}")
            return False
        return True

    def check_all(
        self,
        contexts: Sequence[tuple[int, ...]],
        outcome: Outcome,
        *,
        threads: int = 1,
        tags: Mapping[str, Any] | None = None,
    ) -> int:
        """Ask for all contexts, several at once; return how many were answered rightly."""
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(lambda context: self.check(context, outcome, tags), contexts))

    def entries(self) -> list[dict[str, Any]]:
        """Return the worker's journal; a last line cut short by a kill is left out."""
        lines = self.journal.read_text().split("\n")[:-1] if self.journal.exists() else []
        return [json.loads(line) for line in lines]

    def in_flight(self, direction: str, at: float | None = None) -> int:
        """Return how many transfers had begun and were not done, now or at a time."""
        states = [
            entry["state"]
            for entry in self.entries()
            if entry["what"] == direction and (at is None or entry["at"] <= at)
        ]
        return states.count("begun") - states.count("done")

    def wait_in_flight(self, direction: str, seconds: float = 60.0) -> None:
        """Wait until a transfer is under way; BenchError where none ever is."""
        limit = time.monotonic() + seconds
        while not self.in_flight(direction):
            if time.monotonic() > limit:
                raise BenchError(f"no {direction} was under way within {seconds:.0f} s")
            time.sleep(0.01)

    def group(self) -> int:
        """Return the server's process group."""
        worker: int = next(e["pid"] for e in self.entries() if e["what"] == "worker")
        return os.getpgid(worker)

    def resident_memory(self) -> int:
        """Return the bytes of memory that the server's processes hold."""
        group = self.group()
        return sum(memory_of(pid) for pid in pids_of(group))

    def settle(self, outcome: Outcome) -> None:
        """Check that nothing is left behind: no slot in transfer, no orphan, engine alive.

        Gauges move with the engine's steps, so short requests that store nothing are sent until
        everything is accounted for.
        """
        limit = time.monotonic() + _QUIET_S
        metrics: dict[str, float] = {}
        while True:
            try:
                self.client.ask((1, 2, 3), 1)
                metrics = self.client.metrics()
            except (Unanswered, BenchError) as error:
                outcome.problems.append(f"the engine is not alive: {error}")
                return
            in_transfer = metrics.get(_IN_TRANSFER, -1.0)
            if in_transfer == 0.0 or time.monotonic() > limit:
                break
            time.sleep(0.2)
        outcome.figures["slots_in_transfer_at_the_end"] = in_transfer
        outcome.expect(in_transfer == 0.0, f"{in_transfer:.1%} of the slots are still in transfer")
        orphans = metrics.get(_ORPHANS, 0.0)
        outcome.expect(orphans == 0, f"{orphans:g} blocks that nothing can reach")
        if _RESIDENT in metrics:
            resident, capacity = metrics[_RESIDENT], metrics[_CAPACITY]
            outcome.figures |= {"resident_blocks": resident, "capacity_blocks": capacity}
            outcome.expect(resident <= capacity, f"{resident:g} blocks in {capacity:g} slots")


class Sampler:
    """Samples a stage's memory in a thread of its own, until the block ends."""

    def __init__(self, stage: Stage, every_s: float = 1.0) -> None:
        self.samples: list[int] = []
        self._stage = stage
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.samples.append(self._stage.resident_memory())
            except OSError:  # the server has ended; whoever talks to it says so
                return


def growth(samples: Sequence[int]) -> float:
    """Return by how much memory grew after warm-up, as a share: 0.05 is five percent.

    The first third is warm-up. Of the rest, the median of the first quarter is compared with that
    of the last.
    """
    after = samples[len(samples) // 3 :]
    if len(after) < 8:
        raise BenchError(f"{len(samples)} samples of memory are too few to judge")
    part = len(after) // 4
    first, last = sorted(after[:part]), sorted(after[-part:])
    return last[part // 2] / first[part // 2] - 1


def differs(expected: Reply, reply: Reply) -> str | None:
    """Return how an answer differs from the right one, or None."""
    pairs = zip(expected.token_ids, reply.token_ids, strict=True)
    for at, (right, token) in enumerate(pairs):
        difference = abs(expected.logprobs[at] - reply.logprobs[at])
        if right != token:
            return f"token {token} for {right} at position {at}"
        if not difference <= TOLERANCE:
            return f"logprob off by {difference:.4f} at position {at}"
    return None


def pids_of(group: int) -> list[int]:
    """Return the processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def memory_of(pid: int) -> int:
    """Return a process's resident memory in bytes, 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _config(
    model: Path, *, gpu_blocks: int, extra: Mapping[str, Any] | None = None
) -> MeasuredConfig:
    transfer = None
    if extra is not None:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(extra),
        }
    return MeasuredConfig(
        model=model,
        gpu_blocks=gpu_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        kv_space_gib=1,
        kv_transfer=transfer,
        environment={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
    )
