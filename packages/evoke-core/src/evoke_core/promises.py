"""Promises of reuse: how long they are, and how much of that is left, in steps of powers of two.

A promise speaks of seconds, a ranking of requests; the rate of arrivals at the time translates.
One that says *when* the blocks return (``expect_reuse_in_s``) comes nearer as time passes; one that
says only *until when* they may (``ttl_s``) stays as long as it was.

Guarantees: what is left is a function of the terms and the time alone; ``next_step`` is never later
than the moment at which that function changes.
"""

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoke_core.terms import Terms

LENGTHS = tuple(2.0**step for step in range(1, 15))
"""Promises are told apart by length, up to so many requests; the last one also all beyond."""

_EARLY = 1.0 + 1e-9


def length_of(requests: float) -> int:
    """Return the number of a length in requests."""
    return min(bisect_left(LENGTHS, requests), len(LENGTHS) - 1)


def due_in(terms: "Terms", now: float) -> int:
    """Return the number of what is left of a promise at ``now``."""
    return length_of(min(terms.promise, (terms.due - now) * terms.pace))


def next_step(terms: "Terms", number: int) -> float:
    """Return the time in seconds at which ``number`` is left behind; infinity if it stays."""
    if number == 0 or terms.due == inf:
        return inf
    return terms.due - _EARLY * LENGTHS[number - 1] / terms.pace
