"""What a server shows of its tier: metrics, KV events and a recording, after one busy life.

One server with default settings and two ranks (tensor parallelism) serves agents under pressure,
one request at a time and then many at once, and is stopped. Everything it showed must agree with
vLLM's own counters and with each other, and a replay of its recording must find what it found.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.end_to_end.tier import BLOCK, CONTEXT, TIER, Samples, Tier, serving, total

pytestmark = pytest.mark.engine

EVOKE = "vllm:kv_offload_evoke_"
TAIL = 5  # tokens behind a context
MALFORMED = {"priority": 99, "spans": [{"start": 3}], "colour": "red", "end_of_session": True}


@dataclass
class Life:
    """What one server showed, and what its client counted."""

    metrics: dict[str, Samples]
    requests: int
    recording: Path
    events: list[Any]
    effects: dict[str, list[int]]

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's values with these labels."""
        wanted = labels.items()
        return total(
            {
                given: value
                for given, value in self.metrics[EVOKE + name].items()
                if wanted <= dict(given).items()
            }
        )

    def labels(self, name: str, label: str) -> set[str]:
        return {dict(given)[label] for given in self.metrics[EVOKE + name]}


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("life")
    recording = folder / "recordings" / "server.trace"
    with _subscriber() as (endpoint, payloads):
        publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        options = ["--kv-events-config", json.dumps(publish)]
        options += ["--shutdown-timeout", "20"]  # without it the engine is killed, not stopped
        options += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            cores = sorted(os.sched_getaffinity(0))
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
            patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # resets over HTTP
            tier = stack.enter_context(serving(folder, *options, record_trace=str(recording)))
            for _ in range(50):  # what is published before the subscription arrives is lost
                if not payloads:
                    tier.ask(tier.fresh(1), {"no_store": True})
            effects = _effects(tier)
            _live(tier)
            metrics = tier.metrics()
        time.sleep(1)
    return Life(metrics, tier.requests, recording, _decoded(payloads), effects)


@contextmanager
def _subscriber() -> Iterator[tuple[str, list[bytes]]]:
    """An endpoint to publish KV events to, and the list that they are put into."""
    zmq: Any = pytest.importorskip("zmq")  # vLLM's own requirement
    payloads: list[bytes] = []
    done = threading.Event()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def receive() -> None:
            while not done.is_set():
                if socket.poll(50):
                    payloads.append(socket.recv_multipart()[-1])

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}", payloads
        finally:
            done.set()
            thread.join()


def _decoded(payloads: list[bytes]) -> list[Any]:
    from vllm.distributed.kv_events import KVEventBatch

    msgspec: Any = pytest.importorskip("msgspec")

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    return [event for payload in payloads for event in decode(payload).events]


def _effects(tier: Tier) -> dict[str, list[int]]:
    """By tag, what a full tier takes of a new context, first without the tag, then with it.

    The first context of the tier is asked about with the tag; the new one is like all others.
    """
    tags: dict[str, dict[str, Any]] = {
        "ttl_s": {"ttl_s": 0.2},
        "end_of_session": {"evoke_session": "over", "end_of_session": True},
        "no_store": {"no_store": True},
    }
    effects: dict[str, list[int]] = {}
    for name, told in tags.items():
        effects[name] = []
        for given in (None, told):
            tier.reset()
            tier.ask(tier.fresh(), given)
            tier.scan(TIER // CONTEXT - 1)
            time.sleep(0.3)
            before = tier.stored()
            tier.ask(tier.fresh())
            effects[name].append(tier.stored() - before)
    tier.reset()
    return effects


def _live(tier: Tier) -> None:
    """Agents with hot contexts, sessions that grow, documents that pass, and careless clients."""
    random = Random(1)
    hot = [tier.fresh() for _ in range(3)]
    session = tier.fresh(2)
    for turn in range(1, 16):
        for context in random.sample(hot, 2):
            system = {"start": 0, "end": 3 * BLOCK, "source_type": "system"}
            tier.ask(context, {"source_type": "user", "spans": [system]})
        tier.ask(tier.fresh(), {"source_type": "tool"})
        tier.ask(tier.fresh(6))
        if turn % 7 == 0:
            tier.ask(session, {"evoke_session": "s", "end_of_session": True})
            session = tier.fresh(2)
        session = session + tier.fresh(1)
        tags = {"source_type": "assistant", "evoke_session": "s", "expect_reuse_in_s": 5}
        tier.ask(session[: 9 * BLOCK], tags)
        tier.ask(tier.fresh(4), {"ttl_s": 0.05} if turn % 2 else {"no_store": True})
    tier.ask(hot[0], {"pinned": True})
    tier.ask(hot[0], MALFORMED)
    with ThreadPoolExecutor(6) as pool:  # more than the GPU holds: they wait and are polled
        prompts = [[*random.choice(hot), *tier.fresh(1)[:TAIL]] for _ in range(24)]
        list(pool.map(lambda prompt: _complete(tier.url, prompt), prompts))
    tier.requests += len(prompts)
    tier.ask(tier.fresh(1))  # a last step: all that happened before it has been told


def _complete(url: str, prompt: list[int]) -> None:
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def test_the_default_policy_admits_what_a_tag_has_made_room_for(life: Life) -> None:
    """What nobody has used again does not push out its like; what is over or never came does not
    count."""
    assert life.effects == {
        "ttl_s": [0, CONTEXT],
        "end_of_session": [0, CONTEXT],
        "no_store": [0, CONTEXT],
    }


def test_every_metric_is_there(life: Life) -> None:
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingHistogramMetadata

    from evoke_vllm.metrics import definitions

    for name, metadata in definitions().items():
        if name.endswith("unneeded_window_ratio"):
            continue  # a hybrid model's: tests/vllm/test_hybrid.py
        suffixes = [""]
        if isinstance(metadata, OffloadingCounterMetadata):
            suffixes = ["_total"]
        elif isinstance(metadata, OffloadingHistogramMetadata):
            suffixes = ["_bucket", "_sum", "_count"]
        for suffix in suffixes:
            assert life.metrics.get(name + suffix), f"{name}{suffix} has no value"


def test_lookups_and_hits_are_the_servers_own(life: Life) -> None:
    """One by one and many at once, polled or not: vLLM's counters, in blocks."""
    queried = total(life.metrics["vllm:external_prefix_cache_queries_total"])
    restored = total(life.metrics["vllm:external_prefix_cache_hits_total"])
    assert life.value("hit_blocks_total") == restored / BLOCK > 100
    assert life.value("lookup_blocks_total") == (queried - TAIL * life.requests) / BLOCK
    assert life.value("requests_total") == life.requests
    for result in ("full", "miss", "on_device"):
        assert life.value("requests_total", result=result) > 0, result


def test_source_roles_are_labelled_and_bounded(life: Life) -> None:
    roles = {"system", "user", "assistant", "other", "none"}
    for name in ("lookup", "hit", "stored", "evicted", "evicted_reused", "reused"):
        assert life.labels(f"{name}_blocks_total", "source_role") == roles
    asked = {role: life.value("lookup_blocks_total", source_role=role) for role in roles}
    assert asked["other"] == 15 * CONTEXT  # "tool", which is not configured
    assert all(asked.values()), asked
    for role in ("system", "user", "assistant"):
        assert life.value("hit_blocks_total", source_role=role) > 0, role
    assert life.value("hit_blocks_total", source_role="other") == 0


def test_what_went_in_and_out_adds_up(life: Life) -> None:
    stored, evicted = life.value("stored_blocks_total"), life.value("evicted_blocks_total")
    assert stored - evicted == life.value("resident_blocks") <= TIER
    assert life.value("capacity_blocks") == TIER
    assert 0 < life.value("evicted_reused_blocks_total") < evicted
    assert life.value("reused_blocks_total") >= life.value("hit_blocks_total")
    by_reason = {
        reason: life.value("evicted_blocks_total", reason=reason)
        for reason in life.labels("evicted_blocks_total", "reason")
    }
    assert by_reason.keys() == {"capacity", "expired", "session share", "reset"}
    assert min(by_reason["capacity"], by_reason["expired"]) > 0
    assert by_reason["session share"] == 0
    assert by_reason["reset"] == 6 * TIER
    assert life.value("refused_blocks_total", reason="no_store") > 0


def test_health(life: Life) -> None:
    assert life.value("orphan_blocks") == 0
    assert life.value("aborted_blocks_total") == 0
    assert life.value("recording_dropped_events_total") == 0
    assert life.value("pinned_ratio") == CONTEXT / TIER
    assert 0 <= life.value("expired_blocks") <= TIER


def test_ages_and_intervals(life: Life) -> None:
    """One observation for every 8 blocks, the first block included."""
    evicted = life.value("evicted_blocks_total")
    evicted -= life.value("evicted_blocks_total", reason="reset")
    for name, blocks in (
        ("eviction_age", evicted),
        ("reuse_interval", life.value("reused_blocks_total")),
    ):
        count = life.value(f"{name}_requests_count")
        assert count == (blocks + 7) // 8
        assert 1 <= life.value(f"{name}_requests_sum") / count < life.requests


def test_ignored_tags(life: Life) -> None:
    ignored = life.metrics[EVOKE + "tags_ignored_total"]
    assert {(dict(given)["tag"], dict(given)["reason"]): n for given, n in ignored.items()} == {
        ("priority", "clamped to [0.1, 10]"): 1,
        ("spans", "malformed span"): 1,
        ("unknown", "unknown tag"): 1,
        ("end_of_session", "no session"): 1,
    }


def test_beliefs(life: Life) -> None:
    roles = {f"role_{role}" for role in ("none", "system", "user", "assistant")}
    assert roles <= life.labels("belief", "about")
    for given, value in life.metrics[EVOKE + "belief"].items():
        assert 0 <= value <= 2, given


def test_kv_events_tell_of_the_tier(life: Life) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    tier = [event for event in life.events if getattr(event, "medium", None) == "CPU"]
    stored = [event for event in tier if isinstance(event, BlockStored)]
    removed = [event for event in tier if isinstance(event, BlockRemoved)]
    evicted = life.value("evicted_blocks_total")
    evicted -= life.value("evicted_blocks_total", reason="reset")  # which is not announced
    for events, blocks in ((stored, life.value("stored_blocks_total")), (removed, evicted)):
        assert sum(len(event.block_hashes) for event in events) == blocks > 0
    for event in stored:  # self-describing
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)


def test_a_replay_of_the_recording_finds_what_the_server_found(life: Life) -> None:
    from evoke_core.replay import read_trace, replay

    (result,) = replay(read_trace(life.recording), ["1x", "2x"], ["adaptive", "lru"], jobs=1)
    hits = {(cell.policy, cell.budget): cell.tier_hits for cell in result.cells}
    own = life.value("hit_blocks_total") / life.value("lookup_blocks_total")
    assert 0.1 < own < 0.9, "a server that always or never hits would prove nothing"
    assert abs(hits["adaptive", "1x"] - own) < 0.01
    assert hits["lru", "1x"] < own < hits["adaptive", "2x"]


def test_a_recording_is_whole_and_without_content(life: Life) -> None:
    from evoke_core.recording import read_recording

    recording = read_recording(life.recording)
    asked, found = recording.asked_and_found
    assert asked == life.value("lookup_blocks_total")
    assert found == life.value("hit_blocks_total")
    assert recording.lost == 0
    assert recording.header["capacity"] == TIER
    assert recording.header["tokens_per_block"] == BLOCK
    assert str(life.recording.parent) not in json.dumps(dict(recording.header))
