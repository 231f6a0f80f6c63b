# SPDX-License-Identifier: Apache-2.0
"""Cache policies that use what RFC 0001 proposes, on top of vLLM's own LRU and of EVOKE's."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from evoke_core import EvokeConfig
from evoke_vllm.policy import EvokeCachePolicy


class Picky(LRUCachePolicy):
    """Stores what its configuration says; notes who asked for room."""

    wants = "all"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.asked: list[tuple[list[OffloadKey], int, str]] = []
        self.room_for: list[tuple[int, str]] = []

    @classmethod
    def from_config(cls, cache_capacity: int, extra_config: Mapping[str, Any]) -> "Picky":
        policy = cls(cache_capacity)
        policy.wants = extra_config.get("wants", policy.wants)
        return policy

    def admit(
        self, keys: Sequence[OffloadKey], num_free: int, req_context: ReqContext
    ) -> Collection[OffloadKey]:
        self.asked.append((list(keys), num_free, req_context.req_id))
        if self.wants == "nothing":
            return ()
        if self.wants == "the free":
            return keys[:num_free]
        if self.wants == "every second":
            return {*keys[::2], OffloadKey(b"never offered")}
        return keys

    def evict_for(
        self, n: int, protected: set[OffloadKey], req_context: ReqContext
    ) -> list[tuple[OffloadKey, Any]] | None:
        self.room_for.append((n, req_context.req_id))
        return super().evict_for(n, protected, req_context)


class Told(EvokeCachePolicy):
    """EVOKE's policy without its guesses: told its settings, and who needs the room."""

    @classmethod
    def from_config(cls, cache_capacity: int, extra_config: Mapping[str, Any]) -> "Told":
        settings = extra_config.get("evoke", {})
        return cls(cache_capacity, window_groups=(), config=EvokeConfig(**settings))

    def evict_for(
        self, n: int, protected: set[OffloadKey], req_context: ReqContext
    ) -> list[tuple[OffloadKey, Any]] | None:
        self._needs_room = req_context.req_id
        return self.evict(n, protected)

    def _who_offers(self, keys: set[OffloadKey]) -> str:
        return self._needs_room
