"""The learned ranking, for an operator who does not know the workload. The default.

A block's score is the index that :mod:`~evoke_core.reuse_model` gives its class and age: the hits
per block-request that keeping it earns. A new block must beat the victim (admission), because on
real traces most blocks are never used again.

What clients declare enters as a bounded multiplier, believed only as far as it has proven true.
Blocks are grouped by source role and by whether their priority is raised or lowered; a group whose
blocks are reused more than their past alone predicts is worth more, by as much, within [1/2, 2].
Hints that carry no information (shuffled, or the same for everybody) earn a factor of 1; hints on
dead blocks earn less than none would. So no hint can keep dead blocks alive or starve the rest.

A promise of reuse makes a block worth at least the promise's own index: one hit per as many
block-requests as are left until then, times the skill of promises of that length, how much more
often they were kept than the blocks' past alone predicts. Nobody is believed who promises what
would have happened anyway, or what does not happen. Past its time, a block falls back to its
ordinary value.

Guarantees: deterministic; equal to ranking every leaf by its score; a request pays for at most one
stage of relearning once the pool has seen ``_EAGER`` requests.
"""

import math
from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING

import numpy as np

from evoke_core.history import History
from evoke_core.policies import Policy
from evoke_core.promises import LENGTHS, length_of
from evoke_core.reuse_model import (
    BINS,
    CLASSES,
    EDGES,
    MEMORY,
    ReuseIndex,
    ReuseModel,
    Table,
    bin_of,
    class_of,
)

if TYPE_CHECKING:
    from evoke_core.config import EvokeConfig
    from evoke_core.runs import Run

_CELLS = CLASSES * BINS
_LENGTHS = len(LENGTHS)

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


_SKILL_WEIGHT = 100.0
"""Blocks whose promises were settled before promises of that length are believed half way.

None is believed before: half believed from the start, false ones cost loops of a hundred requests
up to 3.4 points, and true ones gain next to nothing where there are thousands.
"""


class AdaptivePolicy(Policy):
    """Ranks by the learned reuse index; see the module's docstring."""

    admits = True
    ghosts_at_least = 1_024

    def __init__(self, config: "EvokeConfig") -> None:
        self._roles = {role: 1 + at for at, role in enumerate(sorted(config.source_floors))}
        hints = 3 * (1 + len(self._roles))
        self._cells = _CELLS * hints
        self._model = ReuseModel()
        self._sharp = False
        self._full = False
        self._relearn_at = 0
        self._relearning: Generator[None, None, tuple[ReuseIndex, Table]] | None = None
        self._index = ReuseIndex(np.zeros((CLASSES, BINS)))
        self._scores: dict[int, float] = {}  # of the cells that were asked for
        # Per group of hints: blocks that were expected to return, and that did. Counts since the
        # last relearning are integers: sums do not depend on their order.
        self._expected = [0.0] * hints
        self._returned = [0.0] * hints
        self._trusts = [1.0] * hints
        self._promises = [[0] * CLASSES for _ in range(hints)]
        self._kept_promises = [0] * hints
        self._heard: set[int] = set()  # the groups that have a record
        self._applied_at = 0
        # Per length of promise: how far it is believed, and what became of those that are settled.
        self._skill = [0.0] * _LENGTHS
        self._settled = [[0] * CLASSES for _ in LENGTHS]
        self._kept = [0] * _LENGTHS
        self._foreseen = np.zeros(_LENGTHS)
        self._held_true = np.zeros(_LENGTHS)
        self._judged = np.zeros(_LENGTHS)
        self._any_settled = False

    # --- ranking: a rank class is (promise, what is left, hint, class, age bin), numbered ---

    def class_key(self, run: "Run", clock: int) -> Hashable:
        cell = class_of(run.reuse, run.gap) * BINS + bin_of(clock - run.last)
        key = self._hint(run) * _CELLS + cell
        if not run.holding:
            return key
        return key + self._cells * (1 + _LENGTHS * length_of(run.terms.promise) + run.due_in)

    def bound(self, key: Hashable) -> float:
        return self.score(key, 0, 0.0)

    def score(self, key: Hashable, age: int, half_life: float) -> float:
        number: int = key  # type: ignore[assignment]
        promise, cell = divmod(number, self._cells)
        value = self._scores.get(cell)
        if value is None:
            value = self._scores[cell] = self._score(cell)
        if not promise:
            return value
        length, left = divmod(promise - 1, _LENGTHS)
        return max(value, self._skill[length] / LENGTHS[left])

    def _score(self, cell: int) -> float:
        hint, past = divmod(cell, _CELLS)
        of_class, age_bin = divmod(past, BINS)
        return float(self._index[of_class][age_bin]) * self._trusts[hint]

    def next_move(self, key: Hashable, last: int) -> tuple[int, Hashable] | None:
        number: int = key  # type: ignore[assignment]
        older = number % BINS + 1
        return None if older == BINS else (last + EDGES[older], number + 1)

    def index(self, reuse: int, gap: int, age: int) -> float:
        """Return what a block with this history is worth, before any hint."""
        return float(self._index[class_of(reuse, gap)][bin_of(age)])

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
        hint = self._hint(past)
        self._kept_promises[hint] += blocks
        self._heard.add(hint)
        return age

    def settled(self, past: History, blocks: int, kept: bool) -> None:
        self._any_settled = True
        length = length_of(past.terms.promise)
        self._settled[length][class_of(past.reuse, past.gap)] += blocks
        self._kept[length] += blocks * kept

    def entered(self, history: History, blocks: int) -> None:
        cls = class_of(history.reuse, history.gap)
        self._model.touched(history.last, cls, blocks)
        hint = self._hint(history)
        self._promises[hint][cls] += blocks
        self._heard.add(hint)

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

    def _apply(self, index: ReuseIndex, chance: Table) -> None:
        clock = self._model.clock
        self._relearn_at = clock + min(_LONGEST_INTERVAL, max(1, clock // 16))
        self._index = index
        decay = math.exp(-(clock - self._applied_at) / MEMORY)
        self._applied_at = clock
        self._trust(chance[:, -1].tolist(), decay)
        self._scores = {}
        if self._any_settled:
            self._skill = self._promised(chance, decay)

    def _promised(self, chance: Table, decay: float) -> list[float]:
        """Return how far a promise of each length is believed, from 0 to 1."""
        within = chance[:, [bin_of(int(length)) for length in LENGTHS]]
        settled = np.array(self._settled, dtype=np.float64)
        self._foreseen = self._foreseen * decay + (settled * within.T).sum(axis=1)
        self._judged = self._judged * decay + settled.sum(axis=1)
        self._held_true = self._held_true * decay + np.array(self._kept)
        self._settled = [[0] * CLASSES for _ in LENGTHS]
        self._kept = [0] * _LENGTHS
        proven = self._held_true - self._foreseen
        skill = proven / (self._judged - self._foreseen + _SKILL_WEIGHT)
        return [float(each) for each in np.clip(skill, 0.0, 1.0)]

    def beliefs(self) -> dict[str, float]:
        """Return the factor of every role, and how far promises of reuse are believed."""
        names = {0: "none", **{number: role for role, number in self._roles.items()}}
        beliefs = {f"role_{name}": self._trusts[3 * number] for number, name in names.items()}
        for length, skill in zip(LENGTHS, self._skill, strict=True):
            beliefs[f"promise_{length:.0f}"] = skill
        return beliefs

    def _trust(self, chance: list[float], decay: float) -> None:
        """Set each group's factor: how much more its blocks return than their past predicts."""
        for hint in self._heard:
            made = self._promises[hint]
            expected = sum(blocks * chance[cls] for cls, blocks in enumerate(made) if blocks)
            self._expected[hint] = self._expected[hint] * decay + expected
            self._returned[hint] = self._returned[hint] * decay + self._kept_promises[hint]
            self._promises[hint] = [0] * CLASSES
            self._kept_promises[hint] = 0
        overall = (sum(self._returned) + _TRUST_WEIGHT) / (sum(self._expected) + _TRUST_WEIGHT)
        for hint in self._heard:
            foreseen = self._expected[hint] * overall
            lift = (self._returned[hint] + _TRUST_WEIGHT) / (foreseen + _TRUST_WEIGHT)
            self._trusts[hint] = min(_MOST_TRUST, max(_LEAST_TRUST, lift))
