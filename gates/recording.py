"""What one arm answered, as a JSON file: everything that a verdict is derived from.

A recording holds every probe in the order it was asked: which one it was, the answer's tokens and
their logprobs, what the caches did for it, or the error in place of an answer. It carries the
rules and the workload's identity, so that a verdict can be derived from recordings alone. It
names versions and the class of machine, never a host, a path or a port.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from bench.errors import BenchError

SCHEMA = 1
SUFFIX = ".recording.json"


@dataclass(frozen=True)
class Rules:
    """What a verdict asks for.

    `exact`: no divergence at all is allowed, else no more than the control's. `logprob_tolerance`
    is absolute, in nats. The rest are floors: below one of them a run proves nothing.
    """

    exact: bool
    logprob_tolerance: float
    min_probes: int
    min_passkeys: int
    min_restored_probes: int
    min_restored_tokens: int
    min_restored_bytes: int
    min_overcommit: float = 2.0


@dataclass(frozen=True)
class Answer:
    """One probe and what came back.

    Tokens of the prompt: `asked`, `reusable` (full blocks that an engine which never evicts would
    have), `in_gpu` (found in the engine's pool), `restored` (from the tier). With an `error` there
    is no answer. `passkey` is what the text should hold.
    """

    session: int
    turn: int
    kind: str
    prompt: str
    asked: int
    reusable: int
    in_gpu: int = 0
    restored: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    passkey: str | None = None
    error: str | None = None

    @property
    def found(self) -> bool:
        """Whether a passkey was asked for and is in the answer."""
        return self.passkey is not None and self.passkey in self.text


@dataclass(frozen=True)
class Recording:
    """One arm's answers. `workload` holds `digest`, `unique_blocks` and the shape's numbers."""

    profile: str
    arm: str
    title: str
    date: str
    rules: Rules
    workload: Mapping[str, Any]
    server: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    boot_s: float
    wall_s: float
    stored_bytes: int
    restored_bytes: int
    answers: tuple[Answer, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens restored from the tier: its external hits."""
        return sum(answer.restored for answer in self.answers)

    @property
    def restored_probes(self) -> int:
        """Probes of which at least one block was restored."""
        return sum(answer.restored > 0 for answer in self.answers)

    def save(self, path: Path) -> None:
        """Write the recording, one answer a line; an older file is replaced at once, or not."""
        content = {"schema": SCHEMA, **asdict(self)}
        answers = [
            {name: value for name, value in answer.items() if value not in (None, "")}
            for answer in content.pop("answers")
        ]
        for answer in answers:  # JSON knows no NaN, and a damaged block may well give one
            answer["logprobs"] = [v if math.isfinite(v) else str(v) for v in answer["logprobs"]]
        head = json.dumps(content, indent=1)
        lines = ",\n".join("  " + json.dumps(answer, allow_nan=False) for answer in answers)
        text = f'{head[:-2]},\n "answers": [\n{lines}\n ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(text)
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a recording; BenchError names the file if it is not one of this schema."""
        try:
            content = json.loads(path.read_text())
            if content.pop("schema", None) != SCHEMA:
                raise ValueError(f"schema is not {SCHEMA}")
            content["rules"] = Rules(**content["rules"])
            content["notes"] = tuple(content["notes"])
            content["answers"] = tuple(_answer(raw) for raw in content["answers"])
            recording = cls(**content)
            recording.workload["digest"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BenchError(f"{path} is not a recording of a gate: {reason}") from None
        return recording


_ANSWER_FIELDS = {each.name for each in fields(Answer)}


def _answer(raw: dict[str, Any]) -> Answer:
    if unknown := raw.keys() - _ANSWER_FIELDS:
        raise ValueError(f"an answer holds an unknown field {min(unknown)!r}")
    tokens = tuple(int(value) for value in raw.pop("token_ids"))
    logprobs = tuple(float(value) for value in raw.pop("logprobs"))
    answer = Answer(**raw, token_ids=tokens, logprobs=logprobs)
    if len(answer.token_ids) != len(answer.logprobs):
        raise ValueError(f"{answer.kind} {answer.session}.{answer.turn}: tokens without logprobs")
    return answer
