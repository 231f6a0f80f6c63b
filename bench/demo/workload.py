"""What the demo asks a server for: the hot/cold agent shape, made from a seed.

An agent platform serves a few long-lived contexts (instructions, tools, a repository's notes)
again and again while other documents pass through once. So: a set of hot contexts is asked about
once per loop, and between them come cold contexts, new ones in every loop, each asked for once
(a scan). Every loop is shuffled anew. All contexts have the same length, and no two share a
block. Requests say whose text they are, as an agent's client would: a hot context is the system
prompt in front of a user's question, a cold one what a user pasted. In so short a run that moves
nothing: the default policy believes a role as far as it has proven true. The time and the number of
uses tell hot from cold, and a policy has to find out by itself.

Why these numbers. 3 hot and 5 cold contexts of 12 blocks (384 tokens) in 6 loops keep one seed
within minutes on two cores. 33 GPU blocks (one is the engine's own) hold the running request and
one or two contexts, so most returns must come from the tier. The tier holds 1.6 times the hot
set: enough for the hot contexts, not for the 8 contexts that pass between two uses of one. LRU
keeps the contexts used last, which are mostly cold ones that never return; a simulation of stock
LRU over 200 seeds restores 14% of the hot blocks from the third loop on, one of the adaptive
policy 84%, of the scored one 94%. The first two loops are left out of that figure because no
policy can know a context before it has come back once.

`TIE` is the opposite: 6 hot and 6 cold contexts of which every one returns every loop, and a tier
2.6 times the hot set, which holds them all. There is nothing to tell apart and nothing to evict,
so every policy must do the same; what differs between the arms there is noise.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.demo.contexts import make_context, make_question

BLOCK_SIZE = 32
ANSWER_TOKENS = 8

Encode = Callable[[str], list[int]]
"""Turns text into token ids, adding none of its own."""


@dataclass(frozen=True)
class Call:
    """One request: which context it belongs to, in which loop (from 1), and its token ids."""

    context: str
    kind: str  # "hot", "cold" or "trace"
    loop: int
    prompt: tuple[int, ...]
    answer_tokens: int = ANSWER_TOKENS
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Workload:
    """Calls in order, with the pool they run in; `notes` says what a reader must know."""

    name: str
    seed: int
    calls: tuple[Call, ...]
    gpu_blocks: int
    tier_blocks: int
    max_model_len: int
    parameters: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    @property
    def all_blocks(self) -> int:
        """GPU blocks in which nothing this workload asks for is ever evicted."""
        per_call_tail = 2  # a part-filled prompt block and what the answer spills into
        return unique_blocks(call.prompt for call in self.calls) + per_call_tail * len(self.calls)


@dataclass(frozen=True)
class Shape:
    """The hot/cold shape's numbers; `cold_returns`: the same cold contexts in every loop."""

    name: str
    hot: int
    cold: int
    tier_factor: float
    cold_returns: bool
    loops: int = 6
    context_tokens: int = 384
    gpu_blocks: int = 33
    max_model_len: int = 1024


HOT_COLD = Shape("hot-cold", hot=3, cold=5, tier_factor=1.6, cold_returns=False)
TIE = Shape("tie", hot=6, cold=6, tier_factor=2.6, cold_returns=True)


def make_workload(shape: Shape, seed: int, encode: Encode, *, tags: bool = True) -> Workload:
    """Return the shape's calls for one seed; with `tags`, they say whose text they are."""
    rng = random.Random(seed)
    contexts: dict[str, list[int]] = {}
    calls = []
    for loop in range(1, shape.loops + 1):
        cold_from = 0 if shape.cold_returns else (loop - 1) * shape.cold
        visits = [("hot", i) for i in range(shape.hot)]
        visits += [("cold", cold_from + i) for i in range(shape.cold)]
        rng.shuffle(visits)
        for kind, number in visits:
            name = f"{kind}-{number + 1}"
            if name not in contexts:
                contexts[name] = make_context(rng, name, shape.context_tokens, encode)
            prompt = contexts[name] + encode(make_question(rng))
            params = {"evoke": roles(kind, shape.context_tokens)} if tags else None
            calls.append(Call(name, kind, loop, tuple(prompt), kv_transfer_params=params))
    hot_blocks = shape.hot * shape.context_tokens // BLOCK_SIZE
    return Workload(
        name=shape.name,
        seed=seed,
        calls=tuple(calls),
        gpu_blocks=shape.gpu_blocks,
        tier_blocks=int(shape.tier_factor * hot_blocks),
        max_model_len=shape.max_model_len,
        parameters={**asdict(shape), "tags": tags},
    )


def roles(kind: str, context_tokens: int) -> dict[str, Any]:
    """Return the tags of a request about a context: all is the user's but a system prompt."""
    tags: dict[str, Any] = {"source_type": "user"}
    if kind == "hot":
        tags["spans"] = [{"start": 0, "end": context_tokens, "source_type": "system"}]
    return tags


def unique_blocks(prompts: Iterable[Sequence[int]]) -> int:
    """Return the number of distinct full blocks, counted with their whole prefix."""
    seen: set[tuple[int, int]] = set()
    for prompt in prompts:
        chain = 0
        for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            chain = hash((chain, tuple(prompt[start : start + BLOCK_SIZE])))
            seen.add((start, chain))
    return len(seen)
