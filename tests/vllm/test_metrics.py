# SPDX-License-Identifier: Apache-2.0
"""The manager's metrics: what is counted, how often, under which labels, and how it travels."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    get_connector_metric_definitions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from evoke_core import EvokeConfig, RequestTags, Span
from evoke_vllm import compat, metrics
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.metrics import PREFIX, by_role, definitions
from evoke_vllm.spec import EvokeOffloadingSpec
from tests.vllm.shapes import HIT

pytestmark = pytest.mark.engine

DASHBOARD = Path(__file__).parents[2] / "packages" / "evoke-vllm" / "dashboards" / "evoke.json"
ROLES = {"system", "user", "assistant", "other", "none"}


def chain(name: str, length: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32), 0) for i in range(length)]


def context(name: str, **tags: object) -> ReqContext:
    return ReqContext(name, {"evoke": tags} if tags else None)


def poll(
    manager: EvokeOffloadingManager, ctx: ReqContext, keys: list[OffloadKey], on_device: int = 0
) -> int:
    """What the scheduler does with a waiting request in one step; returns the blocks found."""
    found = 0
    for key in keys[on_device:]:
        if manager.lookup(key, ctx) != HIT:
            break
        found += 1
    manager.touch(keys, ctx)
    return found


def serve(
    manager: EvokeOffloadingManager,
    name: str,
    keys: list[OffloadKey],
    *,
    on_device: int = 0,
    polls: int = 1,
    **tags: object,
) -> None:
    """One request from arrival to end."""
    ctx = context(name, **tags)
    manager.on_new_request(ctx)
    for _ in range(polls):
        found = poll(manager, ctx, keys, on_device)
    loaded = on_device + found if found else 0
    if found:
        manager.prepare_load(keys[on_device:loaded], ctx)
        manager.complete_load(set(keys[on_device:loaded]), ctx)
    if loaded < len(keys):
        stored = manager.prepare_store(keys[loaded:], ctx).keys_to_store
        manager.complete_store(set(stored), ctx)
    manager.on_request_finished(ctx)


class Counted:
    """What a manager has handed on so far, added up as vLLM adds it up."""

    def __init__(self, manager: EvokeOffloadingManager) -> None:
        self._manager = manager
        self._sum = OffloadingConnectorStats()

    def __call__(self, name: str, *labels: str) -> Any:
        return self.by_label(name).get(labels, 0)

    def by_label(self, name: str) -> dict[tuple[str, ...], Any]:
        if (stats := self._manager.get_stats()) is not None:
            self._sum.aggregate(stats)
        return self._sum.data["data"].get(name, {})


# --- what is counted ------------------------------------------------------------------------------


def test_a_request_counts_once_however_often_it_is_polled() -> None:
    manager = EvokeOffloadingManager(16)
    count = Counted(manager)
    keys = chain("a", 8)
    serve(manager, "stores", keys, polls=5)
    serve(manager, "finds all", keys, polls=50)
    serve(manager, "finds half", keys[:4] + chain("b", 4), polls=7)
    serve(manager, "has some", keys, on_device=3, polls=2)
    serve(manager, "has all", keys, on_device=8)
    assert count(metrics.LOOKED_UP, "none") == 8 + 8 + 8 + 5
    assert count(metrics.HIT, "none") == 8 + 4 + 5
    assert {labels[0]: n for labels, n in count.by_label(metrics.REQUESTS).items()} == {
        "miss": 1,
        "full": 2,
        "partial": 1,
        "on_device": 1,
    }


def test_the_last_poll_counts() -> None:
    """While a request waited, the GPU lost what it had, or got what it lacked."""
    manager = EvokeOffloadingManager(16)
    count = Counted(manager)
    keys = chain("a", 8)
    for name, on_device in (("loses", [8, 6, 2]), ("gains", [0, 2, 8])):
        ctx = context(name)
        manager.on_new_request(ctx)
        for blocks in on_device:
            poll(manager, ctx, keys, blocks)
        manager.on_request_finished(ctx)
    assert count(metrics.LOOKED_UP, "none") == 6
    assert count(metrics.REQUESTS, "on_device") == 1


def test_of_a_hybrid_model_the_first_group_with_full_attention_speaks() -> None:
    manager = EvokeOffloadingManager(32, window_groups=(0,))
    count = Counted(manager)
    window = [make_offload_key(f"w{i}".encode().ljust(32), 0) for i in range(4)]
    full = [make_offload_key(f"f{i}".encode().ljust(32), 1) for i in range(4)]
    for name in ("stores", "loads"):
        ctx = context(name)
        manager.on_new_request(ctx)
        found = [manager.lookup(key, ctx) == HIT for key in (*full, *reversed(window))]
        manager.touch(window[2:], ctx)
        manager.touch(full, ctx)
        if all(found[:4]):
            manager.prepare_load([*window[2:], *full], ctx)
            manager.complete_load({*window[2:], *full}, ctx)
        else:
            output = manager.prepare_store([*window[2:], *full], ctx)
            manager.complete_store(set(output.keys_to_store), ctx)
        manager.on_request_finished(ctx)
    assert count(metrics.LOOKED_UP, "none") == 8
    assert count(metrics.HIT, "none") == 4


def test_requests_that_never_looked_or_never_came() -> None:
    manager = EvokeOffloadingManager(16)
    count = Counted(manager)
    manager.on_request_finished(context("never came"))
    manager.on_new_request(context("too short for a block"))
    manager.on_request_finished(context("too short for a block"))
    assert sum(count.by_label(metrics.REQUESTS).values()) == 0


def test_stored_refused_evicted_reused() -> None:
    manager = EvokeOffloadingManager(8, config=EvokeConfig(policy="lru"))
    count = Counted(manager)
    serve(manager, "1", chain("a", 4), source_type="user")
    serve(manager, "2", chain("a", 4), source_type="user")
    serve(manager, "3", chain("b", 4), source_type="system")
    serve(manager, "4", chain("c", 6), no_store=True)
    serve(manager, "5", chain("d", 12))
    assert count(metrics.STORED, "user") == 4
    assert count(metrics.STORED, "system") == 4
    assert count(metrics.STORED, "none") == 8
    assert count(metrics.REFUSED, "no_store") == 6
    assert count(metrics.REFUSED, "no room") == 4
    assert count(metrics.EVICTED, "user", "capacity") == 4
    assert count(metrics.EVICTED, "system", "capacity") == 4
    assert count(metrics.EVICTED_REUSED, "user") == 4
    assert count(metrics.EVICTED_REUSED, "system") == 0
    assert count(metrics.REUSED, "user") == 4
    assert count(metrics.RESIDENT) == count(metrics.CAPACITY) == 8
    assert count(metrics.ORPHANS) == 0


def test_what_expires_and_what_is_reset() -> None:
    manager = EvokeOffloadingManager(8, config=EvokeConfig(policy="lru"))
    count = Counted(manager)
    serve(manager, "1", chain("a", 4), evoke_session="s", end_of_session=True)
    assert count(metrics.EXPIRED) == 4
    serve(manager, "2", chain("b", 6))
    assert count(metrics.EVICTED, "none", "expired") == 2
    manager.reset_cache()
    assert count(metrics.EVICTED, "none", "reset") == 8
    assert count(metrics.RESIDENT) == count(metrics.EXPIRED) == 0


def test_the_pinned_share() -> None:
    manager = EvokeOffloadingManager(8)
    count = Counted(manager)
    serve(manager, "1", chain("a", 1), pinned=True)
    assert count(metrics.PINNED_RATIO) == 1 / 8
    serve(manager, "2", chain("b", 4), pinned=True)
    assert count(metrics.PINNED_RATIO) == 2 / 8


def test_failed_writes() -> None:
    manager = EvokeOffloadingManager(8)
    count = Counted(manager)
    ctx = context("r")
    manager.on_new_request(ctx)
    stored = manager.prepare_store(chain("a", 3), ctx).keys_to_store
    manager.complete_store(set(stored), ctx, success=False)
    assert count(metrics.ABORTED) == 3
    assert count(metrics.STORED, "none") == 0


def test_ignored_tags_are_counted_by_tag_and_reason() -> None:
    manager = EvokeOffloadingManager(8)
    count = Counted(manager)
    for name in ("1", "2", "3"):
        serve(manager, name, chain("a", 1), priority="high", colour=name)
        assert count(metrics.TAGS_IGNORED, "unknown", "unknown tag") == int(name)
    assert count(metrics.TAGS_IGNORED, "priority", "not a number") == 3


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ((), {"user": 10}),
        ((Span(0, 4, "system"),), {"system": 2, "user": 8}),
        ((Span(0, 2, "system"), Span(5, 6), Span(8, 90, "tool")), {"user": 6, "tool": 4}),
        ((Span(0, 90, "system"),), {"system": 10}),
    ],
)
def test_blocks_by_the_role_that_spans_give_them(
    spans: tuple[Span, ...], expected: dict[str, int]
) -> None:
    assert by_role(RequestTags(source_type="user", spans=spans), 2, 12) == expected


def test_spans_label_lookups_and_hits() -> None:
    manager = EvokeOffloadingManager(16, tokens_per_block=32)
    count = Counted(manager)
    span = {"start": 0, "end": 90, "source_type": "system"}
    for name in ("1", "2"):
        serve(manager, name, chain("a", 8), source_type="user", spans=[span])
    assert (count(metrics.LOOKED_UP, "system"), count(metrics.LOOKED_UP, "user")) == (6, 10)
    assert (count(metrics.HIT, "system"), count(metrics.HIT, "user")) == (3, 5)


# --- bounds ---------------------------------------------------------------------------------------


def test_strangers_cannot_make_labels() -> None:
    manager = EvokeOffloadingManager(8)
    count = Counted(manager)
    for n in range(200):
        serve(manager, f"r{n}", chain(f"{n}.", 2), source_type=f"role{n}", **{f"tag{n}": n})
    for name in (metrics.LOOKED_UP, metrics.HIT, metrics.STORED, metrics.REUSED):
        assert {labels[0] for labels in count.by_label(name)} == ROLES
    assert count(metrics.LOOKED_UP, "other") == 400
    assert {labels[0] for labels in count.by_label(metrics.EVICTED)} == ROLES
    assert len(count.by_label(metrics.TAGS_IGNORED)) == 1


def test_operators_make_labels() -> None:
    config = EvokeConfig(source_floors={"tool": 0.2})
    manager = EvokeOffloadingManager(8, config=config)
    count = Counted(manager)
    serve(manager, "1", chain("a", 2), source_type="tool")
    serve(manager, "2", chain("b", 2), source_type="user")
    assert (count(metrics.STORED, "tool"), count(metrics.STORED, "other")) == (2, 2)


def observations(stats: OffloadingConnectorStats | None, name: str) -> list[int]:
    assert stats is not None
    return stats.data["data"].get(name, {}).get((), [])


def test_one_observation_for_every_eight_blocks() -> None:
    manager = EvokeOffloadingManager(100, config=EvokeConfig(policy="lru"))
    for n in range(30):
        serve(manager, f"r{n}", chain(f"{n}.", 10))
    ages = observations(manager.get_stats(), metrics.EVICTION_AGE)
    assert len(ages) == (200 + 7) // 8
    assert set(ages) <= set(range(8, 12))


def test_a_step_hands_on_few_observations_however_much_it_moved() -> None:
    manager = EvokeOffloadingManager(20_000, config=EvokeConfig(policy="lru"))
    for n in range(100):
        serve(manager, f"old{n}", chain(f"{n}.", 200))
    manager.get_stats()
    serve(manager, "new", chain("new", 20_000))
    ages = observations(manager.get_stats(), metrics.EVICTION_AGE)
    assert len(ages) == metrics.MAX_OBSERVATIONS
    # Thinned evenly: the quantiles are those of the blocks, whose ages go from 1 to 100.
    assert abs(sorted(ages)[len(ages) // 2] - 50) <= 3
    assert manager.get_stats() is None


def test_a_step_hands_on_only_what_has_changed() -> None:
    manager = EvokeOffloadingManager(8)
    serve(manager, "1", chain("a", 4))
    assert manager.get_stats() is not None
    assert manager.get_stats() is None, "an idle step"
    context = ReqContext("2")
    manager.on_new_request(context)
    stats: Any = manager.get_stats()
    assert stats.data["data"].keys() == compat.usage(writing=0, reading=0).keys()


def test_every_call_that_changes_something_is_noticed() -> None:
    manager = EvokeOffloadingManager(8)
    keys, context = chain("a", 4), ReqContext("1")
    for call in (
        lambda: manager.on_new_request(context),
        lambda: manager.touch(keys, context),
        lambda: manager.prepare_store(keys, context),
        lambda: manager.complete_store(keys, context),
        lambda: manager.prepare_load(keys, context),
        lambda: manager.complete_load(keys, context),
        lambda: manager.on_request_finished(context),
        lambda: manager.reset_cache(),
    ):
        manager.get_stats()
        assert manager.get_stats() is None
        call()
        assert manager.get_stats() is not None


# --- how it travels -------------------------------------------------------------------------------


def test_definitions_clash_with_nobody_and_keep_stocks() -> None:
    ours, stock = definitions(), CPUOffloadingSpec.build_metric_definitions({})
    assert all(re.fullmatch(PREFIX + "[a-z_]+", name) for name in ours)
    assert not ours.keys() & (stock.keys() | get_connector_metric_definitions().keys())
    assert EvokeOffloadingSpec.build_metric_definitions({}) == {**stock, **ours}
    with_threshold = EvokeOffloadingSpec.build_metric_definitions({"store_threshold": 2})
    assert len(with_threshold) == len(ours) + len(stock) + 1
    for name, metadata in ours.items():
        assert metadata.documentation.endswith("."), name


@pytest.fixture
def _clean_registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def transfer_config(spec: str = "EvokeOffloadingSpec", module: str = "evoke_vllm.spec") -> Any:
    extra = {"spec_name": spec, "spec_module_path": module, "cpu_bytes_to_use": 1 << 20}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def prometheus(connector: Any, kv_transfer: dict[str, Any]) -> Any:
    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**kv_transfer))
    types: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return connector.build_prom_metrics(
        config, types, ["model_name", "engine"], {0: ["model", "0"], 1: ["model", "1"]}
    )


def sent(stats: Any) -> dict[str, Any]:
    """The stats as the process that serves /metrics gets them from the engine's."""
    data = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
    frames = MsgpackEncoder().encode(outputs)
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames).scheduler_stats
    assert received is not None
    assert received.kv_connector_stats is not None
    return received.kv_connector_stats


def busy_manager() -> EvokeOffloadingManager:
    manager = EvokeOffloadingManager(40)
    for n in range(60):
        serve(manager, f"r{n}", chain(f"{n % 7}.", 10), source_type="user", priority=99)
    return manager


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "model", "engine": "0", **labels})


@pytest.mark.usefixtures("_clean_registry")
def test_everything_survives_the_way_to_prometheus() -> None:
    shown = prometheus(OffloadingConnector, transfer_config())
    manager = busy_manager()
    stats: Any = manager.get_stats()
    expected = {name: dict(values) for name, values in stats.data["data"].items()}
    shown.observe(sent(stats), engine_idx=0)
    for name, metadata in definitions().items():
        for labels, value in expected.get(name, {}).items():
            given = dict(zip(metadata.labelnames, labels, strict=True))
            if isinstance(metadata, OffloadingHistogramMetadata):
                assert sample(f"{name}_count", **given) == len(value)
                assert sample(f"{name}_sum", **given) == sum(value)
            else:
                suffix = "_total" if isinstance(metadata, OffloadingCounterMetadata) else ""
                assert sample(name + suffix, **given) == value
    assert sample(metrics.TAGS_IGNORED + "_total", tag="priority", reason="clamped to [0.1, 10]")
    assert sample(metrics.HIT + "_total", source_role="user")


@pytest.mark.usefixtures("_clean_registry")
def test_a_second_engine_in_the_same_process_starts() -> None:
    """vLLM takes its own metrics back first, by the prefix of their names: ours have it."""
    for _ in range(2):
        unregister_vllm_metrics()
        prometheus(OffloadingConnector, transfer_config())


@pytest.mark.usefixtures("_clean_registry")
@pytest.mark.parametrize("second", ["EvokeOffloadingSpec", "HostOffloadingSpec"])
def test_two_offloading_connectors_under_multi_connector(second: str) -> None:
    """No metric is registered twice, and what both count is added up."""
    module = "evoke_vllm.spec" if second == "EvokeOffloadingSpec" else "evoke_vllm.host"
    connectors = [transfer_config(), transfer_config(second, module)]
    shown = prometheus(
        MultiConnector,
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    )
    merged: Any = busy_manager().get_stats()
    if second == "EvokeOffloadingSpec":
        merged.aggregate(busy_manager().get_stats())
    hits = sum(merged.data["data"][metrics.HIT].values())
    stats = MultiKVConnectorStats(data={"OffloadingConnector": merged})
    rebuilt = MultiConnector.build_kv_connector_stats(sent(stats))
    assert rebuilt is not None
    assert rebuilt.reduce()  # what the log shows
    shown.observe(sent(stats), engine_idx=0)
    assert sample(metrics.HIT + "_total", source_role="user") == hits > 0


# --- the dashboard --------------------------------------------------------------------------------


def exposed_names() -> dict[str, str]:
    """Every series that Prometheus shows of our metrics, and the metric it belongs to."""
    names = {}
    for name, metadata in definitions().items():
        suffixes = ("",)
        if isinstance(metadata, OffloadingCounterMetadata):
            suffixes = ("_total",)
        elif isinstance(metadata, OffloadingHistogramMetadata):
            suffixes = ("_bucket", "_sum", "_count")  # type: ignore[assignment]
        names.update({name + suffix: name for suffix in suffixes})
    return names


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]
    stock = {**CPUOffloadingSpec.build_metric_definitions({}), **get_connector_metric_definitions()}
    known = exposed_names()
    used = {name for each in expressions for name in re.findall(r"vllm:[a-z_]+", each)}
    ours = {name for name in used if name.startswith(PREFIX)}
    assert ours <= known.keys()
    assert {known[name] for name in ours} == definitions().keys()
    assert {name.removesuffix("_total") for name in used - ours} <= stock.keys()
    labels = {label for metadata in definitions().values() for label in metadata.labelnames}
    grouped = {
        label.strip()
        for each in expressions
        for clause in re.findall(r"by \(([^)]*)\)", each)
        for label in clause.split(",")
    }
    assert grouped <= labels | {"le", "engine"}


def test_the_dashboard_can_be_imported_anywhere() -> None:
    board = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "id" not in board
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in taken) < 24
        cells |= taken
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'model_name=~"$model"' in target["expr"]


def test_every_metric_is_documented() -> None:
    readme = (DASHBOARD.parents[1] / "README.md").read_text()
    for name in definitions():
        assert f"`{name.removeprefix(PREFIX)}" in readme, name
