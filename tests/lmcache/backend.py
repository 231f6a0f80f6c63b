# SPDX-License-Identifier: Apache-2.0
"""A backend that treats its dictionary the way LMCache's CPU and disk backends do, without LMCache.

Chunks are named by the letters of the prompt that lead to them: "ab" is the chunk "b" behind "a".
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from evoke_core import EvokeConfig
from evoke_lmcache.guarded import GuardedRetention
from evoke_lmcache.retention import Retention


@define(frozen=True)
class Key:
    """What LMCache's ``CacheEngineKey`` is to a policy."""

    chunk_hash: int
    path: str = field(eq=False)
    request_configs: Mapping[str, Any] | None = field(default=None, eq=False)
    model_name: str = "model"
    world_size: int = 1
    worker_id: int = 0
    dtype: str = "half"
    tags: tuple[tuple[str, str], ...] | None = None


@define(frozen=True)
class LayerKey(Key):
    layer_id: int = 0


@define(eq=False)
class Object:
    """What LMCache's memory objects are to a policy: held by pins and references."""

    pins: int = 0
    references: int = 1

    @property
    def can_evict(self) -> bool:
        return self.pins == 0 and self.references == 1

    def get_ref_count(self) -> int:
        return self.references


def number(path: str) -> int:
    """A hash of a prompt's head, as LMCache chains them; the same on every run."""
    value = 0
    for letter in path:
        value = (value * 1_000_003 + ord(letter)) & (2**61 - 1)
    return value


def keys(path: str, configs: Mapping[str, Any] | None = None, **fields: Any) -> list[Key]:
    """The keys of a prompt, head first; one letter is one chunk."""
    heads = (path[: end + 1] for end in range(len(path)))
    return [Key(number(head), head, configs, **fields) for head in heads]


class Backend:
    """LMCache's CPU backend (``disk``: its disk backend), with room for so many chunks."""

    def __init__(
        self, capacity: int, *, disk: bool = False, settings: Any = None, **options: Any
    ) -> None:
        self.capacity = capacity
        self.disk = disk
        self.complaints: list[str] = []
        self.retention = Retention(
            settings or EvokeConfig(policy="scored", recency_half_life=16.0), **options
        )
        self.guarded = GuardedRetention(
            self.retention, lambda line: self.complaints.append(traceback.format_exc())
        )
        self.chunks = self.guarded.mapping
        self.evicted: list[str] = []
        self._writing: list[Key] = []

    # --- what an engine does ---

    def look_up(self, path: str, configs: Mapping[str, Any] | None = None, **fields: Any) -> int:
        """Look a prompt up and pin what is found; report the hits tail first."""
        found = []
        for key in keys(path, configs, **fields):
            if key not in self.chunks:
                break
            self.chunks[key].pins += 1
            found.append(key)
        for key in reversed(found):
            self.guarded.hit(key)
        return len(found)

    def unpin(self, path: str, n: int) -> None:
        for key in keys(path)[:n]:
            if key in self.chunks:
                self.chunks[key].pins -= 1

    def store(
        self, path: str, configs: Mapping[str, Any] | None = None, *, start: int = 0, **fields: Any
    ) -> int:
        """Allocate for all chunks from ``start`` on, then put what there was room for."""
        batch: list[tuple[Key, Object]] = []
        for key in keys(path, configs, **fields)[start:]:
            if not self.make_room(len(batch)):
                break
            batch.append((key, Object(references=2)))
        for key, thing in batch:
            self.put(key, thing)
        for _, thing in batch:
            thing.references -= 1
        return len(batch)

    def serve(self, path: str, configs: Mapping[str, Any] | None = None, **fields: Any) -> int:
        """Serve a request on its own; return how many chunks it found."""
        found = self.look_up(path, configs, **fields)
        self.unpin(path, found)
        self.store(path, configs, start=found, **fields)
        return found

    def make_room(self, wanted: int = 0) -> bool:
        while len(self.chunks) + len(self._writing) + wanted >= self.capacity:
            victims = self.guarded.candidates(self.chunks, 1)
            if not victims:
                return False
            for victim in victims:
                assert victim in self.chunks  # as LMCache's remove()
                self.chunks.pop(victim)
                self.evicted.append(victim.path)
        return True

    def put(self, key: Key, thing: Object) -> None:
        if key in self.chunks:
            return
        if self.disk:
            self.guarded.put(key)
            self._writing.append(key)
        else:
            self.chunks[key] = thing
            self.guarded.put(key)

    def written(self, order: Callable[[list[Key]], Sequence[Key]] = list) -> None:
        """The disk has written what was put, in whatever order its threads finish."""
        for key in order(self._writing):
            if key not in self.chunks:
                self.chunks[key] = Object()
        self._writing.clear()

    def remove(self, key: Key) -> None:
        """Forced, from outside."""
        if key in self.chunks:
            self.chunks.pop(key)

    # --- looking ---

    def resident(self) -> set[str]:
        return {key.path for key in dict.keys(self.chunks)}

    def parent(self, path: str) -> str | None:
        """The parent that the index has for a resident chunk."""
        name = self.retention.index.parent(self._name(path))
        return None if name is None else self._path(name)

    def position(self, path: str) -> int:
        view = self.retention.index.describe(self._name(path))
        assert view is not None
        return view.position

    def order(self) -> list[str]:
        """All that may go, in the order in which it would."""
        return [self._path(name) for name in self.retention.index.candidates(len(self.chunks))]

    def _name(self, path: str) -> bytes:
        return self.retention._names.name(keys(path)[-1])

    def _path(self, name: bytes) -> str:
        return next(p for p in self.resident() if self._name(p) == name)


def check(backend: Backend) -> None:
    """The index holds what the dictionary holds, and nothing went wrong."""
    assert not backend.complaints, backend.complaints[0]
    assert len(backend.retention.index) == len(backend.resident()) == len(backend.retention)
    assert all(backend._name(path) in backend.retention.index for path in backend.resident())
