"""Generated traces: shapes on which policies differ most, for want of public recordings of them.

- :func:`loop` (W1): contexts visited round robin, the worst case of recency.
- :func:`hot_cold` (W1S): a few contexts in every round while a scan of others passes through.
- :func:`conversations`: growing conversations of skewed popularity behind shared instructions.
- :func:`tenants`: a loop, short conversations and prompts that come once, side by side.
- :func:`concatenate`: one trace after another, a change of phase; :func:`first`: its beginning.

In the first two every request is a context of ``blocks`` blocks and a question of
``question_blocks`` that comes once; with a ``seed`` every round is shuffled anew, without one the
order is fixed. Generated requests are a second apart.
"""

import random
from array import array
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping
from inspect import signature
from itertools import accumulate

from attrs import evolve

from evoke_core.replay.trace import HEAD, Trace, TraceBuilder, TraceError

TOKENS_PER_BLOCK = 512


def loop(
    *,
    contexts: int = 8,
    blocks: int = 47,
    rounds: int = 12,
    question_blocks: int = 1,
    seed: int | None = None,
) -> Trace:
    """Return W1: ``rounds`` visits of each of ``contexts``, round robin.

    Raises:
        TraceError: a number below its minimum.
    """
    _at_least(1, contexts=contexts, blocks=blocks, rounds=rounds)
    _at_least(0, question_blocks=question_blocks)
    visits = ((context, blocks) for _ in range(rounds) for context in range(contexts))
    return _build("w1", visits, contexts, question_blocks, seed)


def hot_cold(
    *,
    hot: int = 2,
    cold: int = 6,
    cold_per_round: int = 3,
    blocks: int = 47,
    cold_blocks: int | None = None,
    rounds: int = 12,
    question_blocks: int = 1,
    seed: int | None = None,
) -> Trace:
    """Return W1S: every round visits all hot contexts and the next ``cold_per_round`` cold ones.

    ``cold_blocks`` is the length of cold contexts, by default that of hot ones.

    Raises:
        TraceError: a number below its minimum.
    """
    _at_least(1, hot=hot, cold=cold, blocks=blocks, rounds=rounds)
    _at_least(0, cold_per_round=cold_per_round, question_blocks=question_blocks)
    if cold_blocks is not None:
        _at_least(1, cold_blocks=cold_blocks)

    def visits() -> Iterable[tuple[int, int]]:
        scanned = 0
        for _ in range(rounds):
            for context in range(hot):
                yield context, blocks
            for _ in range(cold_per_round):
                yield hot + scanned % cold, blocks if cold_blocks is None else cold_blocks
                scanned += 1

    return _build("w1s", visits(), hot + cold_per_round, question_blocks, seed)


def conversations(
    *,
    users: int = 400,
    requests: int = 4000,
    skew: int = 90,
    systems: int = 20,
    system_blocks: int = 8,
    turn_blocks: int = 3,
    turns: int = 12,
    seed: int = 0,
) -> Trace:
    """Return conversations that users of unequal activity go on with, in random order.

    The user of each request is drawn by Zipf's law with exponent ``skew / 100``. A conversation
    starts with one of ``systems`` shared instructions, grows by ``turn_blocks`` a request, and
    is followed by a new one of the same user after ``turns``.

    Raises:
        TraceError: a number below its minimum.
    """
    _at_least(1, users=users, requests=requests, systems=systems, turns=turns)
    _at_least(0, skew=skew, system_blocks=system_blocks)
    _at_least(1, turn_blocks=turn_blocks)
    draw = random.Random(seed)
    weights = list(accumulate((rank + 1) ** (-skew / 100) for rank in range(users)))
    builder = TraceBuilder("zipf", TOKENS_PER_BLOCK)
    done = [0] * users
    for request in range(requests):
        user = bisect(weights, draw.random() * weights[-1], hi=users - 1)
        conversation, turn = divmod(done[user], turns)
        done[user] += 1
        system = (user + conversation) % systems
        shared = [("system", system, at) for at in range(system_blocks)]
        own = [("turn", user, conversation, at) for at in range((turn + 1) * turn_blocks)]
        session = f"user-{user}-{conversation}"
        builder.add(float(request), builder.extend(HEAD, [*shared, *own]), session=session)
    return builder.build()


def tenants(
    *,
    requests: int = 2000,
    scans: int = 30,
    scan_blocks: int = 60,
    contexts: int = 6,
    blocks: int = 40,
    users: int = 100,
    turn_blocks: int = 4,
    turns: int = 10,
    seed: int = 0,
) -> Trace:
    """Return the requests of three tenants in random order.

    ``scans`` percent come from a batch job: prompts of ``scan_blocks`` that are never seen again.
    The others come in equal parts from a loop over ``contexts`` of ``blocks``, each time with a
    question of one block, and from ``users``, drawn with equal chances, whose conversations grow by
    ``turn_blocks`` a request and start anew after ``turns``.

    Raises:
        TraceError: a number below its minimum, or more than 100 percent.
    """
    _at_least(1, requests=requests, contexts=contexts, blocks=blocks, users=users, turns=turns)
    _at_least(1, scan_blocks=scan_blocks, turn_blocks=turn_blocks)
    _at_least(0, scans=scans)
    if scans > 100:
        raise TraceError(f"scans = {scans} is not allowed; allowed: a percentage")
    draw = random.Random(seed)
    builder = TraceBuilder("mix", TOKENS_PER_BLOCK)
    done = [0] * users
    looped = 0
    chain: list[Hashable]
    for request in range(requests):
        if draw.random() * 100 < scans:
            session = f"scan-{request}"
            chain = [("scan", request, at) for at in range(scan_blocks)]
        elif draw.random() < 0.5:
            session = f"context-{looped % contexts}"
            chain = [("context", looped % contexts, at) for at in range(blocks)]
            chain.append(("question", request, 0))
            looped += 1
        else:
            user = draw.randrange(users)
            conversation, turn = divmod(done[user], turns)
            done[user] += 1
            session = f"user-{user}-{conversation}"
            chain = [("turn", session, at) for at in range((turn + 1) * turn_blocks)]
        builder.add(float(request), builder.extend(HEAD, chain), session=session)
    return builder.build()


SHAPES: Mapping[str, Callable[..., Trace]] = {
    "w1": loop,
    "w1s": hot_cold,
    "zipf": conversations,
    "mix": tenants,
}
"""Shapes by name."""


def generate(text: str) -> Trace:
    """Return the shape that ``text`` describes: ``w1``, or ``w1:contexts=20,rounds=5,seed=1``.

    Raises:
        TraceError: an unknown shape or parameter, or a value that is no whole number.
    """
    name, _, rest = text.partition(":")
    if name not in SHAPES:
        raise TraceError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    known = signature(SHAPES[name]).parameters
    given = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise TraceError(f"{text}: unknown parameter {key!r}; known: {', '.join(known)}")
        try:
            given[key] = int(value)
        except ValueError:
            raise TraceError(f"{text}: {key} = {value!r} is no whole number") from None
    trace = SHAPES[name](**given)
    return evolve(trace, name=text)


def first(trace: Trace, requests: int) -> Trace:
    """Return the first ``requests`` requests of a trace, with the blocks that occur in them.

    Raises:
        TraceError: there is no block in them.
    """
    builder = TraceBuilder(trace.name, trace.tokens_per_block)
    for request in range(min(requests, len(trace))):
        builder.add(
            trace.times[request],
            builder.extend(HEAD, trace.chain(request)),
            tokens=trace.tokens[request],
            request_id=trace.ids[request],
            session=trace.sessions[request],
            role=trace.roles[request],
        )
    return builder.build()


def concatenate(traces: Iterable[Trace], name: str | None = None) -> Trace:
    """Return one trace that plays the given ones in turn; they share no blocks.

    Each begins a second after the last request of the one before.

    Raises:
        TraceError: none given, or their blocks differ in size.
    """
    parts = list(traces)
    if not parts:
        raise TraceError("no trace to play")
    sizes = sorted({part.tokens_per_block for part in parts})
    if len(sizes) > 1:
        raise TraceError(f"blocks of {sizes[0]} and {sizes[-1]} tokens in one trace")
    parents: list[int] = []
    tails, times = array("i"), array("d")
    now = 0.0
    for part in parts:
        first = len(parents)
        parents += [HEAD if parent < 0 else parent + first for parent in part.parents]
        tails.extend(HEAD if tail < 0 else tail + first for tail in part.tails)
        begin = part.times[0]
        times.extend(now + time - begin for time in part.times)
        now = times[-1] + 1.0
    return Trace(
        name=name or "+".join(part.name for part in parts),
        tokens_per_block=sizes[0],
        parents=parents,
        tails=tails,
        lengths=array("i", (n for part in parts for n in part.lengths)),
        tokens=array("i", (n for part in parts for n in part.tokens)),
        times=times,
        ids=[each for part in parts for each in part.ids],
        sessions=[each for part in parts for each in part.sessions],
        roles=[each for part in parts for each in part.roles],
        skipped=sum(part.skipped for part in parts),
    )


def _build(
    name: str,
    visits: Iterable[tuple[int, int]],
    per_round: int,
    question_blocks: int,
    seed: int | None,
) -> Trace:
    order = list(visits)
    if seed is not None:
        draw = random.Random(seed)
        for at in range(0, len(order), per_round):
            visited = order[at : at + per_round]
            draw.shuffle(visited)
            order[at : at + per_round] = visited
    builder = TraceBuilder(name, TOKENS_PER_BLOCK)
    for request, (context, blocks) in enumerate(order):
        contents = [("context", context, at) for at in range(blocks)]
        question = [("question", request, at) for at in range(question_blocks)]
        chain = builder.extend(HEAD, [*contents, *question])
        builder.add(float(request), chain, session=f"context-{context}")
    return builder.build()


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise TraceError(f"{name} = {value} is not allowed; allowed: whole numbers >= {least}")
