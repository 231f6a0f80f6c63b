"""Spans: the parts of a prompt that a client describes apart, from tokens to blocks.

A client counts tokens, a tier keeps blocks. A block belongs to whatever covers most of its tokens:
one of the spans, or the uncovered rest of the request. Ties go to a span before the rest and, among
spans, to the one listed first.

Guarantees: what comes out is sorted and disjoint; the cost depends on the number of spans alone,
not on their length.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from attrs import converters, evolve, field, frozen

MIN_PRIORITY = 0.1
MAX_PRIORITY = 10.0
_STEPS_PER_DOUBLING = 4


def quantise_priority(value: float) -> float:
    """Clamp to [0.1, 10] and round to the nearest power of 2^(1/4).

    Few distinct priorities keep few rank classes, and with them the cost of finding a victim.
    """
    clamped = min(MAX_PRIORITY, max(MIN_PRIORITY, value))
    return float(2.0 ** (round(_STEPS_PER_DOUBLING * math.log2(clamped)) / _STEPS_PER_DOUBLING))


@frozen
class Span:
    """What a client says of the blocks from ``start`` to ``end - 1``.

    ``None`` leaves to the request what the span does not say.
    """

    start: int
    end: int
    source_type: str | None = None
    priority: float | None = field(default=None, converter=converters.optional(quantise_priority))
    ttl_s: float | None = None


def in_blocks(spans: Sequence[Span], tokens_per_block: int) -> tuple[Span, ...]:
    """Turn spans of tokens, which may overlap, into disjoint spans of blocks."""
    cuts = set()
    for span in spans:
        for token in (span.start, span.end):
            cuts |= {token // tokens_per_block, -(-token // tokens_per_block)}
    edges = sorted(cuts)
    found: list[Span] = []
    # Between two edges every block is covered alike: the first one decides for all.
    for start, end in pairwise(edges):
        owner = _owner(spans, start * tokens_per_block, (start + 1) * tokens_per_block)
        if owner is None:
            continue
        described = evolve(owner, start=start, end=end)
        if (
            found
            and found[-1].end == start
            and evolve(found[-1], end=end) == evolve(described, start=found[-1].start)
        ):
            described = evolve(described, start=found.pop().start)
        found.append(described)
    return tuple(found)


def _owner(spans: Sequence[Span], low: int, high: int) -> Span | None:
    """Return the span that covers most of the tokens from ``low`` to ``high - 1``."""
    best: Span | None = None
    most = covered = 0
    parts = [
        (max(span.start, low), min(span.end, high), span)
        for span in spans
        if span.start < high and span.end > low
    ]
    for start, end, span in parts:
        if end - start > most:
            best, most = span, end - start
    reach = low
    for start, end, _ in sorted(parts, key=lambda part: part[:2]):
        covered += max(0, end - max(start, reach))
        reach = max(reach, end)
    return best if most >= high - low - covered else None
