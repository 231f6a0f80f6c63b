"""One `vllm serve` process on this machine: started, waited for, and ended whatever happens.

`running` is a context manager. On entry the server is healthy; on any exit (an exception,
Ctrl-C, a SIGTERM turned into an exception) its whole process group is ended, first with SIGTERM,
then with SIGKILL. The server's output is kept in a log. Health is asked over HTTP: after an
engine crash the API server can exit with code 0, so exit codes say nothing.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import ROOT
from bench.errors import BenchError, UsageProblem
from bench.serving.model import check_model_folder

HOST = "127.0.0.1"
SERVED_NAME = "model"
BOOT_BUDGET_S = 300.0
_TERMINATE_S = 10.0
_KILL_S = 5.0
_POLL_S = 0.5

# vLLM's CPU build on few cores: no compilation, two busy threads that sleep when idle, no
# network. A fixed hash seed makes set orders inside the engine repeat from run to run.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

OnWait = Callable[[float, float], None]
"""Told the seconds waited so far and the seconds allowed."""


@dataclass(frozen=True)
class ServerConfig:
    """What the server is started with; sizes in blocks and tokens, `options` as on its command."""

    model: Path
    gpu_blocks: int
    max_model_len: int
    block_size: int = 32
    max_batched_tokens: int = 256
    max_seqs: int = 8
    dtype: str = "float32"
    kv_space_gib: int = 4
    kv_transfer: Mapping[str, Any] | None = None
    options: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """Return the command line that serves this configuration on `port`."""
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += ["--host", HOST, "--port", str(port), "--served-model-name", SERVED_NAME]
        command += ["--dtype", self.dtype, "--block-size", str(self.block_size)]
        command += ["--max-model-len", str(self.max_model_len)]
        command += ["--max-num-batched-tokens", str(self.max_batched_tokens)]
        command += ["--max-num-seqs", str(self.max_seqs)]
        command += ["--num-gpu-blocks-override", str(self.gpu_blocks)]
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*command, *self.options]

    def process_environment(self) -> dict[str, str]:
        """Return the environment the server runs in: ours, then the settings above."""
        environment = {**os.environ, **_ENVIRONMENT}
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_space_gib)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # uncached imports double the boot time
        return environment


@dataclass(frozen=True)
class MeasuredConfig(ServerConfig):
    """A server that can import this repository's own specs; `environment` is added to its own.

    A package could be asked for any setting by the caller's environment: here none is passed on.
    """

    environment: Mapping[str, str] = field(default_factory=dict)

    def process_environment(self) -> dict[str, str]:
        """Return the environment the server runs in."""
        environment = super().process_environment()
        for name in [name for name in environment if name.startswith("EVOKE_")]:
            del environment[name]
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return {**environment, **self.environment}


@dataclass(frozen=True)
class Server:
    """A server that was healthy when `running` handed it out."""

    url: str
    log: Path
    boot_s: float

    def failure(self, what: str) -> BenchError:
        """Return the error to raise when `what` went wrong: says whether the server is alive."""
        if _healthy(self.url):
            return BenchError(f"{what}; the server is healthy (log: {self.log})")
        return BenchError(f"{what}; the server is down: {last_error(self.log)} (log: {self.log})")


@contextmanager
def running(
    config: ServerConfig,
    log: Path,
    *,
    port: int | None = None,
    budget_s: float = BOOT_BUDGET_S,
    on_wait: OnWait = lambda elapsed, budget: None,
) -> Iterator[Server]:
    """Serve `config` until the block ends; a free port is chosen when none is given.

    Raises UsageProblem for a missing model folder or a port in use, BenchError when the server
    dies or is not healthy within `budget_s` seconds.
    """
    check_model_folder(config.model)
    port = _free_port() if port is None else check_port(port)
    url = f"http://{HOST}:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            config.command(port),
            env=config.process_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            boot_s = _wait_until_healthy(process, url, log, budget_s, on_wait)
            yield Server(url, log, boot_s)
        finally:
            end_group(process)


def check_port(port: int) -> int:
    """Return `port` if a server can listen on it here, else raise UsageProblem."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageProblem(f"port {port} on {HOST} cannot be used: {reason}") from None
    return port


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process group led by `process`: SIGTERM, a grace period, SIGKILL."""
    try:
        if _signal_group(process, signal.SIGTERM):
            _wait_for_group(process, _TERMINATE_S)
    finally:
        if _signal_group(process, signal.SIGKILL):
            _wait_for_group(process, _KILL_S)


def last_error(log: Path) -> str:
    """Return the log's most telling line: its last ERROR, else last exception, else last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    for pattern in (r"\bERROR\b.*\]\s+(\S.*)", r"(\w+(?:Error|Exception)\b: .*)", r"(.*)"):
        for line in reversed(lines):
            if match := re.search(pattern, line):
                return match.group(1)
    return "it wrote nothing"


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, budget_s: float, on_wait: OnWait
) -> float:
    started = time.monotonic()
    while True:
        elapsed = time.monotonic() - started
        on_wait(elapsed, budget_s)
        if process.poll() is not None:
            raise BenchError(f"the server died at boot: {last_error(log)} (log: {log})")
        if _healthy(url):
            return elapsed
        if elapsed > budget_s:
            raise BenchError(f"the server was not healthy within {budget_s:.0f} s (log: {log})")
        time.sleep(_POLL_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the group; False when no member is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        process.poll()  # reaps the leader, which would otherwise keep the group alive
        if not _signal_group(process, 0):
            return
        time.sleep(0.1)
