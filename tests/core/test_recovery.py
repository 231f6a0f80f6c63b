# SPDX-License-Identifier: Apache-2.0
"""What to bring back: against a second implementation by the docstring, and example by example."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from evoke_core.recovery import SIMILARITY_STEPS, Recalled, RecoveryMemory

DIM = 3


@frozen
class Block:
    key: bytes
    embedding: tuple[float, ...]
    tokens: int
    span: Hashable
    position: int


# Few directions, so that ties are common; one without a direction.
directions = st.tuples(*[st.sampled_from([-1.0, 0.0, 0.5, 1.0])] * DIM)
blocks = st.builds(
    Block,
    st.sampled_from([bytes([n]) for n in range(12)]),
    directions,
    st.integers(1, 4),
    st.sampled_from([None, "a", "b"]),
    st.integers(0, 5),
)


def cosine(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    x, y = np.array(a), np.array(b)
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / lengths if lengths else 0.0


def remembered(history: list[Block], capacity: int) -> list[Block]:
    """What is left of a history, oldest first."""
    kept: list[Block] = []
    for block in history:
        kept = [
            each
            for each in kept
            if each.key != block.key
            and (block.span is None or (each.span, each.position) != (block.span, block.position))
        ]
        kept = [*kept[-(capacity - 1) :], block] if capacity > 1 else [block]
    return kept


def chosen(
    kept: list[Block],
    query: tuple[float, ...],
    top_k: int,
    max_tokens: int | None,
    threshold: float,
    neighbours: int,
) -> tuple[list[bytes], set[bytes]]:
    """Keys in the order of the answer, and which are anchors; straight from the prose."""

    def at(span: Hashable, position: int) -> Block | None:
        found = [each for each in kept if (each.span, each.position) == (span, position)]
        return found[0] if span is not None and found else None

    def worth(block: Block) -> float:
        return round(cosine(block.embedding, query) * SIMILARITY_STEPS)

    left = 10**9 if max_tokens is None else max_tokens
    taken: list[Block] = []
    anchors: set[bytes] = set()
    for block in sorted(kept, key=lambda each: (-worth(each), -kept.index(each))):
        if len(anchors) == top_k or block in taken or worth(block) / SIMILARITY_STEPS < threshold:
            continue
        group = [block]
        for side in (-1, 1):
            for far in range(1, neighbours + 1):
                near = at(block.span, block.position + side * far)
                if near is None:
                    break
                group.append(near)
        for wanted in (group, [block]):
            new = [each for each in wanted if each not in taken]
            if sum(each.tokens for each in new) <= left:
                left -= sum(each.tokens for each in new)
                taken += new
                anchors.add(block.key)
                break
    answer: list[bytes] = []
    for block in kept:
        if block in taken and block.key not in answer:
            same = [each for each in taken if each.span == block.span] if block.span else [block]
            answer += [each.key for each in sorted(same, key=lambda each: each.position)]
    return answer, anchors


@given(
    st.lists(blocks, max_size=25),
    st.integers(1, 12),
    directions,
    st.integers(0, 6),
    st.none() | st.integers(0, 20),
    st.sampled_from([-1.0, 0.0, 0.4, 0.9, 1.0]),
    st.integers(0, 3),
)
def test_equal_to_brute_force(
    history: list[Block],
    capacity: int,
    query: tuple[float, ...],
    top_k: int,
    max_tokens: int | None,
    threshold: float,
    neighbours: int,
) -> None:
    memory = RecoveryMemory(capacity, DIM)
    for block in history:
        memory.remember(
            block.key,
            block.embedding,
            tokens=block.tokens,
            span=block.span,
            position=block.position,
        )
    kept = remembered(history, capacity)
    assert len(memory) == len(kept) <= capacity
    assert all(block.key in memory for block in kept)
    options: dict[str, Any] = {"max_tokens": max_tokens, "threshold": threshold}
    found = memory.choose(query, top_k, neighbours=neighbours, **options)
    keys, anchors = chosen(kept, query, top_k, max_tokens, threshold, neighbours)
    assert [each.key for each in found] == keys
    assert {each.key for each in found if each.anchor} == anchors
    tokens = {block.key: block.tokens for block in kept}
    if max_tokens is not None:
        assert sum(tokens[each.key] for each in found) <= max_tokens
    by_key = {block.key: block for block in kept}
    for each in found:
        wanted = cosine(by_key[each.key].embedding, query)
        assert each.similarity == pytest.approx(wanted, abs=1e-6)
    assert memory.choose(query, top_k, neighbours=neighbours, **options) == found  # changes nothing


def test_nearest_first_then_newest() -> None:
    memory = RecoveryMemory(8, 2)
    memory.remember(b"far", [1.0, 1.0])
    memory.remember(b"old", [3.0, 0.0])
    memory.remember(b"new", [0.5, 0.0])
    memory.remember(b"away", [-1.0, 0.0])
    assert [each.key for each in memory.choose([2.0, 0.0], 1)] == [b"new"]
    assert [each.key for each in memory.choose([2.0, 0.0], 2)] == [b"old", b"new"]
    assert [each.key for each in memory.choose([2.0, 0.0], 9)] == [b"far", b"old", b"new"]
    assert [each.key for each in memory.choose([2.0, 0.0], 9, threshold=0.8)] == [b"old", b"new"]
    assert len(memory.choose([2.0, 0.0], 9, threshold=-1.0)) == 4


def test_neighbours_come_along_in_reading_order() -> None:
    """The fact is told across blocks 2 and 3; block 0 stands behind a gap."""
    memory = RecoveryMemory(8, 2)
    for position in (4, 3, 2, 0):
        near = [1.0, 0.0] if position == 2 else [0.0, 1.0]
        memory.remember(b"t%d" % position, near, tokens=16, span="turn", position=position)
    memory.remember(b"other", [0.0, 1.0], tokens=16, span="other", position=1)
    assert memory.choose([1.0, 0.0], 1, threshold=0.5, neighbours=2) == [
        Recalled(b"t2", 1.0, True),
        Recalled(b"t3", 0.0, False),
        Recalled(b"t4", 0.0, False),
    ]
    few = memory.choose([1.0, 0.0], 1, threshold=0.5, neighbours=2, max_tokens=47)
    assert [each.key for each in few] == [b"t2"]  # with both it is too much: alone
    assert memory.choose([1.0, 0.0], 1, threshold=0.5, max_tokens=15) == []


def test_a_block_that_does_not_fit_makes_way_for_the_next() -> None:
    memory = RecoveryMemory(8, 2)
    memory.remember(b"small", [1.0, 0.2], tokens=2)
    memory.remember(b"large", [1.0, 0.0], tokens=9)
    assert [each.key for each in memory.choose([1.0, 0.0], 1, max_tokens=5)] == [b"small"]


def test_memory_is_bounded_and_rows_are_used_again() -> None:
    memory = RecoveryMemory(100, 4)
    for n in range(1000):
        dropped = memory.remember(b"%d" % n, [1.0, float(n), 0.0, 0.0])
        assert dropped == (None if n < 100 else b"%d" % (n - 100))
        assert memory.nbytes <= 100 * 4 * 4
    assert memory.forget(b"950")
    assert not memory.forget(b"950")
    assert memory.remember(b"950", [0.0, 0.0, 0.0, 1.0]) is None
    assert [each.key for each in memory.choose([0.0, 0.0, 0.0, 2.0], 1)] == [b"950"]
    assert len(memory) == 100


def test_equal_embeddings_are_equal_wherever_they_stand() -> None:
    """Else ties would be broken by rounding: many rows, long vectors, all the same."""
    draw = np.random.default_rng(0)
    vector, query = draw.standard_normal(577), draw.standard_normal(577)
    memory = RecoveryMemory(700, 577)
    for n in range(700):
        memory.remember(b"%03d" % n, vector)
    found = memory.choose(query, 3, threshold=-1.0)
    assert [each.key for each in found] == [b"697", b"698", b"699"]


@pytest.mark.parametrize("bad", [[1.0], [1.0, float("nan")], [[1.0, 2.0]], [float("inf"), 0.0]])
def test_embeddings_that_are_none_are_refused(bad: Any) -> None:
    memory = RecoveryMemory(4, 2)
    with pytest.raises(ValueError, match="2 finite numbers"):
        memory.remember(b"k", bad)
    with pytest.raises(ValueError, match="2 finite numbers"):
        memory.choose(bad, 1)
    assert len(memory) == 0


def test_other_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        RecoveryMemory(4, 2).remember(b"k", [1.0, 0.0], tokens=0)
    for capacity, dim in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            RecoveryMemory(capacity, dim)


def test_huge_and_tiny_embeddings_keep_their_direction() -> None:
    memory = RecoveryMemory(4, 2)
    memory.remember(b"huge", [1e300, 1e300])
    memory.remember(b"tiny", [1e-300, -1e-300])
    assert [each.key for each in memory.choose([1e-200, 1e-200], 1, threshold=0.99)] == [b"huge"]
