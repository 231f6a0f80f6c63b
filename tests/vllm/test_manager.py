# SPDX-License-Identifier: Apache-2.0
"""EvokeOffloadingManager with vLLM's own classes: what it adds to the ledger, and what it keeps.

Retention itself is tested by the conformance suite, which drives this manager too.
"""

import gc
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from vllm.v1.kv_offload.base import (
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from evoke_vllm import compat
from evoke_vllm.manager import EvokeOffloadingManager
from tests.vllm.shapes import HIT, MISS, PENDING

pytestmark = pytest.mark.engine


def chain(name: str, length: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32), group) for i in range(length)]


def context(name: str, evoke: object = None, **params: object) -> ReqContext:
    return ReqContext(name, params | ({} if evoke is None else {"evoke": evoke}) or None)


def arrive(manager: EvokeOffloadingManager, name: str, *chains: list[OffloadKey]) -> ReqContext:
    ctx = context(name)
    manager.on_new_request(ctx)
    for keys in chains:
        for key in keys:
            if manager.lookup(key, ctx) != HIT:
                break
        manager.touch(keys, ctx)
    return ctx


def store(manager: EvokeOffloadingManager, name: str, keys: list[OffloadKey]) -> PrepareStoreOutput:
    """One whole request; everything granted is written."""
    ctx = arrive(manager, name, keys)
    output = manager.prepare_store(keys, ctx)
    manager.complete_store(set(output.keys_to_store), ctx)
    manager.on_request_finished(ctx)
    return output


def ready(manager: EvokeOffloadingManager, keys: Iterable[OffloadKey]) -> list[bool]:
    ctx = context("looks")
    return [manager.lookup(key, ctx) == HIT for key in keys]


def test_new_requests_are_offloaded_block_by_block() -> None:
    manager = EvokeOffloadingManager(4)
    assert manager.on_new_request(context("r")).policy in (
        getattr(OffloadPolicy, "BLOCK_LEVEL", None),
        getattr(OffloadPolicy, "CHUNK_LEVEL", None),
    )


def test_lookup_says_absent_pending_ready() -> None:
    manager = EvokeOffloadingManager(4)
    (key,) = chain("a", 1)
    ctx = arrive(manager, "r", [key])
    assert manager.lookup(key, ctx) == MISS
    manager.prepare_store([key], ctx)
    assert manager.lookup(key, ctx) == PENDING
    manager.complete_store({key}, ctx)
    assert manager.lookup(key, ctx) == HIT


def test_store_and_load_name_the_same_slots() -> None:
    manager = EvokeOffloadingManager(8)
    keys = chain("a", 5)
    written = store(manager, "w", keys)
    assert isinstance(written.store_spec, CPULoadStoreSpec)
    assert written.keys_to_store == keys
    ctx = arrive(manager, "r", keys)
    loaded = manager.prepare_load(keys, ctx)
    assert loaded.block_ids.tolist() == written.store_spec.block_ids.tolist()
    assert len(set(loaded.block_ids.tolist())) == 5
    manager.complete_load(set(keys), ctx)


def test_loading_what_is_not_stored_is_an_error_of_the_engine() -> None:
    """Any slot it could name would feed another block's data to the model."""
    manager = EvokeOffloadingManager(8)
    ctx = arrive(manager, "r", chain("a", 2))
    with pytest.raises(RuntimeError, match="not stored"):
        manager.prepare_load(chain("a", 2), ctx)


def test_prepare_store_is_never_none_and_grants_a_head() -> None:
    manager = EvokeOffloadingManager(3)
    keys = chain("a", 7)
    ctx = arrive(manager, "r", keys)
    first = manager.prepare_store(keys[:2], ctx)
    second = manager.prepare_store(keys[2:5], ctx)
    third = manager.prepare_store(keys[5:], ctx)
    assert [out.keys_to_store for out in (first, second, third)] == [keys[:2], keys[2:3], []]
    assert [out.evicted_keys for out in (first, second, third)] == [[], [], []]
    assert third.store_spec.block_ids.tolist() == []


def test_an_empty_tier_grants_nothing() -> None:
    manager = EvokeOffloadingManager(0)
    assert store(manager, "r", chain("a", 3)).keys_to_store == []
    assert manager.get_stats() is not None


def test_granted_keys_are_a_subset_in_the_order_offered() -> None:
    manager = EvokeOffloadingManager(8)
    keys = chain("a", 6)
    store(manager, "head", keys[:2])
    ctx = arrive(manager, "r", keys)
    output = manager.prepare_store(keys, ctx)
    assert output.keys_to_store == keys[2:]
    assert len(output.store_spec.block_ids) == 4


def test_an_offer_may_start_in_mid_chain() -> None:
    """After a load, or with a prefix still in the GPU cache, only the rest is offered."""
    manager = EvokeOffloadingManager(8)
    keys = chain("a", 6)
    store(manager, "head", keys[:3])
    ctx = arrive(manager, "r", keys)
    assert manager.prepare_store(keys[3:], ctx).keys_to_store == keys[3:]
    assert manager.ledger.index.parent(keys[3]) == keys[2]

    other = chain("b", 4)
    ctx = arrive(manager, "s", other)
    assert manager.prepare_store(other[2:], ctx).keys_to_store == []  # its parent is nowhere


def test_groups_may_be_mixed_in_one_offer() -> None:
    manager = EvokeOffloadingManager(8, window_groups=(1,))
    full, window = chain("a", 3), chain("a", 3, group=1)
    ctx = arrive(manager, "r", full, window[1:])
    output = manager.prepare_store([*full, window[0], window[2]], ctx)
    assert output.keys_to_store == [*full, window[0], window[2]]
    assert len(set(output.store_spec.block_ids.tolist())) == 5
    manager.complete_store(set(output.keys_to_store), ctx)
    assert ready(manager, [*full, *window]) == [True, True, True, True, False, True]
    assert manager.ledger.index.parent(window[2]) is None
    assert manager.ledger.index.parent(full[2]) == full[1]


@pytest.mark.parametrize("threshold", [2, 3])
def test_a_threshold_warms_the_whole_prompt_in_as_many_requests(threshold: int) -> None:
    manager = EvokeOffloadingManager(64, store_threshold=threshold)
    keys = chain("a", 40)
    granted = [len(store(manager, f"r{n}", keys).keys_to_store) for n in range(threshold)]
    assert granted == [0] * (threshold - 1) + [40]


def test_waiting_does_not_warm() -> None:
    manager = EvokeOffloadingManager(8, store_threshold=2)
    keys = chain("a", 3)
    ctx = arrive(manager, "r", keys)
    for _ in range(50):
        for key in keys:
            manager.lookup(key, ctx)
        manager.touch(keys, ctx)
    assert manager.prepare_store(keys, ctx).keys_to_store == []


def test_the_tracker_is_bounded_and_forgets_tails_first() -> None:
    manager = EvokeOffloadingManager(64, store_threshold=2, max_tracker_size=10)
    keys = chain("a", 30)
    store(manager, "one", keys)
    assert manager.ledger.stats.tracked == 10
    assert store(manager, "two", keys).keys_to_store == keys[:10]


# --- what the engine is told ----------------------------------------------------------------------


def events(manager: EvokeOffloadingManager) -> list[tuple[bool, list[OffloadKey]]]:
    return [
        (event.removed, event.keys)
        for event in manager.take_events()
        if not getattr(event, "metadata_only", False)
    ]


def test_events_tell_stored_and_removed() -> None:
    manager = EvokeOffloadingManager(3, enable_events=True)
    keys = chain("a", 3)
    ctx = arrive(manager, "r", keys)
    manager.prepare_store(keys, ctx)
    assert events(manager) == []
    manager.complete_store(set(keys), ctx)
    manager.on_request_finished(ctx)
    ((removed, stored),) = events(manager)
    assert (removed, set(stored)) == (False, set(keys))

    new = chain("b", 2)
    ctx = arrive(manager, "s", new)
    evicted = manager.prepare_store(new, ctx).evicted_keys
    assert evicted == [keys[2], keys[1]]
    told = events(manager)
    assert all(removed for removed, _ in told)
    assert [key for _, gone in told for key in gone] == evicted
    manager.complete_store(set(new), ctx, success=False)
    assert events(manager) == []
    manager.reset_cache()
    assert events(manager) == []


def test_a_failed_store_is_told_where_that_is_possible() -> None:
    """0.33: the connector releases what it noted for blocks that were never stored."""
    manager = EvokeOffloadingManager(3, enable_events=True)
    keys = chain("a", 2)
    ctx = arrive(manager, "r", keys)
    manager.prepare_store(keys, ctx)
    manager.complete_store(set(keys), ctx, success=False)
    told = list(manager.take_events())
    assert [set(event.keys) for event in told] == [set(keys)] * ("aborted" in compat.EVENT_KINDS)
    assert all(event.removed and event.metadata_only for event in told)


def test_no_events_unless_asked_for() -> None:
    manager = EvokeOffloadingManager(3)
    store(manager, "r", chain("a", 3))
    assert list(manager.take_events()) == []


def metric(manager: EvokeOffloadingManager, name: str) -> float:
    stats: Any = manager.get_stats()
    return stats.data["data"].get(name, {}).get((), 0)


def gauge(manager: EvokeOffloadingManager) -> float:
    return metric(manager, CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC)


def test_the_gauge_shows_what_transfers_pin() -> None:
    manager = EvokeOffloadingManager(4)
    assert gauge(manager) == 0.0
    keys = chain("a", 2)
    ctx = arrive(manager, "r", keys)
    manager.prepare_store(keys, ctx)
    assert gauge(manager) == 0.5
    manager.complete_store(set(keys), ctx)
    assert gauge(manager) == 0.0
    manager.prepare_load(keys[:1], ctx)
    assert gauge(manager) == 0.25
    manager.complete_load(set(keys[:1]), ctx)
    assert gauge(manager) == 0.0


def test_skipped_stores_are_counted_as_stock_counts_them() -> None:
    manager = EvokeOffloadingManager(8, store_threshold=2)
    store(manager, "one", chain("a", 3))
    assert metric(manager, CPUOffloadingMetrics.STORES_SKIPPED) == 3
    assert metric(manager, CPUOffloadingMetrics.STORES_SKIPPED) == 0
    store(manager, "another", chain("b", 1))
    assert metric(manager, CPUOffloadingMetrics.STORES_SKIPPED) == 1


# --- tags -----------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Warnings of our manager; vLLM's loggers do not propagate to the root by themselves."""
    logger = logging.getLogger("evoke_vllm.manager")
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    handler = Collect()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_tags_reach_the_blocks() -> None:
    manager = EvokeOffloadingManager(4)
    keys = chain("a", 2)
    tags = {"source_type": "user", "priority": 2, "evoke_session": "c"}
    ctx = context("r", tags, max_offload_tokens=64)
    manager.on_new_request(ctx)
    manager.touch(keys, ctx)
    manager.prepare_store(keys, ctx)
    view = manager.ledger.index.describe(keys[0])
    assert view is not None
    assert (view.role, view.floor, view.priority) == ("user", 0.6, 2.0)


def test_each_kind_of_malformed_tag_is_warned_of_once_and_counted(warnings: list[str]) -> None:
    manager = EvokeOffloadingManager(4)
    for n in range(3):
        manager.on_new_request(context(f"a{n}", {"priority": "high", "source_type": "user"}))
        manager.on_new_request(context(f"b{n}", {"source_type": 7}))
        manager.on_new_request(context(f"c{n}", "user"))
    assert len(warnings) == 3
    assert sum("priority" in message for message in warnings) == 1
    assert sum("source_type" in message for message in warnings) == 1
    assert all("\n" not in message for message in warnings)
    counted = manager.ledger.stats.tags_ignored
    assert {problem.tag: count for problem, count in counted.items()} == {
        "priority": 3,
        "source_type": 3,
        "evoke": 3,
    }


def test_strangers_cannot_flood_the_log_or_the_counters(warnings: list[str]) -> None:
    manager = EvokeOffloadingManager(4)
    for n in range(500):
        manager.on_new_request(context(f"r{n}", {f"tag{n}": n, "source_type": "\n" * n}))
    assert len(warnings) <= 3
    assert len(manager.ledger.stats.tags_ignored) <= 3


@pytest.mark.parametrize("params", [None, {}, {"evoke": None}, {"do_remote_decode": True}, []])
def test_requests_without_tags(params: Any, warnings: list[str]) -> None:
    manager = EvokeOffloadingManager(4)
    manager.on_new_request(ReqContext("r", params))
    assert warnings == []
    assert manager.ledger.stats.tags_ignored == {}


# --- resets, ends, memory -------------------------------------------------------------------------


def test_a_reset_drops_blocks_and_keeps_requests() -> None:
    manager = EvokeOffloadingManager(4)
    keys = chain("a", 4)
    ctx = context("r", {"priority": 4})
    manager.on_new_request(ctx)
    manager.touch(keys, ctx)
    manager.prepare_store(keys[:2], ctx)
    manager.reset_cache()
    assert ready(manager, keys) == [False] * 4
    output = manager.prepare_store(keys, ctx)
    assert output.keys_to_store == keys
    view = manager.ledger.index.describe(keys[0])
    assert view is not None
    assert view.priority == 4.0


def test_windows_of_requests_that_a_reset_met_are_not_stored() -> None:
    """vLLM offers them again when others have their memory; a request's next life is its own."""
    manager = EvokeOffloadingManager(8, window_groups=[1])
    keys = chain("a", 2) + chain("a", 2, group=1)
    before, after = context("before"), context("after")
    manager.on_new_request(before)
    manager.reset_cache()
    assert manager.prepare_store(keys, before).keys_to_store == keys[:2]
    manager.on_new_request(after)
    assert manager.prepare_store(keys, after).keys_to_store == keys[2:]
    manager.on_request_finished(before)
    manager.on_new_request(before)
    more = chain("b", 2, group=1)
    assert manager.prepare_store(more, before).keys_to_store == more


def test_a_finished_request_the_scheduler_never_announced() -> None:
    manager = EvokeOffloadingManager(4)
    manager.on_request_finished(context("never seen"))
    assert manager.ledger.stats.open_requests == 0


def test_memory_does_not_grow_with_the_requests_served() -> None:
    """Metadata, ghosts and tracker all have their bounds."""
    manager = EvokeOffloadingManager(32, store_threshold=2, max_tracker_size=200)

    def serve(first: int, last: int) -> int:
        for n in range(first, last):
            keys = chain(f"{n % 997}.", 6)
            for again in ("a", "b"):
                store(manager, f"{n}{again}", keys)
            list(manager.take_events())
            manager.get_stats()
        gc.collect()
        return len(gc.get_objects())

    warm = serve(0, 1000)
    assert serve(1000, 3000) < warm + 500
    stats = manager.ledger.stats
    assert stats.tracked <= 200
    assert stats.ghosts <= 4 * 32 + 1024
    assert stats.open_requests == 0
