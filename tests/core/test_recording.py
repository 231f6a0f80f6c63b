# SPDX-License-Identifier: Apache-2.0
"""Reading recordings that are cut off, broken or none, and explaining a request's misses."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import Decision
from evoke_core.recording import (
    Recorder,
    Recording,
    RecordingError,
    explain,
    is_recording,
    read_recording,
    worst,
)
from tests.core.served import Server, keys_of, lines


def served(path: Path, *prompts: str, capacity: int = 4) -> Path:
    server = Server.recording(path, capacity)
    for at, prompt in enumerate(prompts):
        server.serve(f"r{at}", prompt)
    server.stop()
    return path


def fates(recording: Recording, request: str) -> list[tuple[int, int, str]]:
    return [(each.begin, each.end, each.fate) for each in explain(recording, request).stretches]


# --- reading ---


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = served(tmp_path / "t.jsonl", "ab", "cd", "ab").read_bytes()
    events = len(read_recording(tmp_path / "t.jsonl").events)
    ends = [at for at, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in range(ends[0], len(whole), 7):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        recording = read_recording(path)
        assert recording.bad == []
        assert recording.cut_off == (whole[cut - 1 : cut + 1].count(b"\n") == 0)
        assert len(recording.events) <= events


@given(st.data())
def test_no_damage_raises_anything_but_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t.jsonl"
    written = served(path, "abc", "abd", "abc").read_bytes().splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(written) - 1))
        junk = st.sampled_from([b"", b"{}\n", b"[1]\n", b"\xff\n", b'{"k":"prompt","r":1,"b":3}\n'])
        part = data.draw(st.floats(0, 1))
        cut = written[at][: int(part * len(written[at]))] + b"\n"
        written[at] = data.draw(junk | st.none()) or cut
    path.write_bytes(b"".join(written))
    try:
        recording = read_recording(path)
    except RecordingError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert "\n" not in problem
        return
    assert all(problem.startswith(f"{path}:") for problem in recording.bad)
    for each in worst(recording, 10):
        assert sum(stretch.blocks for stretch in each.stretches) == each.blocks


def test_a_bad_line_costs_what_it_brought_and_no_more(tmp_path: Path) -> None:
    path = served(tmp_path / "t.jsonl", "ab", "cd", "ab", "cd", capacity=9)
    written = lines(path)
    bad = next(at for at, line in enumerate(written) if '"h":[0' in line)
    path.write_text("\n".join([*written[:bad], "{broken", *written[bad + 1 :], ""]))
    problems: list[str] = []
    recording = read_recording(path, on_bad=problems.append)
    assert problems == recording.bad
    assert problems[0].startswith(f"{path}:{bad + 1}: no JSON")
    assert all("of a line that is lost" in each for each in problems[1:])
    assert fates(recording, "r3") == [(0, 2, "found")]
    assert recording.asked_and_found == (4, 2)  # cd twice


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a recording"),
        (b'{"hash_ids": [1]}\n', "not a recording"),
        (b'{"evoke_recording":1}\n', "not a recording"),
        (b'{"evoke_recording":2,"run":"a"}\n', "of version 2; this reads version 1"),
        (gzip.compress(b'{"evoke_recording":1')[:-9], "cannot be read"),
    ],
)
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=reason) as error:
        read_recording(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"none\.jsonl: no such file"):
        read_recording(tmp_path / "none.jsonl")
    assert not is_recording(tmp_path / "none.jsonl")
    assert not is_recording(tmp_path)


def test_a_packed_copy_reads_the_same(tmp_path: Path) -> None:
    path = served(tmp_path / "t.jsonl", "ab", "ab")
    packed = tmp_path / "copy.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert is_recording(packed)
    assert read_recording(packed).asked_and_found == read_recording(path).asked_and_found
    assert read_recording(packed).name == "copy"


def test_the_header_tells_of_the_tier(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 7, "scored", bytes_per_block=1 << 20)
    server.stop()
    recording = read_recording(tmp_path / "t.jsonl")
    assert recording.number("capacity") == 7
    assert recording.number("bytes_per_block") == 1 << 20
    assert recording.header["policy"] == "scored"
    assert recording.number("what") is None


# --- explaining ---


def test_found_new_and_on_the_device(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 9)
    server.serve("one", "abc")
    server.serve("two", "abcde", device=1)
    server.stop()
    recording = read_recording(tmp_path / "t.jsonl")
    assert fates(recording, "one") == [(0, 3, "new")]
    assert fates(recording, "two") == [(0, 1, "device"), (1, 3, "found"), (3, 5, "new")]
    found = explain(recording, "two")
    assert (found.blocks, found.device, found.found, found.missed) == (5, 1, 2, 2)
    assert found.missed_again == 0


def test_evicted_for_whom_and_when(tmp_path: Path) -> None:
    recording = read_recording(served(tmp_path / "t.jsonl", "abc", "xyz", "abc"))
    found = explain(recording, "r2")
    [head, tail] = found.stretches
    assert (head.begin, head.end, head.fate) == (0, 1, "found")
    assert (tail.begin, tail.end, tail.fate, tail.reason) == (1, 3, "evicted", "capacity")
    assert (tail.request, tail.seconds_before, tail.age, tail.reused) == ("r1", 1.0, 1, False)
    assert found.missed_again == 2


def test_evictions_of_one_call_that_differ_are_two_stretches(tmp_path: Path) -> None:
    recording = read_recording(served(tmp_path / "t.jsonl", "abcd", "ab", "wxyz", "abcd"))
    stretches = explain(recording, "r3").stretches
    assert [(s.begin, s.end, s.age, s.reused) for s in stretches] == [
        (0, 2, 1, True),
        (2, 4, 2, False),
    ]


def test_refused_and_not_offered(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 2)
    server.serve("long", "abcd")  # cd find no room
    server.time += 1.0
    server.open("stopped")
    server.look("stopped", "xy")
    server.close("stopped")  # before it offered anything
    server.time += 3.0
    server.serve("again", "abcd")
    server.serve("other", "xy")
    server.stop()
    recording = read_recording(tmp_path / "t.jsonl")
    [found, refused] = explain(recording, "again").stretches
    assert (found.begin, found.end, found.fate) == (0, 2, "found")
    assert (refused.fate, refused.reason, refused.request) == ("refused", "no room", "long")
    assert refused.seconds_before == 5.0
    [never] = explain(recording, "other").stretches
    assert (never.fate, never.request, never.seconds_before) == ("not offered", "stopped", 5.0)


def test_a_refusal_noted_before_its_offer_is_a_refusal(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", header={"tokens_per_block": 4})
    keys = keys_of("ab")
    recorder.decisions([Decision("refused", keys, "below threshold", 0, None, 0)], "one")
    recorder.offered("one", keys)
    recorder.prompt("two", keys, tier_start=0, found=0)
    recorder.close()
    [stretch] = explain(read_recording(tmp_path / "t.jsonl"), "two").stretches
    assert (stretch.fate, stretch.reason) == ("refused", "below threshold")


def test_aborted_in_transfer_emptied_and_not_restored(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", header={"tokens_per_block": 4})
    stored, reset = (
        Decision("stored", keys_of("ab"), "", 0, None, 0),
        Decision("evicted", keys_of("ab"), "reset", 0, None, 0),
    )
    aborted = Decision("aborted", keys_of("pq"), "", 0, None, 0)
    for request, prompt in (("one", "ab"), ("two", "pq"), ("three", "mn")):
        recorder.offered(request, keys_of(prompt))
    recorder.decisions([stored, aborted])
    for at, prompt in enumerate(("ab", "pq", "mn")):
        recorder.prompt(f"before{at}", keys_of(prompt), tier_start=0, found=0)
    recorder.decisions([reset])
    for at, prompt in enumerate(("ab", "pq")):
        recorder.prompt(f"after{at}", keys_of(prompt), tier_start=0, found=0)
    recorder.close()
    recording = read_recording(tmp_path / "t.jsonl")
    seen = {each.id: explain(recording, each.id).stretches for each in recording.requests[3:]}
    assert {name: [each.fate for each in stretches] for name, stretches in seen.items()} == {
        "before0": ["not restored"],
        "before1": ["aborted"],
        "before2": ["in transfer"],
        "after0": ["emptied"],
        "after1": ["aborted"],
    }


def test_the_last_thing_that_happened_decides(tmp_path: Path) -> None:
    prompts = ("ab", "wxyz", "ab", "wxyz", "ab")  # ab goes, comes back, and goes again
    recording = read_recording(served(tmp_path / "t.jsonl", *prompts))
    [stretch] = explain(recording, "r4").stretches
    assert (stretch.fate, stretch.request, stretch.seconds_before) == ("evicted", "r3", 1.0)


def test_what_was_before_a_recording_began_is_unknown(tmp_path: Path) -> None:
    path = served(tmp_path / "t.jsonl", "ab")
    written = lines(path)
    head = json.loads(written[0]) | {"part": 4}
    path.write_text("\n".join([json.dumps(head, separators=(",", ":")), *written[1:], ""]))
    recording = read_recording(path)
    assert fates(recording, "r0") == [(0, 2, "unknown")]
    assert explain(recording, "r0").missed_again == 0


def test_the_worst_come_first(tmp_path: Path) -> None:
    recording = read_recording(
        served(tmp_path / "t.jsonl", "abcd", "mnop", "ab", "qrstuv", "abcd", "mn")
    )
    listed = worst(recording, 3)
    again = [each.missed_again for each in listed]
    assert again == sorted(again, reverse=True)
    assert [each.request for each in listed] == ["r4", "r2", "r5"]
    assert listed[0] == explain(recording, "r4")


def test_an_unknown_request_names_near_ones(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 4)
    for name in ("chatcmpl-4711", "chatcmpl-4712", "embed-1"):
        server.serve(name, "ab")
    server.open("waiting")
    server.stop()
    recording = read_recording(tmp_path / "t.jsonl")
    with pytest.raises(
        RecordingError, match="no request 'chatcmpl-471'; near: chatcmpl-4711, chatc"
    ):
        explain(recording, "chatcmpl-471")
    assert explain(recording, "chatcmpl-4712").request == "chatcmpl-4712"
    assert explain(recording, "emb").request == "embed-1"  # nothing else begins so
    with pytest.raises(RecordingError, match="no request 'zzz'; it has 4 others"):
        explain(recording, "zzz")
    with pytest.raises(RecordingError, match="'waiting' was opened, and never looked"):
        explain(recording, "waiting")


def test_an_explanation_is_json(tmp_path: Path) -> None:
    recording = read_recording(served(tmp_path / "t.jsonl", "ab", "wxyz", "ab"))
    copy: dict[str, Any] = json.loads(json.dumps(explain(recording, "r2").as_dict()))
    assert copy["missed"] == 2
    assert copy["stretches"][0]["fate"] == "evicted"
