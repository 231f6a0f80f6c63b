"""Anonymised Claude Code sessions, one a line, with their prompts' blocks run-length encoded.

A request keeps the first ``keep`` blocks of the previous prompt of the same agent and adds runs of
``[first id, count]``. Ids are local to the session. A sub-agent is an entry with ``requests`` of
its own, whose times count from its start; the entry's own ``t`` is the time at which it ended.

Guarantees: blocks are grouped in fours, eights, ... from the head on, an unfilled group at the end
is dropped; sessions start at times drawn uniformly from the window, session by session in order of
the file, by ``random.Random(seed)``: the same file, window and seed give the same interleaving, and
the first N sessions start at the same times however many follow. Within a session the recorded
times are kept. (Published replays of "the first 80 sessions" are of another selection of sessions
and another interleaving: their numbers cannot be compared with ours to the digit.)
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

from evoke_core.replay.readers.common import BadLineError, is_count, number, sequence, text
from evoke_core.replay.trace import HEAD, TraceBuilder, TraceError

_ROLES = {"tool_result": "tool", "text": "user"}


@frozen
class _Step:
    """One request: what it keeps of its agent's previous prompt and what it adds, in block ids."""

    agent: int
    time: float
    tokens: int
    keep: int
    add: list[int]
    role: str | None


def reader(
    builder: TraceBuilder, *, sessions: int | None, window: float, seed: int
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that adds one line's session to ``builder``, up to ``sessions`` of them."""
    draw = random.Random(seed)
    count = 0

    def add(record: Mapping[str, Any]) -> None:
        nonlocal count
        if sessions is not None and count >= sessions:
            return
        size = number(record, "block_size")
        if size < 1 or builder.tokens_per_block % size:
            raise TraceError(
                f"{builder.name}: blocks of {size:g} tokens cannot be grouped to"
                f" {builder.tokens_per_block}; allowed: multiples of {size:g}"
            )
        steps = list(_steps(record, 0.0, [0]))
        start = draw.uniform(0.0, window)
        name = text(record, "id") or str(count)
        _add_session(builder, steps, builder.tokens_per_block // int(size), name, count, start)
        count += 1

    return add


def _add_session(
    builder: TraceBuilder, steps: list[_Step], group: int, name: str, number_: int, start: float
) -> None:
    ids: dict[int, list[int]] = {}  # agent -> its last prompt, in block ids
    chains: dict[int, list[int]] = {}  # the same, in the trace's blocks
    for step in steps:
        prompt = ids.setdefault(step.agent, [])
        chain = chains.setdefault(step.agent, [])
        del prompt[step.keep :]
        prompt += step.add
        del chain[step.keep // group :]
        groups = [
            # Ids mean nothing outside the session, so its number is part of the first block.
            (number_ if at == 0 else None, *prompt[at : at + group])
            for at in range(len(chain) * group, len(prompt) - group + 1, group)
        ]
        chain += builder.extend(chain[-1] if chain else HEAD, groups)
        builder.add(start + step.time, chain, tokens=step.tokens, session=name, role=step.role)


def _steps(record: Mapping[str, Any], start: float, agents: list[int]) -> Iterator[_Step]:
    """Yield an agent's requests, its sub-agents' included. ``agents`` counts agents so far."""
    agent = agents[0]
    length = 0
    for entry in sequence(record, "requests"):
        if not isinstance(entry, dict):
            raise BadLineError("requests: an entry is no object")
        time = start + number(entry, "t")
        if "requests" in entry:
            agents[0] += 1
            yield from _steps(entry, time - number(entry, "duration_ms", 0) / 1000.0, agents)
            continue
        keep = entry.get("keep")
        if not is_count(keep) or keep > length:
            raise BadLineError(f"keep = {keep!r:.40}: the prompt before has {length} blocks")
        add: list[int] = []
        for run in sequence(entry, "add"):
            if not (isinstance(run, list) and len(run) == 2 and all(map(is_count, run))):
                raise BadLineError(f"add: {run!r:.40} is no [first id, count]")
            add += range(run[0], run[0] + run[1])
        length = keep + len(add)
        kinds = entry.get("input_types") or [None]
        yield _Step(agent, time, int(number(entry, "in")), keep, add, _role(kinds))


def _role(kinds: Any) -> str | None:
    return _ROLES.get(kinds[0]) if isinstance(kinds, list) and kinds[0] is not None else None
