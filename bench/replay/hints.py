"""What clients may claim, honestly or not: tags for every request of a trace.

Each function can be sent to another process. What is shuffled or greedy is decided by a hash, so it
is the same in every run.

A *promise* is `expect_reuse_in_s`: an agent that waits for a tool knows when it will be back. Here
it knows it exactly, as the best client could; where no session is recorded, nobody promises.
"""

import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache

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


def promised(trace: Trace, request: int) -> RequestTags:
    """Return what is true: role, session and its end, and when the request's blocks return."""
    returns = _returns(trace)[request]
    return _promise(trace, request, returns, last=returns is None)


def promised_at_random(trace: Trace, request: int) -> RequestTags:
    """Return the promise that is true of another request."""
    returns = _returns(trace)
    drawn = zlib.crc32(f"promise {request}".encode())
    return _promise(trace, request, returns[drawn % len(returns)])


def promised_at_once(trace: Trace, request: int) -> RequestTags:
    """Return the most that can be promised: everything comes back within a second."""
    return _promise(trace, request, 1.0)


def _promise(
    trace: Trace, request: int, seconds: float | None, *, last: bool = False
) -> RequestTags:
    session = trace.sessions[request]
    if session is None:
        return recorded_tags(trace, request)
    return RequestTags(
        source_type=trace.roles[request],
        session=session,
        expect_reuse_in_s=seconds,
        end_of_session=last and _last_of_session(trace)[session] == request,
    )


@lru_cache(maxsize=1)
def _returns(trace: Trace) -> list[float | None]:
    """Return, per request, the seconds until its blocks return; None if they never do.

    Its blocks return with the next request that uses the one at three quarters of its chain: not
    with everybody who shares its beginning, and though its end may be rewritten.
    """
    next_use: dict[int, float] = {}
    returns: list[float | None] = [None] * len(trace)
    for request in reversed(range(len(trace))):
        chain = trace.chain(request)
        if chain:
            back = next_use.get(chain[3 * len(chain) // 4])
            if back is not None:
                returns[request] = max(0.001, min(86_400.0, back - trace.times[request]))
            next_use.update(dict.fromkeys(chain, trace.times[request]))
    return returns


@lru_cache(maxsize=1)
def _last_of_session(trace: Trace) -> dict[str | None, int]:
    return {session: request for request, session in enumerate(trace.sessions)}


CLAIMS: Mapping[str, Callable[[Trace, int], RequestTags]] = {
    "truthful": recorded_tags,
    "truthful, with promises": promised,
    "shuffled": shuffled,
    "all at maximum": maximum,
    "one greedy tenant": greedy,
    "promises at random": promised_at_random,
    "everything promised at once": promised_at_once,
}
"""Tags by what they are, in the order in which they are reported."""
