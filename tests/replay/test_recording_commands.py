"""Recordings from the outside: `evoke replay RECORDING` and `evoke explain RECORDING`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evoke_core import RequestTags
from evoke_core.replay.command import cli
from tests.core.served import Server, lines


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, args)))


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    found = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in found]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    server = Server.recording(path, 4, bytes_per_block=1 << 30)
    for at, prompt in enumerate(["abc", "xyz", "abcd", "xyz"]):
        tags = RequestTags(session=f"s{at}")
        server.serve(f"chatcmpl-{at}", prompt, device=2 if at == 2 else 0, tags=tags)
    server.stop()
    return path


def test_replay_says_what_was_recorded_and_what_twice_the_memory_gives(recording: Path) -> None:
    result = run("replay", recording, "--policy", "ledger-lru,min", "--jobs", 1)
    # 3 + 3 + 2 + 3 blocks asked of the tier; nothing but x was left when it came back
    assert "talk: 4 requests, 7 different blocks of 4 tokens" in result.stdout
    assert "recorded with lru, 4 blocks, 4 GiB: tier hits 0.0000" in result.stdout
    table = rows(result)
    assert [row[:3] for row in table[::2]] == [
        ["0.5x", "2", "2"],
        ["1x", "4", "4"],
        ["2x", "8", "8"],
    ]
    one, two = table[2], table[4]
    assert (one[3], one[8]) == ("ledger-lru", "0.0000")
    assert two[7] == f"{2 / 13:.4f}"  # on the GPU
    assert two[8] == f"{4 / 11:.4f}"  # c, and xyz


def test_replay_options_of_recordings(recording: Path, tmp_path: Path) -> None:
    base = ("replay", recording, "--policy", "lru,scored", "--jobs", 1)
    assert rows(run(*base, "--budget", "50%,2x"))[0][1] == "3"
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    result = run(*base, "--no-tags", "--gpu-blocks", 9, "--json", out, "--plot", picture)
    assert rows(result)[0][7] == f"{6 / 13:.4f}"
    document = json.loads(out.read_text())
    assert document["settings"]["tags"] is False
    assert document["traces"][0]["recorded"]["policy"] == "lru"
    assert picture.stat().st_size > 1000
    mixed = run("replay", recording, "w1:blocks=3", "--policy", "lru", "--jobs", 1)
    assert rows(mixed)[0][0] == "1%"
    failed = run("replay", "w1:blocks=3", "--policy", "lru", "--budget", "2x")
    assert failed.exit_code == 2
    assert "budget 2x: w1:blocks=3 is no recording" in failed.stderr


def test_explain_one_request(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "why.json"
    result = run("explain", recording, "--request", "chatcmpl-2", "--json", out)
    assert "chatcmpl-2, " in result.stdout
    assert "4 blocks of 4 tokens, 2 on the device, 0 found in the tier, 2 missed" in result.stdout
    assert [row[:3] for row in rows(result)] == [
        ["0–1", "2", "on the device"],
        ["2–2", "1", "evicted (capacity), last used 1 request earlier, never since it was stored"],
        ["3–3", "1", "never seen before"],
    ]
    assert rows(result)[1][3:] == ["1 s", "chatcmpl-1"]
    document = json.loads(out.read_text())
    assert document["recording"] == "talk"
    assert document["requests"][0]["stretches"][1]["reason"] == "capacity"


def test_explain_lists_the_worst(recording: Path) -> None:
    table = rows(run("explain", recording, "--worst", 2))
    assert [row[0] for row in table] == ["chatcmpl-3", "chatcmpl-2"]
    assert table[0][2:] == ["3", "0", "0", "3", "3", "evicted (capacity)"]
    assert len(rows(run("explain", recording))) == 4
    printed = run("explain", recording, "--json", "-")
    assert json.loads(printed.stdout)["requests"][0]["request"] == "chatcmpl-3"


def test_explain_says_what_a_recording_lacks(recording: Path) -> None:
    text = recording.read_text()
    recording.write_text(text.replace('"part":1', '"part":2') + '{"k":"lost","n":7}\n{"t":1,"k"')
    result = run("explain", recording, "--request", "chatcmpl-3")
    assert "7 calls could not be written, and are missing" in result.stderr
    assert "cut off in the middle of a line: 1 file" in result.stderr
    assert "its beginning was deleted to make room" in result.stderr
    written = lines(recording)
    recording.write_text("\n".join([*written[:-1], "{", *written[2:4], ""]))
    assert "1 bad line skipped" in run("explain", recording).stderr


def test_ids_cannot_steer_a_terminal(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 4)
    server.serve("[bold]\x1b[2J", "ab")
    server.stop()
    for args in ((), ("--request", "[bold]\x1b[2J"), ("--request", "[bold]\x1b[2")):
        result = run("explain", tmp_path / "t.jsonl", *args)
        assert "[bold]?[2J" in result.output
        assert "\x1b[2J" not in result.output


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (("explain", "none.jsonl"), 1, "none.jsonl: no such file"),
        (("explain", __file__), 1, "not a recording"),
        (("explain", "{}", "--request", "chatcmpl"), 1, "no request 'chatcmpl'; near: chatcmpl-"),
        (("explain", "{}", "--request", "x", "--worst", 3), 2, "exclude each other"),
        (("explain", "{}", "--json", "no/such/x.json"), 2, "no/such/x.json: no such folder"),
        (("replay", "{}", "--budget", "0x"), 2, "budget '0x' is not allowed"),
    ],
)
def test_errors_are_one_line(
    recording: Path, args: tuple[object, ...], code: int, reason: str
) -> None:
    result = run(*(recording if arg == "{}" else arg for arg in args))
    assert result.exit_code == code
    [message] = result.stderr.splitlines()
    assert message.startswith("Error: ")
    assert reason in message
