"""What the readers share: taking values out of a record, and saying what is wrong with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

Tokenizer = Callable[[str], Sequence[int]]
"""Turns text into token ids."""

_REQUIRED = object()


class BadLineError(ValueError):
    """A line that cannot be used; the message is the reason."""


def number(record: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
    """Return a number of the record; ``default`` where it is missing or null."""
    value = record.get(key)
    if value is None and default is not _REQUIRED:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise BadLineError(f"{key} = {value!r:.40} is no number")
    return value


def text(record: Mapping[str, Any], key: str) -> str | None:
    """Return a text of the record; None where it is missing or null."""
    value = record.get(key)
    if value is not None and not isinstance(value, (str, int)):
        raise BadLineError(f"{key} = {value!r:.40} is no text")
    return None if value is None else str(value)


def sequence(record: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of the record."""
    value = record.get(key)
    if not isinstance(value, list):
        raise BadLineError(f"{key} = {value!r:.40} is no list")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Say whether a value is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
