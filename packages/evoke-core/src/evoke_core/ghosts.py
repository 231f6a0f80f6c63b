"""What is remembered of evicted blocks: how many distinct requests had touched them.

Guarantees: at most ``limit`` entries, first evicted first forgotten, every operation O(1). A block
that becomes resident again is taken out of the memory, but its place in the queue stays occupied
until it reaches the front, which keeps the queue a plain deque of keys.
"""

from collections import deque

# An entry packs the serial number of its place in the queue above the count.
_COUNT_BITS = 6
_COUNT_MASK = (1 << _COUNT_BITS) - 1


class GhostMemory:
    """Reuse counts of blocks that are no longer resident."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._queue: deque[bytes] = deque()
        self._front = 0  # serial number of the queue's first place

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, keys: list[bytes], count: int, limit: int) -> None:
        """Add evicted blocks, all with the same ``count`` (below 64), then forget beyond ``limit``.

        Precondition: none of the keys is in the memory.
        """
        entries, queue = self._entries, self._queue
        first = self._front + len(queue) << _COUNT_BITS | count
        step = 1 << _COUNT_BITS
        entries.update(zip(keys, range(first, first + step * len(keys), step), strict=True))
        queue.extend(keys)
        end = self._front + max(0, len(queue) - limit)
        for place in range(self._front, end):
            key = queue.popleft()
            entry = entries.pop(key, None)
            if entry is not None and entry >> _COUNT_BITS != place:
                entries[key] = entry  # it came back and left again since: a later place is its own
        self._front = end

    def recall(self, keys: list[bytes]) -> list[int]:
        """Take blocks out of the memory; return their counts, 0 for one that is not remembered."""
        if self._entries.keys().isdisjoint(keys):
            return [0] * len(keys)
        return [self._entries.pop(key, 0) & _COUNT_MASK for key in keys]

    def clear(self) -> None:
        self._entries.clear()
        self._front += len(self._queue)
        self._queue.clear()
