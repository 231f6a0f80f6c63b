"""Specs for the bench: the tier's managers, with a clock on every call.

`Stock` is the stock tier, `Evoke` EVOKE's, `Published` the seed's formula. Each adds up the CPU
time of the scheduler's thread inside manager calls, and between the ends of scheduler steps:
manager time over step time is what a policy costs. A step's time is that thread's too (scheduler,
and with one worker in the process the model's own thread); waiting for work is none. Nested calls
count once.

`bench_profile` in the extra configuration names the file, JSON, that is written when the engine
ends and now and then before. Without it nothing is measured.
"""

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager

from bench.matrix.published_manager import PublishedManager
from evoke_vllm.host import HostOffloadingSpec
from evoke_vllm.spec import EvokeOffloadingSpec

_CALLS = (
    *("on_new_request", "lookup", "touch", "prepare_load", "complete_load", "prepare_store"),
    *("complete_store", "on_request_finished", "on_schedule_end", "take_events", "get_stats"),
)
_WRITE_EVERY = 20  # steps; a server that is killed loses at most so many


class Profile:
    """Adds up the time of a manager's calls and of the steps around them."""

    def __init__(self, path: Path, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._path = path
        self._clock = clock
        self._depth = 0
        self._stepped: int | None = None
        self._counts = {"steps": 0, "calls": 0, "manager_ns": 0, "step_ns": 0, "worst_step_ns": 0}
        self._by_call = {f"{name}_ns": 0 for name in _CALLS}
        self._in_step = 0

    def watch(self, manager: Any) -> None:
        """Put a clock on every call of `manager` that a scheduler makes."""
        for name in _CALLS:
            setattr(manager, name, self._timed(name, getattr(manager, name)))
        ending = manager.shutdown

        def shutdown() -> None:
            self.write()
            ending()

        manager.shutdown = shutdown
        atexit.register(self.write)

    def write(self) -> None:
        """Replace the file by what was counted so far."""
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        draft.write_text(json.dumps({**self._counts, **self._by_call}) + "\n")
        draft.replace(self._path)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, counts, by_call = self._clock, self._counts, self._by_call
        key = f"{name}_ns"
        ends_step = name == "on_schedule_end"

        def timed(*args: Any, **more: Any) -> Any:
            if self._depth:
                return call(*args, **more)
            self._depth = 1
            started = clock()
            try:
                return call(*args, **more)
            finally:
                ended = clock()
                self._depth = 0
                counts["calls"] += 1
                by_call[key] += ended - started
                self._in_step += ended - started
                if ends_step:
                    self._end_step(ended)

        return timed

    def _end_step(self, now: int) -> None:
        counts = self._counts
        if self._stepped is not None:  # the first step has no beginning
            counts["steps"] += 1
            counts["manager_ns"] += self._in_step
            counts["step_ns"] += now - self._stepped
            counts["worst_step_ns"] = max(counts["worst_step_ns"], self._in_step)
            if counts["steps"] % _WRITE_EVERY == 0:
                self.write()
                now = self._clock()  # what the file cost belongs to no step
        self._in_step = 0
        self._stepped = now


class _Watched:
    """Mixed in ahead of a spec: its manager is watched where a profile is asked for."""

    _watched: OffloadingManager | None = None

    def get_manager(self) -> OffloadingManager:
        if self._watched is None:
            self._watched = super().get_manager()  # type: ignore[misc]
            if path := self.extra_config.get("bench_profile"):  # type: ignore[attr-defined]
                Profile(Path(path)).watch(self._watched)
        return self._watched


class Stock(_Watched, HostOffloadingSpec):
    """The stock tier: LRU, or what `eviction_policy` says."""


class Evoke(_Watched, EvokeOffloadingSpec):
    """EVOKE's tier."""


class _Published(HostOffloadingSpec):
    _published: PublishedManager | None = None

    def get_manager(self) -> OffloadingManager:
        if self._published is None:
            self._published = PublishedManager(self.num_blocks)
        return self._published


class Published(_Watched, _Published):
    """The tier under the seed's published formula."""
