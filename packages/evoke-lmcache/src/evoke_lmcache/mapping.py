"""The dictionary that LMCache keeps its chunks in, with a listener on every change.

LMCache tells a cache policy of some removals and not of others, and of a put before or after it
has happened. What is in the dictionary is the truth, so the dictionary tells.

Guarantees: a dictionary like any other, in insertion order; the listener hears of every key that
comes or goes, once, after it happened; nothing that a listener raises reaches the caller.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

_MISSING = object()


class Listener(Protocol):
    """What is told. None of these may raise."""

    def looked(self, key: Any, found: bool) -> None: ...
    def used(self, key: Any) -> None: ...
    def stored(self, key: Any) -> None: ...
    def gone(self, key: Any) -> None: ...
    def cleared(self) -> None: ...


class ChunkMapping(dict[Any, Any]):
    """A ``dict`` that tells its listener. ``get``, iteration and ``len`` tell nothing."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self._listener.looked(key, found)
        return found

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        self._listener.used(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        new = not super().__contains__(key)
        super().__setitem__(key, value)
        if new:
            self._listener.stored(key)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._listener.gone(key)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        if super().__contains__(key):
            value = super().pop(key)
            self._listener.gone(key)
            return value
        if default is _MISSING:
            raise KeyError(key)
        return default

    def popitem(self) -> tuple[Any, Any]:
        item = super().popitem()
        self._listener.gone(item[0])
        return item

    def clear(self) -> None:
        super().clear()
        self._listener.cleared()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if not super().__contains__(key):
            self[key] = default
        return super().__getitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> "ChunkMapping":  # type: ignore[override,misc]
        self.update(other)
        return self
