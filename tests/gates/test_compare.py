"""The comparer on recordings checked in: every kind of failure is seen, and named, and only it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from gates.__main__ import main
from gates.compare import make_verdict, render
from gates.recording import SUFFIX, Recording
from tests.gates import make_recordings
from tests.gates.make_recordings import FOLDER


def load(name: str) -> Recording:
    return Recording.load(FOLDER / f"{name}{SUFFIX}")


def verdict(candidate: str, baseline: str = "baseline", control: str = "control") -> dict[str, Any]:
    return make_verdict(load(baseline), load(candidate), load(control))


def test_the_recordings_checked_in_are_the_ones_described(tmp_path: Path) -> None:
    written = make_recordings.recordings()
    assert {path.name.removesuffix(SUFFIX) for path in FOLDER.iterdir()} == written.keys()
    for name, recording in written.items():
        path = tmp_path / "file"
        recording.save(path)
        assert path.read_text() == (FOLDER / f"{name}{SUFFIX}").read_text(), name


def test_good_passes_and_says_what_it_saw() -> None:
    made = verdict("good")
    assert (made["verdict"], made["vacuous"], made["reasons"]) == ("pass", False, [])
    assert made["failures"] == []
    counts = made["counts"]
    assert counts["probes"] == 8
    assert counts["passkeys_found"] == counts["passkeys_baseline"] == 2
    assert counts["restored_probes"] == 6
    assert counts["restored_tokens"] == 320
    assert counts["restored_bytes"] == 320 * 64
    assert counts["overcommit"] == 4.0


def test_differences_within_the_tolerance_pass_and_are_told() -> None:
    made = verdict("within-tolerance")
    assert made["verdict"] == "pass"
    assert made["counts"]["largest_logprob_difference"] == pytest.approx(0.005)


ROWS = {
    "token": {
        "kind": "token",
        "session": 1,
        "turn": 2,
        "probe": "replay",
        "restored": 64,
        "position": 1,
        "expected_token": 121,
        "token": 999,
        "expected_logprob": -1.5,
        "logprob": -1.75,
    },
    "logprob": {
        "kind": "logprob",
        "session": 2,
        "turn": 2,
        "probe": "grow",
        "restored": 32,
        "position": 2,
        "expected_token": 212,
        "token": 212,
        "expected_logprob": -0.125,
        "logprob": -0.25,
    },
    "not-a-number": {
        "kind": "logprob",
        "session": 1,
        "turn": 2,
        "probe": "grow",
        "restored": 32,
        "position": 1,
        "expected_token": 111,
        "token": 111,
        "expected_logprob": -1.5,
        "logprob": "nan",
    },
    "length": {
        "kind": "length",
        "session": 2,
        "turn": 2,
        "probe": "replay",
        "restored": 64,
        "detail": "2 tokens, baseline 3",
    },
    "passkey": {
        "kind": "passkey",
        "session": 1,
        "turn": 3,
        "probe": "passkey",
        "restored": 64,
        "detail": "' 48218.' lacks 48213",
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_each_kind_of_failure_is_told_precisely(name: str) -> None:
    made = verdict(name)
    assert made["verdict"] == "fail"
    assert made["vacuous"] is False
    assert made["failures"] == [ROWS[name]]
    assert len(made["reasons"]) == 1
    json.loads(render(made))


def test_an_unanswered_probe_fails_and_its_passkey_is_lost() -> None:
    made = verdict("error")
    assert made["verdict"] == "fail"
    assert [row["kind"] for row in made["failures"]] == ["error", "passkey"]
    assert made["failures"][0]["detail"] == "status 500"
    assert any("1 probes were not answered" in reason for reason in made["reasons"])


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("vacuous", ["probes with restored blocks", "restored tokens", "restored bytes"]),
        ("few-restored", ["probes with restored blocks"]),
    ],
)
def test_a_run_below_a_floor_is_vacuous(name: str, lacks: list[str]) -> None:
    made = verdict(name)
    assert (made["verdict"], made["vacuous"]) == ("fail", True)
    assert made["failures"] == []
    for lack, reason in zip(lacks, made["reasons"], strict=True):
        assert reason.startswith("vacuous: ")
        assert lack in reason


@pytest.mark.parametrize(
    ("candidate", "baseline", "control", "message"),
    [
        ("fewer-probes", "baseline", "control", "did not answer the same probes"),
        ("other-workload", "baseline", "control", "their workloads differ"),
        ("other-rules", "baseline", "control", "different rules"),
        ("good", "evicting-baseline", "control", "the baseline found 0 of 64 .* it evicted"),
        ("good", "good", "control", "the baseline restored blocks"),
        ("good", "baseline-error", "control", "no answer to passkey 2.3: status 500"),
        ("good", "baseline", "control-with-tier", "the control restored blocks"),
        ("good", "baseline", "control-error", "the control did not answer every probe: status 5"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    candidate: str, baseline: str, control: str, message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        verdict(candidate, baseline, control)


def test_exact_rules_want_a_control_that_repeats() -> None:
    made = verdict("good", control="control-diverging")
    assert made["verdict"] == "fail"
    assert "the engine itself does not repeat" in made["reasons"][0]


@pytest.mark.parametrize(("name", "expected"), [("loose-one", "pass"), ("loose-two", "fail")])
def test_otherwise_the_control_sets_the_bar(name: str, expected: str) -> None:
    made = verdict(name, "loose-baseline", "loose-control")
    assert made["divergences_allowed"] == 1
    assert made["verdict"] == expected


def test_other_arms_of_the_same_family_are_judged_and_strangers_only_told() -> None:
    three = load("baseline"), load("good"), load("control")
    told = make_verdict(*three, others={"lru": load("lru-diverging")})
    assert told["verdict"] == "pass"
    assert told["others"]["lru"]["divergences"] == 1
    judged = make_verdict(*three, others={"evoke-scored": load("scored-diverging")})
    assert judged["verdict"] == "fail"
    assert judged["reasons"][0].startswith("evoke-scored: 1 probes diverge")


def negative(name: str) -> dict[str, Any]:
    three = load("baseline"), load("good"), load("control")
    return make_verdict(*three, negatives={"flip": load(name)})


def test_a_negative_control_that_is_seen_leaves_the_verdict() -> None:
    made = negative("negative-seen")
    assert made["verdict"] == "pass"
    assert made["negative_controls"]["flip"]["verdict"] == "fail"
    assert made["negative_controls"]["flip"]["first_failures"] == [ROWS["token"]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("negative-unseen", "its damage went unnoticed"),
        ("negative-idle", "it restored nothing"),
        ("negative-by-error", "its damage went unnoticed"),
    ],
)
def test_one_that_is_not_breaks_the_gate(name: str, why: str) -> None:
    made = negative(name)
    assert made["verdict"] == "broken"
    assert made["negative_controls"]["flip"]["verdict"] == "pass"
    assert why in made["reasons"][-1]


def test_compare_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "verdict.json"

    def run(candidate: str, *more: str) -> int:
        files = {"baseline": "baseline", "candidate": candidate, "control": "control"}
        args = [f"--{k}={FOLDER / f'{v}{SUFFIX}'}" for k, v in files.items()]
        return main(["compare", *args, f"--out={out}", *more])

    assert run("good") == 0
    assert json.loads(out.read_text()) == verdict("good")
    assert run("token") == 1
    assert "session 1, turn 2 (replay): token at position 1" in capsys.readouterr().out
    unseen = FOLDER / f"negative-unseen{SUFFIX}"
    assert run("good", f"--negative={unseen}") == 1
    assert "BROKEN" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    good = FOLDER / f"good{SUFFIX}"
    for text in ("{", "[]", '{"schema": 2}', good.read_text().replace('"found"', '"x"')[:-40]):
        broken.write_text(text)
        args = [f"--{each}={broken}" for each in ("baseline", "candidate", "control")]
        assert main(["compare", *args, f"--out={tmp_path / 'out'}"]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "is not a recording of a gate" in error
