"""What a cell should find, by simulation: written down before it is measured.

The requests are served one after the other: first from an LRU pool as large as the engine's, then
from the tier; what was computed is offered to the tier block by block of prefill. `store_threshold`
is not simulated for stock arms, and an open loop is simulated as if nothing overlapped.
"""

from dataclasses import dataclass
from typing import Any

from bench.matrix.published_score import PublishedScore
from bench.matrix.workloads.work import Work
from evoke_core import BlockLedger, BlockState, EvokeConfig
from evoke_core.replay import TraceBuilder, make_tier

_CHUNK_TOKENS = 256
POLICIES = ("lru", "arc", "adaptive", "published")


@dataclass(frozen=True)
class Prediction:
    """Shares of prompt tokens outside the engine's pool that the tier restores: all, and hot."""

    restored: float
    hot: float | None


class _Published:
    """P1 behind the calls of `evoke_core.replay`'s tiers."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._score = PublishedScore()

    def begin(self, request: int, chain: list[int], start: int) -> int:
        hits = 0
        for key in chain[start:]:
            if not self._score.looked_up(key):
                break
            hits += 1
        self._score.touch(chain)
        return hits

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        offered = chain[begin:end]
        new = [key for key in offered if key not in self._score][: self._capacity]
        short = len(self._score) + len(new) - self._capacity
        for key in self._score.lowest(max(0, short), set(offered)):
            self._score.remove(key)
        for key in new[: self._capacity - len(self._score)]:
            self._score.insert(key)

    def end(self) -> None:
        pass


class _Ledger:
    """EVOKE's ledger with a store threshold."""

    def __init__(self, capacity: int, threshold: int) -> None:
        config = EvokeConfig(policy="adaptive")
        self._ledger = BlockLedger(capacity, config=config, store_threshold=threshold)
        self._id = ""

    def begin(self, request: int, chain: list[int], start: int) -> int:
        self._id = str(request)
        self._ledger.open(self._id)
        hits = 0
        for key in _keys(chain[start:]):
            if self._ledger.lookup(self._id, key) is not BlockState.READY:
                break
            hits += 1
        self._ledger.touch(self._id, _keys(chain))
        return hits

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        grant = self._ledger.reserve(self._id, _keys(chain[begin:end]), start=begin)
        if grant.keys:
            self._ledger.commit(self._id, grant.keys, ticket=grant.ticket)

    def end(self) -> None:
        self._ledger.close(self._id)
        self._ledger.drain_decisions()


def predict(
    work: Work, policy: str, *, tier_blocks: int, gpu_blocks: int, threshold: int = 0
) -> Prediction:
    """Return what `policy` should restore of `work`; sizes in blocks of the tier's size."""
    builder = TraceBuilder("cell", work.block_size)
    for number, chain in enumerate(work.chains()):
        builder.add(float(number), builder.extend(-1, chain))
    trace = builder.build()
    tier: Any
    if policy == "published":
        tier = _Published(tier_blocks)
    elif policy == "adaptive":
        tier = _Ledger(tier_blocks, threshold)
    else:
        tier = make_tier(policy, tier_blocks, trace)
    pool = make_tier("lru", max(1, gpu_blocks - 1), trace)  # the engine keeps one block for itself
    chunk = max(1, _CHUNK_TOKENS // work.block_size)
    asked: dict[bool, int] = {True: 0, False: 0}
    found: dict[bool, int] = {True: 0, False: 0}
    for number, request in enumerate(work.requests):
        chain = trace.chain(number)
        in_gpu = pool.begin(number, chain, 0)
        pool.offer(chain, in_gpu, len(chain))
        pool.end()
        hits = tier.begin(number, chain, in_gpu)
        for start in range(in_gpu + hits, len(chain), chunk):
            tier.offer(chain, start, min(start + chunk, len(chain)))
        tier.end()
        hot = request.kind == "hot"
        asked[hot] += len(request.prompt) - in_gpu * work.block_size
        found[hot] += hits * work.block_size
    total = asked[True] + asked[False]
    return Prediction(
        restored=round(sum(found.values()) / total, 4) if total else 0.0,
        hot=round(found[True] / asked[True], 4) if asked[True] else None,
    )


def _keys(chain: list[int]) -> list[bytes]:
    return [block.to_bytes(4, "little") for block in chain]
