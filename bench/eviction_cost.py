"""What a request costs in the scheduler: EVOKE's manager beside the stock LRU manager.

Both managers run the same calls, in the order in which vLLM 0.24.0's scheduler makes them, turn by
turn in one process, so that a noisy machine disturbs both alike: compare the ratios. Times are the
thread's CPU times (a manager never waits): what other programs take is not counted. The pool is
first filled by a history rich in reuse (conversations that grow, share system prompts and are
revisited), so that EVOKE's many small runs and rank classes are really there.

A *miss* request names 64 blocks that are nowhere and evicts 64; a *hit* request restores 64. By
default the misses replace the whole pool once: often enough to meet the rare requests that a median
hides, in which a dictionary of all blocks is rebuilt (both managers have such dictionaries).
"""

import gc
import hashlib
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import click
from rich.progress import track
from rich.table import Table
from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.progress import make_console
from evoke_core import EvokeConfig
from evoke_vllm.manager import EvokeOffloadingManager

BLOCKS = 64
"""Blocks of a measured request."""

LONG_S = 0.005
"""A request above it is counted as long."""

_AT_LEAST = 1_000  # requests of each kind

_SYSTEM_PROMPTS = 20
_SHARED = 16
_TURN = 8
_TURNS = 12

console = make_console()


class Conversations:
    """Hashes of the blocks of many growing conversations, made from a seed.

    ``turn()`` picks an old conversation more often than it starts one, recent ones more often than
    old ones, and returns the chain of its next turn.
    """

    def __init__(self, seed: int, *, keep: int = 10_000) -> None:
        self._random = random.Random(seed)
        self._chains: deque[list[bytes]] = deque(maxlen=keep)
        self._made = 0

    def turn(self) -> list[bytes]:
        if self._chains and self._random.random() < 0.75:
            back = min(len(self._chains), 1 + int(self._random.expovariate(1 / 200)))
            chain = self._chains[-back]
            if len(chain) < _SHARED + _TURN * _TURNS:
                chain += self.fresh(_TURN)
            return chain
        system = self._random.randrange(_SYSTEM_PROMPTS)
        shared = [_digest(f"system {system} {i}") for i in range(_SHARED)]
        self._chains.append(shared + self.fresh(self._random.choice((8, 16, 32))))
        return self._chains[-1]

    def fresh(self, n: int) -> list[bytes]:
        self._made += n
        return [_digest(f"block {self._made - i}") for i in range(n)]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Driver:
    """Makes the calls that vLLM 0.24.0's scheduler makes for one request after the other."""

    def __init__(self, manager: OffloadingManager, priorities: int = 0) -> None:
        self.manager = manager
        self._priorities = priorities
        self._requests = 0

    def run(self, hashes: list[bytes]) -> int:
        """Serve one request to the end; return how many of its blocks were restored."""
        manager = self.manager
        self._requests += 1
        context = ReqContext(str(self._requests), self._params())
        # The engine makes its own key objects for each request.
        keys = [make_offload_key(block_hash, 0) for block_hash in hashes]
        manager.on_new_request(context)
        restored = 0
        for key in keys:
            if not manager.lookup(key, context):
                break
            restored += 1
        manager.touch(keys, context)
        if restored:
            manager.prepare_load(keys[:restored], context)
        manager.on_schedule_end()
        if restored:
            manager.complete_load(set(keys[:restored]), context)
        if restored < len(keys):
            self._store(keys, restored, context)
        manager.on_request_finished(context)
        for _ in manager.take_events():
            pass
        return restored

    def _params(self) -> dict[str, Any] | None:
        """Return tags with one of the priorities from 0.1 to 10, in turn; None for no tags."""
        if not self._priorities:
            return None
        at = self._requests % self._priorities / self._priorities
        return {"evoke": {"priority": 0.1 * 100.0**at}}

    def _store(self, keys: list[OffloadKey], restored: int, context: ReqContext) -> None:
        output = self.manager.prepare_store(keys[restored:], context)
        if output is not None and output.keys_to_store:
            self.manager.touch(keys, context)
            self.manager.complete_store(set(output.keys_to_store), context)


def measure(
    blocks: int, requests: int, seed: int, policy: str, priorities: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Return seconds per request, by kind (miss, hit) and manager (lru, evoke)."""
    drivers = {
        "lru": Driver(CPUOffloadingManager(blocks), priorities),
        "evoke": Driver(
            EvokeOffloadingManager(blocks, config=EvokeConfig(policy=policy)), priorities
        ),
    }
    conversations = Conversations(seed)
    _fill(drivers, conversations, blocks)
    gc.collect()
    # No bar while the clock runs: drawing it would be measured too.
    console.print(f"measuring {requests:,} requests of each kind")
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in drivers} for kind in ("miss", "hit")
    }
    for number in range(requests):
        names = list(drivers) if number % 2 else list(reversed(drivers))
        miss = conversations.fresh(BLOCKS)
        for name in names:
            taken, restored = _timed(drivers[name], miss)
            assert restored == 0
            seconds["miss"][name].append(taken)
        for name in names:  # the request just stored is resident in both
            taken, restored = _timed(drivers[name], miss)
            assert restored == BLOCKS
            seconds["hit"][name].append(taken)
        for name in names:  # keep the history rich
            drivers[name].run(list(conversations.turn()))
    return seconds


def _fill(drivers: dict[str, Driver], conversations: Conversations, blocks: int) -> None:
    evoke = drivers["evoke"].manager
    assert isinstance(evoke, EvokeOffloadingManager)
    for _ in track(_until_full(evoke, blocks), f"filling {blocks:,} blocks", console=console):
        chain = list(conversations.turn())
        for driver in drivers.values():
            driver.run(chain)


def _until_full(manager: EvokeOffloadingManager, blocks: int) -> Iterator[None]:
    """Yield until a tenth of the pool has been evicted."""
    while manager.ledger.stats.evicted < blocks // 10:
        yield


def _timed(driver: Driver, hashes: list[bytes]) -> tuple[float, int]:
    start = time.thread_time()
    restored = driver.run(hashes)
    return time.thread_time() - start, restored


@click.command("eviction-cost")
@click.option("--blocks", multiple=True, type=click.IntRange(BLOCKS * 4), help="Pool sizes.")
@click.option(
    "--requests",
    type=click.IntRange(10),
    help="Of each kind.  [as many as replace the pool, at least 1,000]",
)
@click.option("--policy", default=EvokeConfig().policy, show_default=True)
@click.option("--priorities", default=0, help="Requests carry so many different priorities.")
@click.option("--seed", default=0, show_default=True)
def main(
    blocks: tuple[int, ...], requests: int | None, policy: str, priorities: int, seed: int
) -> None:
    """Time 64-block miss and hit requests through the manager interface, beside stock LRU."""
    table = Table(title=f"milliseconds per {BLOCKS}-block request, one run")
    for heading in ("resident blocks", "request", "manager"):
        table.add_column(heading, justify="left" if heading in ("request", "manager") else "right")
    long = f"above {1e3 * LONG_S:.0f} ms"
    for heading in ("mean", "median", "maximum", long, "median / LRU's"):
        table.add_column(heading, justify="right")
    for size in blocks or (10_000, 100_000, 1_000_000):
        number = requests or max(_AT_LEAST, size // BLOCKS)
        for kind, by_manager in measure(size, number, seed, policy, priorities).items():
            base = statistics.median(by_manager["lru"])
            for name, values in by_manager.items():
                median = statistics.median(values)
                figures = (statistics.fmean(values), median, max(values))
                table.add_row(
                    f"{size:,}",
                    kind,
                    "stock LRU" if name == "lru" else f"EVOKE ({policy})",
                    *(f"{1e3 * value:.3f}" for value in figures),
                    str(sum(value > LONG_S for value in values)),
                    f"{median / base:.2f}",
                )
    console.print(table)


if __name__ == "__main__":
    main()
