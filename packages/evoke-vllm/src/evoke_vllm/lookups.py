"""What each request asked of the tier, and what it got: once per request, however often it waited.

vLLM looks a waiting request's blocks up in every step, from the first block that the GPU does
not have to the first miss, then (up to 0.30) names the whole prompt; since 0.31 the prompt is known
from the request's context. The last time before anything is loaded or
stored is the one that was scheduled; what is loaded then is what was found. Both are what the
server's own counters of external cache hits count, in whole blocks.

Of a hybrid model's groups the first with full attention speaks for the request.
"""

from collections.abc import Callable, Collection

from attrs import define

from evoke_core import RequestTags
from evoke_core.index import MAX_OPEN_REQUESTS

GROUP_BYTES = 4
"""Length of the KV-cache group's number at the end of a key."""


@define(eq=False)
class Request:
    """One request until it is known what it found.

    Attributes:
        keys: the blocks of its prompt, head first, when it last looked; None before.
        first: the block from which on it looked; None if the GPU had all.
    """

    request_id: str
    tags: RequestTags
    keys: list[bytes] | None = None
    first: bytes | None = None


Settle = Callable[[Request, int, int], None]
"""Told a request, the position from which on it asked, and the number of blocks it found."""


class Lookups:
    """Follows requests from arrival to the moment at which it is known what they found.

    Args:
        group: the group that speaks for a request.
        settle: told once about each request.
    """

    def __init__(self, group: int, settle: Settle) -> None:
        self.group = group
        self._suffix = group.to_bytes(GROUP_BYTES, "big")
        self._settle = settle
        self._requests: dict[str, Request] = {}

    def opened(self, request_id: str, tags: RequestTags) -> None:
        """A request arrived."""
        if len(self._requests) >= MAX_OPEN_REQUESTS:  # an engine that never closes must not leak
            self.settled(next(iter(self._requests)))
        self._requests[request_id] = Request(request_id, tags)

    def named(self, request_id: str, keys: list[bytes], first: bytes | None) -> None:
        """A request named its blocks in the group, having looked them up from ``first`` on.

        None if it looked nothing up: the GPU has got all of them meanwhile.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.keys = keys
            request.first = first

    def looked(self, request_id: str, first: bytes) -> None:
        """A request looks its blocks up, from ``first`` on; it lists them later."""
        request = self._requests.get(request_id)
        if request is not None:
            request.first = first

    def listed(self, request_id: str, keys: list[bytes]) -> None:
        """A request has these blocks in the group, head first."""
        request = self._requests.get(request_id)
        if request is not None:
            request.keys = keys

    def waits(self, request_id: str) -> bool:
        """Say whether it is not known yet what a request found."""
        return request_id in self._requests

    def loading(self, request_id: str, keys: Collection[bytes]) -> None:
        """A request restores blocks, those of a group together: this is what it found."""
        if request_id in self._requests:
            suffix = self._suffix
            if (
                isinstance(keys, list)
                and keys
                and keys[0][-GROUP_BYTES:] == keys[-1][-GROUP_BYTES:]
            ):
                found = len(keys) if keys[0].endswith(suffix) else 0
            else:
                found = sum(key.endswith(suffix) for key in keys)
            self.settled(request_id, found)

    def settled(self, request_id: str, found: int = 0) -> None:
        """A request begins to store, or ends: it is known what it found."""
        request = self._requests.pop(request_id, None)
        if request is None or request.keys is None:
            return
        start = len(request.keys)
        if request.first is not None and request.first in request.keys:
            start = request.keys.index(request.first)
        self._settle(request, start, found)
