"""Contexts with facts planted in them, and questions about the facts.

A context is a system message of short notes in the model's ChatML form, an exact number of tokens
long. Some notes are facts: a five-digit code of some thing, spread evenly over the context. A
question asks for one of them, and the answer scores if it holds the code. No two contexts share a
block, because each begins with its own name, unless a common head is put in front.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.matrix.workloads.work import Encode

ANSWER_TOKENS = 8
"""A code of five digits and what a small model may put before it."""

_PLACES = ("attic", "barn", "cellar", "dock", "foundry", "garden", "harbour", "kiln", "mill")
_COLOURS = ("amber", "black", "copper", "green", "grey", "ivory", "olive", "red", "white")
_GOODS = ("anchors", "baskets", "bells", "bottles", "candles", "crates", "ladders", "ropes")
_PEOPLE = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Lena")
_ACTIONS = ("counted", "moved", "packed", "painted", "repaired", "sorted", "washed", "weighed")
_SAFES = ("bank", "castle", "clinic", "hotel", "museum", "office", "school", "station", "theatre")


@dataclass(frozen=True)
class Context:
    """Token ids, and the code of each thing whose fact is planted in them."""

    name: str
    tokens: tuple[int, ...]
    codes: dict[str, str]


def make_context(
    rng: Random, name: str, tokens: int, encode: Encode, *, facts: int = 2, head: str = ""
) -> Context:
    """Return a context of exactly `tokens` tokens; at least one fact, and all of them whole."""
    codes = {safe: f"{rng.randrange(10**4, 10**5)}" for safe in rng.sample(_SAFES, facts)}
    text = f"{head}<|im_start|>system\nReport {name}, edition {rng.randrange(10**6)}."
    ids = encode(text)
    waiting = list(codes)
    while len(ids) < tokens or waiting:
        planted = facts - len(waiting)
        if waiting and len(ids) >= (planted + 0.5) * tokens / (facts + 0.5):
            safe = waiting.pop(0)
            text += f" The code of the {safe} is {codes[safe]}."
        else:
            text += " " + _note(rng)
        ids = encode(text)
        if waiting and len(ids) > tokens:
            raise ValueError(f"{tokens} tokens are too few for {facts} facts")
    return Context(name, tuple(ids[:tokens]), codes)


def ask_for(safe: str) -> str:
    """Return the text that ends the system message and asks for one code.

    The answer is begun, so that it is short: a cell's time should go into prompts.
    """
    return chat(f"What is the code of the {safe}?") + f"The code of the {safe} is"


def ask_for_all(safes: Sequence[str]) -> str:
    """Return the text that ends the system message and asks for codes as JSON."""
    keys = ", ".join(f'"{safe}"' for safe in safes)
    shape = "{" + ", ".join(f'"{safe}": "12345"' for safe in safes) + "}"
    return chat(f"Give the codes of {keys} as JSON like {shape}. Answer with JSON only.")


def chat(question: str) -> str:
    """Return a question as a user's turn, and the head of the answer."""
    return f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def filler(rng: Random, tokens: int, encode: Encode) -> str:
    """Return notes of about `tokens` tokens."""
    text = _note(rng)
    while len(encode(text)) < tokens:
        text += " " + _note(rng)
    return text


def _note(rng: Random) -> str:
    who, did = rng.choice(_PEOPLE), rng.choice(_ACTIONS)
    what = f"{rng.randrange(2, 100)} {rng.choice(_COLOURS)} {rng.choice(_GOODS)}"
    return f"{who} {did} {what} in the {rng.choice(_PLACES)}."
