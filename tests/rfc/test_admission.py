# SPDX-License-Identifier: Apache-2.0
"""RFC 0001, in a vLLM with its patch: `nox -s "rfc(number='0001')"`."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s rfc`")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies import base

if not hasattr(base.CachePolicy, "admit"):
    pytest.skip("this vLLM does not have the patch: run `nox -s rfc`", allow_module_level=True)

from tests.rfc.policies import Picky, Told
from tests.vllm.engine import MiniEngine, tokens_of
from tests.vllm.shapes import BLOCK, PAGE, create_spec

OURS = "tests.rfc.policies"


def chain(name: str, blocks: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{at}".encode().ljust(32), 0) for at in range(blocks)]


def asks(name: str, keys: list[OffloadKey]) -> ReqContext:
    context = ReqContext(name)
    for at, key in enumerate(keys):
        context.set_offload_key_position(key, (at + 1) * BLOCK)
    return context


def manager(slots: int, policy: str = "Picky", **extra: Any) -> Any:
    return CPUOffloadingManager(slots, policy, OURS, enable_events=True, extra_config=extra)


def store(tier: Any, name: str, keys: list[OffloadKey]) -> Any:
    context = asks(name, keys)
    tier.on_new_request(context)
    output = tier.prepare_store(keys, context)
    if output is not None:
        tier.complete_store(output.keys_to_store, context)
    tier.on_request_finished(context)
    return output


def test_what_is_refused_is_not_stored_and_displaces_nothing() -> None:
    tier = manager(3)
    old = chain("old", 3)
    store(tier, "first", old)
    tier._policy.wants = "nothing"
    output = store(tier, "second", chain("new", 2))
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    assert tier._policy.asked[-1] == (chain("new", 2), 0, "second")
    assert tier._policy.room_for == []
    assert all(tier._policy.get(key).is_ready for key in old)
    assert all(not event.removed for event in tier.take_events())
    tier._policy.wants = "all"  # refused now is not refused for ever
    assert store(tier, "third", chain("new", 2)).keys_to_store == chain("new", 2)


def test_exactly_what_was_admitted_is_stored_in_the_offers_order() -> None:
    tier = manager(8, wants="every second")
    output = store(tier, "r", chain("a", 5))
    assert output.keys_to_store == chain("a", 5)[::2]
    assert len(output.store_spec.chunk_ids) == 3
    assert [tier._policy.get(key) is not None for key in chain("a", 5)] == [True, False] * 2 + [
        True
    ]


def test_only_what_is_not_there_is_asked_about() -> None:
    tier = manager(8)
    store(tier, "r", chain("a", 2))
    store(tier, "s", chain("a", 4))
    assert [(len(keys), free) for keys, free, _ in tier._policy.asked] == [(2, 8), (2, 6)]
    store(tier, "t", chain("a", 4))
    assert len(tier._policy.asked) == 2


def test_the_head_of_what_does_not_fit_can_be_stored() -> None:
    """Without admission the whole offer is refused, and offered again at every step."""
    for wants, stored in (("all", None), ("the free", chain("new", 2))):
        tier = manager(4, wants=wants)
        held = chain("held", 2)
        store(tier, "first", held)
        tier.prepare_load(held, asks("first", held))  # being read: cannot be evicted
        output = store(tier, "second", chain("new", 4))
        assert (output and output.keys_to_store) == stored


def test_a_policy_knows_who_needs_the_room() -> None:
    tier = manager(3)
    store(tier, "first", chain("a", 3))
    store(tier, "second", chain("b", 2))
    assert tier._policy.room_for == [(2, "second")]


def test_a_policy_without_these_methods_is_what_it_was() -> None:
    tier = CPUOffloadingManager(3, "lru", extra_config={"wants": "nothing"})
    store(tier, "first", chain("a", 3))
    output = store(tier, "second", chain("b", 2))
    assert output.keys_to_store == chain("b", 2)
    assert len(output.evicted_keys) == 2


def test_positions_of_a_request_can_be_read_and_not_written() -> None:
    context = asks("r", chain("a", 3))
    assert dict(context.offload_key_positions) == {
        key: (at + 1) * BLOCK for at, key in enumerate(chain("a", 3))
    }
    with pytest.raises(TypeError):
        context.offload_key_positions[OffloadKey(b"x")] = 1


@pytest.mark.parametrize("tiering", [False, True])
def test_a_spec_hands_its_configuration_on(tiering: bool) -> None:
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec" if tiering else "CPUOffloadingSpec",
        "spec_module_path": ...,
        "eviction_policy": "Picky",
        "cache_policy_module_path": OURS,
        "wants": "nothing",
        "cpu_bytes_to_use": 4 * PAGE,
    }
    if tiering:
        extra["secondary_tiers"] = []
    made: Any = create_spec(extra).get_manager()
    try:
        policy = (made.primary_tier if tiering else made)._policy
        assert isinstance(policy, Picky)
        assert policy.wants == "nothing"
    finally:
        made.shutdown()


def test_evoke_is_told_its_settings_and_who_needs_the_room() -> None:
    """No look into the environment, and no guess: nothing of the storing request's chain goes."""
    tier = manager(3, "Told", evoke={"policy": "lru"})
    assert isinstance(tier._policy, Told)
    assert tier._policy.index.config.policy == "lru"
    mine = asks("mine", chain("a", 4))
    tier.on_new_request(mine)
    output = tier.prepare_store(chain("a", 2), mine)
    tier.complete_store(output.keys_to_store, mine)
    store(tier, "other", chain("b", 1))
    assert tier.prepare_store(chain("a", 4)[2:3], mine).evicted_keys == chain("b", 1)
    assert tier.prepare_store(chain("a", 4)[3:], mine) is None, "its own chain fills the tier"


def test_a_refused_promotion_is_a_miss_and_not_a_wait(tmp_path: Path) -> None:
    """The engine asks at every step for what is said to be on its way from a file."""
    files = {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 1, "n_write_threads": 1}
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "spec_module_path": ...,
        "eviction_policy": "Picky",
        "cache_policy_module_path": OURS,
        "secondary_tiers": [files],
    }
    writer = MiniEngine(6, extra=extra, seed=1)
    finish(writer, "abcd")
    while writer.manager.has_pending_work():
        writer.step()
        time.sleep(0.002)
    reader = MiniEngine(6, extra=extra | {"wants": "nothing"}, seed=2)
    finish(reader, "abcd")
    assert reader.hits.get("r", 0) == 0
    assert reader.manager.primary_tier._policy.asked, "nothing was promoted: this proves nothing"
    writer.connector.shutdown()
    reader.connector.shutdown()


def finish(mini: Any, prompt: str) -> None:
    request = mini.add("r", tokens_of(prompt))
    for _ in range(400):
        mini.step()
        if request.is_finished():
            return
        time.sleep(0.002)
    pytest.fail("the request waits for ever")
