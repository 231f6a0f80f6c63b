"""The comparer: recordings in, a verdict out. It reads no clock and starts nothing.

Two answers to the same prompt agree if their tokens are equal and no logprob differs by more than
the tolerance. An answer counts as one divergence, whatever follows the first difference: after a
token differs the two models have read different texts. Every answer is compared with the
baseline's, the arm that never evicts.

A candidate passes if

* it is not vacuous: enough probes, enough passkeys that the baseline finds, a pool that was
  overcommitted, and enough restored from the tier, all above the stated floors;
* it answers every probe, and finds every passkey that the baseline finds;
* it diverges from the baseline no more often than the control (the same small pool, no tier:
  everything recomputed) does, and where the rules say exact, not at all. The same holds for
  further arms of the candidate's family ("evoke-..."): they are judged by their answers.

A gate that cannot fail proves nothing, so a negative control (a worker that damages restores) is
judged by the same rules, and must fail them by its answers: it must diverge, on a probe that was
restored, more often than the rules allow. If one does not, the verdict is `broken`, whatever the
candidate did.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from gates.recording import Answer, Recording

SCHEMA = 1
PASS, FAIL, BROKEN = "pass", "fail", "broken"
_SHOWN_ROWS = 5  # rows of a negative control that the verdict repeats; all are in its recording


@dataclass(frozen=True)
class Failure:
    """One probe that went wrong, and how.

    `position` counts the answer's tokens from 0; with `kind` "logprob" both tokens are equal.
    """

    kind: str  # "token", "logprob", "length", "passkey" or "error"
    session: int
    turn: int
    probe: str
    restored: int
    position: int | None = None
    expected_token: int | None = None
    token: int | None = None
    expected_logprob: float | None = None
    logprob: float | None = None
    detail: str = ""

    def line(self) -> str:
        """Return one line for a person."""
        where = f"session {self.session}, turn {self.turn} ({self.probe})"
        if self.position is None:
            return f"{where}: {self.kind}: {self.detail}"
        return (
            f"{where}: {self.kind} at position {self.position}: token {self.token} "
            f"({_number(self.logprob)}), baseline {self.expected_token} "
            f"({_number(self.expected_logprob)})"
        )


@dataclass(frozen=True)
class Comparison:
    """A recording against the baseline: what failed, and the largest difference tolerated."""

    recording: Recording
    failures: tuple[Failure, ...]
    largest_difference: float

    @property
    def divergences(self) -> int:
        """Probes whose answer is not the baseline's."""
        return sum(f.kind != "passkey" for f in self.failures)

    @property
    def lost_passkeys(self) -> int:
        """Passkeys that the baseline finds and this arm does not."""
        return sum(f.kind == "passkey" for f in self.failures)

    @property
    def restored_divergences(self) -> int:
        """Divergences in answers, not errors, of probes with at least one restored block."""
        return sum(f.restored > 0 and f.kind not in ("passkey", "error") for f in self.failures)

    def counts(self) -> dict[str, Any]:
        """Return what the verdict says of one arm."""
        return {
            "probes": len(self.recording.answers),
            "divergences": self.divergences,
            "largest_logprob_difference": _rounded(self.largest_difference),
            "passkeys_found": sum(answer.found for answer in self.recording.answers),
            "passkeys_lost": self.lost_passkeys,
            "restored_probes": self.recording.restored_probes,
            "restored_tokens": self.recording.restored_tokens,
            "restored_bytes": self.recording.restored_bytes,
            "stored_bytes": self.recording.stored_bytes,
            "gpu_hit_tokens": sum(answer.in_gpu for answer in self.recording.answers),
        }


def compare(baseline: Recording, other: Recording) -> Comparison:
    """Compare every answer of `other` with the baseline's.

    Raises BenchError where they did not answer the same prompts under the same rules, or where
    the baseline is none: it failed to answer, evicted, or restored something.
    """
    _check_baseline(baseline)
    _check_comparable(baseline, other)
    failures: list[Failure] = []
    largest = 0.0
    for expected, answer in zip(baseline.answers, other.answers, strict=True):
        difference, failure = _compare_answer(expected, answer, baseline.rules.logprob_tolerance)
        largest = max(largest, difference)
        if failure is not None:
            failures.append(failure)
        if expected.found and not answer.found:
            failures.append(
                _failure("passkey", answer, detail=f"{answer.text!r} lacks {answer.passkey}")
            )
    return Comparison(other, tuple(failures), largest)


def make_verdict(
    baseline: Recording,
    candidate: Recording,
    control: Recording,
    *,
    others: Mapping[str, Recording] | None = None,
    negatives: Mapping[str, Recording] | None = None,
) -> dict[str, Any]:
    """Return the verdict as it is published; the same recordings give the same verdict.

    `others` are further arms by name, compared for information unless the name begins with the
    candidate's arm and a dash; `negatives` are the negative controls by name.
    Raises BenchError as `compare` does.
    """
    _check_control(control)
    judged = compare(baseline, candidate)
    recomputed = compare(baseline, control)
    beside = {name: compare(baseline, recording) for name, recording in (others or {}).items()}
    rules = baseline.rules
    allowed = 0 if rules.exact else recomputed.divergences
    lacks = _vacuity(baseline, judged)
    reasons = [f"vacuous: {lack}" for lack in lacks]
    for name, compared in {candidate.arm: judged, **beside}.items():
        if name == candidate.arm or name.startswith(f"{candidate.arm}-"):
            limit = "none is allowed" if rules.exact else f"the control has {allowed}"
            reasons += [f"{name}: {lack}" for lack in _faults(compared, allowed, limit)]
    if rules.exact and recomputed.divergences:
        reasons.append(
            f"the control diverges on {recomputed.divergences} probes although the rules are "
            "exact: the engine itself does not repeat"
        )
    verdict = FAIL if reasons else PASS
    negative_controls = {
        name: _judge_negative(compare(baseline, recording), allowed)
        for name, recording in (negatives or {}).items()
    }
    for name, negative in negative_controls.items():
        if negative["verdict"] != FAIL:
            verdict = BROKEN
            reasons.append(f"negative control {name}: {negative['why']}")
    return {
        "schema": SCHEMA,
        "profile": baseline.profile,
        "candidate": candidate.arm,
        "verdict": verdict,
        "vacuous": bool(lacks),
        "reasons": reasons,
        "rules": asdict(rules),
        "divergences_allowed": allowed,
        "counts": {
            **judged.counts(),
            "passkeys_baseline": sum(answer.found for answer in baseline.answers),
            "overcommit": _overcommit(candidate),
        },
        "failures": [_row(failure) for failure in judged.failures],
        "control": {
            **recomputed.counts(),
            "failures": [_row(failure) for failure in recomputed.failures],
        },
        "others": {
            name: {
                **compared.counts(),
                "failures": [_row(failure) for failure in compared.failures],
            }
            for name, compared in beside.items()
        },
        "negative_controls": negative_controls,
    }


def render(verdict: Mapping[str, Any]) -> str:
    """Return the verdict as JSON text, one failure a line."""
    return json.dumps(verdict, indent=1, allow_nan=False) + "\n"


def load_verdict(path: Path) -> dict[str, Any]:
    """Read a verdict; BenchError names the file if it is none."""
    try:
        verdict: dict[str, Any] = json.loads(path.read_text())
        if verdict["schema"] != SCHEMA or verdict["verdict"] not in (PASS, FAIL, BROKEN):
            raise ValueError("not a verdict of this schema")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"{path} is not a verdict of a gate: {reason}") from None
    return verdict


def _compare_answer(
    expected: Answer, answer: Answer, tolerance: float
) -> tuple[float, Failure | None]:
    """Return the largest logprob difference before any failure, and the failure."""
    if answer.error is not None:
        return 0.0, _failure("error", answer, detail=answer.error)
    largest = 0.0
    pairs = zip(
        zip(expected.token_ids, expected.logprobs, strict=True),
        zip(answer.token_ids, answer.logprobs, strict=True),
        strict=False,
    )
    for position, ((token, logprob), (other, other_logprob)) in enumerate(pairs):
        difference = abs(logprob - other_logprob)
        if token != other or not difference <= tolerance:  # a NaN is never within
            kind = "token" if token != other else "logprob"
            return largest, _failure(
                kind,
                answer,
                position=position,
                expected_token=token,
                token=other,
                expected_logprob=logprob,
                logprob=other_logprob,
            )
        largest = max(largest, difference)
    if len(expected.token_ids) != len(answer.token_ids):
        lengths = f"{len(answer.token_ids)} tokens, baseline {len(expected.token_ids)}"
        return largest, _failure("length", answer, detail=lengths)
    return largest, None


def _failure(kind: str, answer: Answer, **told: Any) -> Failure:
    return Failure(kind, answer.session, answer.turn, answer.kind, answer.restored, **told)


def _check_baseline(baseline: Recording) -> None:
    for answer in baseline.answers:
        where = f"{answer.kind} {answer.session}.{answer.turn}"
        if answer.error is not None:
            raise BenchError(f"the baseline has no answer to {where}: {answer.error}")
        if answer.restored:
            raise BenchError(f"the baseline restored blocks for {where}: it must have no tier")
        if answer.in_gpu < answer.reusable:
            raise BenchError(
                f"the baseline found {answer.in_gpu} of {answer.reusable} tokens of {where} in its "
                "pool: it evicted, and is no baseline"
            )


def _check_control(control: Recording) -> None:
    if control.restored_tokens or control.restored_bytes:
        raise BenchError("the control restored blocks: it must have no tier")
    if error := next((a.error for a in control.answers if a.error is not None), None):
        raise BenchError(f"the control did not answer every probe: {error}")


def _check_comparable(baseline: Recording, other: Recording) -> None:
    names = f"{baseline.arm} and {other.arm} cannot be compared"
    if baseline.profile != other.profile:
        raise BenchError(f"{names}: profiles {baseline.profile} and {other.profile}")
    if baseline.rules != other.rules:
        raise BenchError(f"{names}: they were recorded under different rules")
    if baseline.workload["digest"] != other.workload["digest"]:
        raise BenchError(f"{names}: their workloads differ")
    if baseline.server.get("model") != other.server.get("model"):
        raise BenchError(f"{names}: their models differ")
    asked = [(a.session, a.turn, a.kind, a.prompt, a.passkey) for a in baseline.answers]
    if asked != [(a.session, a.turn, a.kind, a.prompt, a.passkey) for a in other.answers]:
        raise BenchError(f"{names}: they did not answer the same probes in the same order")


def _vacuity(baseline: Recording, candidate: Comparison) -> list[str]:
    """Return what is missing for the run to prove anything."""
    rules, recording = baseline.rules, candidate.recording
    passkeys = sum(answer.found for answer in baseline.answers)
    figures: Sequence[tuple[float, float, str]] = (
        (len(recording.answers), rules.min_probes, "probes"),
        (passkeys, rules.min_passkeys, "passkeys found by the baseline"),
        (recording.restored_probes, rules.min_restored_probes, "probes with restored blocks"),
        (recording.restored_tokens, rules.min_restored_tokens, "restored tokens"),
        (recording.restored_bytes, rules.min_restored_bytes, "restored bytes"),
        (_overcommit(recording), rules.min_overcommit, "times the pool in distinct blocks"),
    )
    return [
        f"{have:g} {what}, at least {least:g} needed"
        for have, least, what in figures
        if have < least
    ]


def _faults(compared: Comparison, allowed: int, limit: str) -> list[str]:
    """Return what is wrong with an arm's answers."""
    faults = []
    if compared.divergences > allowed:
        faults.append(f"{compared.divergences} probes diverge from the baseline; {limit}")
    if compared.lost_passkeys:
        faults.append(f"{compared.lost_passkeys} passkeys that the baseline finds are lost")
    if errors := sum(failure.kind == "error" for failure in compared.failures):
        faults.append(f"{errors} probes were not answered")
    return faults


def _overcommit(recording: Recording) -> float:
    return round(recording.workload["unique_blocks"] / recording.server["gpu_blocks"], 2)


def _judge_negative(compared: Comparison, allowed: int) -> dict[str, Any]:
    """Judge a damaged arm: FAIL is what it must be, and by its answers, not by being vacuous."""
    seen = compared.restored_divergences
    if seen > allowed:
        verdict, why = FAIL, f"{seen} restored probes diverge, as they must"
    elif compared.recording.restored_tokens == 0:
        verdict, why = PASS, "it restored nothing, so nothing was damaged"
    else:
        verdict = PASS
        why = f"its damage went unnoticed: {seen} restored probes diverge, {allowed} allowed"
    return {
        "verdict": verdict,
        "why": why,
        **compared.counts(),
        "restored_divergences": seen,
        "first_failures": [_row(failure) for failure in compared.failures[:_SHOWN_ROWS]],
    }


def _row(failure: Failure) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, float) else value
        for name, value in asdict(failure).items()
        if value not in (None, "")
    }


def _rounded(value: float) -> float | str:
    """Return a logprob for JSON, which knows no NaN."""
    return round(value, 6) if math.isfinite(value) else str(value)


def _number(value: float | None) -> str:
    return "no logprob" if value is None else f"{value:.4f}"
