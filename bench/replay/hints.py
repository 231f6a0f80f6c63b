"""What clients may claim, honestly or not: tags for every request of a trace.

Each function can be sent to another process. `shuffled` and `greedy` are decided by a hash, so they
are the same in every run.
"""

import zlib
from collections.abc import Callable, Mapping

from evoke_core import RequestTags
from evoke_core.replay import Trace, recorded_tags

_ROLES = ("system", "user", "assistant", None)
_PRIORITIES = (0.1, 0.5, 1.0, 2.0, 10.0)
_TENANTS = 8


def shuffled(trace: Trace, request: int) -> RequestTags:
    """Return a role and a priority that say nothing about the request."""
    drawn = zlib.crc32(f"tags {request}".encode())
    role = _ROLES[drawn % len(_ROLES)]
    priority = _PRIORITIES[drawn // len(_ROLES) % len(_PRIORITIES)]
    return RequestTags(source_type=role, priority=priority, session=trace.sessions[request])


def maximum(trace: Trace, request: int) -> RequestTags:
    """Return the most that can be claimed, by everybody."""
    return RequestTags(source_type="system", priority=10.0, session=trace.sessions[request])


def greedy(trace: Trace, request: int) -> RequestTags:
    """Return the most that can be claimed for one tenant in eight, and nothing for the others.

    A tenant is a session, or where none is recorded, what begins with the same two blocks.
    """
    chain = trace.chain(request)
    tenant = trace.sessions[request] or str(chain[:2])
    if zlib.crc32(f"tenant {tenant}".encode()) % _TENANTS:
        return RequestTags(session=trace.sessions[request])
    return maximum(trace, request)


CLAIMS: Mapping[str, Callable[[Trace, int], RequestTags]] = {
    "truthful": recorded_tags,
    "shuffled": shuffled,
    "all at maximum": maximum,
    "one greedy tenant": greedy,
}
"""Tags by what they are, in the order in which they are reported."""
