"""Recorded agent traces with full text, as a workload.

A trace is JSON lines, plain or gzipped; each has `timestamp` (microseconds), `session_id`,
`input` and `output` (text). Calls are sent one at a time with their whole `input` as prompt. A
call that is longer than the bound is left out, never cut: a cut tail would turn a session's
growing prompts into one and the same prompt, with hits that no real session has.

Order: `together` (the default) starts all sessions at the same moment and interleaves their calls
by the time since their session's first call, as on a server that runs several agents; `recorded`
keeps the recorded times, which in a trace recorded one session after the other gives a tier
nothing to do. The recorded answers are not replayed; every call asks for a few tokens.

The GPU pool holds one call of the longest length allowed, the tier half of the trace's distinct
blocks.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.demo.workload import ANSWER_TOKENS, BLOCK_SIZE, Call, Encode, Workload, unique_blocks
from bench.errors import UsageProblem

ORDERS = ("together", "recorded")
TIER_SHARE = 0.5
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "timestamp": (int, float),
    "session_id": str,
    "input": str,
    "output": str,
}


@dataclass(frozen=True)
class _Record:
    timestamp: float
    session: str
    text: str


def load_trace(
    path: Path, encode: Encode, *, max_calls: int, max_tokens: int, order: str
) -> Workload:
    """Return the first `max_calls` calls, in replay order, of at most `max_tokens` tokens.

    Raises UsageProblem when the file is missing, a line is bad (with its number), or no call
    fits the bounds.
    """
    records = list(_read(path))
    starts: dict[str, float] = {}
    for record in sorted(records, key=lambda r: r.timestamp):
        starts.setdefault(record.session, record.timestamp)
    offsets = starts if order == "together" else dict.fromkeys(starts, 0.0)
    records.sort(key=lambda r: r.timestamp - offsets[r.session])  # stable: ties keep file order

    names = {session: f"session-{i + 1}" for i, session in enumerate(starts)}
    calls: list[Call] = []
    tokens = too_long = 0
    for record in records:
        prompt = encode(record.text)
        tokens += len(prompt)
        if not prompt or len(prompt) > max_tokens:
            too_long += 1
        elif len(calls) < max_calls:
            calls.append(Call(names[record.session], "trace", 1, tuple(prompt)))
    if not calls:
        raise UsageProblem(f"{path}: no call has {max_tokens} tokens or fewer")
    kept_tokens = sum(len(call.prompt) for call in calls)
    kept_sessions = len({call.context for call in calls})
    call_blocks = -(-(max_tokens + ANSWER_TOKENS) // BLOCK_SIZE)
    distinct = unique_blocks(call.prompt for call in calls)
    return Workload(
        name="trace",
        seed=0,
        calls=tuple(calls),
        gpu_blocks=call_blocks + 1,  # the engine keeps one block for itself
        tier_blocks=max(1, int(TIER_SHARE * distinct)),
        max_model_len=call_blocks * BLOCK_SIZE,
        parameters={
            "file": path.name,
            "order": order,
            "max_calls": max_calls,
            "max_tokens": max_tokens,
            "tier_share": TIER_SHARE,
            "distinct_blocks": distinct,
        },
        notes=(
            f"replayed {len(calls)} of {len(records)} calls, {kept_sessions} of {len(starts)} "
            f"sessions, {kept_tokens:,} of {tokens:,} prompt tokens; order: {order}",
            f"left out: {too_long} calls that are empty or longer than {max_tokens} tokens, "
            f"{len(records) - too_long - len(calls)} beyond the first {max_calls}; "
            "all recorded answers; no prompt was cut",
        ),
    )


def _read(path: Path) -> Iterator[_Record]:
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageProblem(f"cannot read trace {path}: {error}") from None


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if gzipped else path.open("rb")  # type: ignore[return-value]


def _parse(line: bytes, where: str) -> _Record:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UsageProblem(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UsageProblem(f"{where}: not a JSON object")
    for name, kind in _FIELDS.items():
        if name not in row:
            raise UsageProblem(f"{where}: no field {name!r}")
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise UsageProblem(f"{where}: field {name!r} has a wrong type")
    return _Record(float(row["timestamp"]), row["session_id"], row["input"])
