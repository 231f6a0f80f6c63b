"""How blocks are ranked. A policy says what a block is worth; it never finds the victim itself.

A policy sorts blocks into *rank classes* and must keep one promise, which makes exact victim
selection cheap: within a class, a block touched earlier never scores higher. So the lowest block of
a class is its least recently touched one, and a search compares one block per class instead of
scanning the pool. Where age changes the order between blocks of equal past, a policy makes age part
of the class and says when a block moves to the next.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from evoke_core.history import History

if TYPE_CHECKING:
    from evoke_core.config import EvokeConfig
    from evoke_core.runs import Run


class Policy:
    """A ranking of blocks. Subclasses define the first three methods; the others do nothing."""

    admits = False
    """Whether a new block must beat the blocks that would make room for it."""

    ghosts_at_least = 0
    """Evicted blocks to remember in addition to ``ghost_factor`` per resident one."""

    def class_key(self, run: "Run", clock: int) -> Hashable:
        """Return what ``run``'s blocks share with every block of the same rank class."""
        raise NotImplementedError

    def bound(self, key: Hashable) -> float:
        """Return a lower bound of the class's scores over all ages."""
        raise NotImplementedError

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        """Return the score of a block of this class, ``age`` requests after its last touch.

        Must not rise with ``age`` within a class.
        """
        raise NotImplementedError

    def next_move(self, key: Hashable, last: int) -> tuple[int, Hashable] | None:
        """Return when, and to which class, a block of this class moves by age alone.

        ``last`` is the tick of its last touch; None if it stays.
        """
        return None

    def begin(self, capacity: int, chain_length: float) -> None:
        """The pool is full for the first time: ``capacity`` blocks, and blocks per request."""

    def advance(self, clock: int, capacity: int) -> bool:
        """A request begins. Return True if scores have changed."""
        return False

    def used(self, past: History, tick: int, blocks: int) -> int:
        """Blocks with this past are used by the request with this tick, and leave it behind.

        Returns the gap to keep in their history.
        """
        return 0

    def entered(self, history: History, blocks: int) -> None:
        """Blocks have this history now: they are new, or were used."""

    def settled(self, past: History, blocks: int, kept: bool) -> None:
        """A promise of reuse was kept by blocks with this past, or broken.

        Called before the use that keeps it.
        """

    def beliefs(self) -> Mapping[str, float]:
        """Return a few figures that sum up what was learned, by name."""
        return {}

    def forget(self, past: History, blocks: int) -> None:
        """Blocks with this past will not be recognised again."""

    def clear(self) -> None:
        """All blocks were dropped at once, for no reason of their own."""


class ScoredPolicy(Policy):
    """The seed formula, to the letter::

        priority * (floor + (1 - floor) * (w_recency * recency + w_reuse * reuse
                                           + w_attention * attention + w_coherence * coherence))

    with ``recency = 2 ** (-age / half_life)`` and ``reuse = 1 - 2 ** -n`` for ``n`` distinct
    requests. Everything but the age is fixed within a class. While a block holds its value its
    recency is 1.
    """

    def __init__(self, config: "EvokeConfig") -> None:
        self._weights = (
            config.w_recency,
            config.w_reuse,
            config.w_attention,
            config.w_coherence,
        )

    def class_key(self, run: "Run", clock: int) -> Hashable:
        return (
            run.priority,
            run.floor,
            run.reuse,
            run.attention,
            run.coherence,
            run.holding,
        )

    def bound(self, key: Hashable) -> float:
        return self._value(key, 0.0)

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        return self._value(key, 2.0 ** (-age / half_life))

    def _value(self, key: Any, recency: float) -> float:
        priority, floor, count, attention, coherence, holding = key
        if holding:
            recency = 1.0
        w_recency, w_reuse, w_attention, w_coherence = self._weights
        relevance = (
            w_recency * recency
            + w_reuse * (1.0 - 2.0**-count)
            + w_attention * attention
            + w_coherence * coherence
        )
        return float(priority * (floor + (1.0 - floor) * relevance))


class LruPolicy(Policy):
    """Least recently touched first; the baseline, and the proof that the seam is real."""

    def class_key(self, run: "Run", clock: int) -> Hashable:
        return None

    def bound(self, key: Hashable) -> float:
        return -math.inf

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        return float(-age)


def _adaptive(config: "EvokeConfig") -> Policy:
    from evoke_core.adaptive import AdaptivePolicy

    return AdaptivePolicy(config)


POLICIES: Mapping[str, Callable[["EvokeConfig"], Policy]] = {
    "adaptive": _adaptive,
    "scored": ScoredPolicy,
    "lru": lambda config: LruPolicy(),
}
"""Policies that can be chosen by name."""
