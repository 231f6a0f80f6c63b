# SPDX-License-Identifier: Apache-2.0
"""Promises of reuse under the learned policy: what one is worth, and how it is believed or not.

A promise is kept or broken by what happens to blocks; a witness in the policy's place writes that
down. What the policy makes of it is computed here a second time, from tables that are given.
"""

import math
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_core import EvokeConfig, RequestTags, RetentionIndex, ScoredPolicy
from evoke_core.adaptive import AdaptivePolicy
from evoke_core.reuse_model import BINS, CLASSES, MEMORY, Table, bin_of, class_of
from evoke_core.tags import Span
from evoke_core.terms import Terms

SHORTEST, LONGEST = 2, 2**14


def length_of(promise: float) -> int:
    """Promises are told apart by powers of two, upwards."""
    length = SHORTEST
    while length < promise and length < LONGEST:
        length *= 2
    return length


# --- what becomes of promises ---------------------------------------------------------------------


class Witness(ScoredPolicy):
    """Writes down what becomes of every promised block."""

    def __init__(self, config: EvokeConfig, ghosts_at_least: int = 100) -> None:
        super().__init__(config)
        self.ghosts_at_least = ghosts_at_least
        self.kept = 0
        self.broken = 0
        self.promises: list[float] = []

    def settled(self, past: Any, blocks: int, kept: bool) -> None:
        self.promises.append(past.terms.promise)
        if kept:
            self.kept += blocks
        else:
            self.broken += blocks


def witnessed(ghosts_at_least: int = 100) -> tuple[RetentionIndex, Witness]:
    config = EvokeConfig(policy="scored", ghost_factor=0)
    witness = Witness(config, ghosts_at_least)
    return RetentionIndex(config, policy=witness, capacity=100, window_groups=(1,)), witness


def ask(
    idx: RetentionIndex, keys: list[bytes], now: float | None = 0.0, *, group: int = 0, **tags: Any
) -> None:
    request = f"request {idx.clock}"
    idx.open(request, RequestTags(**tags), now)
    idx.insert(request, keys, group=group)
    idx.close(request)


KEYS = [b"0", b"1", b"2"]


@pytest.mark.parametrize("tag", ["expect_reuse_in_s", "ttl_s"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_promise_is_kept_by_a_use_in_time_and_broken_by_time(tag: str, group: int) -> None:
    until = 12.5 if tag == "expect_reuse_in_s" else 10.0
    for when, kept in ((until - 0.01, True), (until, False)):
        idx, witness = witnessed()
        ask(idx, KEYS, 0.0, group=group, **{tag: 10.0})
        assert (witness.kept, witness.broken) == (0, 0)
        ask(idx, KEYS[:2], when, group=group)
        assert (witness.kept, witness.broken) == ((2, 0) if kept else (0, 3))
        ask(idx, [], 100.0)
        assert (witness.kept, witness.broken) == ((2, 1) if kept else (0, 3))


def test_a_promise_is_settled_once() -> None:
    """Kept by the first use in time: later ones keep nothing, and its time breaks nothing."""
    idx, witness = witnessed()
    ask(idx, KEYS, 0.0, expect_reuse_in_s=10.0)
    for when in (1.0, 2.0, 3.0):
        ask(idx, KEYS, when)
    assert (witness.kept, witness.broken) == (3, 0)
    idx.evict(1)
    ask(idx, KEYS, 4.0)
    ask(idx, KEYS, 50.0)
    ask(idx, KEYS, 51.0)
    assert (witness.kept, witness.broken) == (3, 0)
    ask(idx, KEYS, 52.0, expect_reuse_in_s=10.0)
    ask(idx, KEYS, 99.0)
    assert (witness.kept, witness.broken) == (3, 3)


def test_who_keeps_a_promise_may_make_the_next() -> None:
    idx, witness = witnessed()
    for when in (0.0, 9.0, 18.0, 27.0):
        ask(idx, KEYS, when, expect_reuse_in_s=10.0)
    assert (witness.kept, witness.broken) == (9, 0)
    ask(idx, KEYS, 99.0)
    assert (witness.kept, witness.broken) == (9, 3)


def test_polls_and_the_promising_request_itself_keep_nothing() -> None:
    idx, witness = witnessed()
    idx.open("a", RequestTags(expect_reuse_in_s=10.0), 0.0)
    idx.insert("a", KEYS)
    for _ in range(3):
        idx.touch("a", KEYS)
    idx.evict(1)
    idx.insert("a", KEYS)  # evicted, and stored again by the same request: no return
    assert (witness.kept, witness.broken) == (0, 0)


def test_a_return_after_an_eviction_keeps_the_promise_too() -> None:
    for when, settled in ((12.0, (3, 0)), (12.5, (0, 3))):
        idx, witness = witnessed()
        ask(idx, KEYS, 0.0, expect_reuse_in_s=10.0)
        idx.evict(3)
        ask(idx, [], when)
        assert (witness.kept, witness.broken) == (0, 0), "nobody looks at the evicted"
        ask(idx, KEYS, when)
        assert (witness.kept, witness.broken) == settled


@pytest.mark.parametrize("over", [True, False])
def test_a_promise_that_is_forgotten_is_broken_if_its_time_was_over(over: bool) -> None:
    idx, witness = witnessed(ghosts_at_least=2)
    ask(idx, [b"x"], 0.0, expect_reuse_in_s=10.0)
    idx.evict(1)
    ask(idx, [b"y", b"z"], 12.5 if over else 1.0)
    idx.evict(2)
    assert idx.ghosts == 2
    assert (witness.kept, witness.broken) == (0, 1 if over else 0)


def test_blocks_that_the_engine_drops_settle_nothing() -> None:
    for leave in ("drop", "clear"):
        idx, witness = witnessed()
        ask(idx, [b"x"], 0.0, expect_reuse_in_s=10.0)
        if leave == "drop":
            idx.drop(b"x")
        else:
            idx.clear()
        ask(idx, [b"x"], 1.0)
        ask(idx, [b"x"], 50.0)
        assert (witness.kept, witness.broken) == (0, 0)


def test_without_a_clock_nothing_is_promised() -> None:
    idx, witness = witnessed()
    ask(idx, KEYS, None, expect_reuse_in_s=10.0)
    ask(idx, KEYS, 1.0)
    ask(idx, KEYS, 1e9)
    assert (witness.kept, witness.broken) == (0, 0)


# --- how long a promise is ------------------------------------------------------------------------


def test_before_time_has_passed_a_request_is_a_second() -> None:
    idx, witness = witnessed()
    ask(idx, KEYS, 7.0, expect_reuse_in_s=6.0)
    ask(idx, KEYS, 8.0)
    assert set(witness.promises) == {6.0}


@pytest.mark.parametrize("pause", [0.01, 0.5, 3.0])
def test_seconds_are_turned_into_requests_by_the_pace(pause: float) -> None:
    """Requests that come in pairs, a pause between the pairs: twice the pace of one a pause."""
    idx, witness = witnessed()
    now = 1_000.0
    for _ in range(3_000):
        ask(idx, [], now)
        now += pause
        ask(idx, [], now)
        ask(idx, [], now - 99.0)  # a clock that lags is no time that passes
        idx.open("no clock", RequestTags())
    ask(idx, KEYS, now, expect_reuse_in_s=40.0 * pause)
    ask(idx, KEYS, now)
    (promise,) = set(witness.promises)
    assert promise == pytest.approx(3 * 40.0, rel=0.02)


def test_the_pace_follows_the_traffic() -> None:
    """After 256 requests what was before counts 1/e: of requests a second apart, then .1."""
    idx, witness = witnessed()
    for at in range(20_000):
        ask(idx, [], float(at))
    for at in range(256):
        ask(idx, [], 20_000.0 + 0.1 * at)
    ask(idx, KEYS, 20_000.0 + 25.6, expect_reuse_in_s=100.0)
    ask(idx, KEYS, 20_000.0 + 25.6)
    (promise,) = set(witness.promises)
    per_request = math.exp(-1) * 1.0 + (1 - math.exp(-1)) * 0.1
    assert promise == pytest.approx(100.0 / per_request, rel=0.02)


@pytest.mark.parametrize(
    ("tags", "promise"),
    [
        ({"ttl_s": 9.0}, 9.0),
        ({"expect_reuse_in_s": 9.0}, 9.0),
        ({"ttl_s": 30.0, "expect_reuse_in_s": 20.0}, 30.0),
        ({"ttl_s": 21.0, "expect_reuse_in_s": 20.0}, 20.0),  # holds for 25 seconds
        ({"ttl_s": 9.0, "spans": (Span(start=0, end=3, ttl_s=50.0),)}, 50.0),
        ({"expect_reuse_in_s": 9.0, "spans": (Span(start=0, end=3, ttl_s=2.0),)}, 9.0),
    ],
)
def test_the_promise_that_holds_longer_counts(tags: dict[str, Any], promise: float) -> None:
    idx, witness = witnessed()
    ask(idx, KEYS, 0.0, **tags)
    ask(idx, KEYS, 0.0)
    assert set(witness.promises) == {promise}


def test_of_several_requests_the_promise_that_ends_last_stands() -> None:
    """Each request keeps what was promised before; a shorter promise adds nothing to a longer."""
    for first, second, standing in ((5.0, 60.0, [5.0, 60.0]), (60.0, 5.0, [60.0])):
        idx, witness = witnessed()
        ask(idx, [b"x"], 0.0, expect_reuse_in_s=first)
        ask(idx, [b"x"], 0.0, expect_reuse_in_s=second)
        ask(idx, [b"x"], 70.0)
        ask(idx, [b"x"], 99.0)
        assert witness.promises == standing
        assert witness.kept == len(standing)


# --- what a promise is worth ----------------------------------------------------------------------


class GivenModel:
    """Stands in for the model of reuse: tables are given, nothing is learned."""

    def __init__(self, index: Table, chance: Table) -> None:
        self.index, self.chance = index, chance
        self.clock = 0

    def tick(self, clock: int) -> None:
        self.clock = clock

    def relearn(self, capacity: int, *, sharp: bool) -> Generator[None, None, tuple[Table, Table]]:
        yield
        return self.index, self.chance

    def touched(self, *_: Any) -> None: ...
    def reused(self, *_: Any) -> None: ...
    def forgotten(self, *_: Any) -> None: ...
    def clear(self) -> None: ...


def given_policy(worth: float | Table = 0.0, chance: float | Table = 0.0) -> AdaptivePolicy:
    policy = AdaptivePolicy(EvokeConfig(policy="adaptive"))
    nothing = np.zeros((CLASSES, BINS))
    policy._model = GivenModel(nothing + worth, nothing + chance)  # type: ignore[assignment]
    return policy


def held(promise: float, left: float | None = None, **history: Any) -> Any:
    """The history of blocks of which a return within so many requests is promised.

    So many requests are left until then; None: all of them.
    """
    known = {"reuse": 1, "last": 0, "gap": 0, "role": None, "priority": 1.0} | history
    number = length_of(promise if left is None else left).bit_length() - 2
    terms = Terms(holds_until=math.inf, promise=promise)
    return SimpleNamespace(**known, terms=terms, holding=True, due_in=number)


def score(policy: AdaptivePolicy, past: Any, clock: int = 0) -> float:
    return policy.score(policy.class_key(past, clock), clock, 1.0)


@given(st.floats(1e-9, 1e9) | st.sampled_from([float(2**n) for n in range(18)]))
def test_before_any_was_kept_no_promise_is_believed(promise: float) -> None:
    policy = given_policy()
    assert score(policy, held(promise)) == 0.0


@given(length=st.sampled_from([2.0, 64.0, 2.0**14]), left=st.floats(-9.0, 1e5), kept=st.booleans())
@settings(max_examples=30)
def test_a_promise_is_worth_more_the_nearer_it_is(length: float, left: float, kept: bool) -> None:
    """Believed as promises of its whole length are, and worth a hit per requests that are left."""
    policy = given_policy()
    policy.begin(10, 1.0)
    policy.settled(held(length), 100, kept)
    policy.advance(10, 10)
    believed = 0.5 if kept else 0.0  # 100 blocks beside the 100 of doubt
    left = min(left, length)
    assert score(policy, held(length, left)) == pytest.approx(believed / length_of(left))


def test_who_promises_nothing_is_worth_nothing_more() -> None:
    policy = given_policy()
    past = held(5.0)
    past.holding = False
    assert score(policy, past) == 0.0


@given(
    worth=st.sampled_from([0.0, 1e-6, 0.01, 0.1, 0.4]),
    promise=st.sampled_from([1.0, 2.0, 3.0, 64.0, 1e6]),
    clock=st.integers(0, 50_000),
)
def test_the_ordinary_worth_counts_where_it_is_more(
    worth: float, promise: float, clock: int
) -> None:
    policy = given_policy(worth)
    policy.settled(held(promise), 100, True)
    policy.begin(10, 1.0)
    assert score(policy, held(promise), clock) == max(worth, 0.5 / length_of(promise))


Record = list[tuple[float, int, bool]]
"""Settled promises: (requests promised, blocks, kept)."""

records: st.SearchStrategy[Record] = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 2.5, 30.0, 1e6]), st.integers(1, 500), st.booleans()),
    max_size=12,
)


def skill(history: list[tuple[Record, float]], length: int, chance: float) -> float:
    """How much more often promises of a length were kept than foreseen; `weights` fade records."""
    kept = made = 0.0
    for record, weight in history:
        mine = [(n, ok) for promise, n, ok in record if length_of(promise) == length]
        made += weight * sum(n for n, _ in mine)
        kept += weight * sum(n for n, ok in mine if ok)
    foreseen = chance * made
    return min(1.0, max(0.0, (kept - foreseen) / (made - foreseen + 100.0)))


@settings(max_examples=50)
@given(first=records, second=records, chance=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_skill_is_what_was_kept_beyond_what_was_foreseen(
    first: Record, second: Record, chance: float
) -> None:
    """Two relearnings, the second 1,000 requests later; a block of any past has this chance."""
    policy = given_policy(chance=chance)
    policy.begin(10, 1.0)
    for record, clock in ((first, 10), (second, 1_010)):
        for promise, blocks, kept in record:
            policy.settled(held(promise, reuse=3, gap=7), blocks, kept)
        policy.advance(clock, 10)
    while policy._relearning is not None:
        policy.advance(1_010, 10)
    history = [(first, math.exp(-1_000 / MEMORY)), (second, 1.0)]
    for exponent in range(1, 15):
        length = 2**exponent
        expected = skill(history, length, chance)
        assert policy.beliefs()[f"promise_{length}"] == pytest.approx(expected, abs=1e-12)
        assert score(policy, held(float(length)), 1_010) == pytest.approx(expected / length)


def test_foreseen_is_the_chance_within_the_promised_length_and_of_the_blocks_class() -> None:
    """A block of this class returns for sure within 8 requests, and never earlier than in 4."""
    policy = given_policy()
    past = held(8.0, reuse=2, gap=5)
    never = held(8.0, reuse=2, gap=900)
    model: Any = policy._model
    model.chance[class_of(2, 5), bin_of(8) :] = 1.0
    policy.begin(10, 1.0)
    for blocks, settled in ((1_000, past), (300, held(4.0, reuse=2, gap=5)), (200, never)):
        policy.settled(settled, blocks, True)
    policy.advance(10, 10)
    beliefs = policy.beliefs()
    # All that was certain is no merit; the rest is.
    assert beliefs["promise_8"] == pytest.approx(200 / (200 + 100))
    assert beliefs["promise_4"] == pytest.approx(300 / (300 + 100))


# --- in an index ----------------------------------------------------------------------------------


def given_index(worth: float | Table) -> RetentionIndex:
    """An index in which promises of every length are believed by half."""
    policy = given_policy(worth)
    for exponent in range(1, 15):
        policy.settled(held(2.0**exponent), 100, True)
    policy.begin(10, 1.0)
    return RetentionIndex(EvokeConfig(policy="adaptive"), policy=policy, capacity=100)


def test_while_it_holds_a_promise_ranks_by_its_length_and_then_not_at_all() -> None:
    """All are worth .01 anyway; half a promise of 16 is .031, of 128 .0039 until it is near.

    With 32 requests left, 96 seconds after it was made at one a second, it is worth .0156.
    """
    idx = given_index(0.01)
    ask(idx, [b"short"], 0.0, expect_reuse_in_s=16.0)
    ask(idx, [b"long"], 0.0, expect_reuse_in_s=128.0)
    ask(idx, [b"until"], 0.0, ttl_s=128.0)  # says nothing of when
    for name in (b"a", b"b"):
        ask(idx, [name], 0.0)
    # The pace is unknown (one a second) for the first; requests at once do not make it known.
    far = [b"long", b"until", b"a", b"b"]
    assert idx.candidates(5) == [*far, b"short"]
    ask(idx, [], 19.9)
    assert idx.candidates(5) == [*far, b"short"]
    ask(idx, [], 20.0)
    assert idx.candidates(5) == [b"short", *far]
    ask(idx, [], 63.9)
    assert idx.candidates(5)[-1] == b"b"
    ask(idx, [], 96.0)
    assert idx.candidates(5)[-1] == b"long"
    ask(idx, [], 127.9)
    assert idx.candidates(5)[-1] == b"long"
    ask(idx, [], 159.9)
    assert idx.candidates(5)[-1] == b"long"
    ask(idx, [], 160.0)
    assert idx.candidates(5)[-1] == b"b"


def test_a_promise_lets_a_block_in() -> None:
    """A new block, worth .01, must beat what is worth .03: promised soon (half of a half) it does.

    Promised for late, it does not.
    """
    for promise, added in ((None, []), (2.0, [b"new"]), (1_000.0, [])):
        index = np.full((CLASSES, BINS), 0.03)
        index[class_of(1, 0)] = 0.01
        idx = given_index(index)
        for name in (b"a", b"b"):
            ask(idx, [name], 0.0)
            ask(idx, [name], 0.0)
        idx.open("new", RequestTags(expect_reuse_in_s=promise), 0.0)
        idx.touch("new", [b"new"])
        assert idx.admit("new", [b"new"], 0).added == added


@pytest.mark.parametrize("truth", ["kept", "broken", "what would have happened anyway"])
def test_promises_are_believed_as_far_as_they_come_true(truth: str) -> None:
    """Contexts of a pool, each used twice and then gone for good; half of them are promised.

    Kept: those that return promise, the others say nothing. Broken: the others promise. Or all do.
    """
    idx = RetentionIndex(EvokeConfig(policy="adaptive"), capacity=64)
    now = 0.0
    returning: list[tuple[int, int]] = []
    for at in range(1_200):
        returns = at % 2 == 0
        promises = {"kept": returns, "broken": not returns}.get(truth, True)
        tags = RequestTags(expect_reuse_in_s=8.0 if promises else None)
        for name in [at, *[name for due, name in returning if due == at]]:
            keys = [b"%d-%d" % (name, part) for part in range(3)]
            idx.open(f"r{idx.clock}", tags if name == at else RequestTags(), now)
            idx.touch(f"r{idx.clock - 1}", keys)
            idx.admit(f"r{idx.clock - 1}", keys, 64 - len(idx))
            for key in keys:
                idx.unhold(key)
            idx.close(f"r{idx.clock - 1}")
            now += 1.0
        if returns:
            returning.append((at + 4, at))
    believed = idx.beliefs()["promise_8"]
    if truth == "kept":
        assert believed > 0.6
    elif truth == "broken":
        assert believed < 0.15
    else:
        assert believed < 0.4


def test_beliefs_before_anything_was_settled() -> None:
    idx = RetentionIndex(EvokeConfig(policy="adaptive"))
    beliefs = idx.beliefs()
    promised = {name: value for name, value in beliefs.items() if name.startswith("promise_")}
    assert promised == {f"promise_{2**n}": 0.0 for n in range(1, 15)}
    assert {name for name in beliefs if name not in promised} == {
        "role_none",
        "role_assistant",
        "role_system",
        "role_user",
    }
    assert RetentionIndex(EvokeConfig(policy="lru")).beliefs() == {}
