"""A whole gate against stand-in servers: recorded, judged, published, and derived again."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.progress import Reporter, make_console
from bench.serving.server import MeasuredConfig, Server
from gates import __main__ as program
from gates import recorder
from gates.arms import ARMS
from gates.profiles import Profile, load_profile
from gates.recorder import Bench, record
from gates.recording import SUFFIX, Recording
from gates.run import derive, rederive, run_gate, summary
from tests.gates.fake_server import BLOCK_BYTES, FakeEngine, serving


def encode(text: str) -> list[int]:
    return list(text.encode())


@dataclass
class Engines:
    """Stand-ins by the name of the arm's log, and what is done to each before it serves."""

    made: dict[str, FakeEngine] = field(default_factory=dict)
    change: dict[str, Callable[[FakeEngine], None]] = field(default_factory=dict)

    @contextmanager
    def running(self, config: MeasuredConfig, log: Path, **options: object) -> Iterator[Server]:
        engine = self.made[log.stem] = FakeEngine(tier=config.kv_transfer is not None)
        if config.kv_transfer and "gate_damage" in config.kv_transfer["kv_connector_extra_config"]:
            damage(engine)
        self.change.get(log.stem, lambda engine: None)(engine)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("a line\n")
        with serving(engine) as url:
            yield Server(url, log, boot_s=1.0)


def damage(engine: FakeEngine) -> None:
    """Let the engine end every answer with another token."""
    complete = engine.complete

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, content = complete(body)
        content["choices"][0]["token_ids"][-1] = 0
        return status, content

    engine.complete = answer  # type: ignore[method-assign]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(recorder, "running", made.running)
    return made


@pytest.fixture
def bench() -> Bench:
    profile = load_profile("tiny")
    rules = replace(profile.rules, min_probes=15, min_restored_tokens=1000, min_restored_bytes=1000)
    pools = replace(profile.pools, pool_blocks=23, max_model_len=704)
    profile = replace(
        profile,
        workload=replace(profile.workload, sessions=3, turns=3),
        pools=pools,
        rules=rules,
        arms=("lru",),
    )
    return Bench.prepare(profile, encode, Path("model"))


@pytest.fixture
def reporter() -> Reporter:
    return Reporter(make_console())


def test_a_recording_holds_every_probe(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    made = record(ARMS["evoke"], bench, tmp_path / "evoke.log", reporter)
    asked = [(a.session, a.turn, a.kind, a.prompt, a.asked) for a in made.answers]
    assert asked == [(p.session, p.turn, p.kind, p.digest, len(p.prompt)) for p in bench.probes]
    for probe, answer in zip(bench.probes, made.answers, strict=True):
        assert answer.token_ids[0] == len(probe.prompt)
        assert len(answer.token_ids) == len(answer.logprobs) == probe.answer_tokens
        assert answer.restored == answer.reusable
        assert answer.in_gpu == 0
    assert made.restored_bytes == made.restored_tokens // 32 * BLOCK_BYTES > 0
    assert made.stored_bytes == bench.sizes.unique_blocks * BLOCK_BYTES
    (body,) = (b for b in engines.made["evoke"].bodies if b["prompt"] == [*bench.probes[0].prompt])
    assert (body["temperature"], body["ignore_eos"], body["logprobs"]) == (0, True, 1)
    path = tmp_path / f"evoke{SUFFIX}"
    made.save(path)
    assert Recording.load(path) == made


def test_a_recording_names_no_path_host_or_port(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    path = tmp_path / "made"
    record(ARMS["evoke"], bench, tmp_path / "evoke.log", reporter).save(path)
    text = path.read_text()
    for word in (str(tmp_path), "127.0.0.1", socket.gethostname()):
        assert word not in text


def test_an_unanswered_probe_is_recorded_and_the_rest_still_asked(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    engines.change["evoke"] = lambda engine: engine.refused.add(384)
    made = record(ARMS["evoke"], bench, tmp_path / "evoke.log", reporter)
    errors = {answer.asked: answer.error for answer in made.answers if answer.error}
    assert errors == {384: 'status 500: {"error": {"message": "out of\\nrange"}}'}
    assert all(answer.token_ids for answer in made.answers if answer.asked != 384)


def test_a_crash_leaves_the_rest_unanswered(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    engines.change["evoke"] = lambda engine: engine.deadly.add(576)
    made = record(ARMS["evoke"], bench, tmp_path / "evoke.log", reporter)
    first = next(at for at, answer in enumerate(made.answers) if answer.asked == 576)
    assert all(answer.error is None for answer in made.answers[:first])
    assert all("the server is down" in (a.error or "") for a in made.answers[first:])
    assert made.restored_bytes > 0


def test_the_whole_gate(engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path) -> None:
    verdict = run_gate(bench, tmp_path, reporter)
    assert list(engines.made) == ["baseline", "evoke", "control", "lru", "flip", "swap", "stale"]
    assert verdict["verdict"] == "pass"
    assert json.loads((tmp_path / "verdict.json").read_text()) == verdict
    assert verdict["others"].keys() == {"lru"}
    assert {n: c["verdict"] for n, c in verdict["negative_controls"].items()} == {
        "flip": "fail",
        "swap": "fail",
        "stale": "fail",
    }
    assert rederive(tmp_path) == verdict
    assert summary(verdict)[-1] == "gate tiny: PASS"


def test_a_gate_that_misses_a_negative_control_is_broken(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    engines.change["swap"] = lambda engine: engine.__dict__.pop("complete")
    verdict = run_gate(bench, tmp_path, reporter)
    assert verdict["verdict"] == "broken"
    assert "negative control swap: its damage went unnoticed" in verdict["reasons"][0]
    assert summary(verdict)[-1].startswith("gate tiny: BROKEN")


def test_a_failing_candidate_is_shown(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    engines.change["evoke"] = damage
    verdict = run_gate(bench, tmp_path, reporter)
    assert verdict["verdict"] == "fail"
    assert len(verdict["failures"]) == 15
    lines = summary(verdict)
    assert lines[0] == "  session 1, turn 1 (grow): token at position 7"
    assert "  and 5 more, in the verdict's file" in lines
    assert lines[-1] == "gate tiny: FAIL"


def test_old_recordings_do_not_survive_a_new_run(
    engines: Engines, bench: Bench, reporter: Reporter, tmp_path: Path
) -> None:
    (tmp_path / f"old{SUFFIX}").write_text("{")
    (tmp_path / "verdict.json").write_text("{}")
    run_gate(bench, tmp_path, reporter)
    assert not (tmp_path / f"old{SUFFIX}").exists()


def test_a_changed_recording_or_verdict_is_noticed(
    engines: Engines,
    bench: Bench,
    reporter: Reporter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_gate(bench, tmp_path, reporter)
    assert program.main(["rederive", str(tmp_path)]) == 0
    path = tmp_path / f"evoke{SUFFIX}"
    recording = Recording.load(path)
    answers = list(recording.answers)
    answers[10] = replace(answers[10], token_ids=(1,) * 8)
    replace(recording, answers=tuple(answers)).save(path)
    assert program.main(["rederive", str(tmp_path)]) == 1
    assert "do not give the verdict" in capsys.readouterr().err
    path.unlink()
    with pytest.raises(BenchError, match="holds no recording of evoke"):
        derive(tmp_path)


def test_publishing_replaces_what_was_published(
    engines: Engines, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published"
    monkeypatch.setattr(program, "PUBLISHED", published)
    monkeypatch.setattr(program, "_prepare", lambda *args, **options: bench)
    (published / "tiny").mkdir(parents=True)
    (published / "tiny" / f"old{SUFFIX}").write_text("{}")
    args = ["run", "--profile", "tiny", "--results", str(tmp_path / "results"), "--publish"]
    assert program.main(args) == 0
    names = {path.name for path in (published / "tiny").iterdir()}
    arms = ("baseline", "evoke", "control", "lru", "flip", "swap", "stale")
    assert names == {"verdict.json", *(f"{arm}{SUFFIX}" for arm in arms)}
    assert rederive(published / "tiny")["verdict"] == "pass"


def test_a_vacuous_run_fails(engines: Engines, bench: Bench, tmp_path: Path) -> None:
    engines.change["evoke"] = lambda engine: setattr(engine, "tier", False)
    verdict = run_gate(bench, tmp_path, Reporter(make_console()))
    assert verdict["verdict"] == "fail"
    assert verdict["vacuous"] is True
    assert verdict["failures"] == []


def test_lmcaches_engine_takes_no_profile_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["run", "--package", "lmcache", "--profile", "ada-16gb", "--dry-run"]
    assert program.main(args) == 2
    assert "--package lmcache runs float32 on a CPU: not profile ada-16gb" in (
        capsys.readouterr().err
    )


def test_a_dry_run_in_lmcaches_engine_names_no_server(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared: list[Profile] = []

    def prepare(profile: Profile, *args: object, **options: object) -> Bench:
        prepared.append(profile)
        return bench

    monkeypatch.setattr(program, "_prepare", prepare)
    args = ["run", "--package", "lmcache", "--profile", "tiny", "--dry-run"]
    assert program.main(args) == 0
    assert [profile.name for profile in prepared] == ["lmcache-tiny"]
    out = capsys.readouterr().out
    assert "stale: a stale block restored, in this process" in out
    assert "serve" not in out
