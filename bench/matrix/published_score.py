"""The seed's published formula, "P1", as its semantics are known: the arm A2p.

Written anew from what is published of it, for comparison only: recency halves every 64 *block
touches* (not requests), a request's head is touched before its tail, every lookup counts as reuse
(not every request), and the lowest score goes, whatever stands behind it. Score of a block:

    priority * (floor + (1 - floor) * (w_recency * 2 ** (-age / half_life)
                                       + w_reuse * (1 - 2 ** -lookups)))

with weights of one half each, and floors by source role. Among equals the block touched longest
ago goes first. Eviction scans the whole pool, as the published one does; the pools of this bench
are small.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

HALF_LIFE = 64
FLOORS = {"system": 0.6, "user": 0.6, "assistant": 0.5}
_W_RECENCY = _W_REUSE = 0.5


@dataclass
class _Block:
    touched: int
    lookups: int = 0
    floor: float = 0.0
    priority: float = 1.0


class PublishedScore:
    """Scores of resident blocks by key; it knows no slots and no capacity."""

    def __init__(self) -> None:
        self._clock = 0
        self._blocks: dict[object, _Block] = {}

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        """Say whether a block is resident."""
        return key in self._blocks

    def looked_up(self, key: object) -> bool:
        """Note a lookup; return whether the block is resident."""
        block = self._blocks.get(key)
        if block is None:
            return False
        block.lookups += 1
        return True

    def touch(self, keys: Iterable[object]) -> None:
        """Note a use of each resident block in the given order; each ticks the clock."""
        for key in keys:
            self._clock += 1
            if (block := self._blocks.get(key)) is not None:
                block.touched = self._clock

    def insert(self, key: object, role: str | None = None, priority: float = 1.0) -> None:
        """Add a block, with what its request says of it."""
        self._clock += 1
        floor = FLOORS.get(role or "", 0.0)
        self._blocks[key] = _Block(self._clock, floor=floor, priority=priority)

    def remove(self, key: object) -> None:
        """Drop a block."""
        del self._blocks[key]

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()

    def lowest(self, count: int, spared: Collection[object]) -> list[object]:
        """Return up to `count` blocks with the lowest scores, those in `spared` left out."""
        ranked = sorted(
            (self._score(block), block.touched, number, key)
            for number, (key, block) in enumerate(self._blocks.items())
            if key not in spared
        )
        return [key for _, _, _, key in ranked[:count]]

    def _score(self, block: _Block) -> float:
        recency = 2.0 ** (-(self._clock - block.touched) / HALF_LIFE)
        reuse = 1.0 - 2.0**-block.lookups
        worth = _W_RECENCY * recency + _W_REUSE * reuse
        return block.priority * (block.floor + (1.0 - block.floor) * worth)
