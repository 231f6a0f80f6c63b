"""The protocol that every policy is replayed through, and the adapters behind it.

A request is served in the order in which an engine asks a tier: ``begin`` (how long is the resident
prefix?), then one ``offer`` per prefill chunk, head first, the first one from wherever the resident
prefix ends. There is always at least one offer, so that a policy may do its bookkeeping there.

- :class:`BlockTier` turns requests into accesses of single blocks, for policies that know no
  chains (the rivals). Blocks are accessed tail before head, so that a head is never older than its
  tail; this is what gives the published policies their best numbers on prefixes.
- :class:`LedgerTier` drives a :class:`~evoke_core.ledger.BlockLedger` exactly as an adapter does.
"""

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from evoke_core.ledger import BlockLedger, BlockState
from evoke_core.replay.recorded import RecordedTrace
from evoke_core.replay.trace import Trace
from evoke_core.tags import UNTAGGED, RequestTags

_DRAIN_EVERY = 256  # requests; decisions nobody reads are dropped before they fill memory

TagChooser = Callable[[Trace, int], RequestTags]
"""Says which tags a request carries."""


class Tier(Protocol):
    """A cache that is asked about requests."""

    def begin(self, request: int, chain: list[int], start: int) -> int:
        """Begin a request; return how many blocks from position ``start`` on are resident.

        Blocks before ``start`` are not needed from this tier: a faster one has them.
        """

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        """Offer the blocks at positions ``begin`` to ``end`` of the current request's chain."""

    def end(self) -> None:
        """End the request."""

    def open(self, request: int) -> None:
        """Note that a request arrived, some time before it begins."""

    def resume(self, request: int) -> None:
        """Make a request that has begun the current one: for requests that overlap."""

    def reset(self) -> None:
        """Lose all blocks, as a tier does that is emptied."""


class BlockCache(Protocol):
    """A cache of single blocks."""

    def __contains__(self, block: object) -> bool:
        """Say whether a block is resident."""

    def access(self, block: int) -> None:
        """Note a use of a block; admit it, or not, where it is not resident."""

    def settle(self) -> None:
        """Evict down to the capacity, for caches that do not within ``access``."""


class BlockTier:
    """Requests as accesses of single blocks, tail before head, each block once a request.

    Args:
        cache: an empty one.
        renew: makes another, for ``reset``.
    """

    def __init__(self, cache: BlockCache, *, renew: Callable[[], BlockCache] | None = None) -> None:
        self._cache = cache
        self._renew = renew
        self._request = -1
        self._begun: set[int] = set()  # requests that have offered nothing yet

    def open(self, request: int) -> None:
        pass

    def resume(self, request: int) -> None:
        self._request = request

    def reset(self) -> None:
        if self._renew is None:
            raise NotImplementedError("this cache cannot be emptied")
        self._cache = self._renew()

    def begin(self, request: int, chain: list[int], start: int) -> int:
        self._request = request
        self._begun.add(request)
        cache = self._cache
        hits = 0
        for block in islice(chain, start, None):
            if block not in cache:
                break
            hits += 1
        return hits

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        if self._request in self._begun:  # the resident prefix is used by this request too
            begin = 0
            self._begun.remove(self._request)
        access = self._cache.access
        for block in reversed(chain[begin:end]):
            access(block)
        self._cache.settle()

    def end(self) -> None:
        self._begun.discard(self._request)


class LedgerTier:
    """A block ledger, called as an engine's adapter calls it.

    Args:
        trace: its blocks' keys are made once; share ``keys`` between tiers of one trace.
        tags: what each request carries; by default what was recorded, if anything was.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        trace: Trace,
        *,
        keys: list[bytes] | None = None,
        tags: TagChooser | None = None,
    ) -> None:
        self._ledger = ledger
        self._trace = trace
        self._key = (trace.keys() if keys is None else keys).__getitem__
        self._tags = as_recorded if tags is None else tags
        self._recorded = trace if isinstance(trace, RecordedTrace) else None
        self._id = ""
        self._opened: set[int] = set()

    def open(self, request: int) -> None:
        trace, recorded = self._trace, self._recorded
        now = trace.times[request] if recorded is None else recorded.nows[request]
        self._ledger.open(str(request), self._tags(trace, request), now)
        self._opened.add(request)

    def resume(self, request: int) -> None:
        self._id = str(request)

    def reset(self) -> None:
        self._ledger.reset()

    def begin(self, request: int, chain: list[int], start: int) -> int:
        ledger = self._ledger
        self._id = request_id = str(request)
        keys = list(map(self._key, chain))
        if request not in self._opened:
            self.open(request)
        # No block is resident without its parent, so the end of the prefix can be bisected for.
        low, high = start, len(keys)
        while low < high:
            middle = (low + high) // 2
            if ledger.lookup(request_id, keys[middle]) is BlockState.READY:
                low = middle + 1
            else:
                high = middle
        ledger.touch(request_id, keys)
        return low - start

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        if begin < end:
            ledger = self._ledger
            keys = list(map(self._key, chain[begin:end]))
            grant = ledger.reserve(self._id, keys, start=begin)
            if grant.keys:
                ledger.commit(self._id, grant.keys, ticket=grant.ticket)

    def end(self) -> None:
        self._ledger.close(self._id)
        self._opened.discard(int(self._id))
        if self._ledger.index.clock % _DRAIN_EVERY == 0:
            self._ledger.drain_decisions()


def as_recorded(trace: Trace, request: int) -> RequestTags:
    """Return the tags that were recorded; none where the trace is no server's recording."""
    return trace.tags[request] if isinstance(trace, RecordedTrace) else UNTAGGED


def untagged(trace: Trace, request: int) -> RequestTags:
    """Return no tags, whatever was recorded."""
    return UNTAGGED


def recorded_tags(trace: Trace, request: int) -> RequestTags:
    """Return the tags a truthful client would send: the session and the role, as recorded."""
    if isinstance(trace, RecordedTrace):
        return trace.tags[request]
    return RequestTags(source_type=trace.roles[request], session=trace.sessions[request])
