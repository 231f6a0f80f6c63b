"""What a gate asks a server for: sessions that grow side by side, then come back.

Every session is a conversation that only ever grows: each turn appends exactly `turn_tokens`
tokens to what was asked before, so a turn's prompt is a prefix of the next one's. Turns of all
sessions are interleaved round robin: between two turns of one session every other session is
asked, and its blocks leave a small pool in the meantime. Then each full prefix is asked once more
(replay), again round robin, and in a last round each session is asked for the passkey that one of
its turns planted.

What the assistant says between two turns is part of the workload, not the model's answer: all
arms are asked exactly the same prompts, whatever they answered before. Answers are greedy and of
a fixed length.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], list[int]]
"""Turns text into token ids, adding none of its own."""

KINDS = ("grow", "replay", "passkey")
_LEAST_NOTES = 4  # tokens: a turn that says less than this is no turn


@dataclass(frozen=True)
class Shape:
    """The workload's numbers; tokens are those of the model's own tokenizer."""

    sessions: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    passkey_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Probe:
    """One request: `session` and `turn` count from 1, `passkey` is what an answer must hold."""

    session: int
    turn: int
    kind: str
    prompt: tuple[int, ...]
    answer_tokens: int
    passkey: str | None = None

    @property
    def digest(self) -> str:
        """Return a short name of the prompt: equal prompts, equal names."""
        text = ",".join(map(str, self.prompt))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def make_probes(shape: Shape, encode: Encode) -> tuple[Probe, ...]:
    """Return the probes in the order in which they are asked.

    Raises ValueError where `turn_tokens` leaves no room for what a turn has to say.
    """
    rng = random.Random(shape.seed)
    numbers = range(1, shape.sessions + 1)
    keys = {s: f"{rng.randrange(10_000, 100_000)}" for s in numbers}
    prompts = {s: _prompts(shape, s, keys[s], rng, encode) for s in numbers}
    probes = [
        Probe(s, turn, "grow", prompts[s][turn - 1], shape.answer_tokens)
        for turn in range(1, shape.turns + 1)
        for s in numbers
    ]
    probes += [
        Probe(s, shape.turns, "replay", prompts[s][-1], shape.answer_tokens) for s in numbers
    ]
    question = tuple(encode(_PASSKEY_QUESTION))
    probes += [
        Probe(
            s, shape.turns + 1, "passkey", prompts[s][-1] + question, shape.passkey_tokens, keys[s]
        )
        for s in numbers
    ]
    return tuple(probes)


def unique_blocks(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Return the number of distinct full blocks, each counted with its whole prefix."""
    seen = set()
    for prompt in prompts:
        chain = 0
        for start in range(0, len(prompt) - block_size + 1, block_size):
            chain = hash((chain, tuple(prompt[start : start + block_size])))
            seen.add((start, chain))
    return len(seen)


def reusable_tokens(probes: Sequence[Probe], block_size: int) -> list[int]:
    """Return, per probe, the tokens of its prompt that an engine which never evicts has already.

    Full blocks only, and never the whole prompt: its last token has to be computed.
    """
    longest: dict[int, tuple[int, ...]] = {}
    reusable = []
    for probe in probes:
        before = longest.get(probe.session, ())
        common = min(len(before), len(probe.prompt) - 1)
        assert probe.prompt[:common] == before[:common]
        reusable.append(common // block_size * block_size)
        if len(probe.prompt) > len(before):
            longest[probe.session] = probe.prompt
    return reusable


def workload_digest(probes: Sequence[Probe]) -> str:
    """Return a name of the whole workload: two recordings with the same one are comparable."""
    lines = [f"{p.session} {p.turn} {p.kind} {p.digest} {p.answer_tokens}\n" for p in probes]
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def _prompts(
    shape: Shape, session: int, key: str, rng: random.Random, encode: Encode
) -> list[tuple[int, ...]]:
    """Return a session's prompts, one per turn, each the beginning of the next."""
    planted = 1 + (session - 1) % shape.turns
    prompt: tuple[int, ...] = ()
    prompts = []
    for turn in range(1, shape.turns + 1):
        if turn == 1:
            ship = f"{session}-{rng.randrange(10**6)}"
            head = f"<|im_start|>system\nShip {ship}: you keep its log.<|im_end|>\n"
        else:
            head = "Noted.<|im_end|>\n"
        head += "<|im_start|>user\n"
        if turn == planted:
            head += f"The passkey is {key}. Remember it: {key} is the passkey. "
        prompt += tuple(_fill(shape.turn_tokens, head, rng, encode))
        prompts.append(prompt)
    return prompts


def _fill(size: int, head: str, rng: random.Random, encode: Encode) -> list[int]:
    """Return exactly `size` tokens: the head, notes cut to fit, and the turn's end."""
    start, end = encode(head), encode("<|im_end|>\n<|im_start|>assistant\n")
    room = size - len(start) - len(end)
    if room < _LEAST_NOTES:
        least = size - room + _LEAST_NOTES
        raise ValueError(f"turn_tokens = {size} is too small; at least {least} are needed")
    text = _note(rng)
    notes = encode(text)
    while len(notes) < room:
        text += " " + _note(rng)
        notes = encode(text)
    return start + notes[:room] + end


def _note(rng: random.Random) -> str:
    who, did, what = rng.choice(_CREW), rng.choice(_DEEDS), rng.choice(_CARGO)
    return f"{who} {did} {rng.randrange(2, 60)} {what} at the {rng.choice(_PARTS)}."


_PASSKEY_QUESTION = (
    "Noted.<|im_end|>\n<|im_start|>user\nWhat is the passkey?<|im_end|>\n"
    "<|im_start|>assistant\nThe passkey is"
)
_CREW = "Anka Bram Cleo Dario Edda Femi Greta Hugo Iris Jonas Kira Luca".split()
_DEEDS = "checked counted dried greased lashed mended moved stowed swapped tarred".split()
_CARGO = "barrels bolts bundles cables crates hooks nets oars planks sacks".split()
_PARTS = "bow bridge capstan deck galley hatch hold keel mast rudder stern".split()
