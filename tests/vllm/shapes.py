# SPDX-License-Identifier: Apache-2.0
"""Configurations for tests without a model: vLLM's own classes, whatever their shape this release.

A "model" is a `config.json` of a small Llama; nothing is ever loaded. KV-cache groups are given as
vLLM's specs, one layer each, and overlay each other in one allocation as a hybrid model's do.
"""

import inspect
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from evoke_core import BlockState
from evoke_vllm import compat

BLOCK = 4  # tokens of an engine block
HEAD = 128
PAGE = 2 * BLOCK * 1 * HEAD * 4  # keys and values, one head of 128 floats: one page of memory
GPU_BLOCKS = 64
WINDOW_BLOCKS = 2

assert PAGE % CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT == 0, "else the tier pads every block"

MISS, PENDING, HIT = (
    compat.LOOKUP[state] for state in (BlockState.ABSENT, BlockState.PENDING, BlockState.READY)
)
"""What a manager's `lookup` answers."""

EVOKE = {"spec_name": "EvokeOffloadingSpec", "spec_module_path": "evoke_vllm.spec"}


def full(block: int = BLOCK) -> FullAttentionSpec:
    """A layer of full attention."""
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)


def window(blocks: int = WINDOW_BLOCKS, block: int = BLOCK) -> SlidingWindowSpec:
    """A layer that sees `blocks` blocks back."""
    return SlidingWindowSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=HEAD,
        dtype=torch.float32,
        sliding_window=blocks * block,
    )


@cache
def _model() -> ModelConfig:
    folder = Path(tempfile.mkdtemp(prefix="no-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * HEAD,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "vocab_size": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32"
    )


def vllm_config(
    extra: dict[str, Any],
    *,
    events: bool = False,
    ranks: int = 1,
    block: int = BLOCK,
    async_scheduling: bool = False,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
) -> VllmConfig:
    """An engine's configuration with the offloading connector.

    `...` as a value in `extra` takes a default (our spec, a tier of 1 MiB) away.
    """
    given = EVOKE | {"cpu_bytes_to_use": 1 << 20} | extra
    cache_config = CacheConfig(block_size=block, enable_prefix_caching=True)
    if hasattr(cache_config, "kv_cache_layout"):
        cache_config.kv_cache_layout = "LBNHC"  # engines know it when they make connectors
    config = VllmConfig(
        model_config=_model(),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={k: v for k, v in given.items() if v is not ...},
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    )
    config.cache_config.block_size = block
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # whatever this platform says
    config.parallel_config.world_size = ranks
    return config


def kv_cache_config(layers: Sequence[Any] | None = None, blocks: int = GPU_BLOCKS) -> KVCacheConfig:
    """Groups of one layer each (full attention if none are given), `blocks` engine blocks."""
    layers = layers or [full()]
    names = [f"l{at}" for at in range(len(layers))]
    size = blocks * max(layer.page_size_bytes for layer in layers)
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        tensors = [KVCacheTensor(size=size, shared_by=names)]
    else:  # 0.33: one entry per group, all in one allocation
        tensors = [
            KVCacheTensor(
                size=size,
                layers=[name],
                layer_stride=blocks * layer.page_size_bytes,
                block_stride=layer.page_size_bytes,
            )
            for name, layer in zip(names, layers, strict=True)
        ]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[name], kv_cache_spec=layer)
            for name, layer in zip(names, layers, strict=True)
        ],
    )


def create_spec(
    extra: dict[str, Any] | None = None,
    *,
    layers: Sequence[Any] | None = None,
    events: bool = False,
    ranks: int = 1,
) -> OffloadingSpec:
    """The spec that vLLM's factory makes of this `kv_connector_extra_config`."""
    config = vllm_config(extra or {}, events=events, ranks=ranks)
    return spec_of(config, kv_cache_config(layers))


def spec_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> OffloadingSpec:
    """The spec that vLLM's factory makes, from what the connector hands it."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
            build_offloading_config,
        )
    except ImportError:  # 0.24, 0.25
        return OffloadingSpecFactory.create_spec(config, kv_cache_config)
    return OffloadingSpecFactory.create_spec(build_offloading_config(config, kv_cache_config))
