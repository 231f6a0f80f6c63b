"""EVOKE's ranking inside vLLM's own CPU offloading manager (vLLM 0.27 and later), policy only.

The stock manager, alone or as the primary tier of stock tiering, keeps slots, transfers, events and
metrics, and asks a cache policy whom to evict. ``EvokeCachePolicy`` answers from a retention index:
named in ``eviction_policy`` and ``cache_policy_module_path``, with any stock spec.

What it can not do, because a cache policy is not asked: refuse a block that is worth less than what
it would replace (no admission), grant the head of what does not fit (the manager stores all of an
offer or nothing, and offers again at the next step), report anything, or read the connector's
configuration (settings come from the environment only).

Guarantees: ``evict`` gives exactly ``n`` blocks or ``None`` and then changes nothing; leaves first,
never a block that the manager holds or protects, nor one of the storing request's own chain, as far
as vLLM says who is storing: where it does not, the request that named the blocks last is taken.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve
from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from evoke_core import EvokeConfig, RequestTags, RetentionIndex
from evoke_core.tags import UNTAGGED
from evoke_vllm import chains, compat
from evoke_vllm.hints import read_tags
from evoke_vllm.settings import load_config

logger = init_logger(__name__)

MAX_OPEN = 1_024
"""Requests that are followed at a time: not every vLLM says when one ends (0.31 and later do)."""


MAX_GROUPS = 64
"""KV-cache groups of a model whose partial tails are told apart."""


class EvokeCachePolicy(CachePolicy):
    """Ranks the blocks of vLLM's stock CPU tier.

    Args:
        cache_capacity: slots of the tier.
        window_groups: groups without full attention; found by itself inside an engine.
        config: settings; inside an engine those of the environment.
    """

    def __init__(
        self,
        cache_capacity: int,
        window_groups: Iterable[int] | None = None,
        config: EvokeConfig | None = None,
    ) -> None:
        super().__init__(cache_capacity)
        self.cache_capacity = cache_capacity
        windows = compat.callers_window_groups() if window_groups is None else window_groups
        self._windows = frozenset(windows)
        if config is None:
            config = load_config({}, self._windows, source="the environment")
        self.index = RetentionIndex(
            config,
            window_groups=chains.window_groups(self._windows, range(MAX_GROUPS)),
            capacity=cache_capacity,
        )
        self._positions = (
            chains.Positions(self.index, self.index.touch, self._windows, {})
            if compat.HAS_POSITIONS
            else None
        )
        self._blocks: dict[OffloadKey, Any] = {}
        self._open: OrderedDict[str, ReqContext | None] = OrderedDict()  # last heard of last
        self._namers: OrderedDict[bytes, str] = OrderedDict()  # of blocks that are not here
        self._storing = ""
        self._offered: frozenset[OffloadKey] = frozenset()  # by the request that is storing
        self._new: list[tuple[str, int, int, bytes]] = []  # inserted, but not yet filed
        logger.info(
            "EVOKE ranks up to %d blocks; policy %s, policy-only", cache_capacity, config.policy
        )

    # --- what the manager tells -------------------------------------------------------------------

    @override
    def get(self, key: OffloadKey) -> Any:
        return self._blocks.get(key)

    @override
    def insert(self, key: OffloadKey, block: Any, req_context: ReqContext | None = None) -> None:
        """Note a block that is about to be written."""
        if req_context is not None:
            self._follow(req_context)
            request = req_context.req_id
        else:
            request = self._namer(key)
            self._begin(request, UNTAGGED)  # for a block that nobody has named
        self._namers.pop(key, None)
        self._storing = request
        self._blocks[key] = block
        group, at = self._place(request, key, req_context)
        self._new.append((request, group, at, key))
        if block.ref_cnt == 0:
            self._file()
            self.index.unhold(key)

    @override
    def remove(self, key: OffloadKey) -> None:
        self._file()
        del self._blocks[key]
        self.index.unhold(key)
        self.index.drop(key, "aborted")

    @override
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._file()
        self._follow(req_context)
        request = req_context.req_id
        for group, part in self._parts(keys, req_context):
            for start, stretch in self.index.locate(request, part, group=group):
                self.index.touch(request, stretch, group=group, start=start)
                for key in stretch:
                    if key not in self._blocks:
                        self._namers[key] = request
        while len(self._namers) > 4 * self.cache_capacity + 65_536:
            self._namers.popitem(last=False)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request is about to store these blocks (0.31 and later), for the first time."""
        offered = list(keys)
        self.touch(offered, req_context)
        self._offered = frozenset(offered)
        self._storing = req_context.req_id

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request uses these blocks (0.33 and later)."""
        self.touch(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request has ended (0.31 and later); it counted when it named its blocks."""
        for keys in key_groups:
            self.touch(keys, req_context)
        self._file()
        self._open.pop(req_context.req_id, None)
        self.index.close(req_context.req_id)

    @override
    def mark_evictable(self, key: OffloadKey) -> None:
        self._file()
        self.index.unhold(key)

    @override
    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._file()
        self.index.hold(key)

    @override
    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, Any]] | None:
        self._file()
        if n <= 0:
            return []
        request = self._who_offers(protected)
        victims = self.index.candidates(n, lambda key: key not in protected, protect=request)
        if len(victims) < n:
            return None
        for key in victims:
            self.index.drop(key, "capacity")
        return [(OffloadKey(key), self._blocks.pop(OffloadKey(key))) for key in victims]

    @override
    def clear(self) -> None:
        self._new.clear()
        self._blocks.clear()
        self._namers.clear()
        self._offered = frozenset()
        # Of a request from before, vLLM need not say when it ends.
        self._open = OrderedDict.fromkeys(self._open)
        self.index.clear()

    def _who_offers(self, keys: set[OffloadKey]) -> str:
        """Return the request that stores these blocks, as far as that can be known.

        A first offer is announced by ``on_store_miss``, from 0.31 on. Of any other the request
        that most of its new blocks belong to is taken.
        """
        if self._offered.isdisjoint(keys):
            namers = Counter(self._namer(key) for key in keys if key not in self._blocks)
            if namers:
                return max(sorted(namers), key=namers.__getitem__)
        return self._storing

    def _namer(self, key: OffloadKey) -> str:
        """Return the request that a block belongs to that is not here.

        It is the one that named it last. A block that has been here and went is offered again
        without a word, from 0.31 on: then one whose context names it, the last heard of first.
        """
        if key in self._namers:
            return self._namers[key]
        for request, context in reversed(self._open.items()):
            if context is not None and key in compat.positions(context):
                self._open.move_to_end(request)  # its next block is found at once
                return request
        return self._storing

    # --- requests and places ----------------------------------------------------------------------

    def _follow(self, req_context: ReqContext) -> None:
        """Open a request that is seen for the first time, and name what its context says."""
        if req_context.req_id not in self._open:
            # Spans are given in tokens, and nobody says how many make a block.
            tags = evolve(read_tags(req_context, tokens_per_block=1)[0], spans=())
            self._begin(req_context.req_id, tags)
        self._open[req_context.req_id] = req_context
        self._open.move_to_end(req_context.req_id)
        if self._positions is not None:
            self._positions.follow(req_context)

    def _begin(self, request: str, tags: RequestTags) -> None:
        if request in self._open:
            return
        while len(self._open) >= MAX_OPEN:
            self.index.close(self._open.popitem(last=False)[0])
        self.index.open(request, tags, time.monotonic())
        self._open[request] = None

    def _parts(
        self, keys: Iterable[OffloadKey], req_context: ReqContext | None
    ) -> list[tuple[int, list[bytes]]]:
        if self._positions is not None and req_context is not None:
            return self._positions.parts(keys, req_context)
        return chains.by_group(list(keys))

    def _place(
        self, request: str, key: OffloadKey, req_context: ReqContext | None
    ) -> tuple[int, int]:
        """The group of a new block, and its place in the chain of the request that stores it."""
        ((group, _),) = self._parts([key], req_context or self._open[request])
        last = self._new[-1] if self._new else None
        if last is not None and last[:2] == (request, group):
            known = self.index.locate(request, [last[3], key], group=group)
            if len(known) == 1:
                return group, last[2] + 1
        ((at, _),) = self.index.locate(request, [key], group=group)
        return group, at

    def _file(self) -> None:
        """Put what was inserted since the last call into the index, stretch by stretch, held."""
        new, self._new = self._new, []
        at = 0
        while at < len(new):
            request, group, start, key = new[at]
            keys = [key]
            while at + len(keys) < len(new) and new[at + len(keys)][:3] == (
                request,
                group,
                start + len(keys),
            ):
                keys.append(new[at + len(keys)][3])
            self.index.insert(request, keys, group=group, start=start)
            self.index.hold(*keys)
            at += len(keys)
