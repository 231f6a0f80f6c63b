# SPDX-License-Identifier: Apache-2.0
"""The learned index, computed a second time: loops over plain numbers, straight from the prose.

`Slow` keeps one record per block and one line per event, and evaluates every formula by its
definition: evidence block by block, smoothing by pooling adjacent violators, the Gittins index by
trying every horizon. It shares nothing with the package but the published constants.
"""

import math
import random
from collections.abc import Generator, Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_core.reuse_model import (
    BINS,
    CLASSES,
    COUNT_EDGES,
    EDGES,
    GAP_EDGES,
    MEMORY,
    ReuseIndex,
    ReuseModel,
    Table,
    bin_of,
    class_of,
)

Grid = list[list[float]]

COUNTS, GAPS = len(COUNT_EDGES) + 1, len(GAP_EDGES) + 1
HORIZON = 3 * MEMORY
WIDTH = [end - start for start, end in pairwise(EDGES)]


def drain(model: ReuseModel, capacity: int, *, sharp: bool) -> tuple[Table, Table]:
    """Relearn in one go, and compute the index of every class."""
    return finish(model.relearn(capacity, sharp=sharp))


def finish(stages: Generator[None, None, tuple[ReuseIndex, Table]]) -> tuple[Table, Table]:
    """Go through the stages that are left."""
    while True:
        try:
            next(stages)
        except StopIteration as done:
            index, chance = done.value
            return np.stack([index[of_class] for of_class in range(CLASSES)]), chance


# --- the formulas, slowly -------------------------------------------------------------------------


def slow_class(reuse: int, gap: int) -> int:
    if reuse <= 1:
        return 0
    count = sum(reuse > edge for edge in COUNT_EDGES)
    spread = sum(gap > edge for edge in GAP_EDGES)
    return 1 + count * GAPS + spread


def slow_bin(age: int) -> int:
    return max(b for b in range(BINS) if EDGES[b] <= age)


class Slow:
    """The model of `ReuseModel`, with a list of blocks and a list of events."""

    def __init__(self) -> None:
        self.clock = 0
        self._folded = [[[0.0, 0.0] for _ in range(BINS)] for _ in range(CLASSES)]
        self._events: list[tuple[int, int, int]] = []  # class, age, 0 reused or 1 forgotten
        self._waiting: list[tuple[int, int]] = []  # class, last: one entry a block
        self._learned_at = 0

    def tick(self, clock: int) -> None:
        self.clock = clock

    def touched(self, tick: int, to_class: int, blocks: int) -> None:
        self._waiting += [(to_class, tick)] * blocks

    def reused(self, of_class: int, last: int, age: int, blocks: int) -> None:
        for _ in range(blocks):
            self._events.append((of_class, age, 0))
            self._waiting.remove((of_class, last))

    def forgotten(self, of_class: int, last: int, blocks: int) -> None:
        for _ in range(blocks):
            self._events.append((of_class, self.clock - last, 1))
            self._waiting.remove((of_class, last))

    def relearn(self, capacity: int, *, sharp: bool) -> tuple[Grid, Grid]:
        reused, unused = self._evidence()
        weight = min(500.0, max(150.0, capacity / 8))
        smooth = 0.0 if sharp else min(500.0, max(0.0, (capacity - 500) / 4))

        overall = slow_hazard(total(reused), total(unused), slow_prior(), 10.0, 0.0)
        by_count = [shift(overall, 0.3 * (bucket - 1)) for bucket in range(COUNTS + 1)]
        hazards = [slow_hazard(reused[0], unused[0], by_count[0], weight, smooth)]
        for count in range(COUNTS):
            for gap in range(GAPS):
                cls = 1 + count * GAPS + gap
                prior = shift(hazards[cls - GAPS], 0.3) if count else by_count[1]
                hazards.append(slow_hazard(reused[cls], unused[cls], prior, weight, smooth))
        index = [slow_gittins(hazard) for hazard in hazards]
        if not sharp:
            bucket_index = []
            for bucket in range(COUNTS + 1):
                rows = [0] if bucket == 0 else range(1 + (bucket - 1) * GAPS, 1 + bucket * GAPS)
                hits = total([reused[row] for row in rows])
                rest = total([unused[row] for row in rows])
                fitted = slow_hazard(hits, rest, by_count[bucket], 0.2 * weight, smooth)
                bucket_index.append(slow_gittins(fitted))
            for cls in range(CLASSES):
                own = index[cls]
                shared = bucket_index[0 if cls == 0 else 1 + (cls - 1) // GAPS]
                index[cls] = [
                    (own[b] * max(own[b:]) * shared[b] * max(shared[b:])) ** 0.25
                    for b in range(BINS)
                ]
        return index, [
            [1.0 - math.prod(1.0 - p for p in hazard[: b + 1]) for b in range(BINS)]
            for hazard in hazards
        ]

    def _evidence(self) -> tuple[Grid, Grid]:
        memory = min(MEMORY, 1 + self.clock / 2)  # what comes first is forgotten sooner
        decay = math.exp(-(self.clock - self._learned_at) / memory)
        self._learned_at = self.clock
        for row in self._folded:
            for cell in row:
                cell[0] *= decay
                cell[1] *= decay
        for cls, age, kind in self._events:
            self._folded[cls][slow_bin(age)][kind] += 1.0
        self._events.clear()
        reused = [[cell[0] for cell in row] for row in self._folded]
        unused = [[cell[1] for cell in row] for row in self._folded]
        for cls, last in self._waiting:
            age = self.clock - last
            if age < HORIZON:
                at = slow_bin(age)
                unused[cls][at] += math.exp(-EDGES[at] / MEMORY)
        return reused, unused


def total(rows: Iterable[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def shift(hazard: list[float], by: float) -> list[float]:
    """Reuse taken to be 2**by times as likely, in terms of the rate."""
    return [1.0 - (1.0 - p) ** (2.0**by) for p in hazard]


def slow_prior() -> list[float]:
    """P(age > a) = (a + 1) ** -1/2, per bin; nothing is said about age 0."""
    prior = [1.0 - math.sqrt((start + 1) / (end + 1)) for start, end in pairwise(EDGES)]
    return [0.0, *prior[1:]]


def slow_hazard(
    reused: list[float], unused: list[float], prior: list[float], weight: float, smooth: float
) -> list[float]:
    exposed, hazard = [], []
    for b in range(BINS):
        reached = sum(reused[b:]) + sum(unused[b:])
        exposed.append(reached - unused[b] / 2)
        hazard.append(min(0.999, (reused[b] + weight * prior[b]) / (exposed[b] + weight)))
    if smooth == 0:
        return hazard
    rates = [-math.log(1 - p) / width for p, width in zip(hazard, WIDTH, strict=True)]
    weights = [(e + weight) * width for e, width in zip(exposed, WIDTH, strict=True)]
    smoothed = [
        1 - math.exp(-rate * width)
        for rate, width in zip(pool_adjacent_violators(rates, weights), WIDTH, strict=True)
    ]
    return [
        min(0.999, (e * p + smooth * q) / (e + smooth))
        for e, p, q in zip(exposed, hazard, smoothed, strict=True)
    ]


def pool_adjacent_violators(values: list[float], weights: list[float]) -> list[float]:
    """The weighted least-squares fit that never rises: neighbours that rise share their mean."""
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, members
    for value, weight in zip(values, weights, strict=True):
        pools.append((value * weight, weight, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] <= pools[-1][0] / pools[-1][1]:
            (a, v, m), (b, w, n) = pools[-2:]
            pools[-2:] = [(a + b, v + w, m + n)]
    return [a / v for a, v, n in pools for _ in range(n)]


def slow_gittins(hazard: list[float]) -> list[float]:
    """The best of all horizons: hits until then over requests held until then."""
    index = []
    for b in range(BINS):
        ahead = (WIDTH[b] - 1) / (2 * WIDTH[b])  # what is left of the bin, on average
        best = gained = held = 0.0
        alive = 1.0
        for x in range(b, BINS):
            p = 1 - (1 - hazard[b]) ** ahead if x == b else hazard[x]
            width = WIDTH[b] * ahead if x == b else WIDTH[x]
            gained += alive * p
            held += alive * (1 - p / 2) * width
            alive *= 1 - p
            if held > 0:
                best = max(best, gained / held)
        index.append(best)
    return index


# --- the constants that the prose promises --------------------------------------------------------


def test_classes_and_bins_are_those_of_the_definition() -> None:
    for reuse in range(60):
        for gap in [0, *range(1, 12), 31, 32, 33, 128, 129, 512, 513, 2048, 2049, 10**6]:
            assert class_of(reuse, gap) == slow_class(reuse, gap)
    for age in [*range(200), *EDGES, *(edge - 1 for edge in EDGES[1:]), 29_999, 10**7]:
        assert bin_of(age) == slow_bin(age)
    assert [bin_of(age) for age in range(17)] == list(range(17)), "short loops are seen sharply"
    assert class_of(53, 10**6) == CLASSES - 1


# --- against the slow computation -----------------------------------------------------------------


class Both:
    """Drives the model and the slow one with the same random life of blocks."""

    def __init__(self, seed: int, *, one_by_one: bool = False) -> None:
        self._rng = random.Random(seed)
        self._one_by_one = one_by_one
        self.model, self.slow = ReuseModel(), Slow()
        self._batches: list[tuple[int, int, int, int, int]] = []  # class, last, reuse, period, n
        self.clock = 0

    def report(self, call: str, *args: int) -> None:
        *where, blocks = args
        getattr(self.slow, call)(*where, blocks)
        for n in [1] * blocks if self._one_by_one else [blocks]:
            getattr(self.model, call)(*where, n)

    def live(self, requests: int) -> None:
        """Some batches come back about every `period` requests, others never; some are forgotten.

        Some requests stay open and touch late, at a tick that has long passed.
        """
        rng = self._rng
        for _ in range(requests):
            self.clock += 1
            self.model.tick(self.clock)
            self.slow.tick(self.clock)
            kept = []
            for cls, last, reuse, period, n in self._batches:
                age = self.clock - last
                if rng.random() < 0.002:
                    self.report("forgotten", cls, last, n)
                elif period and age >= period and rng.random() < 0.8:
                    to_class = class_of(reuse + 1, age)
                    self.report("reused", cls, last, age, n)
                    self.report("touched", self.clock, to_class, n)
                    kept.append((to_class, self.clock, reuse + 1, period, n))
                else:
                    kept.append((cls, last, reuse, period, n))
            self._batches = kept
            if rng.random() < 0.3:
                tick = max(1, self.clock - rng.choice([0, 0, 0, 3, 40]))
                n, period = rng.randint(1, 9), rng.choice([0, 0, 1, 3, 7, 20, 60, 300])
                self.report("touched", tick, 0, n)
                self._batches.append((0, tick, 1, period, n))

    def skip(self, requests: int) -> None:
        """Requests that touch nothing we watch."""
        for _ in range(requests):
            self.clock += 1
            self.model.tick(self.clock)
        self.slow.tick(self.clock)


@pytest.mark.parametrize(
    ("capacity", "sharp"), [(10, True), (10, False), (4_000, True), (900, False), (50_000, False)]
)
def test_equals_the_slow_computation(capacity: int, sharp: bool) -> None:
    """To 1e-9: classes with rich, poor and no evidence, decay over several relearnings."""
    for seed in range(2):
        both = Both(seed)
        for requests in (40, 150):
            both.live(requests)
            index, chance = drain(both.model, capacity, sharp=sharp)
            slow_index, slow_chance = both.slow.relearn(capacity, sharp=sharp)
            np.testing.assert_allclose(index, slow_index, rtol=1e-9, atol=0)
            np.testing.assert_allclose(chance, slow_chance, rtol=1e-9, atol=0)


def test_equals_the_slow_computation_beyond_the_horizon() -> None:
    """Cohorts older than three times the memory are gone, younger ones count for less."""
    both = Both(5)
    for requests, skipped in ((60, 4_000), (30, 9_000), (30, HORIZON - 80), (100, 0)):
        both.live(requests)
        both.skip(skipped)
        index, chance = drain(both.model, 2_000, sharp=False)
        slow_index, slow_chance = both.slow.relearn(2_000, sharp=False)
        np.testing.assert_allclose(index, slow_index, rtol=1e-9, atol=0)
        np.testing.assert_allclose(chance, slow_chance, rtol=1e-9, atol=0)


def test_blocks_last_touched_beyond_the_horizon_take_nobody_elses_place() -> None:
    """Their place in the ring has a new owner: a reuse or a loss of theirs must not touch it."""
    model = ReuseModel()
    model.tick(1)
    model.touched(1, 0, 5)
    for clock in range(2, HORIZON + 2):
        model.tick(clock)
    model.touched(HORIZON + 1, 0, 7)  # the same place as tick 1
    model.reused(0, 1, HORIZON, 2)
    model.forgotten(0, 1, 3)
    model.touched(1, 3, 4)  # a request as old as this touches something
    slow = Slow()
    slow.tick(HORIZON + 1)
    slow.touched(1, 0, 5)
    slow.touched(HORIZON + 1, 0, 7)
    slow.reused(0, 1, HORIZON, 2)
    slow.forgotten(0, 1, 3)
    slow._learned_at = slow.clock  # nothing to decay, and one relearning for both
    index, _ = drain(model, 1_000, sharp=True)
    np.testing.assert_allclose(index, slow.relearn(1_000, sharp=True)[0], rtol=1e-9, atol=0)


lives = st.tuples(st.integers(0, 2**32), st.integers(1, 120), st.booleans())


@settings(max_examples=20)
@given(lives)
def test_one_by_one_is_together_bit_for_bit(life: tuple[int, int, bool]) -> None:
    """Also when the relearning is spread over requests and when nothing else is the same."""
    seed, requests, sharp = life
    together, alone = Both(seed), Both(seed, one_by_one=True)
    for _ in range(2):
        results = []
        for both in (together, alone):
            both.live(requests)
            stages = both.model.relearn(300, sharp=sharp)
            next(stages)  # the evidence is taken here, what follows waits for the next time
            both.live(3)
            results.append(finish(stages))
        for one, other in zip(*results, strict=True):
            assert one.tobytes() == other.tobytes()


# --- what can be checked by hand ------------------------------------------------------------------


def test_no_evidence_is_the_prior() -> None:
    """P(age > a) = (a + 1) ** -1/2 for blocks used twice, likelier from one count to the next."""
    index, chance = drain(ReuseModel(), 100, sharp=True)
    # A block used twice, at age a: the next request brings it back with p = 1 - sqrt((a+1)/(a+2)),
    # and holds it for half of itself if so. Chances fall with age: no longer horizon is better.
    twice = class_of(2, 1)
    for age in range(8):
        p = 1 - math.sqrt((age + 2) / (age + 3))
        assert index[twice, age] == pytest.approx(p / (1 - p / 2), rel=1e-12)
    ever = 1 - math.sqrt(2 / (EDGES[-1] + 1))
    assert chance[twice, -1] == pytest.approx(ever, rel=1e-12)
    assert chance[twice, 0] == 0.0
    assert chance[twice, 5] == pytest.approx(1 - math.sqrt(2 / 7), rel=1e-12)
    per_count = [index[class_of(reuse, 1), 1] for reuse in (1, 2, 3, 5, 9, 17, 40, 41)]
    assert per_count == sorted(per_count)
    assert len(set(per_count)) == len(per_count)
    assert all(index[class_of(7, 1), b] == index[class_of(7, 999), b] for b in range(BINS))


@pytest.mark.parametrize("period", [2, 5, 12])
def test_a_loop_rises_toward_its_period_and_collapses_after_it(period: int) -> None:
    """Each block back every `period` requests: the younger the farther, the older hopeless.

    A block that stands at the period when another request begins was not that request's.
    """
    model = ReuseModel()
    loop = class_of(10, period)
    for clock in range(1, 40 * period):
        model.tick(clock)
        model.touched(clock, loop, 8)
        if clock > period:
            model.reused(loop, clock - period, period, 8)
    index, _ = drain(model, 100, sharp=True)
    ages = index[loop]
    assert all(a < b for a, b in pairwise(ages[:period]))
    for age in range(period):  # nearly certain at the period, held until the middle of it
        assert ages[age] == pytest.approx(1 / (period - age - 0.5), rel=0.15)
    assert ages[period] < ages[period - 1] / 4


def test_a_scan_falls_and_keeps_falling() -> None:
    """Blocks that sit unused make their class look bad, without a single event."""
    model = ReuseModel()
    fresh = [drain(model, 100, sharp=True)[0][0, 1]]
    for clock in range(1, 401):
        model.tick(clock)
        model.touched(clock, 0, 20)
        if clock % 100 == 0:
            fresh.append(drain(model, 100, sharp=True)[0][0, 1])
    assert all(b < a for a, b in pairwise(fresh))
    assert fresh[-1] < fresh[0] / 5


def test_forgetting_a_block_does_not_clear_its_class_of_guilt() -> None:
    """Blocks that left the memory unused count as they did while they waited there."""
    waiting, gone = ReuseModel(), ReuseModel()
    for model in (waiting, gone):
        model.tick(1)
        model.touched(1, 0, 200)
        for clock in range(2, 30):
            model.tick(clock)
    gone.forgotten(0, 1, 200)
    kept = drain(waiting, 100, sharp=True)[0]
    lost = drain(gone, 100, sharp=True)[0]
    assert kept[0, 2] == pytest.approx(lost[0, 2], rel=0.01)
    for index in (kept, lost):
        assert index[0, 2] < drain(ReuseModel(), 100, sharp=True)[0][0, 2] / 2
    assert WIDTH[bin_of(28)] > 1, "in a bin of many ages, where half of the blocks count as exposed"


def test_evidence_decays_to_a_third_in_one_memory() -> None:
    """A loop that ended pulls its class less and less, and the prior takes over again."""
    model = ReuseModel()
    loop = class_of(3, 4)
    for clock in range(1, 50):
        model.tick(clock)
        model.touched(clock, loop, 30)
        if clock > 4:
            model.reused(loop, clock - 4, 4, 30)
    for clock in (46, 47, 48, 49):
        model.forgotten(loop, clock, 30)
    before, _ = drain(model, 100, sharp=True)
    pulls = []
    untouched = drain(ReuseModel(), 100, sharp=True)[0][loop, 3]
    pulls.append(before[loop, 3] / untouched)
    for clock in range(50, 50 + 12 * MEMORY):
        model.tick(clock)
        if (clock - 49) % (2 * MEMORY) == 0:
            pulls.append(drain(model, 100, sharp=True)[0][loop, 3] / untouched)
    assert pulls == sorted(pulls, reverse=True)
    assert pulls[0] > 5
    assert pulls[-1] < 1.2


def test_a_large_pool_needs_more_evidence() -> None:
    """The same few events move the index of a large pool less."""
    model = ReuseModel()
    model.tick(10)
    model.touched(5, class_of(2, 4), 30)
    model.reused(class_of(2, 4), 5, 5, 30)
    small, large = (drain(model, capacity, sharp=True)[0] for capacity in (100, 100_000))
    prior = drain(ReuseModel(), 100, sharp=True)[0]
    at = (class_of(2, 4), 4)
    assert small[at] > large[at] > prior[at]
