"""What a manager's bookkeeping weighs: EVOKE's beside the stock LRU manager's.

Each manager gets a process of its own, serves the same conversations until the pool is full and
whatever it remembers of evicted blocks is full too, and is then weighed by the process's resident
memory. Block keys count: each manager is given its own. So do the conversations, the same for both
(about 10 MiB: negligible in large pools only).

The processes run side by side; a million blocks take minutes, because five and a half million have
to be stored and four times as many are restored between them, as conversations go.
"""

import gc
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.eviction_cost import Conversations, Driver
from bench.progress import make_console
from evoke_core import EvokeConfig
from evoke_vllm.manager import EvokeOffloadingManager

_TURNOVERS = 5.5  # the pool once, and the default of four remembered blocks for each of its slots
_REPORT_EVERY = 500  # requests
_POLL_S = 0.2

console = make_console()


def weigh(
    name: str, blocks: int, seed: int, policy: str, on_stored: Callable[[str, int], None]
) -> int:
    """Return the bytes by which this process has grown; call it in a process of its own.

    `on_stored` is told the manager's name and how many blocks it has stored, now and then.
    """
    conversations = Conversations(seed, keep=2_000)
    before = _resident_bytes()
    driver = Driver(
        CPUOffloadingManager(blocks)
        if name == "lru"
        else EvokeOffloadingManager(blocks, config=EvokeConfig(policy=policy))
    )
    requests = stored = 0
    while stored < _TURNOVERS * blocks:
        chain = conversations.turn()
        stored += len(chain) - driver.run(list(chain))
        requests += 1
        if requests % _REPORT_EVERY == 0:
            on_stored(name, stored)
    on_stored(name, stored)
    gc.collect()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@click.command("memory-cost")
@click.option("--blocks", default=1_000_000, show_default=True, type=click.IntRange(1_000))
@click.option("--policy", default=EvokeConfig().policy, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(blocks: int, policy: str, seed: int) -> None:
    """Weigh the managers' metadata, remembered blocks and trackers included, beside stock LRU."""
    titles = {"lru": "stock LRU", "evoke": f"EVOKE ({policy})"}
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as shared,
        context.Pool(len(titles)) as pool,
        Progress(console=console) as progress,
    ):
        stored = shared.dict()
        bars = {
            name: progress.add_task(f"filling {title}", total=_TURNOVERS * blocks)
            for name, title in titles.items()
        }
        weighing = {
            name: pool.apply_async(weigh, (name, blocks, seed, policy, stored.__setitem__))
            for name in titles
        }
        for each in weighing.values():
            while not each.ready():
                each.wait(_POLL_S)
                for name, bar in bars.items():
                    progress.update(bar, completed=stored.get(name, 0))
        weights = {name: each.get() for name, each in weighing.items()}
    table = Table(title=f"bookkeeping of {blocks:,} resident blocks, bytes a block")
    for heading in ("manager", "bytes a block", "/ LRU's"):
        table.add_column(heading, justify="left" if heading == "manager" else "right")
    for name, title in titles.items():
        ratio = weights[name] / weights["lru"]
        table.add_row(title, f"{weights[name] / blocks:,.0f}", f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
