"""The learned ranking, for an operator who does not know the workload. The default.

A block's score is the index that :mod:`~evoke_core.reuse_model` gives its class and age: the hits
per block-request that keeping it earns. A new block must beat the victim (admission), because on
real traces most blocks are never used again.

What clients declare enters as a bounded multiplier, believed only as far as it has proven true.
Blocks are grouped by source role and by whether their priority is raised or lowered; a group whose
blocks are reused more than their past alone predicts is worth more, by as much, within [1/2, 2].
Hints that carry no information (shuffled, or the same for everybody) earn a factor of 1; hints on
dead blocks earn less than none would. So no hint can keep dead blocks alive or starve the rest.

Guarantees: deterministic; equal to ranking every leaf by its score; a request pays for at most one
stage of relearning once the pool has seen ``_EAGER`` requests.
"""

import math
from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING

import numpy as np

from evoke_core.history import History
from evoke_core.policies import Policy
from evoke_core.reuse_model import (
    BINS,
    CLASSES,
    EDGES,
    MEMORY,
    ReuseModel,
    Table,
    bin_of,
    class_of,
)

if TYPE_CHECKING:
    from evoke_core.config import EvokeConfig
    from evoke_core.runs import Run

_CELLS = CLASSES * BINS

_FEW_CONTEXTS = 16
"""A pool of fewer contexts than this ranks by sharp indices: there, loops decide."""

_EAGER = 256
"""Requests during which each relearning is done at once, while it teaches most."""

_LONGEST_INTERVAL = 128
_LEAST_TRUST = 0.5
_MOST_TRUST = 2.0
_TRUST_WEIGHT = 20_000.0
"""Blocks of expected reuse before a hint's record moves its factor half way.

Much, because promises that are still outstanding count as broken: over a short record a group that
returns late would look like one that does not return. With 1,000 small pools lost up to 1.2 points.
"""


class AdaptivePolicy(Policy):
    """Ranks by the learned reuse index; see the module's docstring."""

    admits = True
    ghosts_at_least = 1_024

    def __init__(self, config: "EvokeConfig") -> None:
        self._roles = {role: 1 + at for at, role in enumerate(sorted(config.source_floors))}
        hints = 3 * (1 + len(self._roles))
        self._model = ReuseModel()
        self._sharp = False
        self._full = False
        self._relearn_at = 0
        self._relearning: Generator[None, None, tuple[Table, Table]] | None = None
        self._index = np.zeros((CLASSES, BINS))
        self._scores = [0.0] * (_CELLS * hints)
        # Per group of hints: blocks that were expected to return, and that did. Counts since the
        # last relearning are integers: sums do not depend on their order.
        self._expected = np.zeros(hints)
        self._returned = np.zeros(hints)
        self._promises = [[0] * CLASSES for _ in range(hints)]
        self._kept_promises = [0] * hints
        self._applied_at = 0

    # --- ranking: a rank class is (hint, class, age bin), numbered ---

    def class_key(self, run: "Run", clock: int) -> Hashable:
        cell = class_of(run.reuse, run.gap) * BINS + bin_of(clock - run.last)
        return self._hint(run) * _CELLS + cell

    def bound(self, key: Hashable) -> float:
        return self._scores[key]  # type: ignore[call-overload, no-any-return]

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        return self._scores[key]  # type: ignore[call-overload, no-any-return]

    def next_move(self, key: Hashable, last: int) -> tuple[int, Hashable] | None:
        older = key % BINS + 1  # type: ignore[operator]
        return None if older == BINS else (last + EDGES[older], key + 1)  # type: ignore[operator]

    def index(self, reuse: int, gap: int, age: int) -> float:
        """Return what a block with this history is worth, before any hint."""
        return float(self._index[class_of(reuse, gap), bin_of(age)])

    # --- learning ---

    def begin(self, capacity: int, chain_length: float) -> None:
        self._full = True
        self._sharp = capacity < _FEW_CONTEXTS * chain_length
        self._relearn(capacity, at_once=True)

    def advance(self, clock: int, capacity: int) -> bool:
        self._model.tick(clock)
        if not self._full or (self._relearning is None and clock < self._relearn_at):
            return False
        return self._relearn(capacity, at_once=clock < _EAGER)

    def used(self, past: History, tick: int, blocks: int) -> int:
        age = max(0, tick - past.last)
        self._model.reused(class_of(past.reuse, past.gap), past.last, age, blocks)
        self._kept_promises[self._hint(past)] += blocks
        return age

    def entered(self, history: History, blocks: int) -> None:
        cls = class_of(history.reuse, history.gap)
        self._model.touched(history.last, cls, blocks)
        self._promises[self._hint(history)][cls] += blocks

    def forget(self, past: History, blocks: int) -> None:
        self._model.forgotten(class_of(past.reuse, past.gap), past.last, blocks)

    def clear(self) -> None:
        self._model.clear()

    def _hint(self, history: History) -> int:
        """Number the group of hints; a role that is not configured counts as none."""
        priority = history.priority
        level = 0 if priority == 1.0 else 1 if priority > 1.0 else 2
        role = history.role
        return level if role is None else 3 * self._roles.get(role, 0) + level

    def _relearn(self, capacity: int, *, at_once: bool) -> bool:
        """Go on relearning, by one stage or to the end; True when the scores are new."""
        if self._relearning is None:
            self._relearning = self._model.relearn(capacity, sharp=self._sharp)
        while True:
            try:
                next(self._relearning)
            except StopIteration as done:
                self._relearning = None
                self._apply(*done.value)
                return True
            if not at_once:
                return False

    def _apply(self, index: Table, chance: Table) -> None:
        clock = self._model.clock
        self._relearn_at = clock + min(_LONGEST_INTERVAL, max(1, clock // 16))
        self._index = index
        scores: list[float] = []
        for trust in self._trust(chance):
            scores += (index * trust).ravel().tolist()
        self._scores = scores

    def _trust(self, chance: Table) -> list[float]:
        """Return each group's factor: how much more its blocks return than their past predicts."""
        decay = math.exp(-(self._model.clock - self._applied_at) / MEMORY)
        self._applied_at = self._model.clock
        self._expected = self._expected * decay + np.array(self._promises) @ chance
        self._returned = self._returned * decay + np.array(self._kept_promises)
        self._promises = [[0] * CLASSES for _ in self._promises]
        self._kept_promises = [0] * len(self._kept_promises)
        overall = (self._returned.sum() + _TRUST_WEIGHT) / (self._expected.sum() + _TRUST_WEIGHT)
        expected = self._expected * overall
        lift = (self._returned + _TRUST_WEIGHT) / (expected + _TRUST_WEIGHT)
        return [float(factor) for factor in np.clip(lift, _LEAST_TRUST, _MOST_TRUST)]
