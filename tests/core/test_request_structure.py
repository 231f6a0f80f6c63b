# SPDX-License-Identifier: Apache-2.0
"""What each tag of a request does, at the index: always once with the tag and once without.

The conformance suite shows that every decision is the rules'; here the rules themselves are told,
one small story each, with the numbers worked out by hand. The ledger's stories are in
`test_request_structure_ledger.py`.
"""

import math
from typing import Any

import pytest

from evoke_core import BlockView, Evicted, EvokeConfig, RequestTags, RetentionIndex
from evoke_core.tags import Span

POLICIES = ("lru", "scored", "adaptive")
DEEP = 8  # more blocks than any pin may hold here


def index(policy: str = "scored", capacity: int | None = 8, **settings: Any) -> RetentionIndex:
    config = EvokeConfig(policy=policy, recency_half_life=4, **settings)
    return RetentionIndex(config, capacity=capacity)


def chain(name: str, blocks: int) -> list[bytes]:
    return [b"%s%d" % (name.encode(), at) for at in range(blocks)]


def store(
    idx: RetentionIndex, name: str, blocks: int = 1, *, now: float | None = 0.0, **tags: Any
) -> list[bytes]:
    """A whole request that stores the chain called like itself."""
    keys = chain(name, blocks)
    ask(idx, keys, now=now, **tags)
    return keys


def ask(idx: RetentionIndex, keys: list[bytes], *, now: float | None = 0.0, **tags: Any) -> None:
    """A whole request for a chain, of which it stores what is missing."""
    request = f"request {idx.clock}"
    idx.open(request, RequestTags(**tags), now)
    idx.insert(request, keys)
    idx.close(request)


def pass_time(idx: RetentionIndex, now: float | None = None, requests: int = 1) -> None:
    """Requests that touch nothing."""
    for _ in range(requests):
        idx.open("time", RequestTags(), now)
        idx.close("time")


def view(idx: RetentionIndex, key: bytes) -> BlockView:
    found = idx.describe(key)
    assert found is not None
    return found


def order(idx: RetentionIndex) -> list[bytes]:
    return idx.candidates(len(idx))


def reasons(evicted: list[Evicted]) -> list[tuple[bytes, str]]:
    return [(key, batch.reason) for batch in evicted for key in batch.keys]


# --- pinned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_block_is_no_candidate(policy: str) -> None:
    for pinned in (False, True):
        idx = index(policy)
        old = store(idx, "old", 2, pinned=pinned)
        new = store(idx, "new", 2)
        pass_time(idx, requests=50)
        assert order(idx)[:2] == ([*reversed(new)] if pinned else [*reversed(old)])
        gone = idx.evict(4)
        assert (
            [key for batch in gone for key in batch.keys][:2] == order(idx)
            or len(idx) == 0
            or (pinned and all(key in idx for key in old))
        )
        assert len(idx) == (2 if pinned else 0)


def test_what_a_pinned_block_hangs_on_stays_too() -> None:
    """The head's own time is over and with it its pin, but a leaf it is not."""
    idx = index()
    store(idx, "x", 2, pinned=True, spans=(Span(start=0, end=1, ttl_s=1.0),))
    plain = store(idx, "plain")
    pass_time(idx, 1.0)
    assert (view(idx, b"x0").pinned, view(idx, b"x0").expired) == (False, True)
    assert order(idx) == plain
    assert idx.pinned == 1


def test_beyond_the_limit_the_deepest_go_unpinned() -> None:
    """A quarter of eight blocks is two: the two at the head."""
    idx = index(capacity=8)
    store(idx, "x", 5, pinned=True)
    assert order(idx) == [b"x4", b"x3", b"x2"]
    idx.evict(8)
    assert b"x0" in idx
    assert b"x1" in idx


@pytest.mark.parametrize(
    ("fraction", "left"), [(0.0, 0), (0.1, 0), (0.25, 2), (0.49, 3), (0.5, 4), (1.0, 6)]
)
def test_the_limit_is_a_part_of_the_pool(fraction: float, left: int) -> None:
    idx = index(capacity=8, max_pinned_fraction=fraction)
    store(idx, "x", 6, pinned=True)
    idx.evict(8)
    assert len(idx) == left


def test_without_a_known_capacity_the_pool_is_as_large_as_it_ever_was() -> None:
    idx = index(capacity=None)
    store(idx, "x", 4)
    store(idx, "y", 4)
    idx.evict(8)
    store(idx, "z", 4, pinned=True)  # eight blocks were resident once
    idx.evict(8)
    assert len(idx) == 2


def test_the_oldest_pin_makes_way() -> None:
    idx = index(capacity=8)
    a, b, c = (store(idx, name, pinned=True) for name in "abc")
    assert order(idx) == a
    ask(idx, b, pinned=True)  # pinned anew: c is the oldest now
    store(idx, "d", pinned=True)
    idx.evict(8)
    assert a[0] not in idx
    assert c[0] not in idx
    assert b[0] in idx


def test_the_request_that_began_last_says_how_old_a_pin_is() -> None:
    """An older request that comes back to a block makes its pin no older, and no younger."""
    idx = index(capacity=8)
    idx.open("old", RequestTags(pinned=True), 0.0)
    b, a = store(idx, "b", pinned=True), store(idx, "a", pinned=True)
    idx.touch("old", a)
    store(idx, "c", pinned=True)
    assert order(idx) == b


def test_of_blocks_that_are_there_already_the_head_is_pinned_too() -> None:
    idx = index(capacity=8)
    keys = store(idx, "x", 5)
    ask(idx, keys, pinned=True)
    assert [view(idx, key).pinned for key in keys] == [True, True, False, False, False]
    assert order(idx) == [b"x4", b"x3", b"x2"]


def test_a_pin_that_is_no_more_leaves_a_high_priority() -> None:
    for pinned, priority in ((False, 1.0), (True, 4.0)):
        idx = index(max_pinned_fraction=0.0)
        store(idx, "x", pinned=pinned)
        assert view(idx, b"x0").priority == priority
    idx = index(max_pinned_fraction=0.0)
    store(idx, "x", pinned=True, priority=10.0)
    assert view(idx, b"x0").priority == 2.0**3.25
    store(idx, "y", pinned=True, priority=0.5)
    assert view(idx, b"y0").priority == 4.0
    store(idx, "z", 2, pinned=True, spans=(Span(start=0, end=1, priority=0.5),))
    assert [view(idx, key).priority for key in chain("z", 2)] == [4.0, 4.0]


def test_a_pin_is_for_what_the_request_touches_not_for_what_follows() -> None:
    idx = index(capacity=16)
    long = store(idx, "x", 3)
    ask(idx, long[:2], pinned=True)
    assert order(idx) == [long[2]]


def test_pins_end_with_the_block() -> None:
    for leave in ("drop", "clear"):
        idx = index()
        store(idx, "x", pinned=True)
        assert order(idx) == []
        if leave == "drop":
            idx.drop(b"x0")
        else:
            idx.clear()
        store(idx, "x")
        assert order(idx) == [b"x0"]


def test_pins_end_with_their_time_and_do_not_come_back() -> None:
    idx = index()
    store(idx, "x", pinned=True, ttl_s=5.0)
    pass_time(idx, 4.9)
    assert order(idx) == []
    pass_time(idx, 5.0)
    assert order(idx) == [b"x0"]
    ask(idx, [b"x0"], now=5.0)
    assert order(idx) == [b"x0"]
    ask(idx, [b"x0"], now=5.0, pinned=True)
    assert order(idx) == []


def test_an_untagged_request_does_not_unpin() -> None:
    idx = index()
    store(idx, "x", pinned=True)
    ask(idx, [b"x0"])
    pass_time(idx, requests=500)
    assert order(idx) == []


def test_a_held_block_that_is_unpinned_stays_held() -> None:
    idx = index(capacity=4)  # one pin
    store(idx, "x", pinned=True)
    idx.hold(b"x0")
    store(idx, "y", pinned=True)
    assert order(idx) == []
    idx.unhold(b"x0")
    assert order(idx) == [b"x0"]


# --- ttl_s ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_whose_time_is_over_goes_first(policy: str) -> None:
    """The block is the pool's best by reuse, priority and recency, and still goes first."""
    for ttl_s in (None, 10.0):
        idx = index(policy)
        plain = store(idx, "plain")
        for _ in range(5):
            store(idx, "best", priority=10.0, ttl_s=ttl_s)
        assert order(idx) == [*plain, b"best0"]
        pass_time(idx, 9.99)
        assert order(idx) == [*plain, b"best0"]
        pass_time(idx, 10.0)
        assert order(idx) == ([b"best0", *plain] if ttl_s else [*plain, b"best0"])
        assert reasons(idx.evict(1)) == (
            [(b"best0", "expired")] if ttl_s else [(plain[0], "capacity")]
        )


def test_full_value_until_its_time_is_over() -> None:
    """scored: old (age 9, reuse 1) is .5 * 2**(-9/4) + .25 = .36, the new one at age 4 is .5.

    While the time runs old counts as just touched: .75.
    """
    for ttl_s, first in ((None, b"old0"), (100.0, b"new0")):
        idx = index()
        store(idx, "old", ttl_s=ttl_s)
        pass_time(idx, 1.0, requests=4)
        store(idx, "new", now=1.0)
        pass_time(idx, 1.0, requests=4)
        assert order(idx)[0] == first


def test_lru_knows_no_full_value() -> None:
    idx = index("lru")
    store(idx, "old", ttl_s=100.0)
    store(idx, "new")
    assert order(idx) == [b"old0", b"new0"]


def test_a_time_ends_only_what_everybody_gave_a_time() -> None:
    idx = index()
    shared = store(idx, "shared", ttl_s=5.0)
    own = store(idx, "own", ttl_s=5.0)
    ask(idx, shared)  # forever
    ask(idx, own, ttl_s=7.0)
    pass_time(idx, 6.0)
    assert order(idx) == [*shared, *own]
    pass_time(idx, 7.0)
    assert order(idx) == [*own, *shared]


def test_the_longest_time_counts_whoever_comes_last() -> None:
    idx = index()
    keys = store(idx, "x", ttl_s=50.0)
    ask(idx, keys, ttl_s=1.0)
    store(idx, "y")
    pass_time(idx, 49.0, requests=20)
    assert idx.evict(1)[0].reason == "capacity"
    idx = index()
    keys = store(idx, "x", ttl_s=50.0)
    ask(idx, keys, ttl_s=1.0)
    pass_time(idx, 50.0)
    assert idx.evict(1)[0].reason == "expired"


def test_a_use_revives() -> None:
    idx = index()
    keys = store(idx, "x", ttl_s=5.0)
    plain = store(idx, "plain")
    pass_time(idx, 5.0)
    assert order(idx) == [*keys, *plain]
    ask(idx, keys, now=6.0, ttl_s=5.0)
    assert order(idx) == [*plain, *keys]
    pass_time(idx, 10.9)
    assert order(idx) == [*plain, *keys]
    pass_time(idx, 11.0)
    assert order(idx) == [*keys, *plain]


def test_a_poll_does_not_revive() -> None:
    """The request was counted before; asking again is no use."""
    idx = index()
    idx.open("long", RequestTags(ttl_s=5.0), 0.0)
    idx.insert("long", [b"x"])
    store(idx, "plain")
    pass_time(idx, 5.0)
    idx.touch("long", [b"x"])
    idx.insert("long", [b"x"])
    assert order(idx) == [b"x", b"plain0"]


@pytest.mark.parametrize("stored", [False, True])
def test_who_comes_to_a_block_after_its_own_time_finds_it_over(stored: bool) -> None:
    """The time runs from when the request was opened, whenever it gets to its blocks."""
    for now, over in ((4.99, False), (5.0, True)):
        idx = index()
        if stored:
            store(idx, "x", ttl_s=1.0)
        idx.open("long", RequestTags(ttl_s=5.0, pinned=True), 0.0)
        plain = store(idx, "plain")
        pass_time(idx, now)
        idx.insert("long", [b"x0"])
        seen = view(idx, b"x0")
        assert (seen.expired, seen.holding, seen.pinned) == (over, not over, not over)
        assert order(idx) == ([b"x0", *plain] if over else plain)
        assert idx.expired == over


def test_a_new_residency_has_a_time_of_its_own() -> None:
    idx = index()
    store(idx, "x", ttl_s=5.0)
    idx.evict(1)
    store(idx, "x")
    store(idx, "plain")
    pass_time(idx, 100.0)
    assert [reason for _, reason in reasons(idx.evict(2))] == ["capacity", "capacity"]
    idx = index()
    store(idx, "x")
    idx.evict(1)
    store(idx, "x", ttl_s=5.0)
    pass_time(idx, 100.0)
    assert reasons(idx.evict(1)) == [(b"x0", "expired")]


@pytest.mark.parametrize("policy", POLICIES)
def test_among_the_expired_the_oldest_go_first_then_the_deepest(policy: str) -> None:
    """Whatever else they would have been worth: here the older are worth more."""
    idx = index(policy, capacity=16)
    store(idx, "a", 2, ttl_s=1.0, priority=10.0, source_type="system")
    store(idx, "b", 3, ttl_s=1.0, priority=0.1)
    store(idx, "c", 1)
    idx.open("d", RequestTags(ttl_s=1.0), 0.0)
    idx.insert("d", chain("d", 3))
    idx.insert("d", chain("e", 2), group=1)
    idx.close("d")
    pass_time(idx, 1.0)
    expected = [b"a1", b"a0", b"b2", b"b1", b"b0", b"d2", b"d1", b"e1", b"d0", b"e0", b"c0"]
    assert order(idx) == expected


def test_without_a_clock_times_are_ignored_and_counted() -> None:
    idx = index()
    store(idx, "x", now=None, ttl_s=1.0, expect_reuse_in_s=100.0)
    assert idx.times_ignored > 0
    ignored = idx.times_ignored
    store(idx, "plain", now=1e9)
    pass_time(idx, 2e9)
    assert idx.times_ignored == ignored
    assert reasons(idx.evict(1)) == [(b"x0", "capacity")]


def test_time_does_not_run_backwards() -> None:
    idx = index()
    store(idx, "x", ttl_s=5.0)
    store(idx, "plain")
    pass_time(idx, 5.0)
    assert idx.now == 5.0
    pass_time(idx, 2.0)
    pass_time(idx, None)
    assert idx.now == 5.0
    assert order(idx) == [b"x0", b"plain0"]


def test_a_huge_leap_expires_everything_that_has_a_time() -> None:
    idx = index(capacity=64)
    for at in range(8):
        store(idx, f"t{at}", 2, ttl_s=86_400.0)
    store(idx, "plain")
    pass_time(idx, 1e15)
    assert order(idx)[-1] == b"plain0"
    assert {batch.reason for batch in idx.evict(16)} == {"expired"}


def test_a_child_may_outlive_its_parent_which_waits() -> None:
    idx = index()
    ask(idx, [b"x0"], ttl_s=1.0)
    ask(idx, [b"x0", b"x1"], ttl_s=50.0)
    ask(idx, [b"y0"])
    idx.open("late", RequestTags(ttl_s=1.0), 1.0)
    idx.close("late")
    assert order(idx) == [b"y0", b"x1", b"x0"] or order(idx)[-1] == b"x0"


# --- expect_reuse_in_s ----------------------------------------------------------------------------


def test_a_promise_holds_until_a_quarter_after_its_time() -> None:
    """scored, ages and values as in the story of the TTL; afterwards as if nothing had been said.

    Ten seconds are promised: held while the time is before 12.5.
    """
    for promise in (None, 10.0):
        idx = index()
        store(idx, "old", expect_reuse_in_s=promise)
        pass_time(idx, 1.0, requests=4)
        store(idx, "new", now=1.0)
        pass_time(idx, 12.49, requests=4)
        assert order(idx)[0] == (b"new0" if promise else b"old0")
        pass_time(idx, 12.5)
        assert order(idx) == [b"old0", b"new0"]
        assert [reason for _, reason in reasons(idx.evict(2))] == ["capacity", "capacity"]


def test_the_longest_promise_counts() -> None:
    idx = index()
    keys = store(idx, "old", expect_reuse_in_s=80.0)
    ask(idx, keys, expect_reuse_in_s=1.0)
    pass_time(idx, 99.0, requests=20)
    store(idx, "new", now=99.0)
    pass_time(idx, 99.0, requests=8)
    assert order(idx)[0] == b"new0"
    pass_time(idx, 100.0)
    ask(idx, [b"new0"], now=100.0)
    assert order(idx)[0] == b"old0"


def test_lru_takes_no_promise() -> None:
    idx = index("lru")
    store(idx, "old", expect_reuse_in_s=100.0)
    store(idx, "new")
    assert order(idx) == [b"old0", b"new0"]


# --- end_of_session -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_with_its_session_a_block_goes_first(policy: str) -> None:
    for ends in (False, True):
        idx = index(policy)
        store(idx, "other", session="t")
        store(idx, "own", 2, session="s")
        last = store(idx, "last", session="s", end_of_session=ends)
        assert order(idx) == (
            [b"own1", b"own0", *last, b"other0"] if ends else [b"other0", b"own1", b"own0", *last]
        )
        assert reasons(idx.evict(1))[0][1] == ("expired" if ends else "capacity")


def test_what_others_touch_stays() -> None:
    """Shared with another session, or with a request of no session: not the session's own."""
    idx = index(capacity=16)
    shared, plain, own = (store(idx, name, session="s") for name in ("shared", "plain", "own"))
    ask(idx, shared, session="t")
    ask(idx, plain)
    ask(idx, plain, session="s")
    ask(idx, [], session="s", end_of_session=True)
    assert reasons(idx.evict(1)) == [(own[0], "expired")]
    assert {batch.reason for batch in idx.evict(2)} == {"capacity"}


def test_the_session_ends_when_the_request_does() -> None:
    idx = index()
    store(idx, "old")
    own = store(idx, "own", session="s")
    idx.open("last", RequestTags(session="s", end_of_session=True), 0.0)
    idx.insert("last", [b"more"])
    assert order(idx) == [b"old0", *own, b"more"]
    idx.close("last")
    assert order(idx) == [*own, b"more", b"old0"]


def test_a_session_that_goes_on_revives_its_blocks() -> None:
    idx = index()
    own = store(idx, "own", session="s", end_of_session=True)
    store(idx, "new")
    assert order(idx) == [*own, b"new0"]
    ask(idx, own, session="s")
    assert order(idx) == [b"new0", *own]


def test_who_touched_a_block_is_remembered_past_its_eviction() -> None:
    for first, expired in (("t", False), (None, False), ("s", True)):
        idx = index()
        store(idx, "x", session=first)
        idx.evict(1)
        store(idx, "x", session="s", end_of_session=True)
        assert reasons(idx.evict(1)) == [(b"x0", "expired" if expired else "capacity")]


def test_a_session_end_without_a_session_ends_nothing() -> None:
    idx = index()
    store(idx, "x")
    store(idx, "y", end_of_session=True)
    assert {batch.reason for batch in idx.evict(2)} == {"capacity"}


def test_the_end_of_a_session_ends_its_pins_and_no_others() -> None:
    idx = index(capacity=8, max_pinned_fraction=1.0)
    mine = store(idx, "mine", session="s", pinned=True)
    store(idx, "other", session="t", pinned=True)
    shared = store(idx, "shared", session="s", pinned=True)
    ask(idx, shared, session="t")
    ask(idx, [], session="s", end_of_session=True)
    assert order(idx) == mine


# --- no_store -------------------------------------------------------------------------------------


def test_an_index_refuses_to_admit_for_who_wants_nothing_stored() -> None:
    for no_store in (False, True):
        idx = index()
        idx.open("a", RequestTags(no_store=no_store), 0.0)
        idx.touch("a", chain("x", 2))
        got = idx.admit("a", chain("x", 2), 8)
        assert got.added == ([] if no_store else chain("x", 2))
        assert got.refused == (chain("x", 2) if no_store else [])
        assert got.evicted == []


def test_what_the_engine_stores_all_the_same_is_accepted() -> None:
    """Where the engine owns the slots, a block that is there is there."""
    idx = index()
    assert store(idx, "x", 2, no_store=True) == chain("x", 2)
    assert len(idx) == 2


def test_who_stores_nothing_still_uses() -> None:
    idx = index()
    keys = store(idx, "x")
    ask(idx, keys, no_store=True)
    assert view(idx, keys[0]).reuse == 2
    assert view(idx, keys[0]).last == 2


# --- max_session_fraction -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_over_its_share_gives_first_and_only_down_to_it(policy: str) -> None:
    """Half of eight blocks is four: of five, one goes before the older blocks of others."""
    for fraction in (1.0, 0.5):
        idx = index(policy, max_session_fraction=fraction)
        for at in range(3):
            store(idx, f"old{at}")
        for at in range(5):
            store(idx, f"s{at}", session="s")
        usual = [b"old00", b"old10", b"old20", b"s00", b"s10"]
        fair = [b"s00", b"old00", b"old10", b"old20", b"s10"]
        assert idx.candidates(5) == (fair if fraction < 1 else usual)
        expected = ["capacity"] * 5 if fraction == 1 else ["session share", *["capacity"] * 4]
        assert [reason for _, reason in reasons(idx.evict(5))] == expected


def test_a_share_is_looked_at_only_when_room_is_short() -> None:
    idx = index(max_session_fraction=0.5)
    store(idx, "s", 8, session="s")
    assert len(idx) == 8
    pass_time(idx, requests=9)
    assert len(idx) == 8


def test_two_sessions_over_their_share_give_by_rank() -> None:
    idx = index("lru", capacity=10, max_session_fraction=0.2)
    store(idx, "old")
    for at in range(4):
        store(idx, f"s{at}", session="s")
        store(idx, f"t{at}", session="t")
    assert order(idx) == [b"s00", b"t00", b"s10", b"t10", b"old0", b"s20", b"t20", b"s30", b"t30"]


def test_however_many_small_blocks_it_takes_a_session_gives_down_to_its_share() -> None:
    """A flood of 1,500 prompts of one block, 700 over the share; the quiet ones are the oldest."""
    idx = index("lru", capacity=1_600, max_session_fraction=0.5)
    quiet = [key for at in range(100) for key in store(idx, f"q{at}-", session=f"quiet{at % 9}")]
    for at in range(1_500):
        store(idx, f"f{at}-", session="flood")
    gone = reasons(idx.evict(750))
    expected = [(b"f%d-0" % at, "session share") for at in range(700)]
    assert gone == expected + [(key, "capacity") for key in quiet[:50]]


def test_expired_blocks_go_before_those_of_a_session_over_its_share() -> None:
    idx = index("lru", capacity=8, max_session_fraction=0.25)
    for at in range(4):
        store(idx, f"s{at}", session="s")
    dead = store(idx, "dead", ttl_s=1.0)
    pass_time(idx, 2.0)
    assert order(idx) == [*dead, b"s00", b"s10", b"s20", b"s30"]
    assert [reason for _, reason in reasons(idx.evict(5))] == [
        "expired",
        "session share",
        "session share",
        "capacity",
        "capacity",
    ]


def test_expired_blocks_of_a_session_count_until_they_are_gone() -> None:
    """Two of five are dead; with them gone three are left, and the share is three."""
    idx = index("lru", capacity=12, max_session_fraction=0.25)
    old = store(idx, "old")
    for at in range(3):
        store(idx, f"s{at}", session="s")
    for at in range(2):
        store(idx, f"d{at}", session="s", ttl_s=1.0)
    pass_time(idx, 2.0)
    assert order(idx) == [b"d00", b"d10", *old, b"s00", b"s10", b"s20"]


def test_shared_blocks_are_nobodys_share() -> None:
    idx = index("lru", max_session_fraction=0.25)
    for at in range(4):
        store(idx, f"x{at}", session="s")
        ask(idx, [b"x%d0" % at], session="t")
    store(idx, "new")
    assert order(idx)[0] == b"x00"
    assert {batch.reason for batch in idx.evict(5)} == {"capacity"}


def test_the_share_of_a_session_does_not_evict_held_or_pinned_blocks() -> None:
    idx = index("lru", max_session_fraction=0.25, max_pinned_fraction=1.0)
    plain = store(idx, "plain")
    pinned = store(idx, "pinned", session="s", pinned=True)
    held = store(idx, "held", session="s")
    free = store(idx, "free", session="s")
    idx.hold(*held)
    assert order(idx) == [*free, *plain]
    idx.unhold(*held)
    assert order(idx) == [*held, *plain, *free]
    assert pinned[0] in idx


# --- spans ----------------------------------------------------------------------------------------


def test_each_span_makes_its_own_claims() -> None:
    spans = (
        Span(start=0, end=2, source_type="system", priority=2.0),
        Span(start=3, end=4, source_type="tool"),
    )
    for given in (False, True):
        idx = index()
        keys = store(idx, "x", 5, source_type="user", priority=0.5, spans=spans if given else ())
        seen = [(view(idx, key).role, view(idx, key).priority) for key in keys]
        user = ("user", 0.5)
        system = ("system", 2.0)
        assert seen == ([system, system, user, ("tool", 0.5), user] if given else [user] * 5)
        floors = [view(idx, key).floor for key in keys]
        assert floors == ([0.6, 0.6, 0.6, 0.0, 0.6] if given else [0.6] * 5)


def test_a_span_decides_who_goes_first() -> None:
    """A question of little worth behind a system prompt: its blocks go before older ones."""
    for priority in (None, 0.1):
        idx = index()
        old = store(idx, "old")
        spans = (Span(start=1, end=3, priority=priority),)
        store(idx, "x", 3, spans=spans)
        assert order(idx) == (
            [b"x2", b"x1", *old, b"x0"] if priority else [*old, b"x2", b"x1", b"x0"]
        )


def test_a_span_may_have_a_time_of_its_own() -> None:
    idx = index()
    store(idx, "x", 4, spans=(Span(start=2, end=4, ttl_s=5.0),))
    store(idx, "plain")
    pass_time(idx, 5.0)
    assert order(idx) == [b"x3", b"x2", b"x1", b"x0", b"plain0"]
    assert [reason for _, reason in reasons(idx.evict(4))] == ["expired"] * 2 + ["capacity"] * 2
    idx = index()
    store(idx, "x", 2, ttl_s=5.0, spans=(Span(start=1, end=2, ttl_s=50.0),))
    store(idx, "plain")
    pass_time(idx, 6.0)
    # The head's time is over, but the block behind it lives: the parent waits, then goes at once.
    assert order(idx) == [b"plain0", b"x1", b"x0"]


def test_a_worthy_block_behind_an_unworthy_one_keeps_it() -> None:
    """A child may outrank its parent: the parent waits."""
    idx = index()
    store(idx, "x", 2, priority=0.1, spans=(Span(start=1, end=2, priority=8.0),))
    new = store(idx, "new")
    assert order(idx) == [*new, b"x1", b"x0"]


def test_spans_count_for_blocks_that_are_touched_too() -> None:
    idx = index()
    keys = store(idx, "x", 3)
    ask(idx, keys, spans=(Span(start=1, end=2, source_type="system", priority=2.0**1.5),))
    assert [view(idx, key).role for key in keys] == [None, "system", None]
    assert [view(idx, key).priority for key in keys] == [1.0, 2.0**1.5, 1.0]


def test_blocks_without_positions_know_no_spans() -> None:
    config = EvokeConfig(policy="scored")
    idx = RetentionIndex(config, window_groups=(1,))
    spans = (Span(start=0, end=9, source_type="system", priority=5.0, ttl_s=1.0),)
    idx.open("a", RequestTags(source_type="user", spans=spans), 0.0)
    idx.insert("a", [b"w0", b"w1"], group=1)
    idx.close("a")
    assert [(view(idx, key).role, view(idx, key).priority) for key in (b"w0", b"w1")] == [
        ("user", 1.0)
    ] * 2
    pass_time(idx, 9.0)
    assert {batch.reason for batch in idx.evict(2)} == {"capacity"}


def test_a_key_named_twice_in_a_window_group_moves_nobody() -> None:
    idx = RetentionIndex(EvokeConfig(policy="scored"), window_groups=(1,))
    idx.open("a", RequestTags(), 0.0)
    assert idx.insert("a", [b"v", b"w", b"v", b"x"], group=1, start=3) == [b"v", b"w", b"x"]
    assert [view(idx, key).position for key in (b"v", b"w", b"x")] == [3, 4, 6]


def test_blocks_that_differ_only_in_their_spans_are_told_apart_for_good() -> None:
    """A span's edge in the middle of a chain, touched again in pieces of other lengths."""
    idx = index(capacity=32)
    keys = store(idx, "x", 8, spans=(Span(start=3, end=5, priority=4.0),))
    ask(idx, keys[:4])
    ask(idx, keys[:6], spans=(Span(start=0, end=1, priority=8.0),))
    priorities = [view(idx, key).priority for key in keys]
    assert priorities == [8.0, 1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 1.0]
    assert [view(idx, key).reuse for key in keys] == [3, 3, 3, 3, 2, 2, 1, 1]


# --- what is told ---------------------------------------------------------------------------------


def test_an_eviction_tells_whether_the_blocks_were_used_again() -> None:
    idx = index("lru")
    once, twice = store(idx, "once"), store(idx, "twice")
    ask(idx, twice)
    assert [(batch.keys, batch.reused) for batch in idx.evict(2)] == [(once, False), (twice, True)]
    store(idx, "twice")
    assert [batch.reused for batch in idx.evict(1)] == [False], "a new residency counts anew"


def test_beliefs_are_numbers_by_name() -> None:
    for policy in POLICIES:
        idx = index(policy, capacity=4)
        for at in range(12):
            store(idx, f"x{at % 5}", 2)
            idx.evict(max(0, len(idx) - 4))
        beliefs = idx.beliefs()
        assert bool(beliefs) == (policy == "adaptive")
        for name, value in beliefs.items():
            assert isinstance(name, str)
            assert math.isfinite(value)
