"""What bringing a block back costs, against computing it again: medians, by block length."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from examples.transformers_runtime.cache import Block, BoundedCache

LENGTHS = (16, 32, 64, 128, 256, 512)
BEFORE = 512  # tokens in the cache that stay


@torch.inference_mode()
def measure(
    model: Any, lengths: Sequence[int], repeats: int, before: int = BEFORE
) -> list[tuple[int, float, float]]:
    """Return (tokens, seconds to restore, seconds to prefill) for each length.

    A restore takes the stored block, turns its keys and lands it at the end of ``before`` tokens; a
    prefill runs the model over as many tokens at the same place. Content does not matter to either.
    """
    draw = torch.Generator().manual_seed(0)

    def read(cache: BoundedCache, tokens: int, name: bytes) -> float:
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=draw)
        began = time.perf_counter()
        model(input_ids=ids, cache=cache.dynamic, use_cache=True, logits_to_keep=1)
        took = time.perf_counter() - began
        cache.name([Block(name, tokens)])
        return took

    found = []
    for length in lengths:
        cache = BoundedCache(model)
        read(cache, before, b"before")
        read(cache, length, b"block")  # warm-up
        stored = cache.evict([b"block"])
        prefill, restore = [], []
        for _ in range(repeats):
            prefill.append(read(cache, length, b"block"))
            cache.evict([b"block"])
            # It left from elsewhere: else the rotation would be one by nothing.
            moved = [evolve(each, position=each.position + 100) for each in stored]
            began = time.perf_counter()
            cache.restore(moved)
            restore.append(time.perf_counter() - began)
            cache.evict([b"block"])
        found.append((length, statistics.median(restore), statistics.median(prefill)))
    return found
