# SPDX-License-Identifier: Apache-2.0
"""What each tag of a request does where the ledger owns the slots: with the tag and without."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_core import BlockLedger, BlockState, Decision, EvokeConfig, RequestTags, TagProblem
from evoke_core.tags import Span

POLICIES = ("lru", "scored", "adaptive")


def ledger(capacity: int, policy: str = "scored", **given: Any) -> BlockLedger:
    return BlockLedger(capacity, config=EvokeConfig(policy=policy, recency_half_life=4, **given))


def chain(name: str, blocks: int) -> list[bytes]:
    return [b"%s%d" % (name.encode(), at) for at in range(blocks)]


def ask(
    pool: BlockLedger, keys: list[bytes], *, now: float | None = 0.0, **tags: Any
) -> tuple[list[bytes], list[bytes]]:
    """A whole request for a chain: what it stored, and what went for it."""
    request = f"request {pool.index.clock}"
    pool.open(request, RequestTags(**tags), now)
    pool.touch(request, keys)
    got = pool.reserve(request, keys)
    pool.commit(request, got.keys, ticket=got.ticket)
    pool.close(request)
    return got.keys, got.evicted


def store(
    pool: BlockLedger, name: str, blocks: int = 1, *, now: float | None = 0.0, **tags: Any
) -> list[bytes]:
    keys = chain(name, blocks)
    assert ask(pool, keys, now=now, **tags)[0] == keys
    return keys


def popular(**tags: Any) -> BlockLedger:
    """Eight blocks under the adaptive policy, full of chains with a record, between scans at first.

    The chains `dead...` were asked for with these tags, the chains `live...` without.
    """
    pool = ledger(8, "adaptive")
    for turn in range(24):
        for at in range(2):
            ask(pool, chain(f"dead{at}-", 2), **tags)
            ask(pool, chain(f"live{at}-", 2))
        if turn < 20:
            ask(pool, chain(f"scan{turn}-", 2))
    for name in ("dead0-", "dead1-", "live0-", "live1-"):
        assert resident(pool, chain(name, 2)) == chain(name, 2)
    pool.drain_decisions()
    return pool


def resident(pool: BlockLedger, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if pool.lookup("anybody", key) is not BlockState.ABSENT]


def evictions(pool: BlockLedger) -> list[Decision]:
    return [each for each in pool.drain_decisions() if each.kind == "evicted"]


def refusals(pool: BlockLedger) -> list[tuple[list[bytes], str]]:
    return [(each.keys, each.reason) for each in pool.drain_decisions() if each.kind == "refused"]


# --- pinned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_prompt_survives_a_flood(policy: str) -> None:
    for pinned in (False, True):
        pool = ledger(8, policy)
        keys = store(pool, "prompt", 2, pinned=pinned)
        for at in range(40):
            for _ in range(3):  # even the learned policy lets this traffic in
                ask(pool, chain(f"flood{at % 12}-", 4))
        assert resident(pool, keys) == (keys if pinned else [])
        assert pool.stats.pinned == 2 * pinned


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_pins_leave_room_for_the_others(policy: str) -> None:
    """However much is pinned, three quarters of the pool are everybody's."""
    pool = ledger(16, policy)
    for at in range(30):
        ask(pool, chain(f"greedy{at}-", 6), pinned=True)
        assert pool.stats.pinned <= 4
    for _ in range(30):
        for at in range(3):
            ask(pool, chain(f"hot{at}-", 4))
    hot = [key for at in range(3) for key in chain(f"hot{at}-", 4)]
    assert resident(pool, hot) == hot
    assert pool.stats.pinned == 4


def test_when_everything_is_pinned_the_others_are_refused_and_nothing_raises() -> None:
    pool = ledger(4, max_pinned_fraction=1.0)
    store(pool, "x", 4, pinned=True)
    assert ask(pool, [b"y"]) == ([], [])
    assert refusals(pool) == [([b"y"], "no room")]
    assert ask(pool, [b"z0", b"z1"], pinned=True) == ([], [])
    assert pool.stats.pinned == 4


@pytest.mark.parametrize("blocks", [2, 5])
def test_a_pinned_new_block_need_not_compete(blocks: int) -> None:
    """adaptive: residents with a record beat a newcomer, unless it is pinned (here two blocks)."""
    for pinned in (False, True):
        pool = popular()
        stored, _ = ask(pool, chain("new", blocks), pinned=pinned)
        assert stored == (chain("new", 2) if pinned else [])


def test_a_pin_on_a_block_being_written_goes_with_its_abort() -> None:
    pool = ledger(4)
    pool.open("a", RequestTags(pinned=True), 0.0)
    got = pool.reserve("a", [b"x"])
    assert pool.stats.pinned == 1
    pool.abort("a", got.keys)
    assert pool.stats.pinned == 0
    pool.reset()
    assert pool.stats.pinned == 0


def test_a_reset_unpins() -> None:
    pool = ledger(8)
    keys = store(pool, "x", 2, pinned=True)
    pool.reset()
    assert pool.stats.pinned == 0
    store(pool, "x", 2)
    assert pool.stats.pinned == 0
    for at in range(8):
        store(pool, f"y{at}")
    assert resident(pool, keys) == []


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "scored"])
def test_expired_blocks_make_room_first(policy: str) -> None:
    for ttl_s in (None, 10.0):
        pool = ledger(4, policy)
        plain, dead = store(pool, "plain", 2), store(pool, "dead", 2, ttl_s=ttl_s)
        ask(pool, dead, ttl_s=ttl_s)
        ask(pool, [], now=9.9)
        assert pool.stats.expired == 0
        ask(pool, [], now=10.0)
        assert pool.stats.expired == (2 if ttl_s else 0)
        pool.drain_decisions()
        gone = [*reversed(dead if ttl_s else plain)]
        assert ask(pool, chain("new", 2), now=10.0) == (chain("new", 2), gone)
        reason = "expired" if ttl_s else "capacity"
        assert {(each.reason, each.reused) for each in evictions(pool)} == {(reason, bool(ttl_s))}
        assert pool.stats.expired == 0


def test_nothing_new_needs_to_beat_an_expired_block() -> None:
    """adaptive: a chain nobody ever asked for against blocks that every round used."""
    for ttl_s in (None, 10.0):
        pool = popular(ttl_s=ttl_s)
        ask(pool, [], now=11.0)
        assert pool.stats.expired == (4 if ttl_s else 0)
        stored, evicted = ask(pool, chain("new", 8), now=11.0)
        if ttl_s:
            assert (stored, evicted) == (
                chain("new", 4),
                [b"dead0-1", b"dead0-0", b"dead1-1", b"dead1-0"],
            )
            assert {each.reason for each in evictions(pool)} == {"expired"}
        else:
            assert len(stored) < 4
            assert {each.reason for each in evictions(pool)} <= {"capacity"}


def test_times_without_a_clock_are_counted_by_tag() -> None:
    pool = ledger(8)
    pool.open("a", RequestTags(ttl_s=1.0, expect_reuse_in_s=2.0))
    pool.open("b", RequestTags(spans=(Span(start=0, end=1, ttl_s=1.0),)))
    pool.open("c", RequestTags(ttl_s=1.0), 0.0)
    pool.open("d", RequestTags(priority=2.0))
    assert pool.stats.tags_ignored == {
        TagProblem("ttl_s", "no clock"): 2,
        TagProblem("expect_reuse_in_s", "no clock"): 1,
    }


# --- end_of_session -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sessions_end_frees_its_own_blocks_and_not_the_shared_prefix(policy: str) -> None:
    for ends in (False, True):
        pool = ledger(9, policy)
        prefix = chain("system", 2)
        for name, last in (("s", ends), ("t", False), ("t", False)):
            turn = [*prefix, *chain(name, 2)]
            ask(pool, turn, session=name)
            ask(pool, turn, session=name, end_of_session=last)
        assert pool.stats.expired == 2 * ends
        pool.drain_decisions()
        assert ask(pool, [*prefix, *chain("u", 5)], session="u")[0] in (
            chain("u", 5),
            chain("u", 3),
        )
        gone = {key: each.reason for each in evictions(pool) for key in each.keys}
        assert resident(pool, prefix) == prefix
        if ends:
            assert gone == {b"s1": "expired", b"s0": "expired"}
            assert resident(pool, chain("t", 2)) == chain("t", 2)
        else:
            assert set(gone.values()) <= {"capacity"}


def test_blocks_still_being_written_end_with_the_session_too() -> None:
    pool = ledger(4)
    pool.open("a", RequestTags(session="s", end_of_session=True), 0.0)
    got = pool.reserve("a", [b"x"])
    pool.close("a")
    assert pool.stats.expired == 1
    assert ask(pool, chain("y", 4))[0] == chain("y", 3)  # it is pending, so it stays
    pool.commit("a", got.keys)
    pool.drain_decisions()
    assert ask(pool, [b"z"]) == ([b"z"], [b"x"])
    assert [each.reason for each in evictions(pool)] == ["expired"]


def test_a_request_id_used_again_ends_the_session_of_the_first() -> None:
    pool = ledger(4)
    pool.open("a", RequestTags(session="s", end_of_session=True), 0.0)
    pool.commit("a", pool.reserve("a", [b"x"]).keys)
    pool.open("a", RequestTags(), 0.0)
    assert pool.stats.expired == 1


# --- no_store -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_no_store_stores_nothing_new_and_evicts_nothing(policy: str) -> None:
    for no_store in (False, True):
        pool = ledger(4, policy)
        old = store(pool, "old", 4)
        pool.drain_decisions()
        keys = [*old[:2], b"new"]
        stored, evicted = ask(pool, keys, no_store=no_store)
        if no_store:
            assert (stored, evicted) == ([], [])
            assert refusals(pool) == [([b"new"], "no_store")]
            assert resident(pool, old) == old
        elif policy != "adaptive":
            assert (stored, evicted) == ([b"new"], [b"old3"])
        view = pool.index.describe(old[0])
        assert view is not None
        assert view.reuse == 2, "what is there is used all the same"


def test_what_one_does_not_want_stored_another_may_store() -> None:
    pool = ledger(4)
    pool.open("private", RequestTags(no_store=True), 0.0)
    assert pool.reserve("private", [b"x"]).keys == []
    assert store(pool, "x") == [b"x0"]


# --- max_session_fraction -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flooding_session_does_not_displace_the_others(policy: str) -> None:
    """Half of the pool is a session's share; the flood is popular, so that it ranks high."""
    left = {}
    for fraction in (1.0, 0.5):
        pool = ledger(16, policy, max_session_fraction=fraction)
        quiet = [key for at in range(4) for key in store(pool, f"quiet{at}", 2, session=f"q{at}")]
        for at in range(40):
            for _ in range(4):
                ask(pool, chain(f"flood{at // 4}-", 4), session="flood")
        left[fraction] = len(resident(pool, quiet))
    assert left[0.5] == 8
    assert left[1.0] < 8


def test_a_decision_says_that_the_share_was_the_reason() -> None:
    pool = ledger(8, "lru", max_session_fraction=0.5)
    old = store(pool, "old", 2)
    for at in range(6):
        store(pool, f"s{at}", session="s")
    pool.drain_decisions()
    assert ask(pool, chain("new", 3)) == (chain("new", 3), [b"s00", b"s10", old[1]])
    assert [(each.keys, each.reason) for each in evictions(pool)] == [
        ([b"s00"], "session share"),
        ([b"s10"], "session share"),
        ([old[1]], "capacity"),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_share_counts_what_waits_to_come_in(policy: str) -> None:
    """A session exactly at its share that offers one block more gives one of its own for it."""
    for session, gone, reason in (("s", b"s00", "session share"), ("new", b"old0", "capacity")):
        pool = ledger(8, policy, max_session_fraction=0.5)
        store(pool, "old", 1)
        for at in range(4):
            store(pool, f"s{at}", session="s")
        for at in range(3):
            store(pool, f"t{at}")
        pool.drain_decisions()
        assert ask(pool, [b"x"], session=session) == ([b"x"], [gone])
        assert [each.reason for each in evictions(pool)] == [reason]


# --- spans ----------------------------------------------------------------------------------------


def test_the_ledger_keeps_the_head_that_a_span_names() -> None:
    """scored: a tool's output behind a system prompt is the first to go, and named as tool's."""
    spans = (Span(start=0, end=2, source_type="system"), Span(start=2, end=4, source_type="tool"))
    for given_spans in ((), spans):
        pool = ledger(8)
        keys = store(pool, "x", 4, spans=given_spans)
        store(pool, "y", 4)
        pool.drain_decisions()
        ask(pool, chain("z", 4))
        gone = [(key, each.role) for each in evictions(pool) for key in each.keys]
        if given_spans:
            assert gone[:2] == [(keys[3], "tool"), (keys[2], "tool")]
            assert resident(pool, keys) == keys[:2]
        else:
            assert gone == [(key, None) for key in reversed(keys)]


# --- reporting ------------------------------------------------------------------------------------


def test_reuses_are_told_with_their_interval_once() -> None:
    pool = ledger(8)
    keys = store(pool, "x", 3, source_type="user")
    store(pool, "y")
    ask(pool, keys[:2], source_type="tool")
    assert [(gap, blocks, role) for gap, blocks, role in pool.drain_reuses()] == [(2, 2, "user")]
    assert pool.drain_reuses() == []
    ask(pool, keys)
    told = [(gap, role) for gap, blocks, role in pool.drain_reuses() for _ in range(blocks)]
    assert sorted(told) == [(1, "user"), (1, "user"), (3, "user")]


def test_reuses_are_bounded_where_nobody_reads_them() -> None:
    pool = ledger(4)
    for _ in range(10_000):
        ask(pool, [b"x"])
    told = pool.drain_reuses()
    assert 0 < len(told) < 10_000
    assert told[-1] == (1, 1, None)


def test_stats_count_what_is_marked() -> None:
    pool = ledger(16)
    store(pool, "pinned", 2, pinned=True)
    store(pool, "dead", 3, ttl_s=1.0)
    store(pool, "both", 1, ttl_s=1.0, pinned=True)
    assert (pool.stats.pinned, pool.stats.expired, pool.stats.orphans) == (3, 0, 0)
    ask(pool, [], now=1.0)
    assert (pool.stats.pinned, pool.stats.expired, pool.stats.orphans) == (2, 4, 0)
    ask(pool, chain("dead", 1), now=1.0)
    assert pool.stats.expired == 3


# --- what must hold whatever is said --------------------------------------------------------------

limits_of_others = st.fixed_dictionaries(
    {
        "max_pinned_fraction": st.sampled_from([0.0, 0.25, 1.0]),
        "max_session_fraction": st.sampled_from([0.1, 0.5, 1.0]),
    }
)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    policy=st.sampled_from(POLICIES),
    limits=limits_of_others,
    leaps=st.booleans(),
)
def test_settings_and_time_mean_nothing_to_who_says_nothing(
    seed: int, policy: str, limits: dict[str, float], leaps: bool
) -> None:
    """No tag of this kind: the same decisions as with other limits, and without a clock."""
    logs = []
    for silent in (False, True):
        draw = random.Random(seed)
        pool = ledger(12, policy, **(limits if silent else {}))
        now = 0.0
        for _ in range(25):
            tags = {"priority": draw.choice([0.5, 1.0, 3.0])} if draw.random() < 0.3 else {}
            keys = chain(f"c{draw.randrange(6)}-", draw.randint(1, 5))
            now += draw.choice([0.0, 1.0, 1e9 if leaps else 2.0])
            ask(pool, keys, now=now if silent else None, **tags)
        logs.append((pool.drain_decisions(), pool.index.candidates(12), pool.stats))
    assert logs[0] == logs[1]


hostile = st.fixed_dictionaries(
    {
        "session": st.sampled_from(["s", "t", None]),
        "pinned": st.booleans(),
        "ttl_s": st.sampled_from([None, 0.001, 5.0, 86_400.0]),
        "expect_reuse_in_s": st.sampled_from([None, 0.001, 5.0, 86_400.0]),
        "end_of_session": st.booleans(),
        "no_store": st.sampled_from([False, False, True]),
        "priority": st.sampled_from([0.1, 1.0, 10.0]),
    }
)


@given(
    requests=st.lists(
        st.tuples(hostile, st.integers(0, 4), st.integers(1, 6), st.sampled_from([0.0, 3.0, 1e7])),
        max_size=40,
    ),
    policy=st.sampled_from(POLICIES),
    limits=limits_of_others,
)
def test_whatever_is_said_the_pool_stays_whole(
    requests: list[tuple[dict[str, Any], int, int, float]],
    policy: str,
    limits: dict[str, float],
) -> None:
    """Nothing raises, pins stay within their limit, and all slots are accounted for."""
    pool = ledger(10, policy, **limits)
    now = 0.0
    for tags, name, blocks, step in requests:
        now += step
        _, evicted = ask(pool, chain(f"c{name}-", blocks), now=now, **tags)
        stats = pool.stats
        assert stats.pinned <= int(limits["max_pinned_fraction"] * 10)
        assert stats.orphans == 0
        assert stats.resident + stats.free == 10
        assert stats.expired <= stats.resident
        assert not set(evicted) & set(chain(f"c{name}-", blocks))
