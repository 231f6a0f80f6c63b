"""What a manager's bookkeeping weighs: EVOKE's beside the stock LRU manager's.

Each manager gets a process of its own, serves the same conversations until the pool is full and
whatever it remembers of evicted blocks is full too, and is then weighed by the process's resident
memory. Block keys count: each manager is given its own.
"""

import gc
import multiprocessing
import resource
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.eviction_cost import Conversations, Driver
from evoke_core import EvokeConfig
from evoke_vllm.manager import EvokeOffloadingManager

_TURNOVERS = 5.5  # the pool once, and the default of four remembered blocks for each of its slots

console = Console(soft_wrap=True)


def weigh(name: str, blocks: int, seed: int, policy: str) -> int:
    """Return the bytes by which this process has grown; call it in a process of its own."""
    conversations = Conversations(seed, keep=2_000)
    before = _resident_bytes()
    driver = Driver(
        CPUOffloadingManager(blocks)
        if name == "lru"
        else EvokeOffloadingManager(blocks, config=EvokeConfig(policy=policy))
    )
    served = 0
    while served < _TURNOVERS * blocks:
        chain = conversations.turn()
        served += len(chain) - driver.run(list(chain))
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
    context = multiprocessing.get_context("spawn")
    table = Table(title=f"bookkeeping of {blocks:,} resident blocks, bytes a block")
    for heading in ("manager", "bytes a block", "/ LRU's"):
        table.add_column(heading, justify="left" if heading == "manager" else "right")
    base = 0
    for name, title in (("lru", "stock LRU"), ("evoke", f"EVOKE ({policy})")):
        with console.status(f"filling {title}"), context.Pool(1) as pool:
            weight = pool.apply(weigh, (name, blocks, seed, policy))
        base = base or weight
        table.add_row(title, f"{weight / blocks:,.0f}", f"{weight / base:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
