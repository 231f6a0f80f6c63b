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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evoke_vllm.spec import EvokeOffloadingSpec
from gates.faults import FAULTS_KEY

_POLL_S = 0.005


class FaultySpec(EvokeOffloadingSpec):
    """EVOKE's tier behind a slow worker."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._faults = vllm_config.kv_transfer_config.kv_connector_extra_config[FAULTS_KEY]

    def get_handlers(self, kv_caches: Any) -> Iterator[Any]:
        """vLLM 0.24: one handler for each direction."""
        journal = Journal(Path(self._faults["journal"]))
        journal.write(what="worker", pid=os.getpid())
        for source, target, handler in super().get_handlers(kv_caches):
            direction = "store" if source.medium() == "GPU" else "load"
            delay_s = float(self._faults.get(f"{direction}_s", 0.0))
            make_late(handler, direction, delay_s, journal)
            yield source, target, handler


class Journal:
    """Appends JSON lines to a file, each at once: the process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **entry: Any) -> None:
        """Append one entry, with the time."""
        self._file.write(json.dumps({"at": time.time(), **entry}) + "\n")


def make_late(handler: Any, direction: str, delay_s: float, journal: Journal) -> None:
    """Let `handler` do each transfer `delay_s` late, in the order they came."""
    submit, finished, wait = handler.transfer_async, handler.get_finished, handler.wait
    late: list[tuple[float, int, Any]] = []

    def transfer_async(job_id: int, spec: Any) -> bool:
        journal.write(what=direction, job=job_id, state="begun")
        late.append((time.monotonic() + delay_s, job_id, spec))
        return True

    def get_finished() -> list[Any]:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, job_id, spec = late.pop(0)
            submit(job_id, spec)
        results: list[Any] = finished()
        for result in results:
            journal.write(what=direction, job=result.job_id, state="done")
        return results

    def wait_for(job_ids: set[int]) -> None:
        while any(job_id in job_ids for _, job_id, _ in late):
            if (rest := late[0][0] - time.monotonic()) > 0:
                time.sleep(min(rest, _POLL_S))
                continue
            _, job_id, spec = late.pop(0)
            submit(job_id, spec)
        wait(job_ids)

    handler.transfer_async, handler.get_finished = transfer_async, get_finished
    handler.wait = wait_for
