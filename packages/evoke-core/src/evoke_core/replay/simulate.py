"""One cell of a replay: one trace through one tier, request by request.

A request's hits are its longest resident prefix, in the GPU cache where there is one and from there
on in the tier. Then it touches its blocks and offers those it had to compute, all at once or chunk
by chunk, and is done before the next one starts: requests do not overlap.
"""

import time
from collections.abc import Callable
from typing import Literal

from attrs import define

from evoke_core.replay.rivals.lru import PlainLru
from evoke_core.replay.tiers import BlockTier, Tier
from evoke_core.replay.trace import Trace

Half = Literal["first", "second", "all"]
HALVES: tuple[Half, ...] = ("first", "second", "all")


@define
class Counts:
    """What was asked for and what was found, over the requests that count.

    ``hit_*`` includes what the GPU cache served, ``gpu_*`` is that part alone. A request is a hit
    if at least half of its tokens were found (the first block of a shared instruction alone, which
    nearly every request finds, spares nobody a wait). ``seconds`` is the time the replay took,
    uncounted requests included.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_requests: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    gpu_blocks: int = 0
    seconds: float = 0.0


def simulate(
    trace: Trace,
    tier: Tier,
    *,
    gpu_blocks: int = 0,
    chunk: int = 0,
    half: Half = "all",
    on_request: Callable[[int, int], None] | None = None,
) -> Counts:
    """Replay ``trace`` through ``tier`` and return what it found.

    Args:
        gpu_blocks: size of an LRU cache in front, as an engine's GPU pool; 0 for none.
        chunk: blocks of prefill offered at a time; 0 for all at once.
        half: which requests count: the first half in order of time (the rest is not replayed), the
            second half (after the first has warmed the tier), or all.
        on_request: told of each replayed request and the blocks it found.
    """
    middle = len(trace) // 2
    first = middle if half == "second" else 0
    last = middle if half == "first" else len(trace)
    gpu = BlockTier(PlainLru(gpu_blocks)) if gpu_blocks else None
    counts = Counts()
    size = trace.tokens_per_block
    started = time.perf_counter()
    for request in range(last):
        chain = trace.chain(request)
        length = len(chain)
        on_gpu = 0
        if gpu is not None:
            on_gpu = gpu.begin(request, chain, 0)
            gpu.offer(chain, on_gpu, length)
        hits = on_gpu + tier.begin(request, chain, on_gpu)
        step = chunk or max(1, length - hits)
        position = hits
        while True:
            end = min(position + step, length)
            tier.offer(chain, position, end)
            position = end
            if position >= length:
                break
        tier.end()
        if request >= first:
            tokens = trace.tokens[request]
            counts.requests += 1
            counts.blocks += length
            counts.tokens += tokens
            found = min(hits * size, tokens)
            counts.hit_requests += 0 < tokens <= 2 * found
            counts.hit_blocks += hits
            counts.hit_tokens += found
            counts.gpu_blocks += on_gpu
        if on_request is not None:
            on_request(request, hits)
    counts.seconds = time.perf_counter() - started
    return counts
