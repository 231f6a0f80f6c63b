# SPDX-License-Identifier: Apache-2.0
"""The recorder: what is written comes back, files stay within bounds, callers notice nothing."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evoke_core import Decision, RequestTags, Span
from evoke_core.recording import Event, Recorder, Recording, read_recording
from evoke_core.recording import recorder as module
from evoke_core.recording.segments import full_segments
from tests.core.served import Server, keys_of, lines

HEADER = {"tokens_per_block": 4, "capacity": 8, "policy": "lru"}
TAGS = [
    RequestTags(),
    RequestTags(source_type="system", priority=2.0, session="s-1"),
    RequestTags(session="s-2", ttl_s=3.5, pinned=True, no_store=True),
    RequestTags(session="s", expect_reuse_in_s=0.5, end_of_session=True),
    RequestTags(spans=(Span(0, 2, source_type="system", priority=4.0), Span(3, 5, ttl_s=1.5))),
]


def record(path: Path, calls: list[tuple[Any, ...]], **options: Any) -> Recorder:
    """Make the calls, as (method, args, keywords), and close."""
    recorder = Recorder(path, header=HEADER, **options)
    for name, args, keywords in calls:
        getattr(recorder, name)(*args, **keywords)
    recorder.close()
    return recorder


def shape(recording: Recording, event: Event) -> tuple[Any, ...]:
    request = recording.requests[event.request].id if event.request >= 0 else None
    place = (event.group, event.start, len(event.blocks))
    asked = (event.tier_start, event.found, event.tokens)
    outcome = (event.reason, event.age, event.role, event.reused)
    return event.kind, request, place, asked, outcome


# --- round trip ---

chains = st.text("ab", min_size=1, max_size=8)
KINDS: list[Literal["stored", "refused", "evicted", "aborted"]] = [
    "stored",
    "refused",
    "evicted",
    "aborted",
]
ids = st.sampled_from(["r1", "r2", 'r"3\n', "ré"])
places = st.tuples(st.integers(0, 2), st.integers(0, 5))


@st.composite
def call(draw: st.DrawFn) -> tuple[Any, ...]:
    name = draw(st.sampled_from(["opened", "prompt", "offered", "decisions", "closed"]))
    request = draw(ids)
    group, start = draw(places)
    where = {"group": group, "start": start}
    if name == "opened":
        now = draw(st.none() | st.floats(0, 1e6, allow_nan=False))
        return name, (request, now, draw(st.sampled_from(TAGS))), {}
    if name == "prompt":
        asked = {"tier_start": draw(st.integers(0, 9)), "found": draw(st.integers(0, 9))}
        tokens = draw(st.none() | st.integers(0, 99))
        return name, (request, keys_of(draw(chains))), {**where, **asked, "tokens": tokens}
    if name == "offered":
        return name, (request, keys_of(draw(chains))), where
    if name == "closed":
        return name, (request,), {}
    kind = draw(st.sampled_from(KINDS))
    keys = keys_of(draw(chains))
    if kind == "evicted":
        keys.reverse()
    reason = draw(st.sampled_from(["", "capacity", "no room"]))
    age = draw(st.integers(0, 9)) if kind == "evicted" else 0
    role = draw(st.none() | st.just("user"))
    reused = kind == "evicted" and draw(st.booleans())
    return name, ([Decision(kind, keys, reason, age, role, group, reused)], request), {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(call(), max_size=25), st.sampled_from([1 << 16, 1 << 30]))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[Any, ...]], max_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("recording") / "t.jsonl"
    recorder = record(path, calls, max_bytes=max_bytes)
    recording = read_recording(path)
    assert (recorder.lost, recording.lost, recording.bad, recording.cut) == (0, 0, [], False)
    opened = [args for name, args, _ in calls if name == "opened"]
    by_open = [each for each in recording.requests if (each.id, each.now, each.tags) in opened]
    assert [(each.id, each.now, each.tags) for each in by_open if each.now is not None] == [
        args for args in opened if args[1] is not None
    ]
    expected = []
    polls: dict[str, dict[int, Any]] = {}
    known: dict[bytes, int] = {}
    for name, args, where in calls:
        request = args[1] if name == "decisions" else args[0]
        if name == "opened":
            polls.pop(request, None)
            continue
        if name == "closed":
            polls.pop(request, None)
            expected.append(("close", request, (0, 0, 0), (0, 0, None), ("", 0, None, None)))
            continue
        [decision] = args[0] if name == "decisions" else [None]
        keys = args[1] if decision is None else decision.keys
        if name == "prompt":
            said = (len(keys), where["start"], where["tier_start"], where["found"])
            groups = polls.setdefault(request, {})
            if groups.get(where["group"]) == said:
                continue  # a poll that tells nothing new
            groups[where["group"]] = said
        for key in keys if decision is None or decision.kind != "evicted" else keys[::-1]:
            known.setdefault(key, len(known))
        if decision is not None:
            reused = decision.reused if decision.kind == "evicted" else None
            outcome = (decision.reason, decision.age, decision.role, reused)
            place = (decision.group, 0, len(keys))
            expected.append((decision.kind, request, place, (0, 0, None), outcome))
            continue
        asked = (0, 0, None)
        if name == "prompt":
            asked = (where["tier_start"], where["found"], where["tokens"])
        kind = {"prompt": "prompt", "offered": "offer"}[name]
        place = (where["group"], where["start"], len(keys))
        expected.append((kind, request, place, asked, ("", 0, None, None)))
    events = [event for event in recording.events if event.kind != "open"]
    assert [shape(recording, event) for event in events] == expected
    assert recording.blocks == len(known)
    numbers = iter(events)
    for name, args, _ in calls:  # equal keys are equal numbers, in order
        if name in ("offered", "decisions"):
            keys = args[1] if name == "offered" else args[0][0].keys
            kind = "offer" if name == "offered" else args[0][0].kind
            event = next(each for each in numbers if each.kind == kind)
            if kind == "evicted":
                keys = keys[::-1]
            assert list(event.blocks) == [known[key] for key in keys]


def test_blocks_are_named_once_and_cannot_be_recognised(tmp_path: Path) -> None:
    key, other = b"a known text's hash, 32 bytes ...", b"b"
    path = tmp_path / "t.jsonl"
    record(
        path,
        [
            ("prompt", ("r1", [key, other]), {"tier_start": 0, "found": 0}),
            ("offered", ("r1", [key, other]), {}),
            ("prompt", ("r2", [key]), {"tier_start": 0, "found": 1}),
        ],
    )
    prompt, offer, second = (
        json.loads(line) for line in lines(path) if '"prompt"' in line or '"offer"' in line
    )
    assert (prompt["b"], offer["b"], second["b"]) == ([[0, 2]], [[0, 2]], [[0, 1]])
    assert "h" in prompt
    assert "h" not in offer
    assert "h" not in second
    again = tmp_path / "again.jsonl"
    record(again, [("offered", ("r1", [key, other]), {})])
    [line] = [json.loads(line) for line in lines(again) if '"offer"' in line]
    assert line["h"][1] != prompt["h"][1]  # the same blocks, under another key
    assert key not in path.read_bytes()


def test_polls_that_repeat_are_not_written_and_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    keys = keys_of("abcd")
    asked = {"tier_start": 0, "found": 0}
    recorder = Recorder(path, header=HEADER)
    for _ in range(1000):
        recorder.prompt("r", keys, **asked)
    recorder.prompt("r", keys, tier_start=1, found=2)
    recorder.offered("r", keys)
    recorder.prompt("r", keys, tier_start=4, found=0)  # preempted, and back
    recorder.closed("r")
    recorder.close()
    recording = read_recording(path)
    prompts = [event for event in recording.events if event.kind == "prompt"]
    assert [(event.found, event.counts) for event in prompts] == [(0, 0), (2, 1), (0, 0)]
    assert recording.asked_and_found == (3, 2)


def test_keys_may_change_after_the_call(tmp_path: Path) -> None:
    keys = keys_of("ab")
    recorder = Recorder(tmp_path / "t.jsonl", header=HEADER)
    recorder.offered("r", keys)
    keys += keys_of("xyz")
    recorder.close()
    [event] = [each for each in read_recording(tmp_path / "t.jsonl").events if each.kind == "offer"]
    assert len(event.blocks) == 2


# --- files ---


def test_files_rotate_within_bounds_and_each_reads_alone(tmp_path: Path) -> None:
    path, limit = tmp_path / "t.jsonl", 1 << 16
    recorder = Recorder(path, header=HEADER, max_bytes=limit)
    recorder.opened("long", 7.0, TAGS[1])  # open from the first file to the last
    shared = keys_of("s" * 20)
    for at in range(3000):
        recorder.opened(f"r{at}", float(at), TAGS[at % len(TAGS)])
        keys = [*shared, b"%d" % at]
        recorder.prompt(f"r{at}", keys, tier_start=0, found=20)
        recorder.offered("long", keys[-1:], start=at)
        recorder.closed(f"r{at}")
        if at % 100 == 0:
            time.sleep(0.002)
            total = sum(each.stat().st_size for each in tmp_path.iterdir() if each.exists())
            assert total <= limit
    recorder.closed("long")
    recorder.close()
    assert recorder.lost == 0
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= limit
    segments = full_segments(path)
    assert len(segments) > 2
    assert segments[0].number > 1  # the oldest had to go
    whole = read_recording(path)
    assert whole.cut
    assert whole.bad == []
    assert whole.requests[-1].id == "r2999"
    [long] = [each for each in whole.requests if each.id == "long"]
    assert (long.now, long.tags) == (7.0, TAGS[1])
    prompts = [event for event in whole.events if event.kind == "prompt"]
    assert len({tuple(event.blocks[:20]) for event in prompts}) == 1
    assert len({event.blocks[20] for event in prompts}) == len(prompts)
    alone = read_recording(segments[-1].path)
    assert alone.cut
    assert alone.bad == []
    assert len(alone.requests) > 10


def test_full_files_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, header=HEADER, max_bytes=1 << 18)
    for at in range(1500):
        recorder.opened(f"request-{at}", float(at), TAGS[1])
    deadline = time.monotonic() + 20
    while not (packed := [each for each in full_segments(path) if each.packed]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    recorder.close()
    assert gzip.decompress(packed[0].path.read_bytes()).startswith(b'{"evoke_recording":')
    assert [each.id for each in read_recording(path).requests] == [
        f"request-{at}" for at in range(1500)
    ]


def test_a_recording_goes_on_where_the_server_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for run in range(3):
        record(path, [("opened", (f"r{run}", None), {}), ("offered", ("r", keys_of("ab")), {})])
    recording = read_recording(path)
    assert recording.runs == 3
    assert [each.id for each in recording.requests] == ["r0", "r", "r1", "r", "r2", "r"]
    assert [event.kind for event in recording.events].count("reset") == 2
    assert recording.blocks == 6  # what one run had is another's no longer
    assert not recording.cut


@pytest.mark.parametrize("left", [3, 40])
def test_a_first_line_that_was_cut_off_costs_its_file_only(tmp_path: Path, left: int) -> None:
    path = tmp_path / "t.jsonl"
    record(path, [("opened", ("r0", None), {})])
    record(path, [("opened", ("r1", None), {})])
    path.write_bytes(path.read_bytes()[:left])
    recorder = record(path, [("opened", ("r2", None), {})])
    assert recorder.lost == 0
    recording = read_recording(path)
    assert [each.id for each in recording.requests] == ["r0", "r2"]
    assert (recording.cut_off, recording.bad) == (1, [])


def test_two_writers_take_two_files(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first, second = (Recorder(path, header=HEADER) for _ in range(2))
    first.opened("a", None)
    second.opened("b", None)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    first.close()
    second.close()
    assert {first.path.name, second.path.name} == {"t.jsonl", "t.2.jsonl"}
    assert [read_recording(each.path).requests[0].id for each in (first, second)] == ["a", "b"]


def test_a_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, header=HEADER, max_bytes=1 << 18)
    seen = 0
    for at in range(4000):
        recorder.opened(f"request-{at}", float(at), TAGS[1])
        if at % 400 == 399:
            wait_for(lambda: path.exists() and path.stat().st_size > 0)
            recording = read_recording(path)
            numbers = [int(each.id.removeprefix("request-")) for each in recording.requests]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else 1
            assert len(numbers) >= seen or recording.cut
            assert recording.bad == []
            seen = len(numbers)
    recorder.close()


# --- what goes wrong ---


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 10)
    monkeypatch.setattr(module, "_PAUSE", 3600.0)
    recorder = Recorder(tmp_path / "t.jsonl", header=HEADER)
    for at in range(25):
        recorder.opened(f"r{at}", None)
    assert recorder.lost == 15
    recorder.close()
    recording = read_recording(tmp_path / "t.jsonl")
    assert [each.id for each in recording.requests] == [f"r{at}" for at in range(10)]
    assert recording.lost == 15


def test_queued_blocks_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BLOCKS", 10)
    monkeypatch.setattr(module, "_PAUSE", 3600.0)
    recorder = Recorder(tmp_path / "t.jsonl", header=HEADER)
    for _ in range(4):
        recorder.offered("r", keys_of("abcd"))
    recorder.close()
    assert recorder.lost == 2
    recording = read_recording(tmp_path / "t.jsonl")
    assert [event.kind for event in recording.events].count("offer") == 2


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_fails_costs_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    monkeypatch.setattr(module, "_RETRY", 0.05)
    path = tmp_path / "t.jsonl"
    full = threading.Event()
    write = os.write

    def failing(file: int, data: Any) -> int:
        if full.is_set():
            if len(data) > 20:
                return write(file, data[:20])  # half a line, and then no more
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", failing)
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(path, header=HEADER)
        recorder.opened("before", None)
        wait_for(lambda: path.exists() and "before" in path.read_text())
        full.set()
        for at in range(3):
            recorder.opened(f"lost{at}", None)
            before = recorder.lost
            wait_for(lambda at=at, before=before: recorder.lost > 0 and not recorder._queue)
        wait_for(lambda: recorder.lost >= 3)
        full.clear()
        time.sleep(0.1)
        recorder.opened("after", None)
        wait_for(lambda: "after" in path.read_text())
        recorder.close()
    recording = read_recording(path)
    assert [each.id for each in recording.requests] == ["before", "after"]
    assert recording.bad == []
    assert recording.lost >= 3
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0].getMessage()


def test_a_path_that_vanishes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    monkeypatch.setattr(module, "_CHECK", 0.0)
    monkeypatch.setattr(module, "_RETRY", 0.0)
    path = tmp_path / "folder" / "t.jsonl"
    recorder = Recorder(path, header=HEADER)
    recorder.opened("before", None)
    wait_for(lambda: path.exists() and "before" in path.read_text())
    path.unlink()
    path.parent.rmdir()
    wait_for(path.exists)
    recorder.opened("after", None)
    recorder.close()
    assert [each.id for each in read_recording(path).requests] == ["after"]


@pytest.mark.parametrize("kind", ["folder", "text", "below a file", "device"])
def test_a_path_that_cannot_be_written_raises_nothing_and_is_left_alone(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to(os.devnull)
    else:
        path.write_text("my thesis\n")
    with caplog.at_level(logging.WARNING):
        recorder = record(
            path / "t.jsonl" if kind == "below a file" else path,
            [("opened", ("r", None), {}), ("offered", ("r", keys_of("ab")), {})],
        )
    assert recorder.lost > 0
    assert len(caplog.records) == 1
    if kind in ("text", "below a file"):
        assert path.read_text() == "my thesis\n"
    assert [each.name for each in tmp_path.iterdir()] == ["t.jsonl"]


def test_calls_that_make_no_sense_cost_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    header: dict[Any, Any] = {**HEADER, "what": object(), ("no", "key"): 1}
    recorder = Recorder(path, header=header)
    recorder.offered("r", ["no bytes"])  # type: ignore[list-item]
    recorder.decisions([Decision("stored", [7], "", 0, None, 0)])  # type: ignore[list-item]
    recorder.opened("r", "soon", None)  # type: ignore[arg-type]
    recorder.closed("nobody")
    recorder.opened("good", 1.0)
    recorder.close()
    recorder.opened("too late", 2.0)
    assert recorder.lost == 4
    assert "good" in [each.id for each in read_recording(path).requests]


def test_without_a_thread_everything_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING):
        recorder = record(tmp_path / "t.jsonl", [("opened", ("r", None), {})])
    assert recorder.lost == 1
    assert len(caplog.records) == 1


def test_closing_twice_or_in_a_child_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, header=HEADER)
    recorder.opened("a", None)
    child = os.fork()
    if child == 0:
        recorder.opened("child", None)
        recorder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.opened("b", None)
    recorder.close()
    recorder.close()
    assert [each.id for each in read_recording(path).requests] == ["a", "b"]


_PROGRAM = """
import os, sys, time
from evoke_core.recording import Recorder

recorder = Recorder(sys.argv[1], header={"tokens_per_block": 4, "capacity": 8, "policy": "lru"})
how = sys.argv[2]
at = 0
while how == "kill" or at < 500:
    stamp = time.time()
    recorder.opened(f"{at} {stamp}", stamp)
    recorder.offered(f"{at} {stamp}", [b"%d.%d" % (at, i) for i in range(50)])
    if at % 10 == 0:
        print(at, stamp, flush=True)
    at += 1
    time.sleep(0.0005)
"""

_CHILD = """
import multiprocessing, sys
from evoke_core.recording import Recorder

def serve():
    recorder = Recorder(sys.argv[1], header={})
    for at in range(500):
        recorder.opened(str(at), None)

process = multiprocessing.get_context("fork").Process(target=serve)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_a_kill_loses_at_most_the_last_second(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path), "kill"], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    told = [running.stdout.readline() for _ in range(150)]
    running.send_signal(signal.SIGKILL)
    told += running.stdout.read().splitlines()
    running.wait()
    recording = read_recording(path)
    written = [each.id for each in recording.requests]
    assert [id_.split()[0] for id_ in written] == [str(at) for at in range(len(written))]
    assert recording.bad == []
    _, last_told = told[-1].split()
    last_written = written[-1].split()[1]
    assert float(last_told) - float(last_written) < 1.0


@pytest.mark.parametrize("program", [_PROGRAM, _CHILD])
def test_a_process_that_ends_without_closing_loses_nothing(tmp_path: Path, program: str) -> None:
    path = tmp_path / "t.jsonl"
    command = [sys.executable, "-c", program, str(path), "end"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert len(read_recording(path).requests) == 500


def test_the_core_imports_nothing_of_it() -> None:
    program = (
        "import sys, evoke_core\n"
        "assert not [name for name in sys.modules if name.startswith('evoke_core.recording')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_server_that_is_recorded_decides_the_same(tmp_path: Path) -> None:
    silent, recorded = Server.silent(5), Server.recording(tmp_path / "t.jsonl", 5)
    for at, prompt in enumerate(["abc", "abd", "xyz", "abc", "abd", "xyz"]):
        assert silent.serve(str(at), prompt) == recorded.serve(str(at), prompt)
    recorded.stop()
