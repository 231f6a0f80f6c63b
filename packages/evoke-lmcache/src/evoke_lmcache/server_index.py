"""What happens in an LMCache server, translated to the retention index.

A server keeps objects: one per chunk, rank and object group. They are worth something together, so
the index files chunks. A lookup names a request and all chunks of its prompt, head first: nothing
has to be guessed. Requests end, and say so.

Events travel through a queue that drops them when it is full. So nothing here takes an event for
granted: what was missed is found when a later request uses the chunk, or when LMCache says that an
object to be evicted is not there.

Guarantees: memory is bounded by what the server holds and by ``MAX_CHAINS``; unknown objects,
requests and repeated events are harmless. Not thread-safe: the module holds a lock.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

from evoke_core import EvokeConfig, RequestTags, RetentionIndex, TagProblem
from evoke_lmcache.lineage import ROOT, Lineage

MAX_CHAINS = 4_096
"""Requests that may be open at a time; the oldest are closed beyond it."""

CAPACITY = "capacity"


@define(eq=False)
class _Request:
    request_id: str
    chain: list[bytes]
    at: dict[bytes, int]


@define
class Counters:
    """Chunks since construction, and events."""

    requests: int = 0
    looked_up: int = 0
    found: int = 0
    stored: int = 0
    evicted: int = 0
    removed: int = 0
    recovered: int = 0
    stale: int = 0


@define(eq=False)
class _Chunk:
    objects: dict[Any, None] = field(factory=dict)


class ServerIndex:
    """Which chunks a server holds, and which go first.

    Args:
        config: the operator's settings.
        tokens_per_chunk: the server's chunk size.
        warn: told once per kind of tag that cannot be used.
    """

    def __init__(
        self,
        config: EvokeConfig,
        *,
        tokens_per_chunk: int = 256,
        warn: Callable[[TagProblem], None] = lambda problem: None,
    ) -> None:
        self.config = config
        self.index = RetentionIndex(config)
        self.counters = Counters()
        self.tags_ignored: dict[TagProblem, int] = {}
        self._tokens_per_chunk = tokens_per_chunk
        self._warn = warn
        self._lineage = Lineage()
        self._chunks: dict[bytes, _Chunk] = {}
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._open: dict[bytes, str] = {}  # chunk -> the latest open request that has it
        self._leaving: set[bytes] = set()
        self._locked: set[bytes] = set()
        self._strangers = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def objects(self) -> int:
        """How many objects are known to be there."""
        return sum(len(chunk.objects) for chunk in self._chunks.values())

    # --- requests ---

    def lookup(
        self,
        request_id: str,
        namespace: tuple[str, str],
        hashes: Sequence[bytes],
        params: Mapping[str, Any] | None,
        now: float | None,
        *,
        counted: bool = True,
    ) -> None:
        """A request has looked up its prompt: model and salt, its chunks' hashes, its tags.

        ``counted``: what it finds here is what it has found, nothing having been stored since.
        """
        names = [name_of(namespace, digest) for digest in hashes]
        if not names:
            return
        tags, problems = RequestTags.from_transfer_params(
            params, tokens_per_block=self._tokens_per_chunk
        )
        for problem in problems:
            if problem not in self.tags_ignored:
                self._warn(problem)
            self.tags_ignored[problem] = self.tags_ignored.get(problem, 0) + 1
        self._begin(request_id, names, tags, now)
        found = next((n for n, name in enumerate(names) if name not in self._chunks), len(names))
        self.counters.requests += 1
        if counted:
            self.counters.looked_up += len(names)
            self.counters.found += found

    def _begin(
        self, request_id: str, names: list[bytes], tags: RequestTags, now: float | None
    ) -> _Request:
        self.ended(request_id)
        if len(self._requests) >= MAX_CHAINS:
            self.ended(next(iter(self._requests)))
        request = _Request(request_id, names, {name: at for at, name in enumerate(names)})
        self._requests[request_id] = request
        self._open.update(dict.fromkeys(names, request_id))
        for above, name in zip([ROOT, *names[:-1]], names, strict=True):
            self._lineage.learn(name, above, sure=True)
        self.index.open(request_id, tags, now)
        self.index.touch(request_id, names)
        return request

    def ended(self, request_id: str) -> None:
        """A request is over."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for name in request.chain:
            if self._open.get(name) == request_id:
                del self._open[name]
        self.index.close(request_id)

    # --- objects ---

    def written(self, keys: Iterable[Any]) -> None:
        """These objects are there."""
        self._note(keys, recovered=False)

    def accessed(self, keys: Iterable[Any]) -> None:
        """A request that is over had these objects, as far as they are still there.

        What is not known was written while events were lost, or is gone: it counts as there until
        LMCache says otherwise.
        """
        keys = list(keys)
        unknown = [key for key in keys if not self._knows(key)]
        if unknown:
            self._note(unknown, recovered=True)

    def _knows(self, key: Any) -> bool:
        chunk = self._chunks.get(name_of_key(key))
        return chunk is not None and key in chunk.objects

    def _note(self, keys: Iterable[Any], *, recovered: bool) -> None:
        fresh: list[bytes] = []
        for key in keys:
            name = name_of_key(key)
            chunk = self._chunks.get(name)
            if chunk is None:
                chunk = self._chunks[name] = _Chunk()
                fresh.append(name)
            chunk.objects[key] = None
        self._file(fresh)
        self.counters.stored += len(fresh)
        if recovered:
            self.counters.recovered += len(fresh)

    def _file(self, names: list[bytes]) -> None:
        """Make chunks resident, each behind its parent as far as that is known."""
        strangers: list[bytes] = []
        batches: dict[str, list[int]] = {}
        for name in names:
            request_id = self._open.get(name)
            if request_id is None:
                strangers.append(name)
            else:
                batches.setdefault(request_id, []).append(self._requests[request_id].at[name])
        for request_id, positions in batches.items():
            chain = self._requests[request_id].chain
            for start, end in _stretches(sorted(positions)):
                self.index.insert(request_id, chain[start:end], start=start)
        # Written by no open request: generated, prefetched late, or its lookup was lost.
        for name in strangers:
            if self._lineage.parent(name) is None:
                above = strangers[strangers.index(name) - 1] if name != strangers[0] else ROOT
                self._lineage.learn(name, above, sure=False)
        while strangers:
            chain, _ = self._lineage.chain(strangers[-1])
            self._strangers += 1
            request_id = f"\0{self._strangers}"
            self.index.open(request_id)
            self.index.touch(request_id, chain)
            wanted = set(strangers)
            for at, name in enumerate(chain):
                if name in wanted:
                    self.index.insert(request_id, [name], start=at)
            self.index.close(request_id)
            strangers = [name for name in strangers if name not in self.index]

    def gone(self, keys: Iterable[Any]) -> None:
        """These objects are not there any more."""
        for key in keys:
            name = name_of_key(key)
            chunk = self._chunks.get(name)
            if chunk is None or key not in chunk.objects:
                continue
            del chunk.objects[key]
            if not chunk.objects:
                self._drop(name)

    def _drop(self, name: bytes) -> None:
        del self._chunks[name]
        if name in self._leaving:
            self._leaving.discard(name)
            self.index.drop(name, CAPACITY)
            self.counters.evicted += 1
        else:
            self.index.drop(name, "engine")
            self.counters.removed += 1

    def stale(self, name: bytes) -> None:
        """LMCache does not have what was taken to be there."""
        if name in self._chunks:
            del self._chunks[name]
            self._leaving.discard(name)
            self.index.drop(name, "engine")
            self.counters.stale += 1

    # --- eviction ---

    def candidates(self, n: int) -> list[tuple[bytes, list[Any]]]:
        """Return up to ``n`` chunks with their objects, in the order in which they should go.

        Those of open requests come last; those that LMCache has refused to delete not at all,
        until :meth:`unlock`.
        """

        def free(name: bytes) -> bool:
            return name not in self._locked and name not in self._leaving

        def idle(name: bytes) -> bool:
            return free(name) and name not in self._open

        names = self.index.candidates(n, idle)
        if not names:
            names = self.index.candidates(n, free)
        return [(name, list(self._chunks[name].objects)) for name in names]

    def oldest(self, n: int) -> list[tuple[bytes, list[Any]]]:
        """Return up to ``n`` chunks in the order in which they came: for when ranking fails."""
        names = [name for name in self._chunks if name not in self._locked][:n]
        return [(name, list(self._chunks[name].objects)) for name in names]

    def leaving(self, name: bytes) -> None:
        """A chunk is about to be deleted for want of room."""
        self._leaving.add(name)

    def lock(self, name: bytes) -> None:
        """LMCache has refused to delete some of a chunk's objects: somebody reads them."""
        self._leaving.discard(name)
        self._locked.add(name)

    def unlock(self) -> None:
        """Try again what was refused."""
        self._locked.clear()

    def start_over(self) -> None:
        """The server was emptied."""
        self._chunks.clear()
        self._leaving.clear()
        self._locked.clear()
        self.index.clear()


def name_of(namespace: tuple[str, str], digest: bytes) -> bytes:
    """Name a chunk by the model, the salt and the hash of its prefix."""
    space = "\0".join(namespace).encode()
    return hashlib.blake2b(space, digest_size=8).digest() + digest


def name_of_key(key: Any) -> bytes:
    """Name the chunk that an object belongs to."""
    return name_of((key.model_name, key.cache_salt), key.chunk_hash)


def _stretches(positions: list[int]) -> Iterable[tuple[int, int]]:
    """Part ascending positions into consecutive stretches, ends exclusive."""
    start = previous = positions[0]
    for position in positions[1:]:
        if position != previous + 1:
            yield start, previous + 1
            start = position
        previous = position
    yield start, previous + 1
