"""A host-memory worker: lets the offloading connector run on vLLM's CPU backend.

On that backend the engine's KV cache lies in host memory too, so a transfer is a copy between two
host tensors, done when it is submitted. Stock vLLM refuses the platform; everything but the worker
(scheduler, connector, metadata, completion) is stock. On other platforms the stock workers are
used untouched. With several ranks, each has a tier of its own for its share of every block.

``HostOffloadingSpec`` is the stock spec with just this change: the baseline to compare with.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from evoke_vllm import compat
from evoke_vllm.compat import TransferResult


class HostCopies:
    """Copies blocks between the engine's tensors and the tier's, at submission.

    Args:
        engine: the engine's KV tensors, int8, ``(blocks, page bytes)``.
        tier: the tier's tensors, int8, ``(slots, factor * page bytes)``, in the same order; the
            ``factor`` engine blocks of a slot lie one after the other, slots may lie apart.
        factor: engine blocks per offloaded block.
        group_refs: for each KV-cache group, the tensors that hold its layers.
    """

    def __init__(
        self,
        engine: list[torch.Tensor],
        tier: list[torch.Tensor],
        factor: int,
        group_refs: list[list[CanonicalKVCacheRef]],
    ) -> None:
        self.engine = engine
        self.tier = [slots.unflatten(1, (factor, -1)) for slots in tier]
        self._factor = factor
        self._group_refs = group_refs

    def transfer(
        self,
        job_id: int,
        engine_spec: GPULoadStoreSpec,
        tier_spec: BlockIDsLoadStoreSpec,
        *,
        store: bool,
    ) -> TransferResult:
        """Copy what the two specs name, engine to tier (``store``) or back."""
        started = time.perf_counter()
        size = 0
        for refs, engine_rows, slots, parts in self._rows(engine_spec, tier_spec):
            for ref in refs:
                self.copy(ref, engine_rows, slots, parts, store=store)
                size += len(engine_rows) * ref.page_size_bytes
        told: dict[str, Any] = {}
        if compat.HAS_DIRECTIONS:
            told["transfer_type"] = ("GPU", "CPU") if store else ("CPU", "GPU")
        return TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=size,
            transfer_time=time.perf_counter() - started,
            **told,
        )

    def copy(
        self,
        ref: CanonicalKVCacheRef,
        engine_rows: torch.Tensor,
        slots: torch.Tensor,
        parts: torch.Tensor,
        *,
        store: bool,
    ) -> None:
        """Copy one layer's part of some engine blocks, each one part of a slot."""
        engine = self.engine[ref.tensor_idx][:, : ref.page_size_bytes]
        tier = self.tier[ref.tensor_idx][:, :, : ref.page_size_bytes]
        if store:
            tier[slots, parts] = engine[engine_rows]
        else:
            engine[engine_rows] = tier[slots, parts]

    def _rows(
        self, engine_spec: GPULoadStoreSpec, tier_spec: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[list[CanonicalKVCacheRef], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield, per group, its tensors, engine blocks, and where in the tier each belongs.

        A group's first offloaded block may begin in the middle: ``block_indices`` says at which
        engine block of the request the group starts.
        """
        engine_ids = np.asarray(engine_spec.block_ids, dtype=np.int64)
        tier_ids = np.asarray(tier_spec.block_ids, dtype=np.int64)
        engine_at = tier_at = 0
        for refs, size, first in zip(
            self._group_refs, engine_spec.group_sizes, engine_spec.block_indices, strict=True
        ):
            if size == 0:
                continue
            skip = first % self._factor
            slots = -(-(skip + size) // self._factor)
            at = np.arange(skip, skip + size)
            yield (
                refs,
                torch.from_numpy(engine_ids[engine_at : engine_at + size]),
                torch.from_numpy(tier_ids[tier_at + at // self._factor]),
                torch.from_numpy(at % self._factor),
            )
            engine_at += size
            tier_at += slots
        assert engine_at == len(engine_ids)
        assert tier_at == len(tier_ids)


class HostWorker(compat.WorkerBase):
    """Both of vLLM's worker interfaces: one object for both directions, or one for each.

    Args:
        copies: does the work.
        store: the direction where a spec pair does not tell it (``transfer_async``, 0.24).
    """

    def __init__(self, copies: HostCopies, store: bool = True) -> None:
        self._copies = copies
        self._store = store
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy engine blocks to the tier."""
        self._finished.append(self._copies.transfer(job_id, src_spec, dst_spec, store=True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy blocks of the tier to the engine; always done at once, so never ``expedited``."""
        self._finished.append(self._copies.transfer(job_id, dst_spec, src_spec, store=False))
        return True

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """0.24: the handler of one direction."""
        return (self.submit_store if self._store else self.submit_load)(job_id, *spec)

    def get_finished(self) -> list[TransferResult]:
        """The transfers since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted copy is done."""


class HostWorkerMixin(CPUOffloadingSpec):
    """Gives a CPU offloading spec the host-memory worker where the engine runs on a CPU.

    Mixed into the stock spec or one that derives from it, ahead of it.
    """

    copies_class = HostCopies

    def host_copies(self, kv_caches: CanonicalKVCaches) -> HostCopies:
        """The tier's memory, and what copies to and from it."""
        factor = compat.blocks_per_slot(self)
        return self.copies_class(
            [cache.tensor.view(torch.int8) for cache in kv_caches.tensors],
            self.host_tier([factor * cache.page_size_bytes for cache in kv_caches.tensors]),
            factor,
            kv_caches.group_data_refs,
        )

    def host_tier(self, pages: list[int]) -> list[torch.Tensor]:
        """Memory for every slot: a tensor ``(slots, bytes)`` for each of ``pages`` in bytes."""
        return [torch.zeros((compat.slots(self), page), dtype=torch.int8) for page in pages]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """vLLM 0.25 and later."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        return HostWorker(self.host_copies(kv_caches))

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[Any]:
        """vLLM 0.24."""
        if not current_platform.is_cpu():
            yield from super().get_handlers(kv_caches)
            return
        copies = self.host_copies(kv_caches)
        yield GPULoadStoreSpec, CPULoadStoreSpec, HostWorker(copies, store=True)
        yield CPULoadStoreSpec, GPULoadStoreSpec, HostWorker(copies, store=False)


class HostOffloadingSpec(HostWorkerMixin):
    """The stock tier (LRU or ARC) with the host-memory worker."""
