"""What is replayed, and with which budgets.

A workload is *named* if the policy's constants were chosen on it. A shape is *watched* if it was
looked at while the policy was worked on, without being one of the named. What is neither is fresh:
nothing about the policy was decided after it had been replayed. Shapes and budgets are fixed here;
recorded traces are found in a folder or given by path, and told apart by what their first line
holds.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.errors import UsageProblem
from evoke_core.replay import Trace, TraceError, concatenate, first, generate, read_trace

Kind = Literal["recorded", "phase", "shape", "watched"]
SIZES = ("1%", "3%", "10%", "30%")
CODE_SIZES = ("1%", "3%", "8%")
LOOP_SIZES = ("14%", "27%", "55%")
ZIPF_SIZES = ("3%", "10%", "27%")
MIX_SIZES = ("1%", "3%", "10%")
_WATCHED = (
    ("w1-20", "W1: 20 contexts", "w1:contexts=20", (*LOOP_SIZES, "80%")),
    ("w1-5", "W1: 5 contexts of 90", "w1:contexts=5,blocks=90,rounds=20", LOOP_SIZES),
    ("w1-any", "W1: 12 contexts, shuffled", "w1:contexts=12,seed=1", LOOP_SIZES),
    ("w1s-12", "W1S: 12 cold of 120 blocks", "w1s:cold=12,cold_blocks=120", LOOP_SIZES),
    ("w1s-any", "W1S: 2 hot, 6 cold, shuffled", "w1s:seed=2,rounds=24", LOOP_SIZES),
    ("w1s-3", "W1S: 3 hot, 9 cold, shuffled", "w1s:hot=3,cold=9,seed=5", LOOP_SIZES),
    ("zipf", "Zipf .9: 400 users", "zipf", ZIPF_SIZES),
    (
        "zipf-few",
        "Zipf .9: 40 users, long",
        "zipf:users=40,requests=3000,turns=40,seed=1",
        ZIPF_SIZES,
    ),
    (
        "zipf-many",
        "Zipf 1.2: 2,000 users",
        "zipf:users=2000,requests=6000,skew=120,turns=8,seed=2",
        ZIPF_SIZES,
    ),
)
_FRESH = (
    ("w1-16", "W1: 16 contexts of 25", "w1:contexts=16,blocks=25,rounds=15", LOOP_SIZES),
    (
        "w1-10",
        "W1: 10 contexts, shuffled",
        "w1:contexts=10,blocks=64,rounds=20,seed=21",
        LOOP_SIZES,
    ),
    ("w1s-9", "W1S: 2 hot, 9 cold", "w1s:hot=2,cold=9,rounds=18", LOOP_SIZES),
    (
        "w1s-1",
        "W1S: 1 hot, 12 cold, shuffled",
        "w1s:hot=1,cold=12,cold_per_round=2,cold_blocks=70,rounds=24,seed=22",
        LOOP_SIZES,
    ),
    (
        "w1s-6",
        "W1S: 6 hot, 18 cold, shuffled",
        "w1s:hot=6,cold=18,cold_per_round=6,blocks=30,rounds=20,seed=23",
        LOOP_SIZES,
    ),
    (
        "w1s-scan",
        "W1S: 4 hot, 8 cold, long questions",
        "w1s:hot=4,cold=8,question_blocks=30,rounds=20,seed=24",
        LOOP_SIZES,
    ),
    (
        "zipf-short",
        "Zipf .8: 1,000 users, short",
        "zipf:users=1000,requests=5000,turns=4,skew=80,seed=25",
        ZIPF_SIZES,
    ),
    (
        "zipf-long",
        "Zipf 1.1: 200 users, long",
        "zipf:users=200,requests=3000,turns=20,turn_blocks=6,skew=110,seed=26",
        ZIPF_SIZES,
    ),
    ("mix", "Three tenants", "mix:seed=27", MIX_SIZES),
    (
        "mix-scans",
        "Three tenants, half are scans",
        "mix:contexts=12,users=300,scans=50,requests=3000,seed=28",
        MIX_SIZES,
    ),
)
AN_HOUR: dict[str, Any] = {"sessions": 80, "window": 3600.0, "seed": 0}


@dataclass(frozen=True)
class Workload:
    """One trace to be and the budgets to replay it with.

    `settings` say how it was read or generated and are saved; `curve` lists budgets for the plot
    that compares whole curves, `hinted` asks for replays with tags, `loops` counts it to W1, W1S.
    """

    slug: str
    title: str
    kind: Kind
    named: bool
    budgets: tuple[str, ...]
    settings: dict[str, Any]
    load: Callable[[], Trace]
    loops: bool = False
    hinted: bool = False
    curve: tuple[str, ...] = field(default=())


def find_traces(folder: Path) -> list[Path]:
    """Return the recorded traces in a folder and below it, sorted."""
    return sorted(path for path in folder.rglob("*.jsonl*") if path.is_file())


def workloads(paths: Iterable[Path]) -> list[Workload]:
    """Return everything to replay: each recorded trace, the phases if they can be, the shapes."""
    recorded: list[Workload] = []
    conversation: Path | None = None
    code: Path | None = None
    for path in paths:
        form = _form(path)
        if form == "claude-code":
            code = path
            recorded += _claude_code(path)
        elif form == "agent-text":
            recorded.append(_agent_text(path))
        else:
            named = _name(path) == "conversation_trace"
            conversation = path if named else conversation
            recorded.append(_mooncake(path, named))
    phases = []
    if conversation is not None and code is not None:
        phases.append(_phases(conversation, code))
    return [*recorded, *phases, *_shapes()]


def _form(path: Path) -> str:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as lines:
            record = json.loads(next(line for line in lines if line.strip()))
    except (OSError, EOFError, ValueError, StopIteration) as error:
        raise UsageProblem(f"{path}: cannot be read as a trace: {error}") from None
    if isinstance(record, dict):
        for key, form in (
            ("hash_ids", "mooncake"),
            ("requests", "claude-code"),
            ("input", "agent-text"),
        ):
            if key in record:
                return form
    raise UsageProblem(f"{path}: not a trace of a known format")


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _read(path: Path, **settings: Any) -> Callable[[], Trace]:
    def load() -> Trace:
        try:
            return read_trace(path, **settings)
        except TraceError as error:
            raise UsageProblem(str(error)) from None

    return load


def _mooncake(path: Path, named: bool) -> Workload:
    return Workload(
        slug="conversation" if named else _name(path),
        title="Mooncake conversation" if named else _name(path),
        kind="recorded",
        named=named,
        budgets=SIZES,
        settings={"format": "mooncake", "block_tokens": 512},
        load=_read(path),
        hinted=named,
        curve=("0.5%", "1%", "2%", "3%", "5%", "10%", "20%", "30%") if named else (),
    )


def _claude_code(path: Path) -> list[Workload]:
    day: dict[str, Any] = {"window": 86_400.0, "seed": 0}
    return [
        Workload(
            slug=f"{_name(path)}-80",
            title="Claude Code, 80 sessions in 1 h",
            kind="recorded",
            named=True,
            budgets=CODE_SIZES,
            settings={"format": "claude-code", "block_tokens": 512, **AN_HOUR},
            load=_read(path, **AN_HOUR),
            hinted=True,
            curve=("0.5%", "1%", "2%", "3%", "5%", "8%", "12%", "20%"),
        ),
        Workload(
            slug=f"{_name(path)}-all",
            title="Claude Code, all sessions in 24 h",
            kind="recorded",
            named=True,
            budgets=CODE_SIZES,
            settings={"format": "claude-code", "block_tokens": 512, "sessions": "all", **day},
            load=_read(path, **day),
        ),
    ]


def _agent_text(path: Path) -> Workload:
    # So few different tokens that 512 to a block would leave pools of two blocks.
    return Workload(
        slug=f"agent-{_name(path)}",
        title=f"Agent text ({_name(path)})",
        kind="recorded",
        named=False,
        budgets=SIZES,
        settings={"format": "agent-text", "block_tokens": 64, "chars_per_token": 4.0},
        load=_read(path, tokens_per_block=64, chars_per_token=4.0),
    )


def _phases(conversation: Path, code: Path) -> Workload:
    middle = "w1:contexts=20"

    def load() -> Trace:
        parts = [
            first(_read(conversation)(), 3000),
            generate(middle),
            first(_read(code, **AN_HOUR)(), 2000),
        ]
        return concatenate(parts, "phases")

    return Workload(
        slug="phases",
        title="Conversation, then a loop, then Claude Code",
        kind="phase",
        named=True,
        budgets=("2%", "4%", "8%"),
        settings={
            "phases": ["first 3,000 requests", middle, "first 2,000 requests"],
            "block_tokens": 512,
            **AN_HOUR,
        },
        load=load,
    )


def _shapes() -> list[Workload]:
    w1s_4 = "w1s:hot=4,cold=10,seed=3,rounds=20"
    named = [
        _shape("w1", "W1: 8 contexts in turn", "w1", LOOP_SIZES, named=True, loops=True),
        _shape("w1s", "W1S: 2 hot, 6 cold", "w1s", LOOP_SIZES, named=True, loops=True, hinted=True),
        _shape("w1s-4", "W1S: 4 hot, 10 cold, shuffled", w1s_4, LOOP_SIZES, named=True),
    ]
    watched = [_shape(*each, kind="watched") for each in _WATCHED]
    return [*named, *watched, *(_shape(*each) for each in _FRESH)]


def _shape(slug: str, title: str, text: str, budgets: tuple[str, ...], **more: Any) -> Workload:
    more = {"kind": "shape", "named": False, **more}
    return Workload(
        slug=slug,
        title=title,
        budgets=budgets,
        settings={"shape": text, "block_tokens": 512},
        load=lambda: generate(text),
        **more,
    )
