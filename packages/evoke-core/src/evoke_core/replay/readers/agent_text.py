"""Agents' calls with their full text: ``timestamp`` (us), ``session_id``, ``input``.

The input is the whole prompt, as one text or as a list of messages with ``role`` and ``content``.
Blocks are cut every ``tokens_per_block`` tokens, by a tokenizer or by a fixed number of characters
a token; what does not fill a block at the end is in none. Texts are kept as digests only.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from evoke_core.replay.readers.common import BadLineError, Tokenizer, number, text
from evoke_core.replay.trace import HEAD, TraceBuilder, TraceError

_US = 1_000_000.0
_DIGEST_BYTES = 16


def reader(
    builder: TraceBuilder, chars_per_token: float, tokenizer: Tokenizer | None
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that adds one line's request to ``builder``."""
    size = builder.tokens_per_block

    def add(record: Mapping[str, Any]) -> None:
        prompt, role = _prompt(record.get("input"))
        time = number(record, "timestamp", 0) / _US
        session = text(record, "session_id")
        if tokenizer is None:
            tokens = int(len(prompt) / chars_per_token)
            cuts = [int(at * size * chars_per_token) for at in range(tokens // size + 1)]
            parts = [prompt[a:b].encode("utf-8", "surrogatepass") for a, b in pairwise(cuts)]
        else:
            ids = [int(token) for token in tokenizer(prompt)]
            tokens = len(ids)
            cuts = [at * size for at in range(tokens // size + 1)]
            parts = [repr(ids[a:b]).encode() for a, b in pairwise(cuts)]
        contents = [blake2b(part, digest_size=_DIGEST_BYTES).digest() for part in parts]
        chain = builder.extend(HEAD, contents)
        builder.add(time, chain, tokens=tokens, session=session, role=role)

    return add


def load_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer in a ``tokenizer.json``, adding no special tokens.

    Raises:
        TraceError: the package ``tokenizers`` is missing, or the file is none of its own.
    """
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError:
        raise TraceError("a tokenizer file needs the package tokenizers") from None
    try:
        loaded = Loaded.from_file(path)
    except Exception as error:  # the package raises plain exceptions
        raise TraceError(f"{path}: no tokenizer: {error}") from None

    def encode(prompt: str) -> list[int]:
        ids: list[int] = loaded.encode(prompt, add_special_tokens=False).ids
        return ids

    return encode


def _prompt(given: Any) -> tuple[str, str | None]:
    """Return a prompt's text and the role of its last message, where there are messages."""
    if isinstance(given, str):
        return given, None
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise BadLineError(f"input = {given!r:.40} is neither text nor messages")
    role = given[-1].get("role") if given else None
    lines = (f"{part.get('role')}\n{_content(part.get('content'))}\n" for part in given)
    return "".join(lines), role if isinstance(role, str) else None


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
