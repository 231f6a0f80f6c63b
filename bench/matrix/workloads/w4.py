"""W4, multi-turn chats that arrive when they arrive: the open loop.

Each chat grows by a user's turn and a fixed assistant's turn; a later turn's prompt begins with all
of the earlier ones. Half the chats are short and never come back: they are what a tier keeps in
vain. Arrival times are the Mooncake conversation trace's timestamps, scaled, when the trace is
pointed at (`--arrivals FILE`, by default the one beside this repository); otherwise a Poisson
process. A result says which. Several requests are on their way at the same time: what a cache did
is known for the server as a whole, and per request only how many prompt tokens were not computed.

Options: chats, turns, turn_tokens, per_second (mean arrivals).
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

from bench.errors import UsageProblem
from bench.matrix.workloads.text import ANSWER_TOKENS, ask_for, chat, filler, make_context
from bench.matrix.workloads.work import Ask, Request, Work

ARRIVALS = "arrivals"


def make(ask: Ask) -> Work:
    """Return the turns of all chats, in order of arrival."""
    chats, turns = ask.number("chats", 12), ask.number("turns", 5)
    turn_tokens, per_second = ask.number("turn_tokens", 64, 8), ask.real("per_second", 0.7)
    rng = ask.random("chats")
    prompts: list[list[Request]] = []
    for number in range(chats):
        length = turns if number % 2 == 0 else 1
        prompts.append(_chat(ask, rng, f"chat-{number + 1}", length, turn_tokens))
    order = _interleave(rng, prompts)
    times, note = _arrivals(ask, rng, len(order), per_second)
    requests = [replace(each, arrival_s=at) for each, at in zip(order, times, strict=True)]
    return Work(tuple(requests), ask.block_size, notes=(note,))


def _chat(ask: Ask, rng: Random, name: str, turns: int, tokens: int) -> list[Request]:
    """Return one chat's requests: every prompt begins with the whole of the one before."""
    context = make_context(ask.random(name), name, 2 * tokens, ask.encode, facts=1)
    [(safe, code)] = context.codes.items()
    text: list[int] = list(context.tokens)
    requests = []
    for turn in range(1, turns + 1):
        text += ask.encode(chat(filler(rng, tokens // 2, ask.encode)))
        text += ask.encode(filler(rng, tokens // 3, ask.encode))
        prompt = (*text, *ask.encode(ask_for(safe)))
        answer_tokens = ask.number("answer_tokens", ANSWER_TOKENS)
        requests.append(Request(name, "all", turn, prompt, answer_tokens, (code,)))
    return requests


def _interleave(rng: Random, chats: list[list[Request]]) -> list[Request]:
    """Return all turns; each chat's in order, and at random between chats."""
    slots = [number for number, chat in enumerate(chats) for _ in chat]
    rng.shuffle(slots)
    waiting = [iter(chat) for chat in chats]
    return [next(waiting[number]) for number in slots]


def _arrivals(ask: Ask, rng: Random, count: int, per_second: float) -> tuple[list[float], str]:
    path = ask.files.get(ARRIVALS)
    if path is None:
        at, times = 0.0, []
        for _ in range(count):
            times.append(round(at, 3))
            at += rng.expovariate(per_second)
        return times, f"arrivals: a Poisson process, {per_second:g} a second"
    stamps = read_stamps(path)
    if len(stamps) < count:
        raise UsageProblem(f"{path}: {len(stamps)} requests, {count} are needed")
    first = rng.randrange(len(stamps) - count + 1)
    window = stamps[first : first + count]
    span = (window[-1] - window[0]) or 1.0
    scale = count / per_second / span
    times = [round((stamp - window[0]) * scale, 3) for stamp in window]
    note = f"arrivals: {path.name} from request {first + 1} on, scaled to {per_second:g} a second"
    return times, note


def read_stamps(path: Path) -> list[float]:
    """Return the timestamps of a Mooncake trace, sorted, in its own unit."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return sorted(float(json.loads(line)["timestamp"]) for line in text.splitlines() if line)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise UsageProblem(f"cannot read arrivals from {path}: {error}") from None
