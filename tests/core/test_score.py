# SPDX-License-Identifier: Apache-2.0
"""The score to the letter: hand-computed values, seen through the order of eviction.

The index shows no score, so each test sets a block against one whose score is known to be a
little lower or a little higher, and looks who goes first.
"""

from typing import Any

import pytest

from evoke_core import BlockView, EvokeConfig, RequestTags, RetentionIndex


def index(**settings: Any) -> RetentionIndex:
    return RetentionIndex(EvokeConfig(**{"recency_half_life": 4, **settings}))


def view(idx: RetentionIndex, key: bytes) -> BlockView:
    found = idx.describe(key)
    assert found is not None
    return found


def store(
    idx: RetentionIndex, request: str, *keys: bytes, role: str | None = None, priority: float = 1.0
) -> None:
    idx.open(request, RequestTags(source_type=role, priority=priority))
    idx.insert(request, list(keys))
    idx.close(request)


def pass_time(idx: RetentionIndex, requests: int) -> None:
    for _ in range(requests):
        idx.open("time")
        idx.close("time")


def test_recency_halves_in_a_half_life() -> None:
    """w_recency alone: priority 1 at age 4 is 0.5; priority 2**(-3/4) = .595 at age 0 beats it."""
    idx = index(w_recency=1.0, w_reuse=0.0)
    store(idx, "old", b"old")
    pass_time(idx, 3)
    store(idx, "new", b"new", priority=2.0**-0.75)
    assert view(idx, b"old").last + 4 == idx.clock
    assert idx.candidates(2) == [b"old", b"new"]

    idx = index(w_recency=1.0, w_reuse=0.0)
    store(idx, "old", b"old")
    pass_time(idx, 2)
    store(idx, "new", b"new", priority=2.0**-0.75)  # .595 = 2**(-3/4) too: equal, the older goes
    assert idx.candidates(2) == [b"old", b"new"]

    idx = index(w_recency=1.0, w_reuse=0.0)
    store(idx, "old", b"old")
    pass_time(idx, 1)
    store(idx, "new", b"new", priority=2.0**-0.75)  # .595 < 2**(-2/4) = .707
    assert idx.candidates(2) == [b"new", b"old"]


def test_reuse_is_one_minus_two_to_minus_n() -> None:
    """w_reuse alone: n = 1 is .5, n = 2 is .75; times 2**(-2/4) = .707 that is .530 > .5."""
    for priority, first in ((2.0**-0.5, b"once"), (2.0**-0.75, b"twice")):  # .530 and .446
        idx = index(w_recency=0.0, w_reuse=1.0)
        store(idx, "a", b"twice", priority=priority)
        store(idx, "b", b"twice", priority=priority)
        store(idx, "c", b"once")
        assert view(idx, b"twice").reuse == 2
        assert idx.candidates(1) == [first]


@pytest.mark.parametrize(("priority", "first"), [(2.0**0.5, b"none"), (2.0**0.75, b"user")])
def test_the_floor_lifts_what_the_signals_leave(priority: float, first: bytes) -> None:
    """user, age 4: .6 + .4 * (.5 * .5 + .5 * .5) = .8.

    none, age 3: .5 * 2**(-3/4) + .5 * .5 = .547; times 1.414 that is .774, times 1.682 it is .920.
    """
    idx = index()
    store(idx, "u", b"user", role="user")
    store(idx, "n", b"none", priority=priority)
    pass_time(idx, 3)
    assert idx.candidates(1) == [first]


@pytest.mark.parametrize(("role", "floor"), [("system", 0.6), ("user", 0.6), ("assistant", 0.5),
                                             ("tool", 0.0), (None, 0.0)])  # fmt: skip
def test_floors_by_role(role: str | None, floor: float) -> None:
    idx = index()
    store(idx, "a", b"k", role=role)
    seen = view(idx, b"k")
    assert (seen.floor, seen.role) == (floor, role)


def test_signals_count_with_their_weights() -> None:
    """attention .5 at weight .4 is .2; coherence .75 at weight .2 is .15."""
    idx = index(w_recency=0.0, w_reuse=0.0, w_attention=0.4, w_coherence=0.2)
    for name in (b"attended", b"coherent", b"plain"):
        store(idx, name.decode(), name)
    assert idx.signal(b"attended", attention=0.5)
    assert idx.signal(b"coherent", coherence=0.75)
    assert idx.candidates(3) == [b"plain", b"coherent", b"attended"]
    assert idx.signal(b"coherent", attention=0.25)  # .15 + .1
    assert idx.candidates(3) == [b"plain", b"attended", b"coherent"]


def test_signals_are_quantised_clamped_and_left_alone_by_none() -> None:
    idx = index()
    store(idx, "a", b"k")
    assert (view(idx, b"k").attention, view(idx, b"k").coherence) == (0.0, 0.0)
    idx.signal(b"k", attention=0.3, coherence=7.0)
    assert view(idx, b"k").attention == 19 / 64
    assert view(idx, b"k").coherence == 1.0
    idx.signal(b"k", attention=-1.0)
    assert (view(idx, b"k").attention, view(idx, b"k").coherence) == (0.0, 1.0)
    assert not idx.signal(b"unknown", attention=0.5)
    for junk in (float("nan"), "high"):
        assert not idx.signal(b"k", attention=junk)  # type: ignore[arg-type]
    assert view(idx, b"k").attention == 0.0


def test_signals_go_with_the_block() -> None:
    idx = index()
    store(idx, "a", b"k")
    idx.signal(b"k", attention=1.0, coherence=1.0)
    idx.evict(1)
    store(idx, "b", b"k")
    assert (view(idx, b"k").attention, view(idx, b"k").coherence) == (0.0, 0.0)


def test_a_signal_in_mid_chain_changes_one_block_only() -> None:
    idx = index(w_recency=0.0, w_reuse=0.0, w_attention=1.0)
    store(idx, "a", b"0", b"1", b"2")
    idx.signal(b"1", attention=1.0)
    assert [view(idx, key).attention for key in (b"0", b"1", b"2")] == [0.0, 1.0, 0.0]
    assert [idx.parent(key) for key in (b"0", b"1", b"2")] == [None, b"0", b"1"]
    assert idx.candidates(3) == [b"2", b"1", b"0"]  # leaf-first, whatever a block is worth


def test_ties_go_oldest_then_deepest() -> None:
    idx = index(w_recency=0.0, w_reuse=1.0)  # the score does not see age
    store(idx, "a", b"a0", b"a1", b"a2")
    store(idx, "b", b"b0")
    store(idx, "c", b"c0", b"c1")
    assert idx.candidates(6) == [b"a2", b"a1", b"a0", b"b0", b"c1", b"c0"]
    idx = index()
    idx.open("both")
    idx.insert("both", [b"x0", b"x1"], group=0)
    idx.insert("both", [b"y0", b"y1", b"y2"], group=1)
    idx.close("both")
    assert idx.candidates(5) == [b"y2", b"x1", b"y1", b"x0", b"y0"]


# --- reuse ----------------------------------------------------------------------------------------


def test_reuse_counts_distinct_requests() -> None:
    idx = index()
    idx.open("a")
    idx.insert("a", [b"k"])
    for _ in range(5):
        idx.touch("a", [b"k"])
    assert view(idx, b"k").reuse == 1
    idx.open("b")
    for _ in range(5):
        idx.touch("b", [b"k"])
        idx.touch("a", [b"k"])
    assert view(idx, b"k").reuse == 2
    assert view(idx, b"k").last == 2


def test_reuse_is_remembered_past_eviction_but_not_past_a_drop() -> None:
    idx = index()
    for name in "abc":
        store(idx, name, b"k")
    assert view(idx, b"k").reuse == 3
    idx.evict(1)
    assert b"k" not in idx
    store(idx, "d", b"k")
    assert view(idx, b"k").reuse == 4
    assert idx.drop(b"k")
    store(idx, "e", b"k")
    assert view(idx, b"k").reuse == 1


def test_memory_of_the_evicted_is_first_in_first_out() -> None:
    idx = index(ghost_factor=2)
    for n in range(5):
        store(idx, f"r{n}", b"%d" % n)
        idx.evict(1)
    assert idx.ghosts == 2  # twice the one block that was ever resident
    store(idx, "again", b"3")
    assert view(idx, b"3").reuse == 2
    idx.evict(1)
    store(idx, "forgotten", b"1")
    assert view(idx, b"1").reuse == 1


def test_no_ghosts_when_told_so() -> None:
    idx = index(ghost_factor=0)
    store(idx, "a", b"k")
    idx.evict(1)
    store(idx, "b", b"k")
    assert (view(idx, b"k").reuse, idx.ghosts) == (1, 0)


def test_reuse_is_capped_where_the_score_is_one() -> None:
    idx = index()
    for n in range(60):
        store(idx, f"r{n}", b"k")
    assert view(idx, b"k").reuse == 53
    idx.evict(1)
    store(idx, "again", b"k")
    assert view(idx, b"k").reuse == 53


# --- claims ---------------------------------------------------------------------------------------


def test_the_highest_claim_stands_while_it_lives() -> None:
    idx = index(recency_half_life=2)
    idx.open("vip", RequestTags(source_type="user", priority=4.0))
    idx.insert("vip", [b"k"])
    for n in range(9):  # long past the half-life: an open request's claim does not age
        store(idx, f"r{n}", b"k", role="tool")
        seen = view(idx, b"k")
        assert (seen.floor, seen.role, seen.priority) == (0.6, "user", 4.0)
    idx.close("vip")
    store(idx, "last", b"k", role="assistant", priority=0.5)
    seen = view(idx, b"k")
    assert (seen.floor, seen.role, seen.priority) == (0.5, "assistant", 0.5)


def test_a_closed_claim_lives_a_half_life() -> None:
    idx = index(recency_half_life=2)
    store(idx, "vip", b"k", role="user", priority=4.0)
    for name, priority in (("a", 4.0), ("b", 4.0), ("c", 1.0)):  # ages 1, 2, 3
        store(idx, name, b"k")
        assert view(idx, b"k").priority == priority


def test_an_equal_claim_renews() -> None:
    idx = index(recency_half_life=2)
    for name in ("vip", "too", "three"):
        store(idx, name, b"k", role="user", priority=4.0)
    store(idx, "four", b"k")
    store(idx, "five", b"k")
    assert view(idx, b"k").priority == 4.0
    store(idx, "six", b"k")
    assert view(idx, b"k").priority == 1.0


def test_floor_and_priority_are_claimed_apart() -> None:
    idx = index()
    store(idx, "role", b"k", role="system", priority=0.5)
    store(idx, "weight", b"k", role="tool", priority=4.0)
    seen = view(idx, b"k")
    assert (seen.floor, seen.role, seen.priority) == (0.6, "system", 4.0)


def test_claims_of_neighbours_lapse_apart() -> None:
    """Two blocks of one chain, alike in all that can be seen, but claimed by different requests."""
    idx = index(recency_half_life=2)
    store(idx, "before", b"0", b"1")
    idx.evict(1)
    idx.drop(b"0")
    idx.open("early", RequestTags(source_type="user"))
    idx.open("late", RequestTags(source_type="user", priority=2.0))
    idx.insert("late", [b"0"])
    idx.touch("early", [b"0"])  # renews the floor, at an older tick
    idx.insert("late", [b"1"], start=1)
    idx.close("early")
    idx.close("late")
    upper, lower = view(idx, b"0"), view(idx, b"1")
    assert (upper.last, upper.reuse, upper.floor) == (lower.last, lower.reuse, lower.floor)
    pass_time(idx, 1)
    idx.open("after")
    idx.touch("after", [b"0", b"1"])
    assert (view(idx, b"0").floor, view(idx, b"1").floor) == (0.0, 0.6)


# --- half-life ------------------------------------------------------------------------------------


def test_a_fixed_half_life_stays() -> None:
    idx = index(recency_half_life=5)
    for n in range(40):
        store(idx, f"r{n}", b"%d" % n)
        idx.evict(len(idx) - 2)
    assert idx.half_life == 5


def test_auto_half_life_follows_the_turnover() -> None:
    """A pool of 100 blocks, one new block a request: it turns over once in 100 requests."""
    idx = index(recency_half_life="auto")
    assert idx.half_life == 64
    for n in range(100):
        store(idx, f"r{n}", b"%d" % n)
    assert idx.half_life == 64  # nothing was evicted yet
    for n in range(100, 350):
        idx.evict(1)
        store(idx, f"r{n}", b"%d" % n)
    assert idx.half_life == 100


def test_auto_half_life_has_bounds() -> None:
    idx = index(recency_half_life="auto")
    for n in range(20):
        store(idx, f"r{n}", *(b"%d-%d" % (n, i) for i in range(8)))
        idx.evict(len(idx))
    assert idx.half_life == 16
    idx = index(recency_half_life="auto")
    store(idx, "a", b"a")
    pass_time(idx, 70_000)
    idx.evict(1)
    assert idx.half_life == 65_536
