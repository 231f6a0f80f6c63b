"""What an LMCache backend does to its dictionary, translated to the retention index.

LMCache tells a cache policy of puts and hits, one key at a time. Which request is behind them,
where in the prompt a chunk stands and what comes before it is not said, but can be seen:

- A lookup walks a prompt from its head and stops at the first chunk that is missing. Then the
  chunks found are reported as hits in one go, tail first. So the order of the hits is the chain,
  and the chunk that was missed follows the last one found, or begins the prompt.
- A store puts chunks head first, one batch per call; the objects of a batch stay referenced until
  the batch is complete, so a batch's end can be told. The next batch of a chunked prefill, which
  nobody looks up, belongs to the newest request that has begun to store. But when that one has
  stored one small batch, and the one before it has just stored a full one, they share a step of
  the scheduler: new requests are stored first, the last part of the running one follows.
- All of a request's keys carry the same ``request_configs``: its tags. Where one process schedules
  and stores, even the same object on every store; another object says nothing.

A wrong guess is possible only between requests that store at the same time and have the same
tags (or none), in different objects. It is put right by the first lookup that finds the chunks.

Guarantees: the index holds exactly the chunks that the dictionary holds; a request counts once per
chunk; ``candidates`` changes nothing that decides later ones; memory is bounded. All calls may come
from several threads, one lock serialises them. Nothing here knows LMCache's types.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from evoke_core import EvokeConfig, RequestTags, RetentionIndex, TagProblem
from evoke_lmcache.lineage import ROOT, Lineage
from evoke_lmcache.naming import Names

MAX_STREAMS = 256
"""Requests kept open, because LMCache never says that one has ended."""

MAX_THREADS = 64
MAX_PLACED = 65_536
PATIENCE = 8
"""Empty answers after which a request's own chain is no longer protected from itself."""

CAPACITY = "capacity"
_EVICTED, _REMOVED = "evicted", "removed"


@define(eq=False)
class _Stream:
    """One request, as far as it can be told.

    Attributes:
        chain: its chunks, head first, the first one at position ``start``.
        looked_up: it began with a lookup, so that more of its chunks may be stored later.
        stored: something of it was put.
        ends: the request ends its session.
        batches: how many it has stored.
        batch: chunks of the last one.
        stored_at: number of the last one.
        stored_with: the tags it came with, the object itself.
    """

    request_id: str
    configs: Mapping[str, Any] | None
    chain: list[bytes]
    start: int
    looked_up: bool
    ends: bool
    batches: int = 0
    batch: int = 0
    stored_at: int = 0
    stored_with: Mapping[str, Any] | None = None

    @property
    def stored(self) -> bool:
        return self.batches > 0

    @property
    def end(self) -> int:
        return self.start + len(self.chain)


@define(eq=False)
class _Chunk:
    """A resident chunk: the keys it is filed under (one, or one per layer), and where it stands."""

    position: int
    parent: bytes | None
    request_id: str
    keys: dict[Any, None] = field(factory=dict)


@define(eq=False)
class _Thread:
    """What one thread did last.

    Attributes:
        missed: a chunk it looked for in vain, with its key, until what follows says why.
        missed_known: whether that chunk's parent was known.
        bare, bare_key: the chunk it has just found and not used.
        noted: the chunk that has been taken for a duplicate last.
        duplicate: ``bare_key``, when it missed.
        from_head: the chunks it has just found, and not used, begin a prompt.
        before: the chunk it had found, and not used, just before it missed.
        unpinned: it missed at the end of such a walk from a prompt's head.
        walked: it has found and used chunks since it last reported hits, missed or put.
        after_walk: ``walked``, when it missed.
        put: the chunk and key that it put last.
    """

    missed: tuple[bytes, Any] | None = None
    missed_known: bool = False
    bare: bytes | None = None
    bare_key: Any = None
    noted: bytes | None = None
    from_head: bool = False
    before: bytes | None = None
    duplicate: Any = None
    unpinned: bool = False
    walked: bool = False
    after_walk: bool = False
    put: tuple[bytes, Any] | None = None


@define
class Counters:
    """Chunks since construction."""

    stored: int = 0
    evicted: int = 0
    removed: int = 0
    hits: int = 0
    requests: int = 0
    refiled: int = 0


class Retention:
    """Follows one backend's dictionary and ranks what is in it.

    Args:
        config: the operator's settings.
        tokens_per_chunk: LMCache's chunk size, in which spans of tokens are read.
        lineage, names: shared by the backends of a process, which see the same chunks.
        lock: shared with everything that shares the lineage.
        clock: seconds, read once per request.
        warn: told once per kind of tag that cannot be used.
    """

    def __init__(
        self,
        config: EvokeConfig,
        *,
        tokens_per_chunk: int = 256,
        lineage: Lineage | None = None,
        names: Names | None = None,
        lock: "threading.RLock | None" = None,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[TagProblem], None] = lambda problem: None,
    ) -> None:
        self.config = config
        self.tokens_per_chunk = tokens_per_chunk
        self.index = RetentionIndex(config)
        self.counters = Counters()
        self.tags_ignored: dict[TagProblem, int] = {}
        self.lock = threading.RLock() if lock is None else lock
        self._lineage = Lineage() if lineage is None else lineage
        self._names = Names() if names is None else names
        self._clock = clock
        self._warn = warn
        self._chunks: dict[bytes, _Chunk] = {}
        self._placed: OrderedDict[bytes, tuple[_Stream, int]] = OrderedDict()
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._tails: dict[bytes, list[_Stream]] = {}
        self._threads: OrderedDict[int, _Thread] = OrderedDict()
        self._run: deque[bytes] = deque()
        self._run_configs: Mapping[str, Any] | None = None
        self._run_world = 1
        self._run_echo = False
        self._run_missed = False
        # What looked its prompt up last and missed some of it, or has stored since.
        self._newest: _Stream | None = None
        self._batch: _Stream | None = None  # whose batch was put last
        self._batches = 0
        self._full_batch = 0  # chunks that a step of a chunked prefill stores
        self._offered: set[bytes] = set()
        self._refusals = 0

    # --- what happens to the dictionary ---

    def looked(self, key: Any, found: bool) -> None:
        """Somebody asked whether ``key`` is there."""
        self._close_run()
        name, thread = self._names.name(key), self._thread()
        previous, was_known = thread.missed, thread.missed_known
        self._explain_miss(thread)
        self._note_duplicate(thread)
        if found:
            parent = self._lineage.parent(name)
            thread.from_head = parent == ROOT or (thread.from_head and parent == thread.bare)
            thread.bare, thread.bare_key, thread.noted = name, key, None
            return
        known = self._lineage.parent(name) is not None
        if (
            previous is not None
            and was_known
            and not known
            and hasattr(key, "layer_id")
            and previous[0] != name
        ):
            # A layerwise store asks for all it wants to store before it puts anything.
            self._lineage.learn(name, previous[0], sure=False)
            known = True
        thread.missed, thread.missed_known = (name, key), known
        thread.before, thread.bare = thread.bare, None
        thread.duplicate = thread.bare_key
        thread.unpinned = thread.before is not None and thread.from_head
        thread.after_walk, thread.walked = thread.walked, False

    def used(self, key: Any) -> None:
        """Somebody took the object of ``key`` out to read or to pin it."""
        self._close_run()
        thread = self._thread()
        thread.bare, thread.walked = None, True

    def stored(self, key: Any, mapping: Mapping[Any, Any]) -> None:
        """``key`` is in the dictionary now and was not before."""
        self._close_run()
        name = self._names.name(key)
        thread = self._thread()
        chunk = self._chunks.get(name)
        if chunk is None:
            placed = self._placed.pop(name) if name in self._placed else None
            stream, position = placed or self._place(name, key, thread, mapping)
            self._file(name, key, stream, position)
        else:
            chunk.keys[key] = None
        self._note_put(thread, name, key)

    def put(self, key: Any, mapping: Mapping[Any, Any]) -> None:
        """LMCache says that it puts ``key``; some backends say so before it is there."""
        self._close_run()
        name, thread = self._names.name(key), self._thread()
        if name not in self._chunks and name not in self._placed:
            self._placed[name] = self._place(name, key, thread, mapping)
            if len(self._placed) > MAX_PLACED:
                self._placed.popitem(last=False)
        self._note_put(thread, name, key)

    def hit(self, key: Any) -> None:
        """LMCache says that a request uses ``key``."""
        name, thread = self._names.name(key), self._thread()
        run = self._run
        if not run:
            self._run_missed = thread.missed is not None
            if thread.missed is not None:
                self._lineage.learn(thread.missed[0], name, sure=True)
                thread.missed = None
            self._run_configs = _configs(key)
            self._run_world = getattr(key, "world_size", 1)
            self._run_echo = thread.bare == name
            run.append(name)
        elif name == run[0] or name == run[-1]:
            pass  # another layer of the same chunk
        elif self._lineage.parent(name) == run[-1]:
            run.append(name)  # a backend that reports hits head first
        else:
            self._lineage.learn(run[0], name, sure=True)
            run.appendleft(name)
        thread.bare, thread.walked = None, False

    def gone(self, key: Any) -> None:
        """``key`` has left the dictionary."""
        self._close_run()
        self._thread().bare = None  # it was asked for to be removed
        name = self._names.name(key)
        chunk = self._chunks.get(name)
        if chunk is None or key not in chunk.keys:
            return
        del chunk.keys[key]
        if chunk.keys:
            return
        del self._chunks[name]
        if name in self._offered:
            self._offered.discard(name)
            self.index.drop(name, CAPACITY)
            self.counters.evicted += 1
        else:
            self.index.drop(name, "engine")
            self.counters.removed += 1

    def cleared(self) -> None:
        """The dictionary was emptied in one go."""
        self._close_run()
        self.counters.removed += len(self._chunks)
        self._chunks.clear()
        self._placed.clear()
        self.index.clear()

    # --- whom to evict ---

    def candidates(self, mapping: Mapping[Any, Any], n: int) -> list[Any]:
        """Return up to ``n`` keys, one per chunk, in the order in which they should go.

        Chunks that LMCache holds (pinned or referenced) are passed over, and with them what they
        depend on. So is the chain of the request that is probably asking, unless it has been
        answered with nothing ``PATIENCE`` times.
        """
        self._close_run()
        own_thread = self._thread()
        for thread in self._threads.values():
            # Another thread may be between its lookup and the report of what it found.
            if thread is own_thread or not thread.after_walk:
                self._explain_miss(thread)
        self._note_duplicate(own_thread)
        if n <= 0:
            return []

        def eligible(name: bytes) -> bool:
            chunk = self._chunks.get(name)
            return chunk is not None and all(_evictable(mapping, key) for key in chunk.keys)

        own = self._asking()
        names = self.index.candidates(n, eligible, protect=own)
        if names:
            self._refusals = 0
        elif own is not None:
            self._refusals += 1
            if self._refusals >= PATIENCE:
                self._refusals = 0
                names = self.index.candidates(n, eligible)
        self._offered = set(names)
        return [next(iter(self._chunks[name].keys)) for name in names]

    def __len__(self) -> int:
        return len(self._chunks)

    # --- requests ---

    def _thread(self) -> _Thread:
        number = threading.get_ident()
        thread = self._threads.get(number)
        if thread is None:
            thread = self._threads[number] = _Thread()
            if len(self._threads) > MAX_THREADS:
                self._threads.popitem(last=False)
        return thread

    def _explain_miss(self, thread: _Thread) -> None:
        """The thread missed a chunk, and no hits follow: a request that found nothing."""
        if thread.missed is None:
            return
        (name, key), thread.missed = thread.missed, None
        if thread.unpinned:
            return  # a lookup that nobody counts
        self._lineage.learn(name, ROOT, sure=False)
        parent, configs = self._lineage.parent(name), _configs(key)
        stream = self._stream_at(name, configs)
        if stream is None and parent not in (None, ROOT):
            stream = self._stream_at(parent or ROOT, configs)
        if stream is None:
            world = getattr(key, "world_size", 1)
            stream = self._open(name, configs, world, looked_up=True)
        self._newest = stream

    def _note_duplicate(self, thread: _Thread) -> None:
        """The thread has found a chunk and not used it: it wanted to put it, and it was there."""
        name = thread.bare
        if name is None or thread.bare_key is None or thread.noted == name:
            return
        configs, thread.noted = _configs(thread.bare_key), name
        parent = self._lineage.parent(name)
        stream = self._stream_at(name, configs)  # looked up and missed
        if stream is None and parent not in (None, ROOT):
            stream = self._stream_at(parent or ROOT, configs)
            if stream is not None:
                self._extend(stream, [name])
        if stream is not None and not stream.stored:
            stream.batches, stream.stored_at = 1, self._batches  # it has begun to store

    def _close_run(self) -> None:
        """The hits of one lookup are complete: a request uses these chunks."""
        if not self._run:
            return
        names = list(self._run)
        self._run.clear()
        configs, world = self._run_configs, self._run_world
        self.counters.hits += len(names)
        if self._run_echo and len(names) == 1:
            # Read after it was looked up: the same request, if it is still known.
            chunk = self._chunks.get(names[0])
            if chunk is not None and chunk.request_id in self._streams:
                return
        parent = self._lineage.parent(names[0])
        if parent is None:
            self._lineage.learn(names[0], ROOT, sure=False)
            parent = ROOT
        stream = self._stream_at(parent, configs, unstored=True)
        if stream is None:
            stream = self._open(names[0], configs, world, looked_up=True)
            names = names[1:]
        if names:
            self._extend(stream, names)
        self._put_right(stream)
        for name in stream.chain:
            if (chunk := self._chunks.get(name)) is not None:
                chunk.request_id = stream.request_id
        self._newest = stream if self._run_missed else None

    def _open(
        self, name: bytes, configs: Mapping[str, Any] | None, world: int, *, looked_up: bool
    ) -> _Stream:
        """Begin a request whose chain leads to ``name``; all of it counts as used."""
        for ended in [stream for stream in self._streams.values() if stream.ends]:
            self._close(ended)
        if len(self._streams) >= MAX_STREAMS:
            self._close(next(iter(self._streams.values())))
        tags, problems = RequestTags.from_transfer_params(
            configs, tokens_per_block=self.tokens_per_chunk
        )
        for problem in problems:
            self._ignore(problem)
        # Ranks that decide apart must not see different times.
        now = self._clock() if world == 1 else None
        if now is None:
            for tag in ("ttl_s", "expect_reuse_in_s"):
                if getattr(tags, tag) is not None:
                    self._ignore(TagProblem(tag, "ranks have no common clock"))
            if any(span.ttl_s is not None for span in tags.spans):
                self._ignore(TagProblem("spans.ttl_s", "ranks have no common clock"))
        self.counters.requests += 1
        request_id = f"{self.counters.requests}"
        self.index.open(request_id, tags, now)
        chain, start = self._path(name)
        stream = _Stream(
            request_id, configs, chain, start, looked_up=looked_up, ends=tags.end_of_session
        )
        self._streams[request_id] = stream
        self._tails.setdefault(name, []).append(stream)
        self.index.touch(request_id, chain, start=start)
        return stream

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        self._leave_tail(stream)
        self.index.close(stream.request_id)
        if self._newest is stream:
            self._newest = None
        if self._batch is stream:
            self._batch = None

    def _extend(self, stream: _Stream, names: list[bytes]) -> None:
        self._leave_tail(stream)
        start = stream.end
        stream.chain += names
        self._tails.setdefault(names[-1], []).append(stream)
        self.index.touch(stream.request_id, names, start=start)

    def _leave_tail(self, stream: _Stream) -> None:
        tail = stream.chain[-1]
        waiting = self._tails[tail]
        waiting.remove(stream)
        if not waiting:
            del self._tails[tail]

    def _stream_at(
        self, tail: bytes, configs: Mapping[str, Any] | None, *, unstored: bool = False
    ) -> _Stream | None:
        """Return the newest request with these tags whose chain ends with ``tail``."""
        for stream in reversed(self._tails.get(tail, ())):
            if stream.configs == configs and not (unstored and stream.stored):
                return stream
        return None

    def _stream_above(
        self, name: bytes, configs: Mapping[str, Any] | None
    ) -> tuple[_Stream | None, list[bytes]]:
        """Return the request with these tags that ends nearest above a chunk, and what comes
        between, the chunk included: some of it may have been stored by others meanwhile."""
        chain, _ = self._lineage.chain(name)
        for at in range(len(chain) - 2, -1, -1):
            stream = self._stream_at(chain[at], configs)
            if stream is not None:
                return stream, chain[at + 1 :]
        return None, []

    def _path(self, name: bytes) -> tuple[list[bytes], int]:
        """Return the chain up to ``name``, head first, and the position of its first chunk."""
        chain, rooted = self._lineage.chain(name)
        if not rooted and (chunk := self._chunks.get(chain[0])) is not None:
            return chain, chunk.position  # the links above it are forgotten
        return chain, 0

    def _asking(self) -> str | None:
        """Return the request that memory is probably wanted for."""
        newest = self._newest
        return newest.request_id if newest is not None and newest.looked_up else None

    def _ignore(self, problem: TagProblem) -> None:
        if problem not in self.tags_ignored:
            self._warn(problem)
        self.tags_ignored[problem] = self.tags_ignored.get(problem, 0) + 1

    # --- chunks ---

    def _place(
        self, name: bytes, key: Any, thread: _Thread, mapping: Mapping[Any, Any]
    ) -> tuple[_Stream, int]:
        """Find the request that stores a chunk, and the chunk's position."""
        configs = _configs(key)
        for other in self._threads.values():
            if other is not thread and other.missed is not None and other.missed[0] == name:
                self._explain_miss(other)
        ongoing = self._ongoing(thread, mapping, configs)
        stream = self._stream_at(name, configs)  # looked up and missed
        if stream is None:
            parent, looked_up = self._lineage.parent(name), True
            if parent is None:
                parent = self._guess_parent(name, thread, configs, ongoing)
                looked_up = parent is not None
            self._lineage.learn(name, parent or ROOT, sure=False)
            stream, between = self._stream_above(name, configs)
            if stream is None:
                world = getattr(key, "world_size", 1)
                stream = self._open(name, configs, world, looked_up=looked_up)
            else:
                self._extend(stream, between)
        self._note_batch(stream, new=not ongoing or stream is not self._batch)
        stream.stored_with = configs
        if stream.looked_up:
            self._newest = stream
        return stream, stream.end - 1

    def _ongoing(
        self, thread: _Thread, mapping: Mapping[Any, Any], configs: Mapping[str, Any] | None
    ) -> bool:
        """Say whether the batch that the thread has put last may go on with these tags."""
        if thread.put is None:
            return False
        name, key = thread.put
        if _configs(key) is not configs:
            return False  # the keys of a batch share one object
        return name in self._placed or (key in self._keys(name) and _referenced(mapping, key))

    def _note_batch(self, stream: _Stream, *, new: bool) -> None:
        if new:
            self._batches += 1
            stream.batches += 1
            stream.batch = 0
            self._batch = stream
        stream.batch += 1
        stream.stored_at = self._batches

    def _guess_parent(
        self,
        name: bytes,
        thread: _Thread,
        configs: Mapping[str, Any] | None,
        ongoing: bool,
    ) -> bytes | None:
        """Return the chunk that most likely comes before a chunk nobody has looked up."""
        before = thread.before
        if (
            thread.missed is not None
            and thread.missed[0] == name
            and before is not None
            and _configs(thread.duplicate) == configs
            and (configs or self._stream_at(before, None) or self._stream_above(before, None)[0])
        ):
            return before  # the same batch, whose last chunk was there already
        if ongoing and thread.put is not None:
            return thread.put[0]
        storing = [
            stream
            for stream in self._streams.values()
            if stream.looked_up and stream.stored and stream.configs == configs
        ]
        if not storing:
            return None
        if configs is not None:
            for stream in storing:
                if stream.stored_with is configs:
                    return stream.chain[-1]
        newest = storing.pop()
        running = max(storing, key=lambda stream: stream.stored_at, default=None)
        full = self._full_batch - 1  # a chunk more or less is a matter of alignment
        if newest is self._batch and newest.batches == 1:
            if running is not None and newest.batch < full <= running.batch:
                return running.chain[-1]
            self._full_batch = newest.batch
        return newest.chain[-1]

    def _keys(self, name: bytes) -> Mapping[Any, None]:
        chunk = self._chunks.get(name)
        return {} if chunk is None else chunk.keys

    def _file(self, name: bytes, key: Any, stream: _Stream, position: int) -> None:
        if stream.request_id not in self._streams:
            stream = self._open(
                name, stream.configs, getattr(key, "world_size", 1), looked_up=stream.looked_up
            )
            position = stream.end - 1
        parent = self._lineage.parent(name)
        chunk = _Chunk(position, parent, stream.request_id)
        chunk.keys[key] = None
        self._chunks[name] = chunk
        self.index.insert(stream.request_id, [name], start=position)
        self.counters.stored += 1

    def _note_put(self, thread: _Thread, name: bytes, key: Any) -> None:
        if thread.missed is not None and thread.missed[0] == name:
            thread.missed = None
        thread.bare, thread.walked = None, False
        thread.put = (name, key)

    def _put_right(self, stream: _Stream) -> None:
        """File anew what was filed behind the wrong chunk, now that the right one is known."""
        above = ROOT if stream.start == 0 else None
        for position, name in enumerate(stream.chain, stream.start):
            chunk = self._chunks.get(name)
            if chunk is not None and (
                chunk.position != position or (above is not None and chunk.parent != above)
            ):
                self.index.drop(name, "engine")
                chunk.position, chunk.parent = position, above
                self.index.insert(stream.request_id, [name], start=position)
                self.counters.refiled += 1
            above = name


def _configs(key: Any) -> Mapping[str, Any] | None:
    configs = getattr(key, "request_configs", None)
    return configs if isinstance(configs, Mapping) and configs else None


def _referenced(mapping: Mapping[Any, Any], key: Any) -> bool:
    """Say whether somebody beside the dictionary holds the object; a pin alone is no reference."""
    value = mapping.get(key)
    count = getattr(value, "get_ref_count", None)
    return value is not None and (count() > 1 if callable(count) else not _evictable(mapping, key))


def _evictable(mapping: Mapping[Any, Any], key: Any) -> bool:
    value = mapping.get(key)
    return value is not None and bool(getattr(value, "can_evict", True))
