"""What the stream of requests teaches about reuse, as a number per kind of block and age.

A block's past puts it into a *class*: how many distinct requests have touched it (seven buckets
from 2 on) and how far apart the last two touches were (seven buckets); a block touched once is a
class of its own. For each class the model keeps two histograms over *age*, the requests since the
last touch: ages at which blocks were reused, and ages that blocks have reached without (yet) being
reused. The second half matters as much as the first: a class whose blocks sit for a thousand
requests unused must look bad although it never produced an event. Blocks count whether resident or
remembered, so what the tier evicts does not distort what it learns.

From the two follows the hazard, the chance of a reuse within an age bin of a block that reached it,
and from the hazard the *index*: the largest, over all horizons, of

    P(reused within the horizon) / E(requests held until reuse or horizon)

the Gittins index of a block as a bandit arm: hits per block-request of the best stopping rule, in
other words what a slot earns by keeping this block (Gittins 1979; compare the hit density of LHD,
Beckmann, Chen and Cidon, NSDI 2018). Evicting the lowest index first is exact for independent
blocks and works because it needs no decision between recency and frequency: a loop's blocks rise as
their return comes near, a scan's fall at once.

What it forgets: evidence decays by 1/e in ``MEMORY`` requests, early on in half as many as were
seen: the popular come first, so the first blocks say too much good of those that follow. What it
cannot know: anything that
ages and counts do not show, above all which blocks return together; that the present will end.

Guarantees: pure numbers in, pure numbers out; deterministic; the same whether blocks are reported
one by one or together; what ``relearn`` costs does not depend on the pool's size. Most of it is the
index, so it is computed for classes that have blocks, and for others when it is asked for.
"""

import math
from bisect import bisect_left
from collections.abc import Generator

import numpy as np
import numpy.typing as npt

MEMORY = 5_000
"""Requests after which evidence has decayed to 1/e. A fifth of it costs .004 on real traces."""

_EARLY_MEMORY = 0.5  # of the requests seen so far, where that is less

COUNT_EDGES = (2, 3, 5, 9, 17, 40)
GAP_EDGES = (2, 8, 32, 128, 512, 2048)
_COUNTS = len(COUNT_EDGES) + 1
_GAPS = len(GAP_EDGES) + 1
CLASSES = 1 + _COUNTS * _GAPS

_SINGLE_AGES = 16  # bins of one request each, so that short loops are seen sharply
_OLDEST = 30_000
_HALF_DOUBLINGS_UNTIL = 100  # beyond, a bin for each doubling is as good, and cheaper


def _bin_edges() -> list[int]:
    edges = list(range(_SINGLE_AGES + 2))
    step = 1
    while edges[-1] < _OLDEST:
        edges.append(math.ceil((_SINGLE_AGES + 1) * 2 ** (step / 2)))
        step += 1 if edges[-1] < _HALF_DOUBLINGS_UNTIL else 2
    return edges


EDGES = _bin_edges()
"""Bin b holds the ages from ``EDGES[b]`` to ``EDGES[b + 1] - 1``; the last one also all beyond."""

BINS = len(EDGES) - 1
_BIN_OF = [b for b in range(BINS) for _ in range(EDGES[b], EDGES[b + 1])]
_WIDTH = np.diff(np.array(EDGES, dtype=np.float64))
_HORIZON = 3 * MEMORY  # cohorts older than this weigh next to nothing

# A block is on average in the middle of its own bin: half of it is still ahead.
_AHEAD = (_WIDTH - 1.0) / (2.0 * _WIDTH)

# With no evidence at all, reuse is as likely as under a power law: P(age > a) = (a + 1) ** -1/2.
_PRIOR = 1.0 - np.sqrt((_WIDTH.cumsum() - _WIDTH + 1.0) / (_WIDTH.cumsum() + 1.0))
_PRIOR[0] = 0.0
_PRIOR_WEIGHT = 10.0
_PER_COUNT = 2.0**0.3  # how much likelier reuse is taken to be from one count bucket to the next

_POWERS = _PER_COUNT ** np.arange(-1.0, _COUNTS)[:, None]

_BEFORE = np.tril(np.ones((BINS, BINS), dtype=bool), k=-1)
_UP_TO = np.tril(np.ones((BINS, BINS), dtype=bool))

Table = npt.NDArray[np.float64]


def class_of(reuse: int, gap: int) -> int:
    """Return the class of blocks that ``reuse`` requests touched, the last two ``gap`` apart."""
    if reuse <= 1:
        return 0
    return 1 + bisect_left(COUNT_EDGES, reuse) * _GAPS + bisect_left(GAP_EDGES, gap)


def bin_of(age: int) -> int:
    """Return the bin of an age in requests."""
    return _BIN_OF[age] if age < len(_BIN_OF) else BINS - 1


class ReuseModel:
    """The two histograms and the index computed from them."""

    def __init__(self) -> None:
        self.clock = 0
        self._learned_at = 0
        self._reused = np.zeros((CLASSES, BINS))
        self._unused = np.zeros((CLASSES, BINS))
        # Counts since the last relearning are integers: sums do not depend on their order.
        self._new_reused = np.zeros((CLASSES, BINS), dtype=np.int64)
        self._new_unused = np.zeros((CLASSES, BINS), dtype=np.int64)
        # How many known blocks were last touched at a tick, by class: a ring over the horizon.
        self._cohorts = np.zeros((CLASSES, _HORIZON), dtype=np.int32)

    def tick(self, clock: int) -> None:
        """A new request begins; the cohort that falls out of the horizon is forgotten."""
        self.clock = clock
        self._cohorts[:, clock % _HORIZON] = 0

    def touched(self, tick: int, to_class: int, blocks: int) -> None:
        """Blocks were touched at ``tick`` and are of this class from now on."""
        if self.clock - tick < _HORIZON:
            self._cohorts[to_class, tick % _HORIZON] += blocks

    def reused(self, of_class: int, last: int, age: int, blocks: int) -> None:
        """Blocks of this class, last touched at ``last``, were reused at ``age``."""
        self._new_reused[of_class, bin_of(age)] += blocks
        self._leave(of_class, last, blocks)

    def forgotten(self, of_class: int, last: int, blocks: int) -> None:
        """Blocks of this class, last touched at ``last``, will not be recognised again."""
        self._new_unused[of_class, bin_of(self.clock - last)] += blocks
        self._leave(of_class, last, blocks)

    def clear(self) -> None:
        """No block waits any longer; that none of them was reused again says nothing."""
        self._cohorts[:] = 0

    def _leave(self, of_class: int, last: int, blocks: int) -> None:
        if self.clock - last < _HORIZON:
            self._cohorts[of_class, last % _HORIZON] -= blocks

    def relearn(
        self, capacity: int, *, sharp: bool
    ) -> Generator[None, None, tuple["ReuseIndex", Table]]:
        """Return the index, and the chance of reuse up to each bin as ``(CLASSES, BINS)``.

        A generator: it pauses between stages of one to two milliseconds each, so that a caller can
        spread the work. ``capacity`` in blocks sets how much evidence outweighs what is assumed: a
        large pool decides about blocks of long age, of which there are few events. ``sharp`` trusts
        each class's own histogram alone (for pools of few contexts, where loops matter); otherwise
        it is averaged with a smoothed one and with the count bucket's, and rises toward younger
        ages.
        """
        reused, unused, waiting = self._evidence()
        yield
        weight = min(500.0, max(150.0, capacity / 8.0))
        smooth = 0.0 if sharp else min(500.0, max(0.0, (capacity - 500.0) / 4.0))
        overall = _hazard(
            reused.sum(axis=0, keepdims=True),
            unused.sum(axis=0, keepdims=True),
            _PRIOR[None],
            _PRIOR_WEIGHT,
            0.0,
        )
        by_count_prior = 1.0 - (1.0 - overall) ** _POWERS
        hazard = np.empty((CLASSES, BINS))
        exposed = _exposed(reused, unused)
        hazard[:1] = _shrunk(reused[:1], exposed[:1], by_count_prior[:1], weight, smooth)
        prior = np.repeat(by_count_prior[1:2], _GAPS, axis=0)
        for first in range(1, CLASSES, _GAPS):  # a class starts from the one with a lower count
            rows = slice(first, first + _GAPS)
            hazard[rows] = _shrunk(reused[rows], exposed[rows], prior, weight, smooth)
            prior = 1.0 - (1.0 - hazard[rows]) ** _PER_COUNT
        yield
        by_count = None
        if not sharp:
            by_count = _gittins(
                _hazard(_by_count(reused), _by_count(unused), by_count_prior, 0.2 * weight, smooth)
            )
            yield
        index = ReuseIndex(hazard, by_count)
        index.compute(waiting)
        return index, 1.0 - np.exp(np.log1p(-hazard).cumsum(axis=1))

    def _evidence(self) -> tuple[Table, Table, npt.NDArray[np.intp]]:
        """Fold in what is new, let the old decay, and add the blocks that still wait.

        Returns reused and unused blocks, and the classes that have blocks that wait.
        """
        memory = min(MEMORY, 1.0 + _EARLY_MEMORY * self.clock)
        decay = math.exp(-(self.clock - self._learned_at) / memory)
        self._learned_at = self.clock
        self._reused = self._reused * decay + self._new_reused
        self._unused = self._unused * decay + self._new_unused
        self._new_reused[:] = 0
        self._new_unused[:] = 0
        span = min(self.clock + 1, _HORIZON)
        at = self.clock % _HORIZON
        newest_first = self._cohorts[:, at::-1]
        if span > at + 1:  # the ring has turned
            newest_first = np.concatenate((newest_first, self._cohorts[:, :at:-1]), axis=1)
        starts = [edge for edge in EDGES[:-1] if edge < span]
        waiting = np.add.reduceat(newest_first, starts, axis=1)
        unused = self._unused.copy()
        unused[:, : len(starts)] += waiting * np.exp(-np.array(starts) / MEMORY)
        return self._reused, unused, np.flatnonzero(waiting.any(axis=1))


class ReuseIndex:
    """The index of every class: ``index[of_class]`` is an array of ``BINS`` values.

    Args:
        hazard: the chance of reuse within each bin, ``(CLASSES, BINS)``.
        by_count: the index of each count bucket, to average with; None: the class's own alone.
    """

    def __init__(self, hazard: Table, by_count: Table | None = None) -> None:
        self._hazard = hazard
        self._by_count = by_count
        self._rows: list[Table | None] = [None] * len(hazard)

    def __getitem__(self, of_class: int) -> Table:
        row = self._rows[of_class]
        return self.compute(np.array([of_class]))[0] if row is None else row

    def compute(self, classes: npt.NDArray[np.intp]) -> Table:
        """Compute the index of several classes at once, which costs less than one by one."""
        index = _gittins(self._hazard[classes])
        if self._by_count is not None:
            by_count = self._by_count[_COUNT_OF[classes]]
            index = (index * _from_here_on(index) * by_count * _from_here_on(by_count)) ** 0.25
        for of_class, row in zip(classes.tolist(), index, strict=True):
            self._rows[of_class] = row
        return index


_COUNT_OF = np.array([0] + [1 + count for count in range(_COUNTS) for _ in range(_GAPS)])


def _by_count(histogram: Table) -> Table:
    """Add the classes of each count bucket together: ``(1 + buckets, BINS)``."""
    grouped = histogram[1:].reshape(_COUNTS, _GAPS, BINS).sum(axis=1)
    return np.concatenate((histogram[:1], grouped))


def _hazard(reused: Table, unused: Table, prior: Table, weight: float, smooth: float) -> Table:
    """Return the chance of reuse within each bin, shrunk toward ``prior`` as ``weight`` blocks.

    ``smooth`` shrinks further toward the best non-increasing rate per request, by as many blocks.
    """
    return _shrunk(reused, _exposed(reused, unused), prior, weight, smooth)


def _exposed(reused: Table, unused: Table) -> Table:
    """Return how many blocks reached each bin.

    Of the blocks that ended in a bin unused, half count as exposed (the actuarial estimate).
    """
    return np.asarray(np.cumsum((reused + unused)[:, ::-1], axis=1)[:, ::-1] - unused / 2.0)


def _shrunk(reused: Table, exposed: Table, prior: Table, weight: float, smooth: float) -> Table:
    hazard = np.minimum((reused + weight * prior) / (exposed + weight), 0.999)
    if smooth > 0.0:
        rate = _non_increasing(-np.log1p(-hazard) / _WIDTH, (exposed + weight) * _WIDTH)
        smoothed = -np.expm1(-rate * _WIDTH)
        hazard = np.minimum((exposed * hazard + smooth * smoothed) / (exposed + smooth), 0.999)
    return hazard


def _non_increasing(values: Table, weights: Table) -> Table:
    """Return each row's weighted least-squares fit that never rises.

    By the min-max formula of isotonic regression: at b, the least over i <= b of the largest over
    j >= b of the mean from i to j.
    """
    zero = np.zeros((len(values), 1))
    weight = np.concatenate((zero, np.cumsum(weights, axis=1)), axis=1)
    total = np.concatenate((zero, np.cumsum(weights * values, axis=1)), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (total[:, None, 1:] - total[:, :-1, None]) / (
            weight[:, None, 1:] - weight[:, :-1, None]
        )
    np.copyto(mean, -np.inf, where=_BEFORE)
    largest = np.maximum.accumulate(mean[:, :, ::-1], axis=2)[:, :, ::-1]
    np.copyto(largest, np.inf, where=_BEFORE)
    return np.asarray(largest.min(axis=1))


def _gittins(hazard: Table) -> Table:
    """Return the index at each bin, from the hazards of this bin's half ahead and all later ones.

    A block reused within a bin is held for half of it.
    """
    log_survival = np.log1p(-hazard)
    cumulative = np.concatenate(
        (np.zeros((len(hazard), 1)), np.cumsum(log_survival, axis=1)), axis=1
    )
    first = -np.expm1(_AHEAD * log_survival)
    reaching = np.exp(cumulative[:, None, :-1] - cumulative[:, 1:, None])
    np.copyto(reaching, 0.0, where=_UP_TO)
    reaching *= (1.0 - first)[:, :, None]
    gained = np.cumsum(reaching * hazard[:, None, :], axis=2) + first[:, :, None]
    held = np.cumsum(reaching * ((1.0 - hazard / 2.0) * _WIDTH)[:, None, :], axis=2)
    held += ((1.0 - first / 2.0) * _AHEAD * _WIDTH)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = gained / held
    np.copyto(ratio, 0.0, where=_BEFORE)
    np.copyto(ratio, 0.0, where=~np.isfinite(ratio))
    return np.asarray(ratio.max(axis=2))


def _from_here_on(index: Table) -> Table:
    """Return the largest index from each age on."""
    return np.maximum.accumulate(index[:, ::-1], axis=1)[:, ::-1]
