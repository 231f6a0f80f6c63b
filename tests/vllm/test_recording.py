# SPDX-License-Identifier: Apache-2.0
"""The recorder is told all that a replay needs, in order; a wrong path stops the start."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from evoke_core import ConfigError, Decision, EvokeConfig, RequestTags
from evoke_core.recording import read_recording
from evoke_core.replay import read_trace, replay
from evoke_vllm import metrics
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.recording import open_recorder
from tests.vllm.engine import MiniEngine
from tests.vllm.shapes import BLOCK, HIT, PAGE, create_spec

pytestmark = pytest.mark.engine


def chain(name: str, length: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32), 0) for i in range(length)]


class FakeRecorder:
    """Remembers what it is told."""

    lost = 0

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def opened(self, request_id: str, now: float, tags: RequestTags) -> None:
        self.told.append(("opened", request_id, tags))

    def prompt(
        self, request_id: str, keys: Sequence[bytes], *, group: int, tier_start: int, found: int
    ) -> None:
        self.told.append(("prompt", request_id, len(keys), group, tier_start, found))

    def offered(self, request_id: str, keys: Sequence[bytes], *, group: int, start: int) -> None:
        self.told.append(("offered", request_id, len(keys), group, start))

    def decisions(self, decisions: Iterable[Decision], request_id: str | None = None) -> None:
        for decision in decisions:
            self.told.append((decision.kind, request_id, len(decision.keys), decision.reason))

    def closed(self, request_id: str) -> None:
        self.told.append(("closed", request_id))

    def close(self) -> None:
        self.told.append(("close",))


def test_what_the_recorder_is_told() -> None:
    recorder = FakeRecorder()
    recorded: Any = recorder
    manager = EvokeOffloadingManager(6, config=EvokeConfig(policy="lru"), recorder=recorded)
    keys = chain("a", 6)
    for name, loaded, offered in (("one", 0, keys), ("two", 2, keys[:2] + chain("b", 2))):
        ctx = ReqContext(name, {"evoke": {"priority": 2}})
        manager.on_new_request(ctx)
        for _ in range(3):
            for key in offered[1:] if loaded else offered:  # the GPU has the first one
                if manager.lookup(key, ctx) != HIT:
                    break
            manager.touch(offered, ctx)
        if loaded:
            manager.prepare_load(offered[1:loaded], ctx)
            manager.complete_load(set(offered[1:loaded]), ctx)
        stored = manager.prepare_store(offered[loaded:], ctx).keys_to_store
        manager.complete_store(set(stored), ctx)
        list(manager.take_events())
        manager.on_request_finished(ctx)
    manager.reset_cache()
    manager.shutdown()
    tags = RequestTags(priority=2)
    assert recorder.told == [
        ("opened", "one", tags),
        ("prompt", "one", 6, 0, 0, 0),
        ("offered", "one", 6, 0, 0),
        ("stored", None, 6, ""),
        ("closed", "one"),
        ("opened", "two", tags),
        ("prompt", "two", 4, 0, 1, 1),
        ("offered", "two", 2, 0, 2),
        ("evicted", "two", 2, "capacity"),
        ("stored", None, 2, ""),
        ("closed", "two"),
        ("evicted", None, 6, "reset"),
        ("close",),
    ]


def test_what_the_recorder_loses_is_counted() -> None:
    recorder = FakeRecorder()
    recorded: Any = recorder
    manager = EvokeOffloadingManager(6, recorder=recorded)
    counts: list[int] = []
    for lost in (0, 3, 3):
        recorder.lost = lost
        ctx = ReqContext(str(len(counts)))
        manager.on_new_request(ctx)
        manager.prepare_store(chain(str(len(counts)), 2), ctx)
        stats: Any = manager.get_stats()
        counts.append(stats.data["data"].get(metrics.RECORDING_DROPPED, {}).get((), 0))
    assert counts == [0, 3, 0]


def test_no_path_no_recording() -> None:
    assert open_recorder(EvokeConfig(), source="here") is None


@pytest.mark.parametrize("wrong", ["folder", "below a file", "read only"])
def test_a_path_that_cannot_be_written(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path
    if wrong == "below a file":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "trace"
    elif wrong == "read only":
        path = tmp_path / "trace"
        monkeypatch.setattr("os.access", lambda *given: False)
    with pytest.raises(ConfigError) as caught:
        create_spec({"evoke": {"record_trace": str(path)}}).get_manager()
    message = str(caught.value)
    assert f"record_trace = {str(path)!r} (from kv_connector_extra_config['evoke'])" in message
    assert "allowed: the path of a file" in message
    assert "\n" not in message
    monkeypatch.setenv("EVOKE_RECORD_TRACE", str(path))
    with pytest.raises(ConfigError, match="environment variable EVOKE_RECORD_TRACE"):
        create_spec().get_manager()


def test_a_recording_of_vllms_scheduler_replays_to_the_same_hits(tmp_path: Path) -> None:
    """The spec opens it with what it knows, the engine's shutdown closes it."""
    path = tmp_path / "new" / "folder" / "trace"
    recording = {"record_trace": str(path), "record_trace_mib": 1}
    mini = MiniEngine(12, factor=2, extra={"evoke": recording})
    words = ["abcdefghijkl", "ABCDEFGHIJKL", "abcdefGHIJKL", "mnopqrstuvwx", "012345678901"]
    hits = asked = 0
    for turn in range(60):
        word = words[turn % 2 if turn % 4 < 2 else turn % 5]
        asked += len(word) // 2
        tags = {"evoke": {"source_type": "user", "evoke_session": word[:3]}}
        hits += mini.run(word, params=tags, report=turn % 3 > 0) // (2 * BLOCK)
    mini.finish_transfers()
    mini.connector.shutdown()

    read = read_recording(path)
    assert read.asked_and_found == (asked, hits)
    header = read.header
    assert (header["capacity"], header["tokens_per_block"]) == (12, 2 * BLOCK)
    assert header["bytes_per_block"] == 2 * PAGE
    assert header["runtime"] == "vllm"
    assert header["config"]["max_pinned_fraction"] == 0.25
    assert not any(name.startswith("record_") for name in header["config"])
    (result,) = replay(read_trace(path), ["1x"], ["adaptive"], jobs=1)
    assert 0.1 < hits / asked < 0.9
    assert result.cells[0].tier_hits == hits / asked
