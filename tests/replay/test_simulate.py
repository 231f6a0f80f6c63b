"""The simulation: hits, touches and offers, worked out by hand and against the ledger."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import RequestTags
from evoke_core.replay import (
    Trace,
    TraceBuilder,
    generate,
    known_policies,
    make_tier,
    recorded_tags,
    simulate,
)
from evoke_core.replay.simulate import Counts
from evoke_core.replay.trace import HEAD


def tree(*prompts: str, size: int = 4, tokens: list[int] | None = None) -> Trace:
    builder = TraceBuilder("t", size)
    for time, prompt in enumerate(prompts):
        chain = builder.extend(HEAD, prompt)
        given_tokens = None if tokens is None else tokens[time]
        builder.add(float(time), chain, tokens=given_tokens, session=prompt[0], role="user")
    return builder.build()


def hits(trace: Trace, policy: str, capacity: int, **options: Any) -> list[int]:
    found: list[int] = []
    tier = make_tier(policy, capacity, trace)
    simulate(trace, tier, on_request=lambda _, n: found.append(n), **options)
    return found


@pytest.mark.parametrize("policy", ["ledger-lru", "lru"])
def test_lru_keeps_heads(policy: str) -> None:
    # room for 3: abc; then ad, which costs c; then b is still there, c is not
    assert hits(tree("abc", "ad", "abc"), policy, 3) == [0, 1, 2]
    # a prompt longer than the tier keeps its head
    assert hits(tree("abcdef", "abcdef"), policy, 2) == [0, 2]


def test_ratios_count_blocks_tokens_and_requests() -> None:
    trace = tree("abc", "abc", "ad", "x", tokens=[12, 11, 8, 5])
    counts = simulate(trace, make_tier("lru", 10, trace))
    assert (counts.requests, counts.blocks, counts.tokens) == (4, 9, 36)
    assert counts.hit_blocks == 3 + 1
    assert counts.hit_tokens == 11 + 4  # the third block of the second prompt was not full
    assert counts.hit_requests == 2  # 11 of 11 tokens, 4 of 8
    assert counts.seconds > 0


def test_a_gpu_cache_serves_the_head_and_the_tier_the_rest() -> None:
    trace = tree("abc", "abc", "xyz", "abc")
    tier = make_tier("lru", 6, trace)
    counts = simulate(trace, tier, gpu_blocks=2)
    # 2 of abc on the GPU and c in the tier; after xyz the tier alone serves abc.
    assert counts.gpu_blocks == 2
    assert counts.hit_blocks == 3 + 3


def test_a_gpu_cache_helps_a_tier_that_is_smaller() -> None:
    # The GPU cache holds abc, the tier one block of them; x takes the tier and c's place.
    trace = tree("abc", "abcd", "x", "abcd")
    found: list[int] = []
    simulate(
        trace,
        make_tier("lru", 1, trace),
        gpu_blocks=3,
        on_request=lambda _, n: found.append(n),
    )
    assert found == [0, 3, 0, 2]


def test_chunks_make_lru_lose_heads_and_the_ledger_keep_them() -> None:
    trace = tree("abc", "abc")
    assert hits(trace, "lru", 2) == [0, 2]
    assert hits(trace, "lru", 2, chunk=1) == [0, 0]  # c came last and cost a
    assert hits(trace, "ledger-lru", 2, chunk=1) == [0, 2]  # no request evicts its own chain


def test_halves_add_up_and_the_second_is_warm() -> None:
    trace = generate("w1s:rounds=6,blocks=5")
    parts = {
        half: simulate(trace, make_tier("lru", 20, trace), half=half)
        for half in ("first", "second", "all")
    }
    first, second, whole = parts["first"], parts["second"], parts["all"]
    for name in ("requests", "blocks", "tokens", "hit_blocks", "hit_tokens", "hit_requests"):
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name)
    assert first.requests == len(trace) // 2
    warm: Counts = simulate(tree("ab", "ab"), make_tier("lru", 2, tree("ab", "ab")), half="second")
    assert (warm.requests, warm.hit_blocks) == (1, 2)


@given(
    st.lists(st.text("abc", max_size=6), min_size=1, max_size=40).filter(any),
    st.integers(1, 15),
)
def test_the_ledgers_lru_is_lru(prompts: list[str], capacity: int) -> None:
    builder = TraceBuilder("t", 4)
    for time, prompt in enumerate(prompts):
        builder.add(float(time), builder.extend(HEAD, prompt))
    trace = builder.build()
    assert hits(trace, "ledger-lru", capacity) == hits(trace, "lru", capacity)


@pytest.mark.parametrize("policy", known_policies())
def test_every_policy_finds_all_that_returns_when_nothing_has_to_go(policy: str) -> None:
    trace = tree("abc", "abd", "x", "abd")
    assert hits(trace, policy, 100) == [0, 2, 0, 3]


def test_tags_are_what_the_trace_tells() -> None:
    trace = tree("ab", "cd")
    assert recorded_tags(trace, 1) == RequestTags(source_type="user", session="c")


def test_tags_reach_the_ledger() -> None:
    # With a high priority the first prompt survives a scan that LRU-like scoring would not stop.
    trace = tree("ab", "cd", "ef", "ab")

    def loyal(trace: Trace, request: int) -> RequestTags:
        return RequestTags(priority=10.0 if trace.sessions[request] == "a" else 1.0)

    counts = [
        simulate(trace, make_tier("scored", 4, trace, tags=tags)).hit_blocks
        for tags in (None, loyal)
    ]
    assert counts == [0, 2]
