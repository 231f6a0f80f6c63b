"""Which blocks are pinned, and which pin yields first.

Pins are ordered by the request that set them last, the oldest first, and within a request from its
deepest block up: what stays pinned is closed under parents, because an ancestor of a block is
pinned at least as recently as the block.

Guarantees: setting and dropping a pin costs O(log n); memory stays proportional to the pins.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

_STALE_SLACK = 64


class Pins:
    """Pinned blocks by key."""

    def __init__(self) -> None:
        self._tick: dict[bytes, int] = {}
        self._count: dict[int, int] = {}  # pins by tick
        self._order: list[tuple[int, int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._tick)

    def of(self, tick: int) -> int:
        """Return how many blocks are pinned by the request with this tick."""
        return self._count.get(tick, 0)

    def add(self, keys: Iterable[bytes], tick: int, group: int, start: int) -> None:
        """Pin consecutive blocks of a chain, or renew their pins."""
        for position, key in enumerate(keys, start):
            if self._tick.get(key, -1) < tick:
                self.discard((key,))
                self._tick[key] = tick
                self._count[tick] = self._count.get(tick, 0) + 1
                heappush(self._order, (tick, -position, group, key))
        if len(self._order) > 2 * len(self._tick) + _STALE_SLACK:
            self._order = [each for each in self._order if self._tick.get(each[3]) == each[0]]
            heapify(self._order)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop the pins of blocks, pinned or not."""
        for key in keys:
            tick = self._tick.pop(key, None)
            if tick is not None:
                self._count[tick] -= 1
                if not self._count[tick]:
                    del self._count[tick]

    def surplus(self, limit: int) -> list[bytes]:
        """Drop the pins beyond ``limit``, in order; return their blocks."""
        dropped = []
        while len(self._tick) > limit:
            tick, _, _, key = heappop(self._order)
            if self._tick.get(key) == tick:
                self.discard((key,))
                dropped.append(key)
        return dropped

    def clear(self) -> None:
        self._tick.clear()
        self._count.clear()
        self._order.clear()
