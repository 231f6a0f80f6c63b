"""The demo's shape: exact sizes, no shared blocks, and a gap between LRU and the scored policy."""

import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from statistics import fmean
from typing import Any

import pytest

from bench.demo.workload import BLOCK_SIZE, HOT_COLD, TIE, Shape, Workload, make_workload
from bench.demo.workload import unique_blocks as count_unique_blocks
from evoke_core import BlockLedger, BlockState, RequestTags, Span, chain_keys


def encode(text: str) -> list[int]:
    """One token per word, whatever the tokenizer of the day."""
    return [zlib.crc32(word.encode()) for word in text.split()]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload(HOT_COLD, 0, encode)


def test_same_seed_same_calls(workload: Workload) -> None:
    assert make_workload(HOT_COLD, 0, encode) == workload
    assert make_workload(HOT_COLD, 1, encode).calls != workload.calls


def test_hot_every_loop_cold_once(workload: Workload) -> None:
    for loop in range(1, HOT_COLD.loops + 1):
        names = [call.context for call in workload.calls if call.loop == loop]
        assert sorted(n for n in names if n.startswith("hot")) == ["hot-1", "hot-2", "hot-3"]
        assert len(names) == HOT_COLD.hot + HOT_COLD.cold
    cold = [call.context for call in workload.calls if call.kind == "cold"]
    assert len(set(cold)) == len(cold) == HOT_COLD.cold * HOT_COLD.loops


def test_loops_are_shuffled(workload: Workload) -> None:
    orders = {
        tuple(call.kind for call in workload.calls if call.loop == loop)
        for loop in range(1, HOT_COLD.loops + 1)
    }
    assert len(orders) > 1


def test_contexts_have_the_exact_length_and_share_no_block(workload: Workload) -> None:
    heads = {call.context: call.prompt[: HOT_COLD.context_tokens] for call in workload.calls}
    for call in workload.calls:
        assert call.prompt[: HOT_COLD.context_tokens] == heads[call.context]
        assert len(call.prompt) > HOT_COLD.context_tokens
    per_context = HOT_COLD.context_tokens // BLOCK_SIZE
    assert count_unique_blocks(heads.values()) == per_context * len(heads)


def test_tier_budget(workload: Workload) -> None:
    assert workload.tier_blocks == 57  # 1.6 times 3 contexts of 12 blocks
    assert workload.gpu_blocks == 33
    assert workload.all_blocks >= count_unique_blocks(call.prompt for call in workload.calls)


def test_tie_returns_every_context() -> None:
    tie = make_workload(TIE, 0, encode)
    assert len({call.context for call in tie.calls}) == TIE.hot + TIE.cold
    assert tie.tier_blocks >= (TIE.hot + TIE.cold) * TIE.context_tokens // BLOCK_SIZE


def test_requests_say_whose_text_they_are(workload: Workload) -> None:
    for call in workload.calls:
        assert call.kv_transfer_params is not None
        tags, problems = RequestTags.from_transfer_params(
            call.kv_transfer_params, tokens_per_block=BLOCK_SIZE
        )
        assert problems == ()
        assert tags.source_type == "user"
        system = (Span(0, HOT_COLD.context_tokens // BLOCK_SIZE, "system"),)
        assert tags.spans == (system if call.kind == "hot" else ())
    untagged = make_workload(HOT_COLD, 0, encode, tags=False)
    assert all(call.kv_transfer_params is None for call in untagged.calls)


def hot_hits(shape: Shape, policy: str, seed: int, *, tags: bool = True) -> float:
    """Return the share of hot blocks found in a tier without a GPU pool, loops 3 and later."""
    workload = make_workload(shape, seed, encode, tags=tags)
    found = asked = 0
    tier = _Lru(workload.tier_blocks) if policy == "lru" else _Evoke(workload.tier_blocks)
    for number, call in enumerate(workload.calls):
        keys = chain_keys(call.prompt[: shape.context_tokens], BLOCK_SIZE)
        hits = tier.serve(f"r{number}", keys, call.kv_transfer_params)
        if call.kind == "hot" and call.loop >= 3:
            found += hits
            asked += len(keys)
    return found / asked


class _Lru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, request: str, keys: list[bytes], params: Any) -> int:
        hits = _prefix(key in self.blocks for key in keys)
        for key in reversed(keys):  # tails age first
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hits


class _Evoke:
    def __init__(self, capacity: int) -> None:
        self.ledger = BlockLedger(capacity)

    def serve(self, request: str, keys: list[bytes], params: Any) -> int:
        ledger = self.ledger
        tags, _ = RequestTags.from_transfer_params(params, tokens_per_block=BLOCK_SIZE)
        ledger.open(request, tags)
        hits = _prefix(ledger.lookup(request, key) is BlockState.READY for key in keys)
        ledger.touch(request, keys)
        ledger.reserve(request, keys)
        ledger.commit(request, keys)
        ledger.close(request)
        return hits


def _prefix(flags: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, flags))


def test_the_shape_tells_scored_from_lru() -> None:
    seeds = range(20)
    lru = fmean(hot_hits(HOT_COLD, "lru", seed) for seed in seeds)
    evoke = fmean(hot_hits(HOT_COLD, "evoke", seed) for seed in seeds)
    assert lru > 0.05, "a baseline that never hits would prove nothing"
    assert evoke > lru + 0.3


def test_roles_move_nothing_in_so_short_a_run() -> None:
    for seed in range(20):
        assert hot_hits(HOT_COLD, "evoke", seed) == hot_hits(HOT_COLD, "evoke", seed, tags=False)


def test_nothing_is_lost_where_cold_contexts_return_like_hot_ones() -> None:
    """A loop larger than the tier: LRU drops what returns next, admission keeps a part of it."""
    uniform = replace(HOT_COLD, cold_returns=True)
    seeds = range(20)
    lru = fmean(hot_hits(uniform, "lru", seed) for seed in seeds)
    evoke = fmean(hot_hits(uniform, "evoke", seed) for seed in seeds)
    assert evoke > lru


def test_tie_is_a_tie() -> None:
    for seed in range(5):
        assert hot_hits(TIE, "lru", seed) == hot_hits(TIE, "evoke", seed) == 1.0
