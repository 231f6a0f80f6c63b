"""Replaying a recording: the same tier finds the same blocks, another one what it would have."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoke_core import BlockLedger, EvokeConfig, RequestTags, Span
from evoke_core.recording import Recorder
from evoke_core.replay import (
    Budget,
    RecordedTrace,
    ReplayError,
    Trace,
    TraceError,
    generate,
    known_policies,
    make_tier,
    read_trace,
    replay,
    simulate,
    untagged,
)
from tests.core.served import Server, keys_of, lines

TAGS = st.sampled_from(
    [
        RequestTags(),
        RequestTags(source_type="system", session="s"),
        RequestTags(session="s", pinned=True),
        RequestTags(session="t", ttl_s=2.0, priority=0.5),
        RequestTags(session="t", end_of_session=True),
        RequestTags(expect_reuse_in_s=3.0),
        RequestTags(no_store=True),
        RequestTags(spans=(Span(0, 1, source_type="system", priority=4.0), Span(2, 4, ttl_s=1.5))),
    ]
)
PROMPTS = st.text("ab", max_size=7)


def recorded(path: Path) -> RecordedTrace:
    trace = read_trace(path)
    assert isinstance(trace, RecordedTrace)
    return trace


def hits(trace: Trace, policy: str, capacity: int, **options: Any) -> list[int]:
    """Return what the tier had, per request."""
    found: list[int] = []
    tier = make_tier(policy, capacity, trace)
    simulate(trace, tier, on_request=lambda _, n: found.append(n), **options)
    device = trace.device if isinstance(trace, RecordedTrace) else [0] * len(found)
    return [n - on_device for n, on_device in zip(found, device, strict=True)]


def ledger_name(policy: str) -> str:
    return "ledger-lru" if policy == "lru" else policy


# --- the same tier ---


@st.composite
def overlapping(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Draw steps of up to three requests at a time, and time that passes between them."""
    steps: list[tuple[Any, ...]] = []
    open_: dict[str, int] = {}  # request -> steps it has taken
    for at in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["open", "step", "step", "step", "time", "reset"]))
        if kind == "open" and len(open_) < 3:
            request = f"r{at}"
            open_[request] = 0
            steps.append(("open", request, draw(TAGS)))
        elif kind == "step" and open_:
            request = draw(st.sampled_from(sorted(open_)))
            open_[request] += 1
            if open_[request] == 1:
                prompt = draw(PROMPTS)
                steps.append(("look", request, prompt, draw(st.integers(0, len(prompt)))))
            elif draw(st.booleans()):
                blocks = draw(st.none() | st.integers(1, 3))
                steps.append(("offer", request, blocks, draw(st.text("ab", max_size=2))))
            else:
                del open_[request]
                steps.append(("close", request))
        elif kind == "time":
            steps.append(("time", draw(st.sampled_from([0.5, 1.0, 4.0]))))
        elif kind == "reset" and draw(st.integers(0, 3)) == 0:
            steps.append(("reset",))
    return steps


def drive(server: Server, steps: list[tuple[Any, ...]]) -> None:
    for name, *args in steps:
        if name == "time":
            server.time += args[0]
        else:
            getattr(server, name)(*args)


@settings(max_examples=150)
@given(overlapping(), st.integers(1, 9), st.sampled_from(["lru", "scored", "adaptive"]))
def test_a_recorded_tier_replayed_finds_the_same_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[Any, ...]],
    capacity: int,
    policy: str,
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "t.jsonl"
    server = Server.recording(path, capacity, policy)
    drive(server, steps)
    server.stop()
    if not any(step[0] == "look" and step[2] for step in steps):
        with pytest.raises(TraceError, match="no request with a full block"):
            read_trace(path)
        return
    trace = recorded(path)
    assert list(trace.found) == server.found
    assert hits(trace, ledger_name(policy), capacity) == server.found
    [result] = replay(trace, ["1x"], [ledger_name(policy)], jobs=1)
    asked = sum(server.found) + server.missed
    assert result.cells[0].capacity == capacity
    assert result.cells[0].tier_hits == sum(server.found) / max(1, asked) == trace.tier_hits


# --- another tier ---


@st.composite
def one_by_one(draw: st.DrawFn) -> list[dict[str, Any]]:
    prompts = draw(st.lists(PROMPTS, min_size=2, max_size=14).filter(any))
    return [
        {
            "prompt": prompt,
            "generated": draw(st.text("ab", max_size=2)),
            "tags": draw(TAGS),
            "device": draw(st.integers(0, len(prompt))) if draw(st.booleans()) else 0,
        }
        for prompt in prompts
    ]


@settings(max_examples=150)
@given(
    one_by_one(),
    st.integers(1, 9),
    st.integers(1, 12),
    st.sampled_from(["lru", "scored", "adaptive"]),
)
def test_another_size_finds_what_a_server_of_that_size_would_have(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[dict[str, Any]],
    capacity: int,
    other: int,
    policy: str,
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "t.jsonl"
    server, real = Server.recording(path, capacity, policy), Server.silent(other, policy)
    for at, request in enumerate(requests):
        for each in (server, real):
            each.serve(
                str(at),
                request["prompt"],
                **{name: value for name, value in request.items() if name != "prompt"},
            )
    server.stop()
    assert hits(recorded(path), ledger_name(policy), other) == real.found


def test_a_smaller_tier_computes_and_offers_what_it_no_longer_finds(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 9)
    for at, prompt in enumerate(["abc", "xyz", "abcd", "abcd"]):
        server.serve(str(at), prompt)
    server.stop()
    assert server.found == [0, 0, 3, 4]
    # Room for 4: xyz cost b and c; abcd is computed anew from b on, and stored.
    assert hits(recorded(tmp_path / "t.jsonl"), "ledger-lru", 4) == [0, 0, 1, 4]


def test_requests_overlap_as_they_did(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 9)
    for request in ("one", "two"):
        server.open(request)
    server.look("one", "abc")
    server.offer("one", 1)
    server.look("two", "abc")  # one had stored a, and no more
    for request in ("one", "two"):
        server.offer(request)
        server.close(request)
    server.stop()
    assert server.found == [0, 1]
    trace = recorded(tmp_path / "t.jsonl")
    assert hits(trace, "ledger-lru", 9) == hits(trace, "lru", 9) == [0, 1]


@pytest.mark.parametrize("policy", known_policies())
def test_every_policy_finds_all_that_returns_when_nothing_has_to_go(
    tmp_path: Path, policy: str
) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 100)
    server.serve("0", "abc", generated="de")
    server.serve("1", "abcdef", device=1)  # it has what was generated too
    server.serve("2", "x")
    server.serve("3", "abcdef")
    server.stop()
    trace = recorded(tmp_path / "t.jsonl")
    assert hits(trace, policy, 100) == server.found == [0, 4, 0, 6]
    assert (trace.unique_blocks, trace.references) == (7, 16)
    assert trace.ceiling == (5 + 6) / 16  # 5 of the second prompt, all of the last
    [result] = replay(trace, ["1x"], [policy], jobs=1)
    assert result.cells[0].block_hits == result.ceiling == trace.ceiling


@settings(max_examples=60)
@given(one_by_one(), st.integers(1, 8))
def test_min_is_a_ceiling_for_recordings_too(
    tmp_path_factory: pytest.TempPathFactory, requests: list[dict[str, Any]], capacity: int
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "t.jsonl"
    server = Server.recording(path, capacity)
    for at, request in enumerate(requests):
        server.serve(str(at), request["prompt"], generated=request["generated"])
    server.stop()
    trace = recorded(path)
    best = sum(hits(trace, "min", capacity))
    for policy in ("ledger-lru", "lru", "arc", "wtinylfu", "s3fifo"):
        assert sum(hits(trace, policy, capacity)) <= best, policy


@pytest.mark.parametrize("policy", known_policies())
def test_a_tier_that_was_emptied_is_empty(tmp_path: Path, policy: str) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 100)
    server.serve("0", "abc")
    server.serve("1", "abc")
    server.reset()
    server.serve("2", "abc")
    server.serve("3", "abc")
    server.stop()
    again = Server.recording(tmp_path / "t.jsonl", 100)  # the server starts anew
    again.serve("4", "abc")
    again.stop()
    trace = recorded(tmp_path / "t.jsonl")
    assert hits(trace, policy, 100) == [0, 3, 0, 3, 0]


# --- options ---


def four(path: Path, **header: Any) -> RecordedTrace:
    server = Server.recording(path, 6, **header)
    for at, prompt in enumerate(["abcd", "xyz", "abcd", "xyzw"]):
        server.serve(str(at), prompt, device=2 if at == 2 else 0)
    server.stop()
    return recorded(path)


def test_a_gpu_in_front_replaces_the_recorded_one(tmp_path: Path) -> None:
    trace = four(tmp_path / "t.jsonl")
    counts = simulate(trace, make_tier("lru", 20, trace))
    assert counts.gpu_blocks == 2
    counts = simulate(trace, make_tier("lru", 20, trace), gpu_blocks=20)
    assert counts.gpu_blocks == counts.hit_blocks == 4 + 3
    counts = simulate(trace, make_tier("lru", 20, trace), gpu_blocks=1)
    assert counts.gpu_blocks == 0
    assert counts.hit_blocks == 4 + 3


def test_chunks_are_as_recorded_or_smaller(tmp_path: Path) -> None:
    offers: list[tuple[int, int]] = []

    class Seen:
        def begin(self, request: int, chain: list[int], start: int) -> int:
            return 0

        def offer(self, chain: list[int], begin: int, end: int) -> None:
            offers.append((begin, end))

        def nothing(self, *args: Any) -> None:
            pass

        end = open = resume = reset = nothing

    server = Server.recording(tmp_path / "t.jsonl", 9)
    server.serve("0", "abcdef", chunk=4)
    server.stop()
    trace = recorded(tmp_path / "t.jsonl")
    simulate(trace, Seen())
    assert offers == [(0, 4), (4, 6)]
    offers.clear()
    simulate(trace, Seen(), chunk=3)
    assert offers == [(0, 3), (3, 4), (4, 6)]


def test_halves_add_up(tmp_path: Path) -> None:
    trace = four(tmp_path / "t.jsonl")
    first, second, whole = (
        simulate(trace, make_tier("lru", 6, trace), half=half)
        for half in ("first", "second", "all")
    )
    assert (first.requests, second.requests) == (2, 2)
    for name in ("blocks", "tokens", "hit_blocks", "gpu_blocks"):
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name)


def test_multiples_of_the_recorded_tier(tmp_path: Path) -> None:
    trace = four(tmp_path / "t.jsonl", bytes_per_block=512)
    assert [Budget.parse(text).blocks(trace) for text in ("1x", "2x", "0.5x", "0.01x")] == [
        *(6, 12, 3, 1)
    ]
    assert str(Budget.parse("1.50x")) == "1.5x"
    [result] = replay(trace, ["1x", "2x"], ["lru", "min"], jobs=2)
    assert [cell.capacity for cell in result.cells] == [6, 6, 12, 12]
    copy = json.loads(json.dumps(result.as_dict()))
    assert copy["recorded"]["capacity"] == 6
    assert copy["recorded"]["bytes_per_block"] == 512
    with pytest.raises(ReplayError, match="budget 2x: w1 is no recording"):
        replay(generate("w1"), ["2x"], ["lru"])


def test_tags_are_as_recorded_unless_they_are_not_wanted(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 4, "scored")
    server.serve("0", "ab", tags=RequestTags(priority=10.0))
    for at, prompt in enumerate(["cd", "ef", "ab"], 1):
        server.serve(str(at), prompt)
    server.stop()
    trace = recorded(tmp_path / "t.jsonl")
    assert server.found == [0, 0, 0, 2]
    for tags, found in ((None, 2), (untagged, 0)):
        [result] = replay(trace, ["1x"], ["scored"], tags=tags, jobs=1)
        assert result.cells[0].counts.hit_blocks == found


def test_settings_are_as_recorded_unless_others_are_given(tmp_path: Path) -> None:
    config = EvokeConfig(policy="scored", w_recency=0.0, w_reuse=1.0)
    path = tmp_path / "t.jsonl"
    told = {"w_recency": 0.0, "w_reuse": 1.0, "policy": "scored", "of a later version": 1}
    server = Server.recording(path, 4, "scored", config=told)
    server.ledger = BlockLedger(4, config=config)
    for at, prompt in enumerate(["ab", "ab", "cd", "xy", "ab"]):
        server.serve(str(at), prompt)
    server.stop()
    trace = recorded(path)
    assert server.found[-1] == 2
    assert hits(trace, "scored", 4)[-1] == 2
    other = EvokeConfig(w_recency=1.0, w_reuse=0.0)
    [result] = replay(trace, [4], ["scored"], config=other, jobs=1)
    assert result.cells[0].counts.hit_blocks < sum(server.found)


def test_a_store_threshold_is_as_recorded(tmp_path: Path) -> None:
    server = Server.recording(tmp_path / "t.jsonl", 9, store_threshold=2)
    server.ledger = BlockLedger(9, config=EvokeConfig(policy="lru"), store_threshold=2)
    for at in range(3):
        server.serve(str(at), "abc")
    server.stop()
    assert server.found == [0, 0, 3]
    assert hits(recorded(tmp_path / "t.jsonl"), "ledger-lru", 9) == server.found


def test_tokens_sessions_roles_and_ids(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", header={"tokens_per_block": 4})
    tags = RequestTags(source_type="user", session="s")
    for request, tokens in (("one", 11), ("two", None), ("three", 99)):
        recorder.opened(request, 1.0, tags)
        recorder.prompt(request, keys_of("ab"), tier_start=0, found=0, tokens=tokens)
    recorder.close()
    trace = recorded(tmp_path / "t.jsonl")
    assert list(trace.tokens) == [11, 8, 11]
    assert trace.ids == ["one", "two", "three"]
    assert (trace.sessions, trace.roles) == (["s"] * 3, ["user"] * 3)
    assert trace.tokens_per_block == 4


def test_one_group_of_a_hybrid_model_is_replayed_with_its_share(tmp_path: Path) -> None:
    recorder = Recorder(
        tmp_path / "t.jsonl",
        header={"tokens_per_block": 4, "capacity": 90, "window_groups": [0]},
    )
    for at in range(2):
        request = str(at)
        for group, prompt in ((0, "x"), (1, "ab")):
            keys = keys_of(prompt)
            recorder.prompt(request, keys, group=group, tier_start=0, found=at * len(keys))
            recorder.offered(request, keys, group=group)
        recorder.closed(request)
    recorder.close()
    trace = recorded(tmp_path / "t.jsonl")
    assert (trace.references, trace.unique_blocks, trace.capacity) == (4, 2, 60)
    assert hits(trace, "lru", 60) == [0, 2]


# --- what is wrong with a file ---


def test_bad_lines_are_an_error_and_skipped_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    four(path)
    written = lines(path)
    path.write_text("\n".join([*written[:-1], "{", written[-1], ""]))
    with pytest.raises(TraceError, match=r"^1 bad line: .*t\.jsonl:\d+: no JSON"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (4, 1)


def test_a_header_that_lacks_the_size_of_a_block_is_one_clear_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", header={"capacity": 4})
    recorder.prompt("one", keys_of("ab"), tier_start=0, found=0)
    recorder.close()
    with pytest.raises(TraceError, match="its header does not tell tokens_per_block"):
        read_trace(tmp_path / "t.jsonl")


def test_what_has_no_beginning_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", header={"tokens_per_block": 4})
    recorder.offered("old", keys_of("abcdef")[4:], start=4)  # its prompt was in a file that is gone
    recorder.prompt("new", keys_of("ab"), tier_start=0, found=0)
    recorder.offered("new", keys_of("ab"))
    recorder.close()
    trace = recorded(tmp_path / "t.jsonl")
    assert trace.ids == ["new"]
    assert hits(trace, "lru", 9) == [0]
