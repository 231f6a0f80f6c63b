"""Mooncake's JSON lines: ``timestamp`` (ms), ``input_length`` and one id per block of the prompt.

The ids cover the whole prompt, a partly filled last block included, and are unique per prefix.
"""

from collections.abc import Callable, Mapping
from typing import Any

from evoke_core.replay.readers.common import BadLineError, is_count, number, sequence, text
from evoke_core.replay.trace import HEAD, TraceBuilder

_MS = 1000.0


def reader(builder: TraceBuilder) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that adds one line's request to ``builder``."""

    def add(record: Mapping[str, Any]) -> None:
        ids = sequence(record, "hash_ids")
        if not all(map(is_count, ids)):
            raise BadLineError("hash_ids: not all of them are whole numbers")
        time = number(record, "timestamp", 0) / _MS
        full = len(ids) * builder.tokens_per_block
        tokens = int(number(record, "input_length", full))
        session = text(record, "session_id")
        builder.add(time, builder.extend(HEAD, ids), tokens=tokens, session=session)

    return add
