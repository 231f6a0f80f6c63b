"""What a client says about its request. Hints from strangers: read with care, never trusted.

``RequestTags.parse`` accepts anything and never raises. A malformed tag is left at its default and
reported as a :class:`TagProblem`; the adapter counts problems and warns once per kind.
"""

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

MIN_PRIORITY = 0.1
MAX_PRIORITY = 10.0
MAX_TEXT = 256
"""Longest accepted ``source_type`` or ``evoke_session``, in characters."""

_STEPS_PER_DOUBLING = 4


def quantise_priority(value: float) -> float:
    """Clamp to [0.1, 10] and round to the nearest power of 2^(1/4).

    Few distinct priorities keep few rank classes, and with them the cost of finding a victim.
    """
    clamped = min(MAX_PRIORITY, max(MIN_PRIORITY, value))
    return float(2.0 ** (round(_STEPS_PER_DOUBLING * math.log2(clamped)) / _STEPS_PER_DOUBLING))


@frozen
class TagProblem:
    """One tag that was not used as given: which, and why (a short fixed phrase, safe to count)."""

    tag: str
    reason: str


@frozen(kw_only=True)
class RequestTags:
    """The hints of one request.

    Attributes:
        source_type: source role of the request's text (``system``, ``user``, ``assistant``, ...).
        priority: multiplier of the score, quantised, from 0.1 to 10.
        session: groups requests of one conversation; never changes what a block is worth.
    """

    source_type: str | None = None
    priority: float = field(default=1.0, converter=quantise_priority)
    session: str | None = None

    @classmethod
    def parse(cls, raw: Any) -> tuple["RequestTags", tuple[TagProblem, ...]]:
        """Read a client's ``evoke`` mapping. Never raises; ``None`` means no tags."""
        if raw is None:
            return UNTAGGED, ()
        if not isinstance(raw, Mapping):
            return UNTAGGED, (TagProblem("evoke", "not a mapping"),)
        problems: list[TagProblem] = []
        accepted: dict[str, Any] = {}
        for tag, value in raw.items():
            if tag == "source_type" or tag == "evoke_session":
                name = "session" if tag == "evoke_session" else tag
                if not isinstance(value, str) or not value:
                    problems.append(TagProblem(tag, "not a text"))
                elif len(value) > MAX_TEXT:
                    problems.append(TagProblem(tag, "too long"))
                else:
                    accepted[name] = value
            elif tag == "priority":
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    problems.append(TagProblem(tag, "not a number"))
                elif not _finite(value):
                    problems.append(TagProblem(tag, "not finite"))
                else:
                    if not MIN_PRIORITY <= value <= MAX_PRIORITY:
                        problems.append(TagProblem(tag, "clamped to [0.1, 10]"))
                    accepted[tag] = value
            else:
                # The tag's name comes from a stranger: counting it would grow without bound.
                problems.append(TagProblem("unknown", "unknown tag"))
        return (cls(**accepted) if accepted else UNTAGGED), tuple(problems)


UNTAGGED = RequestTags()


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False
