"""vLLM 0.24's manager interface around the seed's published formula; for the bench only.

Slots, transfers and holds are kept as simply as they can be: a block is readable once its store is
complete, and nothing that is being written or read is evicted. What does not fit is refused from
the tail, as EVOKE does: the stock manager would refuse all of it and be asked again in every step.
"""

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from bench.matrix.published_score import PublishedScore


class PublishedManager(OffloadingManager):
    """Keeps `num_blocks` blocks by the published score."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.reset_cache()

    def reset_cache(self) -> None:
        """Lose all blocks."""
        self._score = PublishedScore()
        self._free = list(range(self._num_blocks))
        self._slots: dict[OffloadKey, int] = {}
        self._writing: set[OffloadKey] = set()
        self._readers: dict[OffloadKey, int] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        resident = self._score.looked_up(key)
        return None if key in self._writing else resident

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._score.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) + 1
        return CPULoadStoreSpec([self._slots[key] for key in keys])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        new = [key for key in keys if key not in self._slots]
        short = len(new) - len(self._free)
        spared = {*keys, *self._writing, *self._readers}
        evicted: list[Any] = self._score.lowest(max(0, short), spared)
        for key in evicted:
            self._drop(key)
        granted = new[: len(self._free)]
        tags = (req_context.kv_transfer_params or {}).get("evoke")
        tags = tags if isinstance(tags, dict) else {}
        priority = tags.get("priority", 1.0)
        for key in granted:
            self._slots[key] = self._free.pop()
            self._writing.add(key)
            self._score.insert(key, tags.get("source_type"), priority)
        slots = CPULoadStoreSpec([self._slots[key] for key in granted])
        return PrepareStoreOutput(keys_to_store=granted, store_spec=slots, evicted_keys=evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        for key in keys:
            if key in self._writing:
                self._writing.remove(key)
                if not success:
                    self._drop(key)

    def _drop(self, key: OffloadKey) -> None:
        self._score.remove(key)
        self._free.append(self._slots.pop(key))
