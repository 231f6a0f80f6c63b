# SPDX-License-Identifier: Apache-2.0
"""BlockLedger: single stories that the conformance suite tells only in the middle of others."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import BlockLedger, BlockState, EvokeConfig, RequestTags, RetentionIndex, Span

KEYS = [b"k%d" % depth for depth in range(8)]


def opened(ledger: BlockLedger, *requests: str) -> BlockLedger:
    for request in requests:
        ledger.open(request, RequestTags(), 0.0)
    return ledger


def state(ledger: BlockLedger, key: bytes) -> BlockState:
    return ledger.lookup("anybody", key)


# --- completions that come too late ---------------------------------------------------------------


def test_a_completion_after_an_abort_makes_nothing_readable() -> None:
    ledger = opened(BlockLedger(4), "a")
    ledger.reserve("a", KEYS[:2])
    assert set(ledger.abort("a", KEYS[:2])) == set(KEYS[:2])
    assert ledger.commit("a", KEYS[:2]) == []
    assert [state(ledger, key) for key in KEYS[:2]] == [BlockState.ABSENT] * 2
    assert ledger.stats.late == 2


def test_a_completion_of_an_earlier_reservation_of_the_same_key() -> None:
    """Aborted, then reserved anew by another request, then by the same one: tickets tell."""
    ledger = opened(BlockLedger(4), "a", "b")
    first = ledger.reserve("a", KEYS[:1])
    ledger.abort("a", KEYS[:1], ticket=first.ticket)
    second = ledger.reserve("b", KEYS[:1])
    assert ledger.commit("a", KEYS[:1], ticket=first.ticket) == []
    assert ledger.commit("a", KEYS[:1]) == []
    assert ledger.abort("a", KEYS[:1]) == []
    assert state(ledger, KEYS[0]) is BlockState.PENDING
    ledger.abort("b", KEYS[:1], ticket=second.ticket)
    third = ledger.reserve("a", KEYS[:1])
    assert ledger.commit("a", KEYS[:1], ticket=first.ticket) == []
    assert state(ledger, KEYS[0]) is BlockState.PENDING
    assert ledger.commit("a", KEYS[:1], ticket=third.ticket) == KEYS[:1]
    assert state(ledger, KEYS[0]) is BlockState.READY


def test_a_completion_of_the_time_before_a_reset() -> None:
    ledger = opened(BlockLedger(4), "a")
    before = ledger.reserve("a", KEYS[:2])
    ledger.reset()
    assert ledger.commit("a", KEYS[:2], ticket=before.ticket) == []
    after = ledger.reserve("a", KEYS[:2])
    assert after.keys == KEYS[:2]
    assert ledger.commit("a", KEYS[:2], ticket=before.ticket) == []
    assert ledger.abort("a", KEYS[:2], ticket=before.ticket) == []
    assert [state(ledger, key) for key in KEYS[:2]] == [BlockState.PENDING] * 2


def test_a_release_of_the_time_before_a_reset_leaves_the_new_reader_alone() -> None:
    ledger = opened(BlockLedger(1), "a", "b", "c")
    for reader in ("a", "b"):
        ledger.reserve(reader, KEYS[:1])
        ledger.commit(reader, KEYS[:1])
        assert ledger.acquire(reader, KEYS[:1]) is not None
        if reader == "a":
            ledger.reset()
    ledger.release("a", KEYS[:1])
    assert ledger.reserve("c", [b"other"]).keys == []  # b still reads the only slot
    ledger.release("b", KEYS[:1])
    assert ledger.reserve("c", [b"other"]).keys == [b"other"]


def test_requests_may_end_before_their_transfers() -> None:
    ledger = opened(BlockLedger(4), "a")
    ledger.reserve("a", KEYS[:3])
    ledger.close("a")
    assert ledger.commit("a", KEYS[:2]) == KEYS[:2]
    assert ledger.abort("a", KEYS[2:3]) == KEYS[2:3]
    assert ledger.stats.pending == 0
    assert ledger.stats.open_requests == 0


def test_acquire_takes_all_or_nothing() -> None:
    ledger = opened(BlockLedger(2), "a", "b")
    ledger.reserve("a", KEYS[:2])
    ledger.commit("a", KEYS[:1])
    assert ledger.acquire("b", KEYS[:2]) is None  # the second is still being written
    assert ledger.acquire("b", [KEYS[0], b"unknown"]) is None
    assert ledger.stats.held == 0
    assert ledger.acquire("b", KEYS[:1]) == ledger.acquire("b", KEYS[:1])
    assert ledger.stats.held == 1
    ledger.release("b", KEYS[:1])
    assert ledger.stats.held == 1, "read twice, released once"
    ledger.release("b", KEYS[:1])
    assert ledger.stats.held == 0


def test_a_reader_releases_nobody_elses_block() -> None:
    ledger = opened(BlockLedger(2), "a", "b", "c")
    for reader, key in (("a", b"x"), ("b", b"y")):
        ledger.reserve(reader, [key])
        ledger.commit(reader, [key])
        assert ledger.acquire(reader, [key]) is not None
    ledger.release("a", [b"y", b"unknown"])
    assert ledger.stats.held == 2
    assert ledger.reserve("c", [b"z"]).keys == []


# --- the threshold --------------------------------------------------------------------------------


def test_a_threshold_counts_requests_and_its_memory_is_bounded() -> None:
    ledger = BlockLedger(64, store_threshold=2, max_tracker_size=5)
    for n in range(2):
        opened(ledger, f"r{n}")
        for _ in range(3):
            ledger.touch(f"r{n}", KEYS)
        granted = ledger.reserve(f"r{n}", KEYS).keys
        assert granted == (KEYS[:5] if n else [])  # where memory is short, heads are remembered
        assert ledger.stats.tracked == 5


# --- the decision stream --------------------------------------------------------------------------


def test_decisions_tell_what_happened_and_why() -> None:
    ledger = BlockLedger(2)
    ledger.open("a", RequestTags(source_type="user"), 0.0)
    ledger.reserve("a", KEYS[:3])
    ledger.commit("a", KEYS[:2])
    opened(ledger, "b", "c")
    ledger.reserve("c", [b"x"], group=3)
    ledger.abort("c", [b"x"])
    told = [(d.kind, d.keys, d.age, d.role, d.group) for d in ledger.drain_decisions()]
    assert told == [
        ("refused", [KEYS[2]], 0, None, 0),
        ("stored", KEYS[:2], 0, "user", 0),
        ("evicted", [KEYS[1]], 2, "user", 0),
        ("aborted", [b"x"], 0, None, 3),
    ]
    assert ledger.drain_decisions() == []
    stats = ledger.stats
    assert (stats.stored, stats.refused, stats.evicted, stats.aborted) == (2, 1, 1, 1)


def test_decisions_that_nobody_reads_are_bounded() -> None:
    ledger = BlockLedger(1, config=EvokeConfig(policy="scored"))
    for n in range(40_000):
        opened(ledger, "a")
        ledger.reserve("a", [b"%d" % n])
        ledger.commit("a", [b"%d" % n])
        ledger.close("a")
    assert ledger.stats.stored == 40_000
    assert len(ledger.drain_decisions()) < 70_000


# --- what no engine should do ---------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [-1, 1.5, "8", None, True])
def test_refuses_a_capacity_that_is_none(capacity: object) -> None:
    with pytest.raises(ValueError, match="capacity"):
        BlockLedger(capacity)  # type: ignore[arg-type]


@pytest.fixture
def _no_endless_loop() -> Iterator[None]:
    """A hang must fail the test, not the whole run."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("a call does not return")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


calls = st.lists(
    st.tuples(
        st.sampled_from(["touch", "reserve", "commit", "abort", "acquire", "release", "open"]),
        st.sampled_from(["a", "b"]),
        st.lists(st.sampled_from([*KEYS[:5], b""]), max_size=5),
        st.integers(0, 4),
        st.integers(0, 1),
    ),
    max_size=40,
)


@pytest.mark.usefixtures("_no_endless_loop")
@given(calls, st.integers(0, 6))
def test_chains_that_are_none_neither_raise_nor_leak_slots(
    steps: list[tuple[str, str, list[bytes], int, int]], capacity: int
) -> None:
    """The same key twice, at two positions, in two groups: nothing is promised but sanity."""
    ledger = opened(BlockLedger(capacity, window_groups=(1,)), "a", "b")
    for call, request, keys, start, group in steps:
        if call in ("touch", "reserve"):
            got = getattr(ledger, call)(request, keys, group=group, start=start)
            if got is not None:
                assert len(got.keys) == len(got.slots) == len(set(got.slots))
                assert all(0 <= slot < capacity for slot in got.slots)
        elif call == "open":
            ledger.open(request, RequestTags(), 0.0)
        else:
            getattr(ledger, call)(request, keys)
        stats = ledger.stats
        states = [state(ledger, key) for key in [*KEYS, b""]]
        assert stats.resident == len(states) - states.count(BlockState.ABSENT)
        assert stats.free == capacity - stats.resident
        ready = [key for key in [*KEYS, b""] if state(ledger, key) is BlockState.READY]
        slots = ledger.acquire("probe", ready)
        assert slots is not None
        assert len(set(slots)) == len(slots)
        ledger.release("probe", ready)


@pytest.mark.usefixtures("_no_endless_loop")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["touch", "insert", "drop", "hold", "unhold", "evict", "candidates"]),
            st.sampled_from(["a", "b"]),
            st.lists(st.sampled_from(KEYS[:5]), min_size=1, max_size=5),
            st.integers(0, 4),
        ),
        max_size=40,
    )
)
def test_an_index_survives_chains_that_are_none(
    steps: list[tuple[str, str, list[bytes], int]],
) -> None:
    index = RetentionIndex()
    index.open("a")
    index.open("b")
    for call, request, keys, number in steps:
        if call in ("touch", "insert"):
            getattr(index, call)(request, keys, start=number)
        elif call in ("drop", "hold", "unhold"):
            getattr(index, call)(keys[0])
        elif call == "evict":
            index.evict(number, protect=request)
        else:
            assert len(set(index.candidates(number))) <= number
        assert len(index) == sum(key in index for key in KEYS)


def test_naming_a_gap_keeps_what_was_named_behind_it() -> None:
    index = RetentionIndex()
    index.open("a")
    index.insert("a", [KEYS[3]], start=3)
    assert index.candidates(5, protect="a") == []
    index.touch("a", KEYS[:3])
    assert index.candidates(5, protect="a") == []


@pytest.mark.parametrize("n", [0, -1])
def test_asking_for_no_candidates(n: int) -> None:
    index = RetentionIndex()
    index.open("a")
    index.insert("a", KEYS)
    assert index.candidates(n) == []
    assert index.evict(n) == []
    assert len(index) == len(KEYS)


def test_blocks_are_reported_as_stored_by_the_role_of_their_span() -> None:
    ledger = BlockLedger(8)
    spans = (Span(0, 2, source_type="system"), Span(3, 4, source_type="assistant"))
    ledger.open("a", RequestTags(source_type="user", spans=spans))
    keys = [b"%d" % at for at in range(5)]
    ledger.touch("a", keys)
    grant = ledger.reserve("a", keys)
    ledger.commit("a", set(grant.keys[:1]))
    ledger.commit("a", set(grant.keys[1:]))
    told = [(each.kind, each.role, each.keys) for each in ledger.drain_decisions()]
    assert told == [
        ("stored", "system", keys[:1]),
        ("stored", "system", keys[1:2]),
        ("stored", "user", keys[2:3]),
        ("stored", "assistant", keys[3:4]),
        ("stored", "user", keys[4:]),
    ]
