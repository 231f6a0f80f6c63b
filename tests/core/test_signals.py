# SPDX-License-Identifier: Apache-2.0
"""Attention mass and task focus by their formulas, and what they do to the order of eviction."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import BlockLedger, EvokeConfig, RetentionIndex
from evoke_core.signals import AttentionMass, TaskFocus, block_mass

KEYS = [bytes([n]) for n in range(6)]
masses = st.just(0.0) | st.floats(1e-250, 1e6)  # below, the tests' own products underflow
steps = st.lists(
    st.dictionaries(st.sampled_from(KEYS), masses, min_size=1).filter(
        lambda step: sum(step.values()) > 0
    ),
    min_size=1,
    max_size=12,
)
vectors = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4).map(np.array)


def observed(history: list[dict[bytes, float]], **settings: Any) -> AttentionMass:
    found = AttentionMass(**settings)
    for step in history:
        found.observe(list(step), list(step.values()))
    return found


@given(steps, st.integers(1, 8), st.floats(0.05, 1.0))
def test_attention_by_its_formula(
    history: list[dict[bytes, float]], window: int, decay: float
) -> None:
    found = observed(history, window=window, decay=decay)
    recent = list(reversed(history[-window:]))
    for key in KEYS:
        named = [(ago, step) for ago, step in enumerate(recent) if key in step]
        if not named:
            assert found.value(key) is None
            continue
        relative = sum(
            decay**ago * len(step) * step[key] / sum(step.values()) for ago, step in named
        ) / sum(decay**ago for ago, _ in named)
        value = found.value(key)
        assert value == pytest.approx(relative / (1 + relative), abs=1e-12)
        assert value is not None
        assert 0.0 <= value < 1.0
    assert dict(found.values()) == {
        key: found.value(key) for key in KEYS if any(key in step for step in recent)
    }


@given(steps, st.randoms())
def test_the_order_within_a_step_moves_no_bit(
    history: list[dict[bytes, float]], random: Any
) -> None:
    shuffled = []
    for step in history:
        items = list(step.items())
        random.shuffle(items)
        shuffled.append(dict(items))
    plain, other = observed(history), observed(shuffled)
    assert [plain.value(key) for key in KEYS] == [other.value(key) for key in KEYS]


@given(steps, st.integers(-20, 20))
def test_the_unit_of_the_masses_does_not_matter(
    history: list[dict[bytes, float]], power: int
) -> None:
    scaled = [{key: mass * 2.0**power for key, mass in step.items()} for step in history]
    assert [observed(history).value(key) for key in KEYS] == pytest.approx(
        [observed(scaled).value(key) for key in KEYS]
    )


def test_a_fair_share_is_one_half_and_a_sink_leaves_the_rest_comparable() -> None:
    even = observed([dict.fromkeys(KEYS, 2.0)])
    assert [even.value(key) for key in KEYS] == [0.5] * 6
    sink = observed([{KEYS[0]: 90.0, KEYS[1]: 6.0, KEYS[2]: 3.0, KEYS[3]: 1.0}])
    values = [sink.value(key) or 0.0 for key in KEYS[:4]]
    assert values == sorted(values, reverse=True)
    assert values[0] < 0.8
    assert values[2] - values[3] > 1 / 64  # the index quantises to 1/64: they still differ there


def test_attention_decays_and_leaves_the_window() -> None:
    """Attended once, then named but not attended: 1, d, d^2 of the weight, then nothing."""
    found = AttentionMass(window=3, decay=0.5)
    found.observe(KEYS[:2], [1.0, 0.0])
    seen = [found.value(KEYS[0])]
    for _ in range(3):
        found.observe(KEYS[:2], [0.0, 1.0])
        seen.append(found.value(KEYS[0]))
    relative = [2.0, 2 * 0.5 / 1.5, 2 * 0.25 / 1.75, 0.0]
    assert seen == pytest.approx([r / (1 + r) for r in relative])
    found.observe(KEYS[:2], [0.0, 0.0])  # no attention at all says nothing
    assert found.value(KEYS[1]) == pytest.approx(2 / 3)
    found.forget(KEYS[1])
    assert found.value(KEYS[1]) is None
    found.clear()
    assert list(found.values()) == []


def test_steps_in_which_a_block_was_away_do_not_count_against_it() -> None:
    found = AttentionMass(window=4, decay=0.5)
    found.observe(KEYS[:2], [3.0, 1.0])
    for _ in range(2):
        found.observe(KEYS[1:3], [1.0, 1.0])
    assert found.value(KEYS[0]) == pytest.approx(1.5 / 2.5)


@pytest.mark.parametrize(
    ("keys", "mass"),
    [
        ([b"a", b"a"], [1.0, 1.0]),
        ([b"a"], [1.0, 1.0]),
        ([b"a"], [-1.0]),
        ([b"a"], [float("nan")]),
        ([b"a"], [float("inf")]),
    ],
)
def test_impossible_masses_are_refused(keys: list[bytes], mass: list[float]) -> None:
    with pytest.raises(ValueError, match="mass"):
        AttentionMass().observe(keys, mass)


def test_arguments_out_of_range_are_refused() -> None:
    for window, decay in ((0, 0.5), (1, 0.0), (1, 1.5)):
        with pytest.raises(ValueError, match="window"):
            AttentionMass(window, decay)
    for rate, snap_below in ((0.0, 0.2), (1.5, 0.2), (0.5, -1.5), (0.5, 2.0)):
        with pytest.raises(ValueError, match="rate"):
            TaskFocus(rate, snap_below)


def test_block_mass_sums_tokens_and_averages_the_rest() -> None:
    weights = np.array([[[0.5, 0.25, 0.25]], [[0.1, 0.2, 0.7]]])  # two heads, one query
    np.testing.assert_allclose(block_mass(weights, [2, 1]), [(0.75 + 0.3) / 2, (0.25 + 0.7) / 2])
    np.testing.assert_allclose(block_mass(weights, [1]), [0.3])  # the tail belongs to no block
    assert block_mass(weights, []).shape == (0,)
    with pytest.raises(ValueError, match="4 tokens"):
        block_mass(weights, [2, 2])


@given(st.lists(vectors, min_size=1, max_size=8), st.floats(0.05, 1.0), st.floats(-1.0, 1.0))
def test_focus_by_its_formula(
    queries: list[np.ndarray[Any, Any]], rate: float, snap_below: float
) -> None:
    task = TaskFocus(rate, snap_below)
    focus: np.ndarray[Any, Any] | None = None
    for query in queries:
        length = np.linalg.norm(query)
        if length < 1e-100:
            continue  # squares underflow in this reference
        unit = query / length
        if focus is not None and abs(focus @ unit - snap_below) < 1e-9:
            return  # rounding decides
        snapped = task.observe(query)
        assert snapped == (focus is None or focus @ unit < snap_below)
        followed = unit if focus is None or snapped else (1 - rate) * focus + rate * unit
        if np.linalg.norm(followed) < 1e-6:
            return  # opposite directions cancelled: rounding decides
        focus = followed / np.linalg.norm(followed)
        assert task.focus is not None
        np.testing.assert_allclose(task.focus, focus, atol=1e-7)


@given(st.lists(vectors, min_size=1, max_size=6), vectors, st.randoms())
def test_coherence_is_bounded_and_block_by_block(
    blocks: list[np.ndarray[Any, Any]], query: np.ndarray[Any, Any], random: Any
) -> None:
    task = TaskFocus()
    task.observe(query)
    together = task.coherence(np.array(blocks))
    assert ((together >= 0.0) & (together <= 1.0)).all()
    order = list(range(len(blocks)))
    random.shuffle(order)
    for at in order:
        assert task.coherence(blocks[at][None])[0] == together[at]


def test_the_focus_follows_a_topic_and_snaps_to_another() -> None:
    bread, sailing = np.eye(2)
    task = TaskFocus(rate=0.5, snap_below=0.3)
    assert task.coherence(np.eye(2)).tolist() == [0.0, 0.0]  # no task yet
    assert task.observe(bread)
    assert not task.observe([1.0, 0.5])  # a step aside: the focus moves a little
    assert task.focus is not None
    assert 0.9 < task.focus[0] < 1.0
    assert task.coherence(np.eye(2))[0] > 0.9
    assert task.observe(sailing)  # another topic: at once, nothing of the old one left
    assert task.coherence(np.eye(2)).tolist() == [0.0, 1.0]
    assert not task.observe([0.0, 0.0])
    assert task.coherence(-np.eye(2)).tolist() == [0.0, 0.0]  # opposite is not worth less than 0
    task.clear()
    assert task.focus is None


def test_huge_embeddings_keep_their_direction() -> None:
    task = TaskFocus()
    task.observe([1e300, 1e300])
    assert task.coherence(np.array([[1e-300, 1e-300], [0.0, 0.0]])) == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("bad", [[[1.0, 0.0]], [float("nan"), 0.0], 1.0, [1.0, 2.0, 3.0]])
def test_embeddings_that_are_none_are_refused(bad: Any) -> None:
    task = TaskFocus()
    task.observe([1.0, 0.0])
    with pytest.raises(ValueError, match="embedding"):
        task.observe(bad)
    with pytest.raises(ValueError, match="embedding"):
        task.coherence(bad if np.ndim(bad) != 2 else bad[0])


def attended_order(weight: float) -> list[bytes]:
    """The index's order after three steps that attend ``KEYS[1]`` most and ``KEYS[2]`` least."""
    index = RetentionIndex(
        EvokeConfig(policy="scored", w_recency=0.1, w_reuse=0.1, w_attention=weight),
        window_groups=[0],
    )
    for key in KEYS[:3]:
        index.open("r")
        index.insert("r", [key])
        index.close("r")
    attention = AttentionMass()
    for _ in range(3):
        attention.observe(KEYS[:3], [2.0, 5.0, 1.0])
    for key, value in attention.values():
        assert index.signal(key, attention=value)
    return index.candidates(3)


def test_attention_decides_who_goes_where_it_has_a_weight() -> None:
    assert attended_order(0.0) == [KEYS[0], KEYS[1], KEYS[2]]  # the oldest first
    assert attended_order(0.8) == [KEYS[2], KEYS[0], KEYS[1]]


@pytest.mark.parametrize("topic", [0, 1, 2])
def test_the_ledger_keeps_what_coheres_with_the_task(topic: int) -> None:
    """Three blocks about three topics; the block about the present one outlasts all newcomers."""
    ledger = BlockLedger(
        3, config=EvokeConfig(policy="scored", w_recency=0.3, w_reuse=0.1, w_coherence=0.6)
    )

    def store(key: bytes) -> list[bytes]:
        ledger.open("r")
        ledger.touch("r", [key])
        grant = ledger.reserve("r", [key])
        ledger.commit("r", grant.keys, ticket=grant.ticket)
        ledger.close("r")
        return grant.evicted

    for key in KEYS[:3]:
        assert store(key) == []
    task = TaskFocus()
    task.observe(np.eye(3)[topic])
    for key, value in zip(KEYS, task.coherence(np.eye(3)), strict=False):
        assert ledger.index.signal(key, coherence=value)
    gone = list(itertools.chain.from_iterable(store(b"new %d" % n) for n in range(8)))
    assert len(gone) == 8
    assert KEYS[topic] not in gone
    task.observe(np.eye(3)[(topic + 1) % 3])  # the topic shifts: now it is a block like any other
    [value] = task.coherence(np.eye(3)[[topic]])
    assert ledger.index.signal(KEYS[topic], coherence=value)
    assert store(b"last") == [KEYS[topic]]
