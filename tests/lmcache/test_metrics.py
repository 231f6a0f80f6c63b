# SPDX-License-Identifier: Apache-2.0
"""The policy's counters where LMCache's own metrics are shown."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="no LMCache here: run `nox -s tests-lmcache`")

from lmcache.v1.internal_api_server.common.metrics_api import get_metrics
from prometheus_client.parser import text_string_to_metric_families

from evoke_lmcache.plugin import register
from tests.lmcache.engine import engine, prompt

CPU = (("backend", "LocalCPUBackend"),)


def shown() -> dict[tuple[str, Any], float]:
    """What LMCache's internal API server answers at ``/metrics``, as far as it is ours."""
    text = asyncio.run(get_metrics(None)).body.decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("evoke_lmcache_") and sample.name.endswith("_total")
    }


def since(before: dict[tuple[str, Any], float]) -> dict[tuple[str, Any], float]:
    now = shown()
    return {at: value - before.get(at, 0) for at, value in now.items() if value != before.get(at)}


def test_what_happens_is_counted_at_lmcaches_metrics() -> None:
    with engine("EVOKE", 10) as cache:
        before = shown()
        for name in ("aa", "bb", "aa"):
            cache.serve(prompt(name, 6))
        counted = since(before)
        counters = cache.cpu.cache_policy.retention.counters
    assert counters.evicted > 0
    assert counters.hits > 0
    assert counted == {
        (f"evoke_lmcache_{name}_total", CPU): value
        for name, value in {
            "chunks_stored": counters.stored,
            "chunks_evicted": counters.evicted,
            "chunks_found": counters.hits,
            "requests": counters.requests,
        }.items()
    }


def test_each_backend_has_its_own(tmp_path: Path) -> None:
    before = shown()
    with engine("EVOKE", 10, local_disk=str(tmp_path), max_local_disk_size=1.0) as cache:
        cache.serve(prompt("dd", 6))
    backends = {dict(labels)["backend"] for name, labels in since(before)}
    assert backends == {"LocalCPUBackend", "LocalDiskBackend"}


def test_the_storage_plugins_policy_is_counted_under_the_cpu_backend() -> None:
    before = shown()
    with engine("LRU", 10, plugin=True) as cache:
        cache.serve(prompt("pp", 6))
    assert since(before)["evoke_lmcache_chunks_stored_total", CPU] == 6


def test_ignored_tags_are_counted_by_name_and_reason_and_clients_add_no_labels() -> None:
    before = shown()
    with engine("EVOKE", 10) as cache:
        for n in range(20):
            wrong = {"lmcache.evoke.priority": f"much{n}", f"lmcache.evoke.new{n}": "x"}
            cache.serve(prompt(f"t{n}", 1), wrong)
    ignored = {
        dict(labels)["tag"]: value
        for (name, labels), value in since(before).items()
        if name == "evoke_lmcache_tags_ignored_total"
    }
    assert ignored == {"priority": 20, "unknown": 20}


def test_a_policy_that_gives_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = register().configure(None, "LocalCPUBackend")
    before = shown()

    def broken(*args: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(policy.retention, "put", broken)
    for _ in range(2):
        policy.update_on_put("a key")
    assert since(before) == {("evoke_lmcache_policies_failed_total", CPU): 1}


def test_other_processes_are_shown_through_prometheus_multi_process_mode(tmp_path: Path) -> None:
    """As vLLM's ``/metrics`` does: it collects what the workers have written."""
    worker = (
        "from tests.lmcache.engine import engine, prompt\n"
        "with engine('EVOKE', 10) as cache: cache.serve(prompt('w', 6))\n"
    )
    reader = (
        "from prometheus_client import CollectorRegistry, generate_latest\n"
        "from prometheus_client.multiprocess import MultiProcessCollector\n"
        "registry = CollectorRegistry(); MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", worker], env=env, check=True, timeout=120)
    answer = subprocess.run(
        [sys.executable, "-c", reader], env=env, check=True, timeout=60, capture_output=True
    )
    line = 'evoke_lmcache_chunks_stored_total{backend="LocalCPUBackend"} 12.0'
    assert line in answer.stdout.decode().splitlines()
