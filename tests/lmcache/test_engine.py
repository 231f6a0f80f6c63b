# SPDX-License-Identifier: Apache-2.0
"""The policy inside the real LMCache engine, on CPU tensors."""

import importlib.metadata
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="no LMCache here: run `nox -s tests-lmcache`")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING, get_cache_policy
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from evoke_lmcache import EvokeCachePolicy, register
from tests.lmcache.engine import CHUNK, CHUNK_BYTES, GIB, Engine, engine, metadata, prompt

STOCK = ["LRU", "LFU", "FIFO"]
SYSTEM = {"lmcache.evoke.source_type": "system", "lmcache.evoke.priority": "4"}


def retention(cache: Engine, backend: str = "LocalCPUBackend") -> Any:
    return cache.backends[backend].cache_policy.retention


def check(cache: Engine) -> None:
    """The index holds exactly what LMCache holds, and nothing went wrong."""
    policy = cache.cpu.cache_policy
    assert not policy.guarded.failed
    names = {policy.retention._names.name(key) for key in cache.cpu.get_keys()}
    assert len(policy.retention.index) == len(names)
    assert all(name in policy.retention.index for name in names)


# --- what it is for ---


@pytest.mark.parametrize("policy", [*STOCK, "EVOKE"])
def test_a_tagged_system_prompt_survives_churn(policy: str) -> None:
    with engine(policy, 40) as cache:
        system = prompt("sys", 8)
        cache.serve(system + prompt("u0", 2), SYSTEM)
        for n in range(30):
            cache.serve(prompt(f"c{n}", 6))
        kept = cache.serve(system + prompt("u1", 2), SYSTEM)
        assert kept == (len(system) if policy == "EVOKE" else 0)
        assert len(cache.cpu.hot_cache) == 40


@pytest.mark.parametrize("policy", [*STOCK, "EVOKE"])
def test_a_prompt_loses_its_tail_first(policy: str) -> None:
    """320 chunks stored, some evicted: everything that is kept must be of use."""
    with engine(policy, 320) as cache:
        long = prompt("a", 320)
        cache.store(long)
        assert cache.hits(long) == 320 * CHUNK
        cache.store(prompt("b", 5))
        kept = len(cache.cpu.hot_cache) - 5
        assert kept == 315
        assert cache.hits(long) == (315 * CHUNK if policy == "EVOKE" else 0)


@pytest.mark.parametrize("settings", [{}, {"policy": "scored"}, {"policy": "lru"}], ids=str)
def test_bytes_read_are_bytes_written(settings: dict[str, str]) -> None:
    """A random mix; the engine compares every chunk that it reads back."""
    draw = random.Random(5)
    heads = [prompt(f"h{n}", 4) for n in range(5)]
    read = 0
    with engine("EVOKE", 60, extra_config={"evoke": settings}, plugin=True) as cache:
        for n in range(150):
            head = draw.choice(heads)[: draw.randint(1, 4) * CHUNK]
            tail = prompt(f"t{draw.randrange(40)}", draw.randint(0, 5))
            configs = draw.choice([None, SYSTEM])
            read += cache.serve(head + tail, configs, step=draw.choice([None, 2 * CHUNK]))
            if n % 10 == 0:
                check(cache)
        assert retention(cache).counters.evicted > 100
        assert retention(cache).counters.refiled == 0
    assert read > 100 * CHUNK


def test_everything_kept_is_reachable() -> None:
    """No chunk is kept behind one that is gone, whatever the order of requests."""
    draw = random.Random(11)
    with engine("EVOKE", 50) as cache:
        prompts = [prompt(f"p{n % 12}", 3) + prompt(f"q{n}", n % 5) for n in range(40)]
        for _ in range(150):
            cache.serve(draw.choice(prompts), draw.choice([None, SYSTEM]))
            cache.look_up(prompt("none", 1))
        reachable = set()
        database = cache.built.token_database
        for tokens in prompts:
            keys = [key for *_, key in database.process_tokens(tokens=tokens)]
            reachable |= set(keys[: cache.hits(tokens) // CHUNK])
        assert set(cache.cpu.get_keys()) == reachable


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    long = prompt("long", 40)
    with engine("EVOKE", 24) as cache:
        cache.serve(prompt("old", 10))
        cache.serve(long, step=4 * CHUNK)
        assert cache.hits(long) == 24 * CHUNK


def test_concurrent_requests_keep_their_chains_apart() -> None:
    """Two chunked prefills without tags, stored step by step as vLLM's scheduler does it."""
    first, second = prompt("one", 11), prompt("two", 9)
    with engine("EVOKE", 64) as cache:
        for tokens in (first, second):
            cache.built.lookup_unpin(cache.look_up(tokens).request)
        # Four chunks a step; in the third one the second request starts and the first one ends.
        cache.store(first[: 4 * CHUNK])
        cache.store(first[: 8 * CHUNK], start=4 * CHUNK)
        cache.store(second[: 1 * CHUNK])
        cache.store(first, start=8 * CHUNK)
        cache.store(second[: 5 * CHUNK], start=1 * CHUNK)
        cache.store(second, start=5 * CHUNK)
        index, name = retention(cache).index, retention(cache)._names.name
        for tokens in (first, second):
            keys = [key for *_, key in cache.built.token_database.process_tokens(tokens=tokens)]
            parents = [index.parent(name(key)) for key in keys]
            assert parents == [None, *(name(key) for key in keys[:-1])]


# --- what it must not touch ---


def test_pinned_chunks_stay() -> None:
    wanted = prompt("pin", 6)
    with engine("LRU", 12, extra_config={"evoke": {"policy": "lru"}}, plugin=True) as cache:
        cache.serve(wanted)
        lookup = cache.look_up(wanted)
        for n in range(10):
            cache.serve(prompt(f"c{n}", 4))
        assert cache.hits(wanted) == len(wanted)
        cache.retrieve(lookup, wanted)
        for n in range(10, 20):
            cache.serve(prompt(f"c{n}", 4))
        assert cache.hits(wanted) == 0


def test_removing_and_clearing_from_outside() -> None:
    with engine("EVOKE", 30) as cache:
        tokens = prompt("a", 10)
        cache.serve(tokens)
        cache.serve(prompt("b", 10))
        cache.cpu.remove(cache.cpu.get_keys()[4])
        check(cache)
        cache.serve(tokens)
        assert cache.hits(tokens) == len(tokens)
        check(cache)
        cache.built.clear()
        assert len(cache.cpu.hot_cache) == 0
        check(cache)


def test_an_error_inside_does_not_reach_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("EVOKE", 12) as cache:
        cache.serve(prompt("a", 6))
        monkeypatch.setattr(retention(cache), "candidates", lambda *args: 1 / 0)
        for n in range(8):
            tokens = prompt(f"b{n}", 6)
            cache.serve(tokens)
            assert cache.hits(tokens) == len(tokens)
        assert cache.cpu.cache_policy.guarded.failed


def test_threads_may_look_up_while_another_stores() -> None:
    """vLLM's lookups come from a thread of their own."""
    failures: list[BaseException] = []
    heads = [prompt(f"h{n}", 4) for n in range(4)]
    with engine("EVOKE", 40) as cache:

        def look() -> None:
            draw = random.Random(2)
            try:
                for _ in range(300):
                    tokens = draw.choice(heads) + prompt(f"t{draw.randrange(9)}", 2)
                    cache.built.lookup_unpin(cache.look_up(tokens).request)
            except BaseException as error:
                failures.append(error)

        looking = threading.Thread(target=look)
        looking.start()
        for n in range(150):
            cache.store(heads[n % 4] + prompt(f"t{n % 9}", 2))
            cache.store(prompt(f"x{n}", 3))
        looking.join()
        assert not failures
        check(cache)


# --- other backends ---


def test_disk_evicts_by_the_same_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "scored")
    disk: dict[str, Any] = {
        "local_disk": f"file://{tmp_path}/",
        "max_local_disk_size": 30.5 * CHUNK_BYTES / GIB,
    }
    system = prompt("sys", 6)

    def settle(cache: Engine) -> None:
        worker = cache.backends["LocalDiskBackend"].disk_worker
        deadline = time.monotonic() + 20
        while worker.put_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not worker.put_tasks

    with engine("EVOKE", 16, **disk) as cache:
        cache.serve(system, SYSTEM)
        for n in range(12):
            settle(cache)
            cache.serve(prompt(f"c{n}", 5))
        settle(cache)
        backend = cache.backends["LocalDiskBackend"]
        files = list(tmp_path.iterdir())
        assert len(files) == len(dict.keys(backend.dict)) == len(retention(cache, str(backend)))
        assert 25 <= len(files) <= 30
        assert not backend.cache_policy.guarded.failed
        assert retention(cache, str(backend)).counters.evicted > 20
        keys = [key for *_, key in cache.built.token_database.process_tokens(tokens=system)]
        assert all(dict.__contains__(backend.dict, key) for key in keys)
        # And what only the disk still has comes back through the memory, intact.
        for key in keys[3:]:
            cache.cpu.remove(key)
        assert cache.serve(system, SYSTEM) == len(system)
        check(cache)


def test_layerwise_groups_go_together() -> None:
    """LMCache's layerwise path evicts all layers of a chunk, or none."""
    layers = 4
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=(layers * 6 + 0.5) * 4096 / GIB,
        cache_policy="EVOKE",
        use_layerwise=True,
    )
    register()
    backend = LocalCPUBackend(config, metadata(), "cpu")
    shape = torch.Size([CHUNK, 2, 64])

    def key(n: int) -> CacheEngineKey:
        return CacheEngineKey("model", 1, 0, 1000 + n, torch.float16)

    def store(numbers: range) -> int:
        """As LMCacheEngine.store_layer: all memory first, then layer by layer."""
        rows, objects = [], []
        for n in numbers:
            row = key(n).split_layers(layers)
            assert not backend.contains(row[0])
            got = backend.batched_allocate(
                shape, torch.float16, layers, MemoryFormat.KV_T2D, busy_loop=False
            )
            if got is None:
                break
            rows.append(row)
            objects.append(got)
        for layer in range(layers):
            batch = [row[layer] for row in rows]
            backend.batched_submit_put_task(batch, [got[layer] for got in objects])
        for got in objects:
            for thing in got:
                thing.ref_count_down()
        return len(rows)

    try:
        assert not backend.contains(key(0).split_layers(layers)[0])
        assert store(range(5)) == 5
        assert not backend.contains(key(10).split_layers(layers)[0])
        assert store(range(10, 14)) == 4
        policy = backend.cache_policy
        kept = sorted({k.chunk_hash - 1000 for k in backend.get_keys()})
        assert kept == [0, 1, 10, 11, 12, 13]
        assert len(backend.get_keys()) == layers * 6
        assert len(policy.retention) == 6
        assert policy.retention.counters.evicted == 3
        assert not policy.guarded.failed
    finally:
        backend.close()


def test_all_keys_of_a_store_bring_the_very_object_it_was_given() -> None:
    """By it stores of one request are told from those of another with equal tags."""
    with engine("EVOKE", 20) as cache:
        tags = [{"lmcache.evoke.source_type": "user"} for _ in range(2)]
        prompts = [prompt("one", 4), prompt("two", 4)]
        for end in (2 * CHUNK, 4 * CHUNK):
            for tokens, given in zip(prompts, tags, strict=True):
                mask = torch.ones(end, dtype=torch.bool)
                mask[: end - 2 * CHUNK] = False
                part = tokens[:end]
                cache.built.store(tokens=part, mask=mask, prompt=part, request_configs=given)
        carried = [key.request_configs for key in dict.keys(cache.cpu.hot_cache)]
        assert len(carried) == 8
        assert all(configs is tags[0] or configs is tags[1] for configs in carried)


# --- configuration ---


@pytest.mark.parametrize(("policy", "plugin"), [("LRU", True), ("EVOKE", False)])
def test_settings_come_from_extra_config(policy: str, plugin: bool) -> None:
    extra = {"evoke": {"policy": "scored", "w_recency": 0.25, "recency_half_life": 40}}
    with engine(policy, 20, extra_config=extra, plugin=plugin) as cache:
        config = retention(cache).config
        assert (config.policy, config.w_recency, config.recency_half_life) == ("scored", 0.25, 40)
        assert retention(cache).tokens_per_chunk == CHUNK
        assert cache.serve(prompt("a", 5)) == 0
        assert cache.serve(prompt("a", 5)) == 5 * CHUNK
        check(cache)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"w_recency": 2}, "w_recency = 2 is not allowed"),
        ({"w_recencey": 1}, "did you mean w_recency"),
        (
            {"w_recency": 0.4, "w_attention": 0.1},
            "LMCache tells a cache policy nothing about attention",
        ),
        ("scored", "extra_config['evoke'] = 'scored' is not allowed"),
    ],
)
@pytest.mark.parametrize(("policy", "plugin"), [("LRU", True), ("EVOKE", False)])
def test_a_wrong_setting_stops_the_start(
    settings: Any, complaint: str, policy: str, plugin: bool
) -> None:
    with (
        pytest.raises(SystemExit, match=r"^EVOKE: ") as stopped,
        engine(policy, 20, extra_config={"evoke": settings}, plugin=plugin),
    ):
        pass
    assert complaint in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "lru")
    with engine("EVOKE", 20) as cache:
        assert retention(cache).config.policy == "lru"
    monkeypatch.setenv("EVOKE_POLICY", "best")
    with pytest.raises(SystemExit, match="policy = 'best'"), engine("EVOKE", 20):
        pass


def test_the_configuration_that_vllm_loaded_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import lmcache.integration.vllm.utils as integration

    loaded = LMCacheEngineConfig.from_defaults(
        chunk_size=32, extra_config={"evoke": {"policy": "scored"}}
    )
    monkeypatch.setattr(integration, "_config_instance", loaded)
    register()
    policy = get_cache_policy("evoke")
    assert isinstance(policy, EvokeCachePolicy)
    assert policy.retention.config.policy == "scored"
    assert policy.retention.tokens_per_chunk == 32


def test_vllm_finds_the_plugin() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="evoke_lmcache")
    [plugin] = [entry.load() for entry in found]
    POLICY_MAPPING.pop("EVOKE", None)
    plugin()
    assert POLICY_MAPPING["EVOKE"] is register() is register()
