"""Writes the small recordings of tests/gates/recordings: python -m tests.gates.make_recordings.

Two sessions of two turns, a replay and a passkey each: eight probes of made-up tokens. Every file
but the first few is the good one with one thing wrong, and is named for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gates.recording import SUFFIX, Answer, Recording, Rules

FOLDER = Path(__file__).parent / "recordings"
RULES = Rules(
    exact=True,
    logprob_tolerance=0.01,
    min_probes=8,
    min_passkeys=2,
    min_restored_probes=2,
    min_restored_tokens=64,
    min_restored_bytes=4096,
)
_KEYS = {1: "48213", 2: "70955"}
_ROUNDS = (("grow", 1), ("grow", 2), ("replay", 2), ("passkey", 3))
Edit = Callable[[Answer], Answer]


def answers() -> list[Answer]:
    """Return what the baseline answers, with nothing restored."""
    made = []
    for round_number, (kind, turn) in enumerate(_ROUNDS):
        for session in (1, 2):
            first = 100 * session + 10 * round_number
            reusable = 0 if round_number == 0 else 32 * min(round_number, 2)
            made.append(
                Answer(
                    session=session,
                    turn=turn,
                    kind=kind,
                    prompt=f"{session}{turn}{kind}",
                    asked=40 * turn,
                    reusable=reusable,
                    in_gpu=reusable,
                    token_ids=(first, first + 1, first + 2),
                    logprobs=(-0.25, -1.5, -0.125),
                    text=f" {_KEYS[session]}." if kind == "passkey" else " Noted.",
                    passkey=_KEYS[session] if kind == "passkey" else None,
                )
            )
    return made


def recording(arm: str, rows: Sequence[Answer], rules: Rules = RULES) -> Recording:
    """Return a recording of these answers."""
    restored = sum(row.restored for row in rows)
    return Recording(
        profile="made-up",
        arm=arm,
        title=arm,
        date="2026-11-30T00:00:00+00:00",
        rules=rules,
        workload={"digest": "made-up", "unique_blocks": 40},
        server={"model": "made-up", "gpu_blocks": 200 if arm == "baseline" else 10},
        versions={"python": "3.11.7"},
        machine={"cpu": "none"},
        boot_s=1.0,
        wall_s=1.0,
        stored_bytes=restored * 32,
        restored_bytes=restored * 64,
        answers=tuple(rows),
    )


def from_tier(row: Answer) -> Answer:
    """Return the same answer, its prefix restored from the tier."""
    return replace(row, in_gpu=0, restored=row.reusable)


def recomputed(row: Answer) -> Answer:
    """Return the same answer, nothing found anywhere."""
    return replace(row, in_gpu=0)


def edited(number: int, **changes: object) -> list[Answer]:
    """Return the candidate's answers, one of them changed."""
    rows = [from_tier(row) for row in answers()]
    rows[number] = replace(rows[number], **changes)  # type: ignore[arg-type]
    return rows


def recordings() -> dict[str, Recording]:
    """Return every recording by the name of its file."""
    rows = answers()
    good = [from_tier(row) for row in rows]
    loose = replace(RULES, exact=False)
    other_token: dict[str, object] = {
        "token_ids": (120, 999, 122),
        "logprobs": (-0.25, -1.75, -0.125),
    }
    diverging = [replace(row, restored=0) for row in edited(4, **other_token)]
    lost = replace(good[7], error="status 500", token_ids=(), logprobs=(), text="")
    gone = replace(lost, restored=0)
    one = edited(5, token_ids=(220, 7, 8))
    two = [*one[:6], *edited(6, token_ids=(1, 2, 3))[6:]]
    files = {
        "baseline": recording("baseline", rows),
        "control": recording("control", [recomputed(row) for row in rows]),
        "good": recording("evoke", good),
        "within-tolerance": recording("evoke", edited(4, logprobs=(-0.25, -1.505, -0.125))),
        "token": recording("evoke", edited(4, **other_token)),
        "logprob": recording("evoke", edited(3, logprobs=(-0.25, -1.5, -0.25))),
        "length": recording("evoke", edited(5, token_ids=(220, 221), logprobs=(-0.25, -1.5))),
        "not-a-number": recording("evoke", edited(2, logprobs=(-0.25, float("nan"), -0.125))),
        "passkey": recording("evoke", edited(6, text=" 48218.")),
        "error": recording("evoke", [*good[:7], lost]),
        "baseline-error": recording("baseline", [*rows[:7], gone]),
        "control-error": recording("control", [*diverging[:4], *map(recomputed, rows[4:7]), gone]),
        "vacuous": recording("evoke", rows),
        "few-restored": recording("evoke", [*rows[:7], good[7]]),
        "fewer-probes": recording("evoke", good[:7]),
        "other-workload": replace(
            recording("evoke", good), workload={"digest": "another", "unique_blocks": 40}
        ),
        "other-rules": recording("evoke", good, replace(RULES, logprob_tolerance=1.0)),
        "evicting-baseline": recording("baseline", [*rows[:4], recomputed(rows[4]), *rows[5:]]),
        "control-with-tier": recording("control", good),
        "control-diverging": recording("control", diverging),
        "scored-diverging": recording("evoke-scored", edited(4, **other_token)),
        "lru-diverging": recording("lru", edited(4, **other_token)),
        "negative-seen": recording("flip", edited(4, **other_token)),
        "negative-by-error": recording("flip", edited(4, error="x", token_ids=(), logprobs=())),
        "negative-unseen": recording("swap", good),
        "negative-idle": recording("stale", rows),
    }
    for name, arm, changed in (
        ("loose-baseline", "baseline", rows),
        ("loose-control", "control", diverging),
        ("loose-one", "evoke", one),
        ("loose-two", "evoke", two),
    ):
        files[name] = recording(arm, changed, loose)
    return files


def main() -> None:
    """Write every file."""
    for name, made in recordings().items():
        made.save(FOLDER / f"{name}{SUFFIX}")


if __name__ == "__main__":
    main()
