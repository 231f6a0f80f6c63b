# SPDX-License-Identifier: Apache-2.0
"""EvokeOffloadingSpec through vLLM's own factory: sizes, options, and refusals in one line."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from evoke_core import ConfigError
from evoke_vllm import compat
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.spec import EvokeOffloadingSpec
from tests.vllm.shapes import BLOCK, PAGE, create_spec, full, window

pytestmark = pytest.mark.engine


def refusal(extra: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        create_spec(extra)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_factory_finds_it_and_it_is_a_stock_spec_underneath() -> None:
    spec = create_spec()
    assert type(spec) is EvokeOffloadingSpec
    assert isinstance(spec, CPUOffloadingSpec)
    manager = spec.get_manager()
    assert type(manager) is EvokeOffloadingManager
    assert spec.get_manager() is manager


def test_sizes_are_the_stock_ones() -> None:
    extra = {"cpu_bytes_to_use": 10 * PAGE + 5, "block_size": 2 * BLOCK}
    spec: Any = create_spec(extra)
    stock: Any = create_spec(extra | {"spec_name": "CPUOffloadingSpec", "spec_module_path": ...})
    assert compat.slots(spec) == compat.slots(stock) == 5
    assert compat.blocks_per_slot(spec) == compat.blocks_per_slot(stock) == 2
    assert compat.bytes_per_slot(spec) == compat.bytes_per_slot(stock) == 2 * PAGE
    assert spec.get_manager().ledger.capacity == 5


def test_options_reach_the_manager() -> None:
    spec = create_spec({"store_threshold": 2, "max_tracker_size": 3, "offload_prompt_only": False,
                        "evoke": {"policy": "lru", "ghost_factor": 1}}, events=True)  # fmt: skip
    assert spec.offload_prompt_only is False
    manager: Any = spec.get_manager()
    assert manager.ledger.index.config.policy == "lru"
    assert manager.ledger.index.config.ghost_factor == 1
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(5)]
    for name in ("a", "b"):
        ctx = ReqContext(name)
        manager.on_new_request(ctx)
        manager.touch(keys, ctx)
        stored = manager.prepare_store(keys, ctx).keys_to_store
        manager.complete_store(set(stored), ctx)
    assert stored == keys[:3]
    assert [event.removed for event in manager.take_events()] == [False]


def test_window_groups_are_found_in_the_engines_configuration() -> None:
    manager: Any = create_spec(layers=[full(), window()]).get_manager()
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    keys = [make_offload_key(bytes([n]) * 32, 1) for n in range(4)]
    manager.touch(keys[2:], ctx)
    assert manager.prepare_store(keys[2:], ctx).keys_to_store == keys[2:]
    assert manager.ledger.index.parent(keys[3]) is None


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "lru")
    manager: Any = create_spec({"evoke": {"policy": "scored"}}).get_manager()
    assert manager.ledger.index.config.policy == "lru"
    monkeypatch.setenv("EVOKE_POLICY", "mru")
    message = refusal({})
    assert "EVOKE_POLICY" in message
    assert "'mru'" in message


@pytest.mark.parametrize(
    ("evoke", "words"),
    [
        ({"w_recency": 2}, ["w_recency", "2"]),
        ({"w_recency": 0.9, "w_reuse": 0.9}, ["sum"]),
        ({"polici": "lru"}, ["polici", "did you mean policy?"]),
        ({"source_floors": {"user": 9}}, ["source_floors", "9"]),
        ([1], ["[1]", "mapping"]),
    ],
)
def test_wrong_settings_stop_the_start(evoke: object, words: list[str]) -> None:
    message = refusal({"evoke": evoke})
    for word in [*words, "kv_connector_extra_config['evoke']"]:
        assert word in message


@pytest.mark.parametrize("weight", ["w_attention", "w_coherence"])
def test_weights_of_signals_that_vllm_does_not_give(
    weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_spec({"evoke": {weight: 0.0}})
    message = refusal({"evoke": {weight: 0.1, "w_reuse": 0.2}})
    assert weight in message
    assert "vLLM" in message
    assert "allowed: 0" in message
    assert "from kv_connector_extra_config['evoke']" in message
    monkeypatch.setenv("EVOKE_W_REUSE", "0.1")
    monkeypatch.setenv(f"EVOKE_{weight.upper()}", "0.2")
    assert f"EVOKE_{weight.upper()}" in refusal({})


@pytest.mark.parametrize("budget", [PAGE - 1, 1, 0, -1, "much", None, True, ...])
def test_a_budget_below_one_block(budget: object) -> None:
    message = refusal({"cpu_bytes_to_use": budget})
    assert "cpu_bytes_to_use" in message
    assert "allowed" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("store_threshold", value) for value in (-1, "2.5", True, 1.5, None)],
        *[("max_tracker_size", value) for value in (0, -1, "many", True, 2.5)],
    ],
)
def test_wrong_stock_options(name: str, value: object) -> None:
    message = refusal({name: value})
    assert f"{name} = {value!r}" in message
    assert "allowed" in message


@pytest.mark.parametrize("value", [0, -BLOCK, BLOCK + 1, "sixteen", 2.5])
def test_a_wrong_block_size(value: object) -> None:
    """Since 0.26 vLLM reads it before it makes a spec, and says on its own what is wrong."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        create_spec({"block_size": value})
    if isinstance(caught.value, ConfigError):
        assert f"block_size = {value!r}" in str(caught.value)
    else:
        assert compat.HAS_WORKERS


def test_the_baseline_spec_has_the_stock_manager() -> None:
    for policy in ("lru", "arc"):
        spec = create_spec(
            {
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "evoke_vllm.host",
                "eviction_policy": policy,
            }
        )
        assert type(spec.get_manager()) is CPUOffloadingManager
