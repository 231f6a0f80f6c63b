"""A host-memory worker: lets the offloading connector run on vLLM's CPU backend.

On that backend the engine's KV cache lies in host memory too, so a transfer is a copy between two
host tensors, done when it is submitted. Stock vLLM refuses the platform; everything but the worker
(scheduler, connector, metadata, completion) is stock. On other platforms the stock handlers are
used untouched.

``HostOffloadingSpec`` is the stock spec with just this change: the baseline to compare with.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

Handlers = Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]


class HostTransferHandler(OffloadingHandler):
    """Copies blocks in one direction, at submission.

    Args:
        engine: the engine's KV tensors, int8, ``(blocks, page bytes)``.
        tier: the tier's tensors, int8, ``(slots * factor, page bytes)``, in the same order.
        factor: engine blocks per offloaded block.
        group_refs: for each KV-cache group, the tensors that hold its layers.
        store: True copies engine to tier, False tier to engine.
    """

    def __init__(
        self,
        engine: list[torch.Tensor],
        tier: list[torch.Tensor],
        factor: int,
        group_refs: list[list[CanonicalKVCacheRef]],
        store: bool,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._factor = factor
        self._group_refs = group_refs
        self._store = store
        self._type = ("GPU", "CPU") if store else ("CPU", "GPU")
        self._finished: list[TransferResult] = []

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        started = time.perf_counter()
        source, target = spec
        engine_spec, tier_spec = (source, target) if self._store else (target, source)
        assert isinstance(engine_spec, GPULoadStoreSpec)
        assert isinstance(tier_spec, BlockIDsLoadStoreSpec)
        size = 0
        for refs, engine_rows, tier_rows in self._rows(engine_spec, tier_spec):
            for ref in refs:
                self._copy(ref, engine_rows, tier_rows)
                size += len(engine_rows) * ref.page_size_bytes
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=size,
                transfer_time=time.perf_counter() - started,
                transfer_type=self._type,
            )
        )
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted copy is done."""

    def _rows(
        self, engine_spec: GPULoadStoreSpec, tier_spec: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[list[CanonicalKVCacheRef], torch.Tensor, torch.Tensor]]:
        """Yield, per group, its tensors and the rows to copy between.

        An offloaded block is ``factor`` rows of the tier. A group's first block may begin in the
        middle: ``block_indices`` says at which engine block of the request the group starts.
        """
        engine_at = tier_at = 0
        for refs, size, first in zip(
            self._group_refs, engine_spec.group_sizes, engine_spec.block_indices, strict=True
        ):
            if size == 0:
                continue
            skip = first % self._factor
            slots = -(-(skip + size) // self._factor)
            ids = tier_spec.block_ids[tier_at : tier_at + slots]
            rows = (ids[:, None] * self._factor + np.arange(self._factor)).ravel()
            yield (
                refs,
                torch.from_numpy(engine_spec.block_ids[engine_at : engine_at + size]),
                torch.from_numpy(rows[skip : skip + size]),
            )
            engine_at += size
            tier_at += slots
        assert engine_at == len(engine_spec.block_ids)
        assert tier_at == len(tier_spec.block_ids)

    def _copy(
        self, ref: CanonicalKVCacheRef, engine_rows: torch.Tensor, tier_rows: torch.Tensor
    ) -> None:
        engine = self._engine[ref.tensor_idx][:, : ref.page_size_bytes]
        tier = self._tier[ref.tensor_idx][:, : ref.page_size_bytes]
        if self._store:
            tier.index_copy_(0, tier_rows, engine.index_select(0, engine_rows))
        else:
            engine.index_copy_(0, engine_rows, tier.index_select(0, tier_rows))


class HostWorkerMixin(CPUOffloadingSpec):
    """Gives a CPU offloading spec the host-memory worker where the engine runs on a CPU."""

    @override
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Handlers:
        if not current_platform.is_cpu():
            yield from super().get_handlers(kv_caches)
            return
        engine = [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
        tier = [
            torch.zeros(
                (self.num_blocks * self.block_size_factor, cache.page_size_bytes),
                dtype=torch.int8,
            )
            for cache in kv_caches.tensors
        ]
        refs = kv_caches.group_data_refs
        factor = self.block_size_factor
        store = HostTransferHandler(engine, tier, factor, refs, store=True)
        load = HostTransferHandler(engine, tier, factor, refs, store=False)
        yield GPULoadStoreSpec, CPULoadStoreSpec, store
        yield CPULoadStoreSpec, GPULoadStoreSpec, load


class HostOffloadingSpec(HostWorkerMixin):
    """The stock tier (LRU or ARC) with the host-memory worker."""
