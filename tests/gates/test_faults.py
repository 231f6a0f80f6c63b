"""The fault gates' own parts: a late worker, what is measured, and that each check can fail."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.progress import Reporter, make_console
from bench.serving.server import Server
from gates import __main__ as program
from gates.client import GateClient, Reply
from gates.faults import checks, report, scene
from gates.faults.checks import FAULTS, Fault
from gates.faults.scene import Outcome, Scene, Stage, differs, growth
from tests.gates.fake_server import FakeEngine, serving

CONTEXT = tuple(range(40))
RIGHT = Reply(tuple(range(40, 48)), (-0.5,) * 8, "")


class Handler:
    """A worker that is done at once."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.waited: list[set[int]] = []

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        self.submitted.append(job_id)
        return True

    def get_finished(self) -> list[Any]:
        done, self.submitted = self.submitted, []
        return [type("Result", (), {"job_id": job})() for job in done]

    def wait(self, job_ids: set[int]) -> None:
        self.waited.append(job_ids)


def late(delay_s: float, journal: Path) -> Handler:
    from gates.faults.worker import Journal, Late

    handler = Handler()
    Late(handler, {"load": delay_s, "store": 0.0}, Journal(journal)).wrap_handler("load")
    return handler


@pytest.mark.engine
def test_a_late_transfer_moves_nothing_before_its_time(tmp_path: Path) -> None:
    handler = late(60.0, tmp_path / "journal")
    assert handler.transfer_async(1, None)
    assert handler.submitted == []
    assert handler.get_finished() == []
    (entry,) = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    assert (entry["what"], entry["job"], entry["state"]) == ("load", 1, "begun")


@pytest.mark.engine
def test_who_waits_for_a_late_transfer_gets_it_and_those_before_it(tmp_path: Path) -> None:
    handler = late(0.05, tmp_path / "journal")
    for job in (1, 2):
        handler.transfer_async(job, None)
    handler.wait({2})
    assert handler.submitted == [1, 2]
    assert handler.waited == [{2}]
    assert [result.job_id for result in handler.get_finished()] == [1, 2]
    entries = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [(e["job"], e["state"]) for e in entries] == [
        (1, "begun"),
        (2, "begun"),
        (1, "done"),
        (2, "done"),
    ]


@pytest.mark.engine
def test_a_worker_of_both_directions_is_late_in_each(tmp_path: Path) -> None:
    from gates.faults.worker import Journal, Late

    class Worker(Handler):
        def submit_load(self, job_id: int, *specs: Any, expedited: bool = False) -> bool:
            return self.transfer_async(job_id, specs)

        def submit_store(self, job_id: int, *specs: Any) -> bool:
            return self.transfer_async(job_id, specs)

    worker = Worker()
    Late(worker, {"load": 60.0, "store": 0.0}, Journal(tmp_path / "journal")).wrap_worker()
    assert worker.submit_load(1, "tier", "engine", expedited=True)
    assert worker.submit_store(2, "engine", "tier")
    assert [result.job_id for result in worker.get_finished()] == [2]
    entries = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [(e["what"], e["state"]) for e in entries] == [
        ("load", "begun"),
        ("store", "begun"),
        ("store", "done"),
    ]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([50, 80, 99] + [100] * 9, 0.0),
        ([100] * 4 + [100, 100, 101, 102, 103, 104, 109, 110], 0.1),
        ([1, 1, 1, 1, 200, 200, 200, 200, 100, 100, 100, 100], -0.5),
    ],
)
def test_growth_leaves_warm_up_out(samples: list[int], expected: float) -> None:
    assert growth(samples) == pytest.approx(expected, abs=0.011)


def test_growth_needs_samples() -> None:
    with pytest.raises(BenchError, match="5 samples of memory are too few"):
        growth([1] * 5)


def test_an_answer_is_compared_token_by_token() -> None:
    assert differs(RIGHT, RIGHT) is None
    other = Reply((40, 41, 9, *range(43, 48)), RIGHT.logprobs, "")
    assert differs(RIGHT, other) == "token 9 for 42 at position 2"
    shifted = Reply(RIGHT.token_ids, (-0.5, -0.51, *RIGHT.logprobs[2:]), "")
    assert differs(RIGHT, shifted) == "logprob off by 0.0100 at position 1"
    assert "nan" in (differs(RIGHT, Reply(RIGHT.token_ids, (float("nan"),) * 8, "")) or "")


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine(tier=True)
    made.gauges = {"kv_offload_cpu_cache_usage_perc": 0.0}
    return made


@pytest.fixture
def stage(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(scene, "_QUIET_S", 0.0)
    log = tmp_path / "log"
    log.write_text("a line\n")
    made = Scene(tmp_path, (CONTEXT,), {CONTEXT: RIGHT}, tmp_path, Reporter(make_console()))
    with serving(engine) as url:
        server = Server(url, log, boot_s=0.0)
        with GateClient(server) as client:
            yield Stage(made, server, client, tmp_path / "journal")


def test_right_answers_are_no_problem(stage: Stage) -> None:
    outcome = Outcome("x")
    assert stage.check_all([CONTEXT] * 3, outcome, threads=3) == 3
    stage.settle(outcome)
    assert outcome.status == "pass"
    assert outcome.figures["slots_in_transfer_at_the_end"] == 0.0


def test_tags_reach_the_request(stage: Stage, engine: FakeEngine) -> None:
    stage.check(CONTEXT, Outcome("x"), {"pinned": True})
    assert engine.bodies[-1]["kv_transfer_params"] == {"evoke": {"pinned": True}}


def test_a_wrong_answer_is_a_problem(stage: Stage) -> None:
    outcome = Outcome("x")
    stage.scene.expected[CONTEXT] = Reply(tuple(range(8)), RIGHT.logprobs, "")  # type: ignore[index]
    assert stage.check_all([CONTEXT], outcome) == 0
    assert outcome.problems == ["wrong answer: token 40 for 0 at position 0"]
    assert outcome.status == "fail"


def test_no_answer_is_a_problem(stage: Stage, engine: FakeEngine) -> None:
    outcome = Outcome("x")
    engine.dead = True
    assert not stage.check(CONTEXT, outcome)
    assert "the server is down" in outcome.problems[0]
    stage.settle(outcome)
    assert "the engine is not alive" in outcome.problems[1]


@pytest.mark.parametrize(
    ("gauges", "problem"),
    [
        ({"kv_offload_cpu_cache_usage_perc": 0.25}, "25.0% of the slots are still in transfer"),
        ({"kv_offload_evoke_orphan_blocks": 3}, "3 blocks that nothing can reach"),
        (
            {"kv_offload_evoke_resident_blocks": 9, "kv_offload_evoke_capacity_blocks": 8},
            "9 blocks in 8 slots",
        ),
    ],
)
def test_a_leak_is_a_problem(
    stage: Stage, engine: FakeEngine, gauges: dict[str, float], problem: str
) -> None:
    engine.gauges |= gauges
    outcome = Outcome("x")
    stage.settle(outcome)
    assert outcome.problems == [problem]


def test_the_journal_tells_what_is_under_way(stage: Stage) -> None:
    with pytest.raises(BenchError, match="no load was under way within 0 s"):
        stage.wait_in_flight("load", seconds=0.0)
    states = [("load", "begun"), ("store", "begun"), ("load", "begun"), ("load", "done")]
    lines = [
        json.dumps({"at": float(at), "what": what, "job": 1, "state": state})
        for at, (what, state) in enumerate(states)
    ]
    stage.journal.write_text("\n".join(lines) + '\n{"at": 4.0, "wha')
    assert stage.in_flight("load") == 1
    assert stage.in_flight("load", at=2.0) == 2
    assert stage.in_flight("store") == 1
    stage.wait_in_flight("load", seconds=0.0)


def test_upstreams_crash_is_told_from_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(checks, "versions", lambda: {"vllm": "0.24.0+cpu"})
    log.write_text("File vllm/offloading/scheduler.py, line 1\nKeyError: 84\n")
    assert checks._is_upstream_crash(log)
    log.write_text("File evoke_vllm/manager.py, line 1\nKeyError: 84\n")
    assert not checks._is_upstream_crash(log)
    log.write_text("File vllm/offloading/scheduler.py, line 1\nKeyError: 84\n")
    monkeypatch.setattr(checks, "versions", lambda: {"vllm": "0.33.0"})
    assert not checks._is_upstream_crash(log)


def test_the_report_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(scene: Scene, outcome: Outcome, minutes: float) -> None:
        raise BenchError("the server died")

    def known(scene: Scene, outcome: Outcome, minutes: float) -> None:
        outcome.upstream = "theirs"

    def fine(scene: Scene, outcome: Outcome, minutes: float) -> None:
        outcome.figures["minutes"] = minutes

    for name, run in (("killed", fails), ("full", known), ("aborted", fine)):
        monkeypatch.setitem(FAULTS, name, Fault(name, name, run))
    nothing = Scene(tmp_path, (), {}, tmp_path, Reporter(make_console()))
    monkeypatch.setattr(report.Scene, "prepare", lambda *args: nothing)
    monkeypatch.setattr(report, "versions", lambda: {"vllm": "9.9.9+cpu"})
    monkeypatch.setattr(program, "prepare_tiny_model", lambda cache: tmp_path)
    monkeypatch.setattr(program, "PUBLISHED", tmp_path / "published")
    args = ["faults", "--results", str(tmp_path), "--minutes", "2", "--publish"]
    assert program.main([*args, "--only", "full", "--only", "aborted"]) == 0
    written = json.loads((tmp_path / "published" / "faults" / "faults-vllm-9.9.9.json").read_text())
    assert written["verdict"] == "pass"
    told = {name: each["status"] for name, each in written["faults"].items()}
    assert told == {"full": "upstream", "aborted": "pass"}
    assert written["faults"]["aborted"]["figures"] == {"minutes": 2.0}
    assert program.main([*args, "--only", "killed"]) == 1
    assert "the server died" in capsys.readouterr().out


def test_no_such_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["faults", "--only", "fire"]) == 2
    assert "no fault 'fire'; there are killed, full" in capsys.readouterr().err


def test_memory_is_that_of_every_process_of_a_group() -> None:
    group = os.getpgid(0)
    assert os.getpid() in scene.pids_of(group)
    assert scene.memory_of(os.getpid()) > 1 << 20
    assert scene.memory_of(2**22 + 1) == 0
