"""Signals that a runtime can compute and a stock server cannot: attention mass, task coherence.

Producers for :meth:`~evoke_core.index.RetentionIndex.signal`: a runtime that sees attention weights
and embeddings feeds them here, step by step, and hands the index what comes out. Both give values
from 0 to 1, which the score multiplies with ``w_attention`` and ``w_coherence``.

Guarantees: nothing here depends on the order in which a step names its blocks, bit for bit; memory
is bounded by the window times the blocks of a step; no call reads a clock, none keeps an array that
a caller may change.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def block_mass(weights: Array, lengths: Sequence[int]) -> Array:
    """Sum attention weights over each block's tokens: the mass that a step put on each block.

    Args:
        weights: attention probabilities, shape (..., tokens): layers, heads and queries come first
            in any number, and their mean is taken.
        lengths: tokens of each block, in the order of the last axis; together at most its length.

    Returns:
        float64, one per block; they add up to 1 where the blocks cover all tokens.

    Raises:
        ValueError: the blocks have more tokens than there are weights.
    """
    per_token = np.asarray(weights, dtype=np.float64).reshape(-1, weights.shape[-1]).mean(axis=0)
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) and ends[-1] > len(per_token):
        raise ValueError(f"blocks of {ends[-1]} tokens in all, weights of {len(per_token)}")
    return np.array(
        [
            math.fsum(per_token[end - size : end])
            for end, size in zip(ends.tolist(), lengths, strict=True)
        ]
    )


class AttentionMass:
    """Attention per block over the last steps, newer steps counting more.

    In a step with ``n`` blocks, block ``b`` receives the share ``a(b)`` of all attention that the
    blocks received; its *relative mass* is ``r = n * a(b)``, 1 where it gets its fair share. Over
    the last ``window`` steps, ``s`` steps ago counting ``decay ** s`` and steps that did not name
    the block not at all::

        R(b) = sum(decay ** s * r[s](b)) / sum(decay ** s)        over the steps that named b
        attention(b) = R(b) / (1 + R(b))

    So the signal is 1/2 at a fair share, whatever the number of blocks, and rises with the mass
    without ever reaching 1: an attention sink that takes most of it leaves the others comparable.

    Args:
        window: steps remembered.
        decay: weight of a step relative to the next, above 0 and at most 1.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, window: int = 32, decay: float = 0.9) -> None:
        if window < 1 or not 0.0 < decay <= 1.0:
            raise ValueError(f"window {window} must be at least 1, decay {decay} in (0, 1]")
        self.decay = decay
        self._steps: deque[dict[bytes, float]] = deque(maxlen=window)

    def observe(self, keys: Sequence[bytes], mass: npt.ArrayLike) -> None:
        """Note one step: how much attention each block received, in any unit.

        A step without any attention says nothing about the blocks and is not counted.

        Raises:
            ValueError: keys and masses differ in number, a key comes twice, or a mass is negative
                or not finite.
        """
        masses = np.asarray(mass, dtype=np.float64)
        if masses.shape != (len(keys),) or len(set(keys)) < len(keys):
            raise ValueError(f"{len(keys)} distinct keys need as many masses, got {masses.shape}")
        if not (np.isfinite(masses) & (masses >= 0.0)).all():
            raise ValueError("attention mass must be finite and not negative")
        total = math.fsum(masses)  # exact, so that no order of the blocks matters
        if total > 0.0:
            relative = len(keys) * (masses / total)
            self._steps.append(dict(zip(keys, relative.tolist(), strict=True)))

    def value(self, key: bytes) -> float | None:
        """Return the block's signal, from 0 to below 1; None if no step of the window named it."""
        weight, weights, sums = 1.0, 0.0, 0.0
        for step in reversed(self._steps):
            relative = step.get(key)
            if relative is not None:
                weights += weight
                sums += weight * relative
            weight *= self.decay
        return None if weights == 0.0 else sums / (weights + sums)

    def values(self) -> Iterator[tuple[bytes, float]]:
        """Yield every block that the window names, most recent step first, and its signal."""
        seen = dict.fromkeys(key for step in reversed(self._steps) for key in step)
        for key in seen:
            value = self.value(key)
            if value is not None:
                yield key, value

    def forget(self, key: bytes) -> None:
        """Drop what is known of a block: it left, and will not come back."""
        for step in self._steps:
            step.pop(key, None)

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()


class TaskFocus:
    """Where the task is: an embedding that follows the queries and snaps when the topic shifts.

    With ``q`` a query's embedding, scaled to length 1, and ``f`` the focus, also of length 1::

        f <- q                                        if there is no focus yet,
                                                      or cos(f, q) < snap_below
        f <- (1 - rate) * f + rate * q, scaled to 1   otherwise

        coherence(b) = max(0, cos(f, embedding of b))

    Embeddings of one model all point in much the same direction. A runtime that subtracts their
    mean before it hands them over gets cosines that tell topics apart.

    Args:
        rate: how fast the focus follows within a topic, above 0 and at most 1.
        snap_below: cosine below which a query begins a new topic, from -1 (never) to 1.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, rate: float = 0.3, snap_below: float = 0.2) -> None:
        if not 0.0 < rate <= 1.0 or not -1.0 <= snap_below <= 1.0:
            raise ValueError(f"rate {rate} must be in (0, 1], snap_below {snap_below} in [-1, 1]")
        self.rate = rate
        self.snap_below = snap_below
        self._focus: Array | None = None

    @property
    def focus(self) -> Array | None:
        """The focus, float64, length 1; None before the first query."""
        return None if self._focus is None else self._focus.copy()

    def observe(self, query: npt.ArrayLike) -> bool:
        """Follow a query, shape (dim,). Return True if it began a topic: the focus is the query.

        A query of length 0 has no direction and changes nothing.

        Raises:
            ValueError: it is not a finite vector, or of another dimension than the focus.
        """
        wanted = _unit(_vectors(query, 1, self._focus))
        if not wanted.any():
            return False
        if self._focus is None or float(self._focus @ wanted) < self.snap_below:
            self._focus = wanted
            return True
        followed = _unit((1.0 - self.rate) * self._focus + self.rate * wanted)
        self._focus = followed if followed.any() else wanted
        return False

    def coherence(self, embeddings: npt.ArrayLike) -> Array:
        """Return each block's coherence, from 0 to 1; 0 without a focus or a direction.

        Args:
            embeddings: shape (blocks, dim).

        Raises:
            ValueError: not a finite matrix, or of another dimension than the focus.
        """
        blocks = _vectors(embeddings, 2, self._focus)
        if self._focus is None:
            return np.zeros(len(blocks))
        # Row by row: a block's value must not depend on the rows around it, as it may in a matmul.
        cosines: Array = (_unit(blocks) * self._focus).sum(axis=1)
        return np.clip(cosines, 0.0, 1.0)

    def clear(self) -> None:
        """Forget the task."""
        self._focus = None


def _vectors(value: npt.ArrayLike, ndim: int, like: Array | None) -> Array:
    found = np.array(value, dtype=np.float64)
    if found.ndim != ndim or not np.isfinite(found).all():
        raise ValueError(f"an embedding must be finite, in {ndim} dimension(s), got {found.shape}")
    if like is not None and found.shape[-1] != like.shape[-1]:
        raise ValueError(f"embeddings of {found.shape[-1]} elements, the focus has {len(like)}")
    return found


def _unit(vectors: Array) -> Array:
    """Scale to length 1, by the largest element first: no square over- or underflows."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    scaled = vectors / np.where(largest > 0.0, largest, 1.0)
    length = np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    found: Array = scaled / np.where(length > 0.0, length, 1.0)
    return found
