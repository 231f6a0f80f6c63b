"""Scores an answer: does it hold what was asked for?"""

import json
from collections.abc import Sequence

FULL = 1.0


def score(answer: str, expected: Sequence[str], *, as_json: bool = False) -> float | None:
    """Return the share of `expected` that the answer holds; None where nothing is expected.

    By substring, letter case aside. As JSON: the first object in the answer must parse, and its
    values, in order, are compared; an answer that holds no object scores 0.
    """
    if not expected:
        return None
    if as_json:
        values = _values(answer)
        found = sum(want == got for want, got in zip(expected, values, strict=False))
        return found / len(expected)
    low = answer.lower()
    return sum(each.lower() in low for each in expected) / len(expected)


def _values(answer: str) -> list[str]:
    start = answer.find("{")
    if start < 0:
        return []
    try:
        found, _ = json.JSONDecoder().raw_decode(answer[start:])
    except ValueError:
        return []
    return [str(value) for value in found.values()]
