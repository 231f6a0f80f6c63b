"""The profiler counts what it should, and the published formula's manager keeps its promises."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext

from bench.matrix.overhead import Profile
from bench.matrix.published_manager import PublishedManager


class Manager:
    """Takes 10 ns for a lookup, 5 for a touch that looks up once, 1 for the end of a step."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self.ended = False

    def lookup(self, key: bytes) -> bool:
        self._clock.now += 10
        if key == b"bad":
            raise KeyError(key)
        return True

    def touch(self) -> None:
        self._clock.now += 5
        self.lookup(b"k")

    def on_schedule_end(self) -> None:
        self._clock.now += 1

    def shutdown(self) -> None:
        self.ended = True

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_time_inside_calls_and_between_steps(tmp_path: Path) -> None:
    clock = Clock()
    manager: Any = Manager(clock)
    path = tmp_path / "profile.json"
    Profile(path, clock).watch(manager)
    manager.lookup(b"k")
    manager.on_schedule_end()  # the first step has no beginning: it is left out
    for _ in range(2):
        clock.now += 100  # the engine's own work
        manager.touch()  # 15, its own lookup within
        manager.on_schedule_end()
    with pytest.raises(KeyError):
        manager.lookup(b"bad")
    manager.shutdown()
    assert manager.ended
    counts = json.loads(path.read_text())
    assert counts["steps"] == 2
    assert counts["manager_ns"] == 2 * 16
    assert counts["step_ns"] == 2 * 116
    assert counts["worst_step_ns"] == 16
    assert counts["touch_ns"] == 30
    assert counts["calls"] == 7


def key(number: int) -> Any:
    return number.to_bytes(8, "big") + bytes(4)


def test_the_published_manager_evicts_nothing_that_is_in_use() -> None:
    manager = PublishedManager(4)
    request = ReqContext("r")
    first = [key(n) for n in range(4)]
    grant = manager.prepare_store(first, request)
    assert grant.keys_to_store == first
    assert manager.lookup(first[0], request) is None  # being written
    assert manager.prepare_store([key(9)], request).keys_to_store == []
    manager.complete_store(set(first), request)
    assert manager.lookup(first[0], request) is True
    manager.prepare_load(first[:2], request)
    grant = manager.prepare_store([key(n) for n in range(10, 14)], request)
    assert len(grant.keys_to_store) == 2, "two are being read"
    assert set(grant.evicted_keys) == set(first[2:])
    manager.complete_load(set(first[:2]), request)
    manager.complete_store(set(grant.keys_to_store), request, success=False)
    assert manager.lookup(grant.keys_to_store[0], request) is False
    assert len(manager.prepare_store([key(20), key(21)], request).keys_to_store) == 2
