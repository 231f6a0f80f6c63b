"""What clients declared about a block beyond its role and priority: whose it is, and until when.

Guarantees: joining is what the requests together say, whatever their order; a block that one
request shares, or gave no end, is nobody's and has none.
"""

import math

from attrs import frozen


@frozen
class Terms:
    """The declarations of all requests that touched a block.

    Attributes:
        owner: the session that all of them named; None if they did not.
        holds_until: time in seconds until which the block keeps its value.
        promise: for how many requests that was, when it was declared.
        due: time in seconds at which the block was promised to be used again; infinity where all
            that was said is until when it may be.
        pace: requests per second when it was declared.
        expires: time in seconds from which the block is the first to go.
    """

    owner: str | None = None
    holds_until: float = -math.inf
    promise: float = 0.0
    due: float = math.inf
    pace: float = 1.0
    expires: float = math.inf

    def joined(self, other: "Terms") -> "Terms":
        """Return what two requests, or what is known and one more, say together."""
        if self is other:
            return self
        later = self if self.holds_until >= other.holds_until else other
        together = Terms(
            self.owner if self.owner == other.owner else None,
            later.holds_until,
            later.promise,
            later.due,
            later.pace,
            max(self.expires, other.expires),
        )
        return NO_TERMS if together == NO_TERMS else together


NO_TERMS = Terms()
