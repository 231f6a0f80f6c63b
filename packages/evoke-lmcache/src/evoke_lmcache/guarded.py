"""The retention of one backend, behind a wall: nothing that goes wrong in it leaves.

An exception in a cache policy would end a store, a lookup or an eviction thread of the engine.
Should one happen, it is logged once, with its trace, and the backend goes on with the oldest chunk
first, for which the dictionary's order is enough.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from evoke_lmcache.mapping import ChunkMapping
from evoke_lmcache.retention import Retention

T = TypeVar("T")

COMPLAINT = "EVOKE cannot go on and leaves this backend to first in, first out; please report this"


class GuardedRetention:
    """Listens to a backend's dictionary and answers its cache policy's questions.

    Args:
        retention: what decides.
        complain: called once, with an exception being handled, when it cannot any more.
        show: told after every change, under the lock; what it raises is one such exception.

    Attributes:
        mapping: the dictionary to keep the backend's chunks in.
        failed: whether first in, first out has taken over.
    """

    def __init__(
        self,
        retention: Retention,
        complain: Callable[[str], None],
        show: Callable[[Retention], None] = lambda retention: None,
    ) -> None:
        self.retention = retention
        self.failed = False
        self._complain = complain
        self._show = show
        self.mapping = ChunkMapping(self)

    # --- what the dictionary tells ---

    def looked(self, key: Any, found: bool) -> None:
        self._safely(self.retention.looked, key, found)

    def used(self, key: Any) -> None:
        self._safely(self.retention.used, key)

    def stored(self, key: Any) -> None:
        self._safely(self.retention.stored, key, self.mapping)

    def gone(self, key: Any) -> None:
        self._safely(self.retention.gone, key)

    def cleared(self) -> None:
        self._safely(self.retention.cleared)

    # --- what the backend tells and asks ---

    def hit(self, key: Any) -> None:
        self._safely(self.retention.hit, key)

    def put(self, key: Any) -> None:
        self._safely(self.retention.put, key, self.mapping)

    def candidates(self, chunks: Mapping[Any, Any], n: int) -> list[Any]:
        found = self._safely(self.retention.candidates, chunks, n)
        return oldest_first(chunks, n) if found is None else found

    def _safely(self, act: Callable[..., T], *args: Any) -> T | None:
        if self.failed:
            return None
        try:
            with self.retention.lock:
                answer = act(*args)
                self._show(self.retention)
                return answer
        except Exception:
            self.failed = True
            self._complain(COMPLAINT)
            return None


def oldest_first(chunks: Mapping[Any, Any], n: int) -> list[Any]:
    """Return up to ``n`` keys that may go, in the order in which they came."""
    keys: list[Any] = []
    for key, value in chunks.items():
        if len(keys) >= n:
            break
        if getattr(value, "can_evict", True):
            keys.append(key)
    return keys
