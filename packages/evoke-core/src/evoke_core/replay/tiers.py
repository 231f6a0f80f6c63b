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


class BlockCache(Protocol):
    """A cache of single blocks."""

    def __contains__(self, block: object) -> bool:
        """Say whether a block is resident."""

    def access(self, block: int) -> None:
        """Note a use of a block; admit it, or not, where it is not resident."""

    def settle(self) -> None:
        """Evict down to the capacity, for caches that do not within ``access``."""


class BlockTier:
    """Requests as accesses of single blocks, tail before head, each block once a request."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._first = True

    def begin(self, request: int, chain: list[int], start: int) -> int:
        self._first = True
        cache = self._cache
        hits = 0
        for block in islice(chain, start, None):
            if block not in cache:
                break
            hits += 1
        return hits

    def offer(self, chain: list[int], begin: int, end: int) -> None:
        if self._first:  # the resident prefix is used by this request too
            begin = 0
            self._first = False
        access = self._cache.access
        for block in reversed(chain[begin:end]):
            access(block)
        self._cache.settle()

    def end(self) -> None:
        pass


class LedgerTier:
    """A block ledger, called as an engine's adapter calls it.

    Args:
        trace: its blocks' keys are made once; share ``keys`` between tiers of one trace.
        tags: what each request carries; nothing by default.
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
        self._tags = tags
        self._id = ""
        self._keys: list[bytes] = []

    def begin(self, request: int, chain: list[int], start: int) -> int:
        ledger = self._ledger
        self._id = request_id = str(request)
        self._keys = keys = list(map(self._key, chain))
        ledger.open(
            request_id, UNTAGGED if self._tags is None else self._tags(self._trace, request)
        )
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
            keys = self._keys[begin:end]
            grant = ledger.reserve(self._id, keys, start=begin)
            if grant.keys:
                ledger.commit(self._id, grant.keys, ticket=grant.ticket)

    def end(self) -> None:
        self._ledger.close(self._id)
        if self._ledger.index.clock % _DRAIN_EVERY == 0:
            self._ledger.drain_decisions()


def recorded_tags(trace: Trace, request: int) -> RequestTags:
    """Return the tags a truthful client would send: the session and the role, as recorded."""
    return RequestTags(source_type=trace.roles[request], session=trace.sessions[request])
