"""Readers, on files written by hand."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from evoke_core.replay import Trace, TraceError, load_tokenizer, read_trace


def write(path: Path, *records: Any, packed: bool = False) -> Path:
    """Write lines: a text as it is, anything else as JSON."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def chains(trace: Trace) -> list[list[int]]:
    return [trace.chain(at) for at in range(len(trace))]


# --- Mooncake ---


def mooncake(time: float, ids: list[int], tokens: int) -> dict[str, Any]:
    return {"timestamp": time, "input_length": tokens, "output_length": 9, "hash_ids": ids}


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(tmp_path: Path, packed: bool) -> None:
    path = write(
        tmp_path / ("talk.jsonl" + ".gz" * packed),
        mooncake(3000, [7, 8], 1000),
        mooncake(1500, [7, 9, 4], 1100),
        packed=packed,
    )
    trace = read_trace(path)
    assert trace.name == "talk"
    assert trace.tokens_per_block == 512
    assert list(trace.times) == [1.5, 3.0]
    assert list(trace.tokens) == [1100, 1000]
    assert list(trace.lengths) == [3, 2]
    first, second = chains(trace)
    assert first[0] == second[0]
    assert first[1] != second[1]


# --- Claude Code ---


def call(t: float, keep: int, *add: list[int], kind: str = "text") -> dict[str, Any]:
    size = keep + sum(run[1] for run in add)
    return {"t": t, "in": 2 * size + 1, "keep": keep, "add": list(add), "input_types": [kind]}


SUB_AGENT = {
    "t": 10.0,  # when it ended, after four seconds
    "type": "subagent",
    "duration_ms": 4000,
    "requests": [call(1.0, 0, [20, 4]), call(2.0, 4, [24, 2])],
}


def session(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "block_size": 2, "requests": list(requests)}


def test_claude_code_groups_blocks_keeps_prefixes_and_nests_sub_agents(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl",
        session(
            "one",
            call(0.0, 0, [1, 5]),
            call(5.0, 4, [9, 2], kind="tool_result"),
            SUB_AGENT,
            call(12.0, 6, [30, 2]),
        ),
    )
    trace = read_trace(path, tokens_per_block=4, window=0)
    assert list(trace.times) == [0.0, 5.0, 7.0, 8.0, 12.0]
    first, second, nested, nested_second, last = chains(trace)
    assert (len(first), len(second), len(last)) == (2, 3, 4)  # the fifth block fills no group
    assert second[:2] == first
    assert last[:3] == second  # what the sub-agent did in between is not its prefix
    assert nested_second[:2] == nested
    assert not set(nested_second) & set(last)
    assert list(trace.tokens)[:2] == [11, 13]
    assert trace.roles == ["user", "tool", "user", "user", "user"]
    assert trace.sessions == ["one"] * 5


def test_claude_code_group_that_changes_inside_is_another_block(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", session("one", call(0, 0, [1, 4]), call(1, 3, [8, 1])))
    first, second = chains(read_trace(path, tokens_per_block=4, window=0))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_claude_code_ids_are_local_to_a_session(tmp_path: Path) -> None:
    same = [session(name, call(0, 0, [1, 4])) for name in ("one", "two")]
    first, second = chains(read_trace(write(tmp_path / "s.jsonl", *same), tokens_per_block=2))
    assert not set(first) & set(second)


def test_claude_code_interleaving_is_set_by_window_and_seed(tmp_path: Path) -> None:
    many = [session(str(i), call(0, 0, [1, 2]), call(1.5, 2, [3, 2])) for i in range(5)]
    path = write(tmp_path / "s.jsonl", *many)
    trace = read_trace(path, tokens_per_block=2, sessions=3, window=100.0, seed=7)
    draw = random.Random(7)
    starts = [draw.uniform(0, 100.0) for _ in range(3)]
    assert list(trace.times) == pytest.approx(sorted([*starts, *(t + 1.5 for t in starts)]))
    assert set(trace.sessions) == {"0", "1", "2"}
    other = read_trace(path, tokens_per_block=2, sessions=3, window=100.0, seed=8)
    assert list(other.times) != list(trace.times)


def test_claude_code_blocks_that_cannot_be_grouped_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", session("one", call(0, 0, [1, 4])))
    with pytest.raises(TraceError, match="blocks of 2 tokens cannot be grouped to 5"):
        read_trace(path, tokens_per_block=5)


# --- full text ---


def text_call(time: int, prompt: Any) -> dict[str, Any]:
    return {"timestamp": time, "session_id": "s", "input": prompt, "output": "…"}


def test_text_is_cut_by_characters_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "calls.jsonl", text_call(2_000_000, "abcdefgh12345"), text_call(3, "abcdefgX")
    )
    trace = read_trace(path, tokens_per_block=2, chars_per_token=2)
    later_one, first_one = chains(trace)
    assert list(trace.times) == [3e-6, 2.0]
    assert (len(first_one), len(later_one)) == (3, 2)  # 13 characters: 6 tokens, 3 blocks of 4
    assert list(trace.tokens) == [4, 6]
    assert first_one[0] == later_one[0]
    assert first_one[1] != later_one[1]


def test_text_is_cut_by_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "calls.jsonl", text_call(0, "a b c d e"), text_call(1, "a b c x"))
    trace = read_trace(
        path, tokens_per_block=2, tokenizer=lambda text: [ord(word) for word in text.split()]
    )
    first, second = chains(trace)
    assert list(trace.tokens) == [5, 4]
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_messages_are_a_prompt_and_name_the_role(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    longer = [*talk, {"role": "tool", "content": [{"text": "42"}]}]
    path = write(tmp_path / "calls.jsonl", text_call(0, talk), text_call(1, longer))
    trace = read_trace(path, tokens_per_block=4, chars_per_token=1)
    assert trace.roles == ["user", "tool"]
    assert trace.chain(1)[: trace.lengths[0]] == trace.chain(0)


def test_a_tokenizer_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"needs the package tokenizers|no tokenizer"):
        load_tokenizer(str(tmp_path / "none.json"))


# --- what is wrong with a file ---

GOOD = mooncake(0, [1], 512)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "no JSON"),
        ("[1, 2]", "not a JSON object"),
        ({"timestamp": 0}, "hash_ids = None is no list"),
        ({"timestamp": 0, "hash_ids": [1, "x"]}, "not all of them are whole numbers"),
        ({"timestamp": "soon", "hash_ids": [1]}, "timestamp = 'soon' is no number"),
    ],
)
def test_a_bad_line_is_an_error_and_skipped_if_asked(
    tmp_path: Path, line: Any, reason: str
) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line, "", line, GOOD)
    problems: list[str] = []
    with pytest.raises(TraceError) as error:
        read_trace(path, on_bad=problems.append)
    assert str(error.value).startswith(f"2 bad lines, first: {path}:2: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:2", f"{path}:4"]
    trace = read_trace(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (2, 2)


def test_a_bad_session_adds_nothing(tmp_path: Path) -> None:
    broken = session("bad", call(0, 0, [1, 4]), call(1, 9, [5, 1]))
    path = write(tmp_path / "s.jsonl", broken, session("good", call(0, 0, [1, 4])))
    with pytest.raises(TraceError, match=r"s\.jsonl:1: keep = 9: the prompt before has 4 blocks"):
        read_trace(path, tokens_per_block=2)
    trace = read_trace(path, tokens_per_block=2, skip_bad=True)
    assert trace.sessions == ["good"]
    assert trace.unique_blocks == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b'{"what": 1}\n', "format unknown"),
        (b"\x1f\x8bnot really", "cannot be read"),
        (b"\xff\xfe\n", "no JSON"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_file_of_bad_lines_only_is_an_error_even_when_they_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "{broken")
    with pytest.raises(TraceError, match="no line in it could be used"):
        read_trace(path, skip_bad=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
