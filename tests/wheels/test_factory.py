# SPDX-License-Identifier: Apache-2.0
"""The installed spec, loaded as vLLM loads it: by name, through the stock factory.

Needs an installed vLLM and no device: the configuration is the engine's own classes where they
can be built without one, and a plain namespace for the rest. Holds beside the stock wheel, where
`nox -s tests-wheels` runs it, and in the CPU engine's environment alike.
"""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-wheels`")

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * BLOCK_TOKENS * 2 * 8 * 4  # keys and values, 2 heads of 8 floats a token
TIER_BLOCKS = 6


def create_spec(evoke: dict[str, Any] | None = None) -> OffloadingSpec:
    """The EVOKE spec for a one-layer model and a tier of TIER_BLOCKS blocks."""
    extra: dict[str, Any] = {
        "spec_name": "EvokeOffloadingSpec",
        "spec_module_path": "evoke_vllm.spec",
        "cpu_bytes_to_use": TIER_BLOCKS * BLOCK_BYTES,
        "block_size": BLOCK_TOKENS,
    }
    if evoke is not None:
        extra["evoke"] = evoke
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
        kv_events_config=None,
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
        parallel_config=SimpleNamespace(
            world_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    layer = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[KVCacheTensor(size=10 * BLOCK_BYTES, shared_by=["layer"])],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=layer)],
    )
    return OffloadingSpecFactory.create_spec(vllm_config, kv_cache_config)


def chain(name: str, length: int) -> list[Any]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32), 0) for i in range(length)]


def request(manager: Any, name: str, keys: list[Any], tags: dict[str, Any] | None = None) -> int:
    """One whole request as the scheduler sees it; returns how many blocks it found."""
    context = ReqContext(name, {"evoke": tags} if tags else None)
    manager.on_new_request(context)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context):
        hits += 1
    manager.touch(keys, context)
    manager.on_schedule_end()
    output = manager.prepare_store(keys[hits:], context)
    if output is not None:
        manager.complete_store(set(output.keys_to_store), context)
    manager.on_request_finished(context)
    return hits


def test_the_factory_finds_the_spec_by_name() -> None:
    spec = create_spec()
    assert type(spec).__module__ == "evoke_vllm.spec"
    assert type(spec.get_manager()).__module__ == "evoke_vllm.manager"
    assert spec.get_manager() is spec.get_manager()


def test_what_was_stored_is_found() -> None:
    manager = create_spec().get_manager()
    keys = chain("a", 4)
    assert request(manager, "first", keys, {"source_type": "user", "priority": 1.5}) == 0
    assert request(manager, "second", keys) == 4


def test_the_tier_holds_what_the_configuration_pays_for() -> None:
    manager = create_spec().get_manager()
    keys = chain("a", TIER_BLOCKS + 2)
    request(manager, "first", keys)
    assert request(manager, "second", keys) == TIER_BLOCKS


def test_a_tagged_prompt_outlives_newer_untagged_ones() -> None:
    manager = create_spec({"policy": "scored"}).get_manager()
    system = chain("system", 4)
    request(manager, "system", system, {"source_type": "system"})
    for i in range(8):
        request(manager, f"scan {i}", chain(f"scan {i} ", 2))
    assert request(manager, "again", system) == 4


@pytest.mark.parametrize("wrong", [{"w_recency": -1}, {"w_recenci": 0.5}])
def test_a_wrong_configuration_stops_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        create_spec(wrong).get_manager()
