"""One cell of a replay: one trace through one tier, request by request.

A request's hits are its longest resident prefix, in the GPU cache where there is one and from there
on in the tier. Then it touches its blocks and offers those it had to compute, all at once or chunk
by chunk, and is done before the next one starts: requests do not overlap.

A server's recording is replayed event by event instead: its requests overlap as they did, the
device has the blocks it had, and what was offered when is as recorded.
"""

import time
from collections.abc import Callable
from typing import Literal

from attrs import define

from evoke_core.replay.recorded import CLOSE, OFFER, OPEN, RESET, SERVE, RecordedTrace
from evoke_core.replay.rivals.lru import PlainLru
from evoke_core.replay.tiers import BlockTier, Tier
from evoke_core.replay.trace import Trace

Half = Literal["first", "second", "all"]
HALVES: tuple[Half, ...] = ("first", "second", "all")

_Note = Callable[[int, int, int, int], None]  # request, blocks, those on the GPU, those found


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
        gpu_blocks: size of an LRU cache in front, as an engine's GPU pool; 0 for none, or for
            what the device had when the trace was recorded.
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

    def note(request: int, length: int, on_gpu: int, hits: int) -> None:
        if request >= first:
            tokens = trace.tokens[request]
            counts.requests += 1
            counts.blocks += length
            counts.tokens += tokens
            found = min(hits * trace.tokens_per_block, tokens)
            counts.hit_requests += 0 < tokens <= 2 * found
            counts.hit_blocks += hits
            counts.hit_tokens += found
            counts.gpu_blocks += on_gpu
        if on_request is not None:
            on_request(request, hits)

    started = time.perf_counter()
    if isinstance(trace, RecordedTrace):
        _overlapping(trace, tier, gpu, chunk, last, note)
    else:
        _one_by_one(trace, tier, gpu, chunk, last, note)
    counts.seconds = time.perf_counter() - started
    return counts


def _one_by_one(
    trace: Trace, tier: Tier, gpu: BlockTier | None, chunk: int, last: int, note: _Note
) -> None:
    """Serve each request to its end before the next one."""
    for request in range(last):
        chain = trace.chain(request)
        length = len(chain)
        on_gpu = 0
        if gpu is not None:
            on_gpu = gpu.begin(request, chain, 0)
            gpu.offer(chain, on_gpu, length)
        hits = on_gpu + tier.begin(request, chain, on_gpu)
        _offer(tier, chain, hits, length, chunk)
        tier.end()
        note(request, length, on_gpu, hits)


def _overlapping(
    trace: RecordedTrace, tier: Tier, gpu: BlockTier | None, chunk: int, last: int, note: _Note
) -> None:
    """Serve requests as they were served: what one finds depends on how far others had come.

    What a request offered is offered again. Where it finds less than it found then, it has to
    compute, and so offers, more; what it finds beyond is offered all the same, which stores
    nothing.
    """
    offers = {request for kind, request, _, _ in trace.events if kind == OFFER}
    paths: dict[int, list[int]] = {}
    owed: dict[int, int] = {}  # where the first offer begins that the recorded one does not cover
    for kind, request, begin, end in trace.events:
        if kind == OPEN:
            tier.open(request)
        elif kind == SERVE:
            if request >= last:
                return
            paths[request] = path = trace.path(request)
            length = trace.lengths[request]
            chain = path[:length]
            on_gpu = trace.device[request]
            if gpu is not None:
                on_gpu = gpu.begin(request, chain, 0)
                gpu.offer(chain, on_gpu, length)
                gpu.end()
            found = tier.begin(request, chain, on_gpu)
            note(request, length, on_gpu, on_gpu + found)
            if (on_gpu, found) != (trace.device[request], trace.found[request]):
                # An engine that restored nothing offers what the device had too.
                owed[request] = on_gpu + found if found else 0
            if request not in offers:
                _offer(tier, path, min(owed.pop(request, length), length), length, chunk)
        elif kind == RESET:
            tier.reset()
        elif kind == OFFER and request in paths:
            tier.resume(request)
            _offer(tier, paths[request], min(begin, owed.pop(request, begin)), end, chunk)
        elif kind == CLOSE:
            paths.pop(request, None)
            tier.resume(request)
            tier.end()


def _offer(tier: Tier, chain: list[int], begin: int, end: int, chunk: int) -> None:
    """Offer blocks, at least once."""
    step = chunk or max(1, end - begin)
    while True:
        stop = min(begin + step, end)
        tier.offer(chain, begin, stop)
        begin = stop
        if begin >= end:
            break
