# SPDX-License-Identifier: Apache-2.0
"""Two LMCache instances on one machine share a real store: Redis, from the distribution.

What one has stored, the other finds, although its own memory never held it. EVOKE decides what each
keeps in memory; what the store keeps is the store's business.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="no LMCache here: run `nox -s tests-lmcache`")
if shutil.which("redis-server") is None:
    pytest.skip("no redis-server here (apt-get install redis-server)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CHUNK = 16  # tokens
SYSTEM = ("sys", 8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"redis://localhost:{port}"
    finally:
        process.terminate()
        process.wait(10)


class Instance:
    """An LMCache in a process of its own."""

    def __init__(self, chunks: int, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lmcache.instance", str(chunks), url],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, operation: str, *parts: tuple[str, int], tagged: bool = False) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([operation, parts, tagged]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the instance ended with {self._process.wait()}")

    def wait_for(self, *parts: tuple[str, int]) -> None:
        """Puts to the store are asynchronous."""
        wanted = sum(n for _, n in parts) * CHUNK
        deadline = time.monotonic() + 60
        while (found := self.ask("hits", *parts)) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found == wanted

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def test_one_instance_finds_what_another_has_stored(store: str) -> None:
    one, two = Instance(24, store), Instance(24, store)
    try:
        assert one.ask("serve", SYSTEM, ("u1", 2), tagged=True) == 0
        two.wait_for(SYSTEM, ("u1", 2))
        assert two.ask("state", SYSTEM)["held"] == 0

        # Read from the store, compared byte by byte, and kept in memory.
        assert two.ask("serve", SYSTEM, ("u2", 2), tagged=True) == 8 * CHUNK
        assert two.ask("state", SYSTEM)["of_prompt"] == 8

        for n in range(12):
            two.ask("serve", (f"c{n}", 6))
        state = two.ask("state", SYSTEM)
        assert state["of_prompt"] == 8, "its own memory still has the tagged prompt"
        assert state["evicted"] > 40
        assert not state["failed"]

        one.wait_for(SYSTEM, ("u2", 2))
        assert one.ask("serve", SYSTEM, ("u2", 2), tagged=True) == 10 * CHUNK
        two.wait_for(("c0", 6))  # long gone from both memories, still in the store
    finally:
        one.stop()
        two.stop()
