"""A trace becomes a workload: whole prompts, in order, and what was left out is said."""

import gzip
import json
from pathlib import Path

import pytest

from bench.demo.trace import load_trace
from bench.demo.workload import Workload
from bench.errors import UsageProblem


def line(timestamp: int, session: str, text: str) -> str:
    record = {"timestamp": timestamp, "session_id": session, "input": text, "output": "x"}
    return json.dumps(record)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


LINES = [
    line(900, "b", "B" * 64),
    line(100, "a", "A" * 64),
    line(300, "a", "A" * 96),
    line(910, "b", "B" * 80),
    line(400, "a", "A" * 500),
]


def load(
    path: Path, *, max_calls: int = 10, max_tokens: int = 96, order: str = "together"
) -> Workload:
    return load_trace(path, encode, max_calls=max_calls, max_tokens=max_tokens, order=order)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def shape(workload: Workload) -> list[tuple[str, int]]:
    return [(call.context, len(call.prompt)) for call in workload.calls]


def test_sessions_start_together(trace: Path) -> None:
    assert shape(load(trace)) == [
        ("session-2", 64),
        ("session-1", 64),
        ("session-2", 80),
        ("session-1", 96),
    ]


def test_recorded_order(trace: Path) -> None:
    assert shape(load(trace, order="recorded")) == [
        ("session-1", 64),
        ("session-1", 96),
        ("session-2", 64),
        ("session-2", 80),
    ]


def test_prompts_are_whole_and_long_calls_left_out(trace: Path) -> None:
    workload = load(trace, max_calls=3)
    assert workload.calls[0].prompt == tuple(encode("B" * 64))
    notes = " ".join(workload.notes)
    assert "replayed 3 of 5 calls, 2 of 2 sessions, 208 of 804 prompt tokens" in notes
    assert "1 calls that are empty or longer than 96 tokens, 1 beyond the first 3" in notes


def test_pools_fit_the_trace(trace: Path) -> None:
    workload = load(trace)
    assert workload.max_model_len >= 96 + workload.calls[0].answer_tokens
    assert workload.gpu_blocks > workload.max_model_len // 32
    assert workload.tier_blocks == 2  # half of A's 3 and B's 2 distinct full blocks
    assert {call.kind for call in workload.calls} == {"trace"}


def test_gzipped_is_the_same(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert load(packed).calls == load(trace).calls


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 1, "session_id": "a", "output": ""}', "no field 'input'"),
        ('{"timestamp": "1", "session_id": "a", "input": "", "output": ""}', "'timestamp' has a"),
    ],
)
def test_bad_line_is_named(trace: Path, bad: str, problem: str) -> None:
    trace.write_text(f"{LINES[0]}\n\n{bad}\n")
    with pytest.raises(UsageProblem, match=f"trace.jsonl:3: .*{problem}"):
        load(trace)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"{}" * 1000)[:20])
    for path in (tmp_path / "none", broken):
        with pytest.raises(UsageProblem, match=f"cannot read trace .*{path.name}"):
            load(path)


def test_nothing_fits(trace: Path) -> None:
    with pytest.raises(UsageProblem, match="no call has 10 tokens or fewer"):
        load(trace, max_tokens=10)
