"""What is remembered of blocks that are no longer resident: the history they had.

Guarantees: at most ``limit`` places, first in, first forgotten, every operation O(1) per block. A
block that becomes resident again is taken out of the memory, but its place stays occupied until it
reaches the front. Blocks that left together share one record.
"""

from collections import deque
from collections.abc import Callable

from evoke_core.bulk import delete
from evoke_core.history import Past


class GhostMemory:
    """Histories of blocks that are no longer resident."""

    def __init__(self, on_forget: Callable[[Past, int], None]) -> None:
        self._on_forget = on_forget
        self._entries: dict[bytes, Past] = {}
        self._queue: deque[tuple[Past, list[bytes]]] = deque()
        self._places = 0

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, keys: list[bytes], past: Past, limit: int) -> None:
        """Add blocks that leave together, first to be forgotten first; forget beyond ``limit``."""
        entries = self._entries
        entries.update(dict.fromkeys(keys, past))
        self._queue.append((past, keys[::-1]))
        self._places += len(keys)
        while self._places > limit:
            oldest, reversed_keys = self._queue[0]
            n = min(self._places - limit, len(reversed_keys))
            gone = reversed_keys[-n:]
            del reversed_keys[-n:]
            self._places -= n
            if not reversed_keys:
                self._queue.popleft()
            if oldest.disturbed:  # who came back and left again since has a record of its own
                gone = [key for key in gone if entries.get(key) is oldest]
            delete(entries, gone)
            if gone:
                self._on_forget(oldest, len(gone))

    def recall(self, keys: list[bytes]) -> list[Past | None]:
        """Take blocks out of the memory; return their histories, None for one not remembered."""
        if self._entries.keys().isdisjoint(keys):
            return [None] * len(keys)
        pasts = [self._entries.pop(key, None) for key in keys]
        for past in pasts:
            if past is not None:
                past.disturbed = True
        return pasts

    def clear(self) -> None:
        self._entries.clear()
        self._queue.clear()
        self._places = 0
