# SPDX-License-Identifier: Apache-2.0
"""An engine in miniature: vLLM's own offloading scheduler, our manager and host worker, no model.

"Computing" a block writes bytes that follow from its content hash into the engine's tensors, so a
restored block is right exactly when its bytes are. Requests, blocks and scheduler outputs carry
only the attributes that vLLM 0.24.0's `OffloadingConnectorScheduler` reads.
"""

import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingSpec,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.worker.worker import OffloadingWorker
from vllm.v1.outputs import KVConnectorOutput

BLOCK = 4  # tokens of an engine block
PAGE = 2 * BLOCK * 1 * 8 * 4  # keys and values, one head of 8 floats
GPU_BLOCKS = 64
WINDOW_BLOCKS = 2


def create_spec(
    extra: dict[str, Any] | None = None, *, window: bool = False, events: bool = False
) -> OffloadingSpec:
    """The spec that vLLM's factory makes of this `kv_connector_extra_config`.

    `window` adds a second KV-cache group, with a sliding window of `WINDOW_BLOCKS` blocks. `...`
    as a value takes a default away.
    """
    config = {
        "spec_name": "EvokeOffloadingSpec",
        "spec_module_path": "evoke_vllm.spec",
        "cpu_bytes_to_use": 1 << 20,
    } | (extra or {})
    shape: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    layers: list[Any] = [FullAttentionSpec(**shape)]
    if window:
        layers.append(SlidingWindowSpec(**shape, sliding_window=WINDOW_BLOCKS * BLOCK))
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={k: v for k, v in config.items() if v is not ...},
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        cache_config=SimpleNamespace(
            block_size=BLOCK, enable_prefix_caching=True, hash_block_size=None
        ),
        parallel_config=SimpleNamespace(
            world_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )
    # As in vLLM, the groups of a hybrid model share one tensor.
    kv_cache_config = KVCacheConfig(
        num_blocks=GPU_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=GPU_BLOCKS * PAGE, shared_by=[f"l{i}" for i in range(len(layers))])
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[f"l{i}"], kv_cache_spec=layer)
            for i, layer in enumerate(layers)
        ],
    )
    return OffloadingSpecFactory.create_spec(vllm_config, kv_cache_config)


class MiniEngine:
    """Runs requests one after the other; transfers end when `finish_transfers` says so."""

    def __init__(self, spec: OffloadingSpec, *, groups: int = 1) -> None:
        self.scheduler = OffloadingConnectorScheduler(spec)
        self.manager: Any = self.scheduler.manager
        self.groups = groups
        self.kv = torch.zeros((GPU_BLOCKS, PAGE), dtype=torch.int8)
        self.worker = OffloadingWorker()
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(self.kv, PAGE)],
            group_data_refs=[[CanonicalKVCacheRef(0, PAGE)]] * groups,
        )
        for source, target, handler in spec.get_handlers(caches):
            self.worker.register_handler(source, target, handler)
        self.unreported: list[int] = []
        self._requests = 0

    def run(
        self,
        tokens: str,
        *,
        chunk: int = 8,
        params: dict[str, Any] | None = None,
        report: bool = True,
    ) -> int:
        """One prompt from arrival to end; one character is one engine block. Returns tokens hit."""
        self._requests += 1
        request: Any = SimpleNamespace(
            request_id=f"r{self._requests}",
            num_tokens=len(tokens) * BLOCK,
            num_prompt_tokens=len(tokens) * BLOCK,
            num_computed_tokens=0,
            block_hashes=[_digest(tokens[: end + 1]) for end in range(len(tokens))],
            kv_transfer_params=params,
            skip_reading_prefix_cache=False,
            is_finished=lambda: request.done,
            done=False,
        )
        self.scheduler.on_new_request(request)
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        while hit is None:  # a block it wants is still being written
            self.finish_transfers()
            hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)

        ids = [
            list(range(1 + g * len(tokens), 1 + (g + 1) * len(tokens))) for g in range(self.groups)
        ]
        self.kv[1:] = -1
        blocks = tuple(
            [SimpleNamespace(block_id=i, is_null=False, block_hash=None) for i in group]
            for group in ids
        )
        loaded = -(-hit // BLOCK)  # a hybrid model computes the prompt's last token again
        if self.groups > 1 and hit:  # the window group's older blocks are never loaded
            for block in blocks[1][: max(0, loaded - WINDOW_BLOCKS)]:
                block.block_id, block.is_null = 0, True
            ids[1] = [block.block_id for block in blocks[1]]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), hit)
        if hit:
            self._step({})
            self.finish_transfers()
            for group in ids:
                for at, block_id in enumerate(group[:loaded]):
                    if block_id:
                        assert self.kv[block_id].tolist() == _content(tokens[: at + 1])
        request.num_computed_tokens = hit
        new: Any = [SimpleNamespace(req_id=request.request_id, block_ids=tuple(ids))]
        while request.num_computed_tokens < request.num_tokens:
            size = min(chunk * BLOCK, request.num_tokens - request.num_computed_tokens)
            first = request.num_computed_tokens // BLOCK
            for group in ids:
                for at in range(first, first + size // BLOCK):
                    self.kv[group[at]] = torch.tensor(_content(tokens[: at + 1]), dtype=torch.int8)
            self._step({request.request_id: size}, new)
            new = []
            request.num_computed_tokens += size
        request.done = True
        self.scheduler.request_finished(request)
        if report:
            self.finish_transfers()
        return hit

    def _step(self, scheduled: dict[str, int], new: Any = ()) -> None:
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=()),
            preempted_req_ids=None,
        )
        meta: Any = self.scheduler.build_connector_meta(output)
        for job, transfer in (meta.load_jobs | meta.store_jobs).items():
            assert self.worker.transfer_async(job, transfer.transfer_spec)
        self.unreported += [result.job_id for result in self.worker.get_finished()]

    def finish_transfers(self) -> None:
        """The worker reports what it has copied."""
        done, self.unreported = self.unreported, []
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def _digest(prefix: str) -> bytes:
    return hashlib.sha256(prefix.encode()).digest()


def _content(prefix: str) -> list[int]:
    """The bytes of the engine block that ends `prefix`."""
    return [byte % 100 for byte in (_digest(prefix) * PAGE)[:PAGE]]
