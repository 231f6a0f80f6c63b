"""Texts for the demo, made from a random generator and a word list of this project's own.

A context is a list of short inventory notes; a question asks about one. Contexts are cut to an
exact number of tokens with the tokenizer in use, and begin with their name, so that two of them
share no block. Prompts follow the model's ChatML form.
"""

import random
from collections.abc import Callable


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLACES = _words("attic barn cellar dock foundry garden harbour kiln library mill orchard quarry")
_COLOURS = _words("amber black copper green grey ivory olive purple red silver white yellow")
_THINGS = _words("anchors baskets bells bottles candles crates kettles lamps ladders ropes sails")
_PEOPLE = _words("Ada Boris Chen Dora Emil Farah Goran Hana Ivo Jana Kofi Lena Mirko Nadia")
_ACTIONS = _words("counted moved packed painted repaired sorted stored washed weighed")


def make_context(
    rng: random.Random, name: str, tokens: int, encode: Callable[[str], list[int]]
) -> list[int]:
    """Return exactly `tokens` token ids: a system message of notes, cut at its tail."""
    text = f"<|im_start|>system\nInventory {name}, edition {rng.randrange(10**6)}."
    ids = encode(text)
    while len(ids) < tokens:
        text += " " + _note(rng)
        ids = encode(text)
    return ids[:tokens]


def make_question(rng: random.Random) -> str:
    """Return the text that ends the system message and asks one question."""
    question = f"How many {rng.choice(_THINGS)} are in the {rng.choice(_PLACES)}?"
    return f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _note(rng: random.Random) -> str:
    who, did = rng.choice(_PEOPLE), rng.choice(_ACTIONS)
    what = f"{rng.randrange(2, 100)} {rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
    return f"{who} {did} {what} in the {rng.choice(_PLACES)}."
