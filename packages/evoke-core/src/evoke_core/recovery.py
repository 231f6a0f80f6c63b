"""Which evicted blocks to bring back for a query: nearest embeddings first, within a budget.

A runtime that keeps evicted blocks in a slower store tells this memory the embedding of each block
that leaves. When a query comes, :meth:`RecoveryMemory.choose` says which blocks are worth bringing
back. What a fact is told in rarely ends where a block does, so blocks carry a span (a turn, a
document) and a position in it, and a choice brings the neighbours along where they fit.

Guarantees: at most ``capacity`` embeddings are kept, the oldest leave first; a choice never exceeds
its budget; it depends on what is remembered and in which order that was remembered, on nothing else
(ties included); no I/O, no clock. A choice costs one pass over the embeddings.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

Array = npt.NDArray[Any]

SIMILARITY_STEPS = 1 << 20
"""Cosines are compared in steps of 1 / SIMILARITY_STEPS: below it float32 only makes noise."""

_ROWS_AT_ONCE = 256


@frozen
class Recalled:
    """A block to bring back.

    ``similarity``: its own cosine to the query, a neighbour's included. ``anchor``: it was chosen
    for that cosine, not for standing beside such a block.
    """

    key: bytes
    similarity: float
    anchor: bool


@frozen
class _Entry:
    row: int
    tokens: int
    span: Hashable
    position: int
    order: int


class RecoveryMemory:
    """Embeddings of evicted blocks. See the module's docstring for what it guarantees.

    Memory: ``capacity * dim`` float32, allocated as it fills, and a small record per block.

    Args:
        capacity: blocks remembered; beyond it the one remembered first is forgotten.
        dim: elements of an embedding.

    Raises:
        ValueError: an argument below 1.
    """

    def __init__(self, capacity: int, dim: int) -> None:
        if capacity < 1 or dim < 1:
            raise ValueError(f"capacity {capacity} and dim {dim} must be at least 1")
        self.capacity = capacity
        self.dim = dim
        self._units = np.zeros((0, dim), dtype=np.float32)  # of length 1, or 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest first
        self._places: dict[tuple[Hashable, int], bytes] = {}
        self._free: list[int] = []
        self._order = 0

    def remember(
        self,
        key: bytes,
        embedding: npt.ArrayLike,
        *,
        tokens: int = 1,
        span: Hashable = None,
        position: int = 0,
    ) -> bytes | None:
        """Note that a block was evicted; return the key that had to be forgotten for it, if any.

        A key that is known is replaced, and is then the newest. So is a block at the same place of
        a span. Without a ``span`` a block has no neighbours.

        Args:
            embedding: shape (dim,), of any length.
            tokens: what the block takes of a budget, at least 1.
            position: which block of its span it is.

        Raises:
            ValueError: an embedding that is not finite or of another dimension, or no tokens.
        """
        found = np.array(embedding, dtype=np.float64)
        if found.shape != (self.dim,) or not np.isfinite(found).all():
            raise ValueError(f"an embedding must be {self.dim} finite numbers, got {found.shape}")
        if tokens < 1:
            raise ValueError(f"a block has at least one token, got {tokens}")
        self.forget(key)
        if span is not None:
            self.forget(self._places.get((span, position), key))
        dropped = None
        if len(self._entries) == self.capacity:
            dropped = next(iter(self._entries))
            self.forget(dropped)
        row = self._free.pop() if self._free else self._new_row()
        self._units[row] = _unit(found)
        self._order += 1
        self._entries[key] = _Entry(row, tokens, span, position, self._order)
        if span is not None:
            self._places[span, position] = key
        return dropped

    def forget(self, key: bytes) -> bool:
        """Drop a block: it came back, or its store lost it. False if it was not remembered."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._free.append(entry.row)
        if entry.span is not None:
            del self._places[entry.span, entry.position]
        return True

    def choose(
        self,
        query: npt.ArrayLike,
        top_k: int,
        *,
        max_tokens: int | None = None,
        threshold: float = 0.0,
        neighbours: int = 0,
    ) -> list[Recalled]:
        """Choose blocks to bring back for a query.

        Blocks are taken by cosine to the query, highest first, ties newest first. Each of the first
        ``top_k`` that reach ``threshold`` and are not yet chosen is an anchor. With it come up to
        ``neighbours`` blocks on each side, without a gap, as far as they are remembered; blocks
        chosen before are free. Where this is too much for what is left of ``max_tokens``, the
        anchor comes alone; where even that is too much, it is passed over, and counts as one of the
        ``top_k`` no more.

        Args:
            query: shape (dim,).
            top_k: anchors at most.
            max_tokens: tokens of all blocks together at most; None: no limit.
            threshold: cosine that an anchor must reach; neighbours need not.

        Returns:
            Blocks in reading order within a span; spans and single blocks in the order in which
            their first block was remembered. Nothing is forgotten: the caller does that for what
            it brings back.

        Raises:
            ValueError: a query that is not finite or of another dimension.
        """
        similarity = self._similarities(query)
        ranked = [key for key in self._entries if similarity[key] >= threshold]
        ranked.sort(key=lambda key: (-similarity[key], -self._entries[key].order))
        left = float("inf") if max_tokens is None else max_tokens
        chosen: dict[bytes, bool] = {}
        anchors = 0
        for key in ranked:
            if anchors >= top_k:
                break
            if key in chosen:
                continue
            for wanted in (self._around(key, neighbours), [key]):
                new = [each for each in wanted if each not in chosen]
                cost = sum(self._entries[each].tokens for each in new)
                if cost <= left:
                    left -= cost
                    chosen.update({each: each == key for each in new})
                    anchors += 1
                    break
        return [Recalled(key, similarity[key], chosen[key]) for key in self._reading_order(chosen)]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings, free rows included."""
        return self._units.nbytes

    def _similarities(self, query: npt.ArrayLike) -> dict[bytes, float]:
        """The cosine of every block to the query, in steps; 0 where one of them has no direction.

        Row by row: a block's cosine must not depend on the rows around it, as it may in a matmul.
        """
        found = np.array(query, dtype=np.float64)
        if found.shape != (self.dim,) or not np.isfinite(found).all():
            raise ValueError(f"a query must be {self.dim} finite numbers, got {found.shape}")
        unit = _unit(found).astype(np.float64)
        cosines = np.zeros(len(self._units))
        for at in range(0, len(cosines), _ROWS_AT_ONCE):
            rows = self._units[at : at + _ROWS_AT_ONCE].astype(np.float64)
            cosines[at : at + len(rows)] = (rows * unit).sum(axis=1)
        stepped = np.rint(np.clip(cosines, -1.0, 1.0) * SIMILARITY_STEPS) / SIMILARITY_STEPS
        return {key: float(stepped[entry.row]) for key, entry in self._entries.items()}

    def _around(self, key: bytes, neighbours: int) -> list[bytes]:
        """The block and its remembered neighbours on both sides, up to the first gap."""
        entry = self._entries[key]
        found = [key]
        if entry.span is not None:
            for step in (-1, 1):
                for distance in range(1, neighbours + 1):
                    near = self._places.get((entry.span, entry.position + step * distance))
                    if near is None:
                        break
                    found.append(near)
        return found

    def _reading_order(self, chosen: dict[bytes, bool]) -> list[bytes]:
        oldest_first = sorted(chosen, key=lambda key: self._entries[key].order)
        spans: dict[Hashable, list[bytes]] = {}
        for key in oldest_first:
            span = self._entries[key].span
            spans.setdefault(("alone", key) if span is None else ("span", span), []).append(key)
        return [
            key
            for keys in spans.values()
            for key in sorted(keys, key=lambda key: self._entries[key].position)
        ]

    def _new_row(self) -> int:
        """A row for one more embedding; the matrix doubles, up to ``capacity``."""
        used = len(self._entries)
        if used == len(self._units):
            grown = np.zeros((min(self.capacity, max(64, 2 * used)), self.dim), dtype=np.float32)
            grown[:used] = self._units
            self._units = grown
        return used


def _unit(vector: Array) -> Array:
    """Scale to length 1 as float32; by the largest element first, so that no square overflows."""
    largest = np.abs(vector).max()
    if largest == 0.0:
        return np.zeros(len(vector), dtype=np.float32)
    scaled = vector / largest
    found: Array = (scaled / np.sqrt((scaled * scaled).sum())).astype(np.float32)
    return found
