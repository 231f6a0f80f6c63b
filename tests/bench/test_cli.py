"""What cannot be right ends with one line and exit code 2, before anything is started."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import ROOT
from bench.__main__ import main


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr("bench.demo.cli.run_plan", refuse)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert output.err.startswith("Error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--nope"], "No such option"),
        (["--arms", "lru,arc"], "no arm 'arc'; there are reference, lru, evoke"),
        (["--trace", "no/such/file"], "file not found: no/such/file"),
        (["--model", "no/such/folder"], "model folder not found: no/such/folder"),
        (["--trace", __file__, "--tie"], "takes no --tie"),
        (["--trace", __file__, "--seeds", "2"], "--seeds"),
        (["--trace", __file__, "--no-tags"], "--no-tags"),
        (["--port", "99999"], "--port"),
        (["--results", f"{__file__}/below"], "--results: cannot create"),
        (["--cache", f"{__file__}/below"], "--cache: cannot create"),
    ],
)
def test_bad_options(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    assert problem in one_line(capsys)


def test_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert "not a model folder (no config.json)" in one_line(capsys)


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in one_line(capsys)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope"]) == 2
    assert "nope" in one_line(capsys)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--seeds", "--tie", "--trace", "--max-calls", "--max-tokens", "--results"):
        assert option in text


def test_no_traceback_from_a_real_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "demo", "--model", "no/such/folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == "Error: model folder not found: no/such/folder\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--vllm", "9.9.9"], "--vllm 9.9.9: the demo runs on 0.24.0 or 0.32.0"),
        (["--vllm=0.33.0"], "--vllm 0.33.0: the demo runs on 0.24.0 or 0.32.0"),
        (["--seeds", "1", "--vllm"], "--vllm needs a value"),
    ],
)
def test_an_engine_that_the_demo_cannot_run_on(options: list[str], problem: str) -> None:
    """It is nox that chooses the engine's environment; it builds none for these."""
    nox = shutil.which("nox") or pytest.skip("nox is not on the path")
    done = subprocess.run(
        [nox, "-s", "demo", "--", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert problem in done.stderr
    assert "Building" not in done.stderr
