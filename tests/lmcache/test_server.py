# SPDX-License-Identifier: Apache-2.0
"""The real `lmcache server`, filled past its watermark: EVOKE's module, and its own LRU."""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="no LMCache here: run `nox -s tests-lmcache`")
pytest.importorskip(
    "lmcache.v1.multiprocess.ext_server_module", reason="the server takes modules from 0.5.5 on"
)

from evoke_core import ConfigError
from evoke_lmcache.server_module import read_settings

ROOT = Path(__file__).parents[2]
TAGS = {"lmcache.evoke.source_type": "system", "lmcache.evoke.priority": "4"}
WORK = {"system_chunks": 8, "churn": 200, "churn_chunks": 6, "tags": TAGS}
SCORED = {"evoke": {"policy": "scored"}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process with a filler in it."""

    def __init__(self, process: subprocess.Popen[bytes], http: int, report: Path, log: Path):
        self.process = process
        self.http = http
        self.log = log
        self._report = report

    def report(self, timeout: float = 120.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not self._report.exists():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)
        found: dict[str, Any] = json.loads(self._report.read_text())
        assert "error" not in found, found["error"]
        return found

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.http}{path}", timeout=10) as answer:
            return str(answer.read().decode())


@contextlib.contextmanager
def server(
    folder: Path, policy: str, module: dict[str, Any] | None, *options: str, **work: Any
) -> Iterator[Server]:
    """`lmcache server` with 4 MiB, 254 chunks of 16 KiB."""
    report, log, http = folder / "report.json", folder / "log", free_port()
    modules = [] if module is None else [("evoke_lmcache.server_module", module)]
    modules.append(("tests.lmcache.filler", WORK | work | {"report": str(report)}))
    command = [
        str(Path(sys.executable).parent / "lmcache"),
        *("server", "--port", str(free_port()), "--http-port", str(http)),
        *("--prometheus-port", str(free_port()), "--chunk-size", "16"),
        *("--l1-size-gb", "0.004", "--no-l1-use-lazy", "--eviction-policy", policy, *options),
    ]
    for path, config in modules:
        command += ["--server-module", json.dumps({"module_path": path, "config": config})]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield Server(process, http, report, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_evicts_by_score_and_no_write_fails(tmp_path: Path) -> None:
    with server(tmp_path, "noop", SCORED, settle_s=0.5) as running:
        report = running.report()
        assert report["failed"] == 0
        assert report["wrong"] == 0
        assert report["hits"]["last"] == 9, "the tagged system prompt was kept"
        assert report["written"] > 1_000
        used, total = report["usage"]
        assert used > 0.7 * total, "memory is used, not merely kept free"

        metrics = {
            line.split()[0].partition("{")[0]: float(line.split()[-1])
            for line in running.get("/metrics").splitlines()
            if line.startswith("evoke_lmcache")
        }
        assert metrics["evoke_lmcache_chunks_evicted"] > 900
        assert metrics["evoke_lmcache_chunks_stored"] == report["written"]
        assert metrics["evoke_lmcache_chunks_found"] == report["found"] == 9
        assert metrics["evoke_lmcache_writes_failed"] == 0
        assert metrics["evoke_lmcache_errors"] == 0
        status = json.loads(running.get("/status"))
        assert '"thread_alive": true' in json.dumps(status)


def test_stock_lru_fails_writes_and_loses_the_prompt(tmp_path: Path) -> None:
    with server(tmp_path, "LRU", None) as running:
        report = running.report()
        assert report["failed"] > 100
        assert report["hits"]["last"] == 0


def test_dropped_events_leave_room_for_writes(tmp_path: Path) -> None:
    with server(
        tmp_path, "noop", SCORED, "--event-bus-queue-size", "4", churn=400, settle_s=0.5
    ) as running:
        report = running.report()
        metrics = running.get("/metrics")
        dropped = next(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("evoke_lmcache_events_dropped")
        )
        assert dropped > 50
        assert report["wrong"] == 0
        assert report["failed"] < 0.05 * report["written"]
        used, total = report["usage"]
        assert used < total


@pytest.mark.parametrize(
    ("policy", "module", "options", "complaint"),
    [
        ("noop", {"evoke": {"w_recencey": 1}}, [], "did you mean w_recency"),
        ("noop", {"headrom": 0.2}, [], "unknown key 'headrom'"),
        ("LRU", SCORED, [], "--eviction-policy = 'LRU'"),
        ("noop", SCORED, ["--disable-observability"], "--disable-observability is not allowed"),
    ],
)
def test_a_wrong_setting_stops_the_start(
    tmp_path: Path, policy: str, module: dict[str, Any], options: list[str], complaint: str
) -> None:
    with server(tmp_path, policy, module, *options) as running:
        assert running.process.wait(90) != 0
        assert complaint in running.log.read_text()


def test_settings_of_the_module() -> None:
    assert read_settings({})["headroom"] == 0.1
    assert read_settings({"headroom": 0.25, "interval_ms": 5})["interval_ms"] == 5
    for wrong in ({"headroom": 0.7}, {"headroom": True}, {"interval_ms": "10"}, {"evoke": 3}):
        with pytest.raises(ConfigError, match="not allowed"):
            read_settings(wrong)


def test_the_server_that_is_meant_is_tested() -> None:
    assert importlib.metadata.version("lmcache") >= "0.5.5"
