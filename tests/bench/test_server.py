"""A server process is waited for, explained when it dies, and never left behind."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.errors import BenchError, UsageProblem
from bench.serving import server as server_module
from bench.serving.server import ServerConfig, end_group, last_error, running

_HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_DYING = """
print("INFO starting")
print("(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] ValueError: no such dtype")
print("RuntimeError: see above")
"""
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@dataclass(frozen=True)
class ScriptConfig(ServerConfig):
    """Runs a Python script instead of an engine; it is handed the port."""

    script: str = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_POLL_S", 0.05)
    monkeypatch.setattr(server_module, "_TERMINATE_S", 0.5)


def script(model: Path, text: str) -> ScriptConfig:
    return ScriptConfig(model, gpu_blocks=2, max_model_len=32, script=text)


def test_healthy_until_the_block_ends(model: Path, tmp_path: Path) -> None:
    waits: list[tuple[float, float]] = []
    with running(
        script(model, _HEALTHY), tmp_path / "log", on_wait=lambda *wait: waits.append(wait)
    ) as server:
        port = int(server.url.rsplit(":", 1)[1])
        assert "healthy" in server.failure("something").message
    assert waits
    assert waits[0][1] == server_module.BOOT_BUDGET_S
    assert "down" in server.failure("something").message
    server_module.check_port(port)


def test_ended_when_the_block_raises(model: Path, tmp_path: Path) -> None:
    def interrupted() -> None:
        with running(script(model, _HEALTHY), tmp_path / "log") as server:
            urls.append(server.url)
            raise KeyboardInterrupt

    urls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    server_module.check_port(int(urls[0].rsplit(":", 1)[1]))


def test_death_at_boot_quotes_the_error_and_the_log(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(
            BenchError, match=r"died at boot: ValueError: no such dtype \(log: "
        ) as error,
        running(script(model, _DYING), log),
    ):
        pass
    assert str(log) in error.value.message
    assert "\n" not in error.value.message


def test_boot_has_a_time_limit(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match="not healthy within 0 s"),
        running(script(model, "import time; time.sleep(60)"), tmp_path / "log", budget_s=0.2),
    ):
        pass


def test_port_in_use(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageProblem, match=f"port {port} .* cannot be used: Address already"),
            running(script(model, _HEALTHY), tmp_path / "log", port=port),
        ):
            pass


def test_missing_model_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageProblem, match="model folder not found"),
        running(script(tmp_path / "none", _HEALTHY), tmp_path / "log"),
    ):
        pass


def test_whole_group_is_killed_even_if_it_ignores_sigterm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    end_group(process)
    process.stdout.close()
    assert process.wait(5) != 0
    limit = time.monotonic() + 5
    while _runs(child) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie that nobody has reaped yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("INFO a\nx ERROR 01-01 [core.py:9] OSError: gone\nRuntimeError: b\n", "OSError: gone"),
        ("INFO a\nTraceback\nModuleNotFoundError: No module named 'x'\nbye\n", "No module named"),
        ("INFO a\nlast words\n\n", "last words"),
        ("", "it wrote nothing"),
    ],
)
def test_last_error(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert expected in last_error(path)
