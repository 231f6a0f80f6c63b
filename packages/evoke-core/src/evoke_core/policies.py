"""How blocks are ranked. A policy says what a block is worth; it never finds the victim itself.

A policy sorts blocks into *rank classes* and must keep one promise, which makes exact victim
selection cheap: within a class, a block touched earlier never scores higher. So the lowest block of
a class is its least recently touched one, and a search compares one block per class instead of
scanning the pool.

Policies hold no state: the index keeps the history and the half-life.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from evoke_core.config import EvokeConfig
    from evoke_core.runs import Run


class Policy(Protocol):
    """A ranking of blocks."""

    def class_key(self, run: "Run") -> Hashable:
        """Return what ``run``'s blocks share with every block of the same rank class."""

    def bound(self, key: Hashable) -> float:
        """Return a lower bound of the class's scores over all ages."""

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        """Return the score of a block of this class, ``age`` requests after its last touch.

        Must not rise with ``age``.
        """


class ScoredPolicy:
    """The seed formula, to the letter::

        priority * (floor + (1 - floor) * (w_recency * recency + w_reuse * reuse
                                           + w_attention * attention + w_coherence * coherence))

    with ``recency = 2 ** (-age / half_life)`` and ``reuse = 1 - 2 ** -n`` for ``n`` distinct
    requests. Everything but the age is fixed within a class.
    """

    def __init__(self, config: "EvokeConfig") -> None:
        self._weights = (
            config.w_recency,
            config.w_reuse,
            config.w_attention,
            config.w_coherence,
        )

    def class_key(self, run: "Run") -> Hashable:
        return (run.priority, run.floor, run.reuse, run.attention, run.coherence)

    def bound(self, key: Hashable) -> float:
        return self._value(key, 0.0)

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        return self._value(key, 2.0 ** (-age / half_life))

    def _value(self, key: Any, recency: float) -> float:
        priority, floor, count, attention, coherence = key
        w_recency, w_reuse, w_attention, w_coherence = self._weights
        relevance = (
            w_recency * recency
            + w_reuse * (1.0 - 2.0**-count)
            + w_attention * attention
            + w_coherence * coherence
        )
        return float(priority * (floor + (1.0 - floor) * relevance))


class LruPolicy:
    """Least recently touched first; the baseline, and the proof that the seam is real."""

    def class_key(self, run: "Run") -> Hashable:
        return None

    def bound(self, key: Hashable) -> float:
        return -math.inf

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        return float(-age)


POLICIES: Mapping[str, Callable[["EvokeConfig"], Policy]] = {
    "scored": ScoredPolicy,
    "lru": lambda config: LruPolicy(),
}
"""Policies that can be chosen by name."""
