"""The workloads: repeatable, of exact size, scored; and what simulations say of them."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench.errors import UsageProblem
from bench.matrix.predict import predict
from bench.matrix.published_score import PublishedScore
from bench.matrix.workloads import NAMES, make_work
from bench.matrix.workloads.scoring import score
from bench.matrix.workloads.work import Ask, Work
from tests.bench.matrix import encode

W1S: dict[str, Any] = {"hot": 3, "cold": 5, "loops": 10, "tokens": 256}
W1: dict[str, Any] = {"contexts": 8, "loops": 9, "tokens": 256, "shuffle": True}


def make(
    name: str, seed: int = 0, files: dict[str, Path] | None = None, **options: int | float | bool
) -> Work:
    return make_work(name, Ask(seed, encode, options, 32, files or {}))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for session in range(4):
            text = f"session {session} " + "begin " * 70
            for call in range(3):
                text += f"call {call} " * 20
                line = {"timestamp": call, "session_id": str(session), "input": text, "output": ""}
                file.write(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_seed_decides_everything(name: str, trace: Path) -> None:
    files = {"trace": trace}
    small: dict[str, Any] = {"sessions": 2} if name == "w3" else {}
    first = make(name, files=files, **small)
    assert first == make(name, files=files, **small)
    others = [make(name, seed, files, **small).requests for seed in range(1, 6)]
    assert any(first.requests != other for other in others)
    assert first.open_loop is (name == "w4")
    for request in first.requests:
        assert len(request.prompt) + request.answer_tokens <= first.longest
    if name != "w3":
        assert all(request.expected for request in first.requests)


def test_hot_contexts_return_in_every_loop_and_cold_ones_never() -> None:
    work = make("w1s", **W1S)
    for loop in range(1, 11):
        kinds = [r.kind for r in work.requests if r.loop == loop]
        assert (kinds.count("hot"), kinds.count("cold")) == (3, 5)
    cold = [r.context for r in work.requests if r.kind == "cold"]
    assert len(set(cold)) == len(cold)
    assert work.hot_blocks == 3 * 8


def test_the_answer_is_in_the_context() -> None:
    """A word is a token here, so a code that was planted is one of the prompt's tokens."""
    for name in ("w1s", "w5", "w2"):
        for request in make(name).requests:
            for code in request.expected:
                assert encode(f"{code}.")[0] in request.prompt


def test_a_chat_grows_by_its_turns() -> None:
    work = make("w4")
    turns: dict[str, list[tuple[int, ...]]] = {}
    for request in work.requests:
        turns.setdefault(request.context, []).append(request.prompt)
    grown = [prompts for prompts in turns.values() if len(prompts) > 1]
    assert grown
    for prompts in grown:
        for one, two in pairwise(prompts):
            shared = next(n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
            assert shared > len(one) - 32
    due = [request.arrival_s or 0.0 for request in work.requests]
    assert due == sorted(due)


def test_arrivals_are_a_traces_timestamps_scaled(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    stamps = [0, 10, 10, 400, 1000, 1500]
    path.write_text("".join(f'{{"timestamp": {t}}}\n' for t in stamps))
    work = make("w4", files={"arrivals": path}, chats=2, turns=5, per_second=2.0)
    assert len(work.requests) == 6
    assert [r.arrival_s for r in work.requests] == [round(t / 500, 3) for t in stamps]
    assert "mooncake.jsonl" in work.notes[0]
    path.write_text("no")
    with pytest.raises(UsageProblem, match="cannot read arrivals"):
        make("w4", files={"arrivals": path})


def test_tenants_share_their_systems_blocks() -> None:
    work = make("w5")
    heads = {chain[0] for chain in work.chains()}
    assert len(heads) == 1
    assert len({chain[-1] for chain in work.chains()}) > 10


def test_the_agent_trace_is_pointed_at(trace: Path) -> None:
    work = make("w3", files={"trace": trace}, sessions=2, calls=5)
    assert len(work.requests) == 5
    assert len({request.context for request in work.requests}) == 2
    with pytest.raises(UsageProblem, match="--trace FILE"):
        make("w3")


def test_a_data_set_that_the_user_points_to(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [
        {"context": f"text {n} " * 90, "questions": ["what?"], "answers": [[f"a{n}", "b"]]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    work = make("w1", files={"data": path}, contexts=8, loops=2)
    assert {request.expected[0] for request in work.requests} == {f"a{n}" for n in range(8)}
    assert "data.jsonl" in work.notes[0]
    with pytest.raises(UsageProblem, match="8 contexts, 9 are needed"):
        make("w1", files={"data": path}, contexts=9)
    path.write_text('{"context": "c", "questions": ["q"], "answers": []}\n')
    with pytest.raises(UsageProblem, match=r"data\.jsonl:1"):
        make("w1", files={"data": path}, contexts=1)


@pytest.mark.parametrize(
    ("answer", "expected", "as_json", "points"),
    [
        ("The code is 12345.", ("12345",), False, 1.0),
        ("the ANSWER", ("Answer", "no"), False, 0.5),
        ("1234", ("12345",), False, 0.0),
        ('Sure: {"a": "11", "b": 22} ok', ("11", "22"), True, 1.0),
        ('{"a": "11"}', ("11", "22"), True, 0.5),
        ('{"a": 11', ("11",), True, 0.0),
        ("11", ("11",), True, 0.0),
        ("anything", (), False, None),
    ],
)
def test_scoring(
    answer: str, expected: tuple[str, ...], as_json: bool, points: float | None
) -> None:
    assert score(answer, expected, as_json=as_json) == points


def rates(name: str, options: dict[str, Any], policy: str, room: float) -> tuple[float, float]:
    """Return restored shares, all and hot, over the primary grid's seeds; room as in cpu.toml."""
    found = []
    for seed in range(3):
        work = make(name, seed, **options)
        blocks = int(room * (work.hot_blocks or work.all_blocks))
        found.append(predict(work, policy, tier_blocks=blocks, gpu_blocks=17))
    return fmean(f.restored for f in found), fmean(f.hot or 0.0 for f in found)


@pytest.mark.parametrize("room", [1.3, 1.6])
def test_hot_and_cold_is_predicted_to_separate_the_policies(room: float) -> None:
    lru, lru_hot = rates("w1s", W1S, "lru", room)
    evoke, evoke_hot = rates("w1s", W1S, "adaptive", room)
    assert evoke_hot > lru_hot + 0.4
    assert evoke > lru + 0.1
    assert rates("w1s", W1S, "published", room)[1] < evoke_hot


def test_uniform_revisits_are_predicted_to_gain_20_points() -> None:
    assert rates("w1", W1, "adaptive", 0.55)[0] > rates("w1", W1, "lru", 0.55)[0] + 0.2


def test_a_threshold_keeps_scans_out() -> None:
    work = make("w6")
    room = int(0.4 * work.hot_blocks)
    with_it = predict(work, "adaptive", tier_blocks=room, gpu_blocks=17, threshold=2)
    assert with_it.restored > 0.0


def test_the_published_formula_ages_by_block_touches() -> None:
    """Its recency dies within one long prompt, and polls count as reuse."""
    kept = PublishedScore()
    for key in ("old", "new"):
        kept.insert(key)
    kept.touch(["new"])
    assert kept.lowest(1, ()) == ["old"]
    kept.looked_up("old")  # one poll outweighs recency
    assert kept.lowest(1, ()) == ["new"]
    assert kept.lowest(5, {"new"}) == ["old"]
    heads = PublishedScore()
    for key in ("head", "tail"):
        heads.insert(key)
    heads.touch(["head", "tail"])  # head first: so the head goes first
    assert heads.lowest(1, ()) == ["head"]
    roles = PublishedScore()
    roles.insert("system", "system")
    roles.insert("other")
    assert roles.lowest(1, ()) == ["other"]
