"""EVOKE's spec with a worker that takes its time and keeps a journal, for the fault gates.

`kv_connector_extra_config["gate_faults"]` is a mapping: `journal` (a file), `load_s` and `store_s`
(seconds by which a transfer in that direction is late). A late transfer moves its data at the end
of the delay, not at its start: if its blocks were given to somebody else in the meantime, the
answers show it. The journal holds a JSON object a line: the process, then every transfer as it
begins and as it is done.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evoke_vllm.spec import EvokeOffloadingSpec
from gates.damage import extra_config
from gates.faults import FAULTS_KEY

_POLL_S = 0.005


class FaultySpec(EvokeOffloadingSpec):
    """EVOKE's tier behind a slow worker."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._faults = extra_config(given[0])[FAULTS_KEY]

    def get_handlers(self, kv_caches: Any) -> Iterator[Any]:
        """vLLM 0.24: one handler for each direction."""
        journal = self._journal()
        for source, target, handler in super().get_handlers(kv_caches):
            late = Late(handler, self._delays(), journal)
            late.wrap_handler("store" if source.medium() == "GPU" else "load")
            yield source, target, handler

    def get_worker(self, kv_caches: Any) -> Any:
        """vLLM 0.25 and later: one worker for both directions."""
        worker = super().get_worker(kv_caches)
        Late(worker, self._delays(), self._journal()).wrap_worker()
        return worker

    def _delays(self) -> dict[str, float]:
        return {name: float(self._faults.get(f"{name}_s", 0.0)) for name in ("load", "store")}

    def _journal(self) -> "Journal":
        journal = Journal(Path(self._faults["journal"]))
        journal.write(what="worker", pid=os.getpid())
        return journal


class Journal:
    """Appends JSON lines to a file, each at once: the process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **entry: Any) -> None:
        """Append one entry, with the time."""
        self._file.write(json.dumps({"at": time.time(), **entry}) + "\n")


class Late:
    """Lets a worker do each transfer late, in the order in which they came.

    `delays` in seconds, by direction. Whoever waits for a transfer gets it and all before it.
    """

    def __init__(self, worker: Any, delays: dict[str, float], journal: Journal) -> None:
        self._worker = worker
        self._delays = delays
        self._journal = journal
        self._late: list[tuple[float, int, Callable[[], Any]]] = []
        self._directions: dict[int, str] = {}
        self._finished, self._wait = worker.get_finished, worker.wait
        worker.get_finished, worker.wait = self._get_finished, self._wait_for

    def wrap_handler(self, direction: str) -> None:
        """Stand before the worker's only direction (vLLM 0.24)."""
        submit = self._worker.transfer_async
        self._worker.transfer_async = lambda job_id, spec: self._queue(
            direction, job_id, lambda: submit(job_id, spec)
        )

    def wrap_worker(self) -> None:
        """Stand before both directions (vLLM 0.25 and later)."""
        for direction in ("load", "store"):
            submit = getattr(self._worker, f"submit_{direction}")

            def late(
                job_id: int, *rest: Any, _way: str = direction, _do: Any = submit, **named: Any
            ) -> bool:
                return self._queue(_way, job_id, lambda: _do(job_id, *rest, **named))

            setattr(self._worker, f"submit_{direction}", late)

    def _queue(self, direction: str, job_id: int, submit: Callable[[], Any]) -> bool:
        self._journal.write(what=direction, job=job_id, state="begun")
        self._directions[job_id] = direction
        due = time.monotonic() + self._delays[direction]
        self._late.append((due, job_id, submit))
        self._late.sort(key=lambda entry: entry[0])
        return True

    def _get_finished(self) -> list[Any]:
        while self._late and self._late[0][0] <= time.monotonic():
            self._late.pop(0)[2]()
        results: list[Any] = self._finished()
        for result in results:
            direction = self._directions.pop(result.job_id)
            self._journal.write(what=direction, job=result.job_id, state="done")
        return results

    def _wait_for(self, job_ids: set[int]) -> None:
        while any(job_id in job_ids for _, job_id, _ in self._late):
            rest = self._late[0][0] - time.monotonic()
            if rest > 0:
                time.sleep(min(rest, _POLL_S))
            else:
                self._late.pop(0)[2]()
        self._wait(job_ids)
