"""Paired bootstrap over seeds and requests: how sure is a difference between two arms?

Both arms answered the same requests with the same seeds. A draw takes seeds with replacement and,
within each, requests with replacement, the same ones for both arms; the figure is computed for each
arm from what was drawn. The interval is the middle 95% of the draws. Figures are ratios of sums
(restored tokens over tokens outside the pool), or means, which are the same with a weight of 1.

The generator's seed is fixed: the same results always give the same interval. Requests of one run
depend on each other through the cache, which such a bootstrap does not see; other seeds show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
LEVEL = 0.95
NON_INFERIOR = -0.03
"""A loss that is still no loss: three points."""

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """One seed: per request, what two arms' figures are sums of. All of one length."""

    top_a: _Numbers
    under_a: _Numbers
    top_b: _Numbers
    under_b: _Numbers


@dataclass(frozen=True)
class Difference:
    """Two arms' figures and their difference a - b (and ratio a / b), with intervals."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        return self.low > 0 or self.high < 0

    @property
    def non_inferior(self) -> bool:
        """Whether a loses less than three points with 97.5% confidence."""
        return self.low > NON_INFERIOR


@dataclass(frozen=True)
class Estimate:
    """One arm's figure with its interval."""

    value: float
    low: float
    high: float


def compare(pairs: Sequence[Pair], *, draws: int = DRAWS) -> Difference | None:
    """Return the difference of two arms over all seeds; None where nothing can be computed."""
    kept = [pair for pair in pairs if len(pair.top_a)]
    if not kept:
        return None
    a = _whole([(p.top_a, p.under_a) for p in kept])
    b = _whole([(p.top_b, p.under_b) for p in kept])
    if not (np.isfinite(a) and np.isfinite(b)):
        return None
    sums = _draw([np.stack([p.top_a, p.under_a, p.top_b, p.under_b]) for p in kept], draws)
    drawn_a, drawn_b = _ratio(sums[0], sums[1]), _ratio(sums[2], sums[3])
    low, high = _interval(drawn_a - drawn_b)
    if not b:
        return Difference(a, b, a - b, low, high)
    ratio_low, ratio_high = _interval(_ratio(drawn_a, drawn_b))
    return Difference(a, b, a - b, low, high, a / b, ratio_low, ratio_high)


def estimate(parts: Sequence[tuple[_Numbers, _Numbers]], *, draws: int = DRAWS) -> Estimate | None:
    """Return one arm's figure: per seed the requests' tops and unders, as in `compare`."""
    kept = [(top, under) for top, under in parts if len(top)]
    if not kept:
        return None
    value = _whole(kept)
    if not np.isfinite(value):
        return None
    sums = _draw([np.stack(part) for part in kept], draws)
    return Estimate(value, *_interval(_ratio(sums[0], sums[1])))


def _draw(seeds: Sequence[_Numbers], draws: int) -> _Numbers:
    """Return sums of every row over drawn seeds and requests: (rows, draws)."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(seeds), size=(draws, len(seeds)))
    total = np.zeros((seeds[0].shape[0], draws))
    for number, values in enumerate(seeds):
        for place in range(len(seeds)):
            here = np.flatnonzero(chosen[:, place] == number)
            requests = rng.integers(values.shape[1], size=(len(here), values.shape[1]))
            total[:, here] += values[:, requests].sum(axis=2)
    return total


def _whole(parts: Sequence[tuple[_Numbers, _Numbers]]) -> float:
    under = float(sum(float(part.sum()) for _, part in parts))
    return float(sum(float(part.sum()) for part, _ in parts)) / under if under else float("nan")


def _ratio(top: _Numbers, under: _Numbers) -> _Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.divide(top, under), dtype=float)


def _interval(values: _Numbers) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
