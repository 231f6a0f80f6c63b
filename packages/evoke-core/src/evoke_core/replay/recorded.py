"""A trace that a server's recorder wrote: what happened between two requests is known too.

Beside the requests it holds the *events* in the order in which they happened: requests are opened,
served, offer blocks for storing (generated ones too) and end, many at a time. Replaying the events
rather than one request after the other keeps what one request finds of another's blocks as it was.

Blocks that the device had are not asked of the tier, as in the engine; how many that were is as
recorded, whatever the replayed tier holds: nearly what it would be, because a block that one tier
restores the other has computed anew, and the device has it either way.
"""

from array import array
from collections.abc import Mapping
from typing import Any

from attrs import field, fields_dict, frozen

from evoke_core.config import ConfigError, EvokeConfig
from evoke_core.replay.trace import Trace
from evoke_core.tags import RequestTags

OPEN, SERVE, OFFER, CLOSE, RESET = range(5)
"""Kinds of events. ``RESET``: the tier was emptied, or the server began anew."""


@frozen(eq=False, kw_only=True)
class RecordedTrace(Trace):
    """A trace with events. Requests are in the order in which they were served.

    Numbers of requests from ``len(trace)`` on are of requests that never were served: they were
    opened, which is part of a policy's time, but asked for nothing.

    Attributes:
        paths: per request, the last block of its prompt *and* what it offered beyond.
        device: per request, leading blocks that the device had.
        found: per request, the blocks that the tier had from there on, when it was recorded.
        tags, nows: per request, those beyond ``len(trace)`` too: what it carried, and the time
            that the ledger was told.
        events: (kind, request, begin, end); the last two are positions, of offers only.
        header: what the recorder was told of the tier.
        referenced: different blocks in the prompts.
        returning: blocks over all requests that were in a prompt, or offered, before.
    """

    paths: "array[int]"
    device: "array[int]"
    found: "array[int]"
    tags: list[RequestTags]
    nows: list[float | None]
    events: list[tuple[int, int, int, int]] = field(repr=False)
    header: Mapping[str, Any]
    referenced: int
    returning: int

    @property
    def unique_blocks(self) -> int:
        """Different blocks in prompts; what was only ever generated is not asked for."""
        return self.referenced

    @property
    def ceiling(self) -> float:
        return self.returning / max(1, self.references)

    @property
    def last_blocks(self) -> "array[int]":
        return self.paths

    @property
    def capacity(self) -> int | None:
        """The recorded tier's size in blocks, where the header tells it."""
        return _size(self.header.get("capacity"))

    @property
    def bytes_per_block(self) -> int | None:
        """Bytes of one block, where the header tells them."""
        return _size(self.header.get("bytes_per_block"))

    @property
    def policy(self) -> str | None:
        """The recorded tier's policy, where the header tells it."""
        name = self.header.get("policy")
        return name if isinstance(name, str) else None

    @property
    def store_threshold(self) -> int:
        """Requests that had to name a block before it was stored; below 2: one."""
        return _size(self.header.get("store_threshold")) or 0

    @property
    def config(self) -> EvokeConfig | None:
        """The recorded tier's settings; None where they are not told, or not allowed here."""
        told: Any = self.header.get("config")
        known = fields_dict(EvokeConfig)
        try:
            return EvokeConfig(**{name: value for name, value in told.items() if name in known})
        except (AttributeError, ConfigError, TypeError):
            return None

    @property
    def tier_hits(self) -> float:
        """Blocks found in the recorded tier, as a share of those it was asked for."""
        asked = self.references - sum(self.device)
        return sum(self.found) / max(1, asked)


def _size(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if whole else None
