"""``evoke replay`` from the outside: tables, JSON, plots, and one line for every error."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread

from evoke_core.replay.command import cli

SMALL = "w1s:blocks=5,rounds=8"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, args)])


def rows(result: Result) -> list[list[str]]:
    """The table's cells, row by row."""
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def trace_file(path: Path, *lines: str) -> Path:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return path


def line(time: int, *ids: int) -> str:
    return json.dumps({"timestamp": time, "input_length": 512 * len(ids), "hash_ids": ids})


def test_a_table_for_each_trace(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "talk.jsonl.gz", line(0, 1, 2, 3), line(1, 1, 4), line(2, 1, 2, 3))
    result = run(path, SMALL, "--budget", "3,40%", "--policy", "lru,wtinylfu,min", "--jobs", 1)
    assert "talk: 3 requests, 4 different blocks of 512 tokens" in result.stdout
    assert SMALL in result.stdout
    table = rows(result)
    assert len(table) == 2 * 6
    budget, blocks, policy, block_hits, token_hits, request_hits, gap, _ = table[0]
    assert (budget, blocks, policy) == ("3", "3", "lru")
    assert (block_hits, token_hits) == ("0.3750", "0.3750")  # by hand: 0, 1, 2 of 8
    assert request_hits == "0.6667"
    assert gap == "+0.000"
    assert [row[2] for row in table[:3]] == ["lru", "wtinylfu", "min"]
    assert table[2][6] == "+1.000"


def test_json_and_plot(tmp_path: Path) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    result = run(
        *(SMALL, "w1:blocks=5", "--budget", "10%,20%,40%", "--policy", "scored,lru,arc,min"),
        *("--json", out, "--plot", picture, "--bytes-per-block", 1 << 26),
    )
    assert [row[2] for row in rows(result)[:1]] == ["0.5"]  # GiB: 8 blocks of 64 MiB
    document = json.loads(out.read_text())
    assert [trace["name"] for trace in document["traces"]] == [SMALL, "w1:blocks=5"]
    assert len(document["traces"][0]["cells"]) == 12
    assert document["settings"]["half"] == "all"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = imread(picture)
    assert pixels.shape[1] > pixels.shape[0]  # two panels side by side
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::7]}) > 8


def test_phases_are_joined_by_plus() -> None:
    result = run(f"{SMALL}+w1:blocks=3,rounds=4", "--budget", "20%", "--policy", "lru", "--jobs", 1)
    assert "72 requests" in result.stdout
    assert len(rows(result)) == 1


def test_gpu_chunk_and_half_reach_the_replay() -> None:
    base = (SMALL, "--budget", "40%", "--policy", "lru,scored", "--jobs", 1)
    plain = [row[3] for row in rows(run(*base))]
    for option in (("--half", "second"), ("--gpu-blocks", 60)):
        assert [row[3] for row in rows(run(*base, *option))] != plain, option
    one = ("w1:contexts=1,blocks=5", "--budget", 3, "--policy", "lru", "--jobs", 1)
    assert float(rows(run(*one))[0][3]) > 0  # its head stays
    assert float(rows(run(*one, "--chunk", 1))[0][3]) == 0  # its tail came last
    assert "20 of them counted" in run(*base, "--half", "second").stdout
    assert "GPU hits" in run(*base, "--gpu-blocks", 14).stdout


def test_tags_reach_the_replay(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": "x" * 10}], "a" * 8, "b" * 8, "c" * 8]
    calls = [
        {"timestamp": at, "input": prompt, "session_id": "s"}
        for at, prompt in enumerate([*prompts, prompts[0]])
    ]
    path = trace_file(tmp_path / "calls.jsonl.gz", *map(json.dumps, calls))
    args = (path, "--budget", 4, "--policy", "scored", "--jobs", 1)
    text = ("--block-tokens", 4, "--chars-per-token", 1)
    assert rows(run(*args, *text))[0][3] == "0.0000"
    assert float(rows(run(*args, *text, "--tags"))[0][3]) > 0  # a user's blocks have a floor


def test_claude_code_options(tmp_path: Path) -> None:
    call = {"t": 0.0, "in": 129, "keep": 0, "add": [[1, 2]]}
    sessions = [{"id": str(at), "block_size": 64, "requests": [call]} for at in range(4)]
    path = trace_file(tmp_path / "s.jsonl.gz", *map(json.dumps, sessions))
    args = (path, "--policy", "lru", "--budget", "50%", "--jobs", 1)
    result = run(*args, "--block-tokens", 64, "--sessions", 3, "--window", 60, "--seed", 1)
    assert "s: 3 requests, 6 different blocks of 64 tokens" in result.stdout
    assert run(*args).exit_code == 1  # blocks of 512: nobody fills one


def test_bad_lines(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "talk.jsonl.gz", line(0, 1, 2), "{", line(1, 1, 2), "[]")
    args = (path, "--budget", "2", "--policy", "lru", "--jobs", 1)
    failed = run(*args)
    assert failed.exit_code == 1
    assert f"{path}:2: no JSON" in failed.stderr
    assert f"{path}:4: not a JSON object" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(f"Error: 2 bad lines, first: {path}:2: ")
    skipped = run(*args, "--skip-bad")
    assert f"{path}: 2 bad lines skipped" in skipped.stderr
    assert rows(skipped)[0][3] == "0.5000"


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (("none.jsonl",), 1, "none.jsonl: no such file, and none of the shapes w1, w1s"),
        (("w1:speed=1",), 1, "unknown parameter 'speed'"),
        (("w1", "--budget", "lots"), 2, "budget 'lots' is not allowed"),
        (("w1", "--policy", "best"), 2, "unknown policy 'best'; known: "),
        (("w1", "--json", "no/such/folder/x.json"), 2, "no/such/folder/x.json: no such folder"),
        (("w1", "--policy", ","), 2, "nothing to replay: no policy"),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], code: int, reason: str) -> None:
    result = run(*args, "--jobs", "1")
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    [message] = result.stderr.splitlines()
    assert message.startswith("Error: ")
    assert reason in message


def test_a_plot_format_that_is_unknown_is_one_line(tmp_path: Path) -> None:
    result = run(SMALL, "--policy", "lru", "--plot", tmp_path / "r.docx", "--jobs", 1)
    assert result.exit_code == 2
    [message] = result.stderr.splitlines()
    assert "docx" in message
