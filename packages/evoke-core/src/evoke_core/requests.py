"""Open requests: their tick, their tags, and the chain of blocks they walk, per group.

The chain is what makes repeated calls harmless: a request counts once per block, however often the
engine polls, because the chain remembers how far it has been counted.
"""

import math
from collections.abc import Mapping

from attrs import define, evolve, field, frozen

from evoke_core.tags import UNTAGGED, RequestTags
from evoke_core.terms import NO_TERMS, Terms

UNKNOWN = b""
PINNED_PRIORITY = 4.0
"""Least priority of a pinned request's blocks: what is left of a pin that had to yield."""

_SLACK = 1.25
"""A promised return may be this much late, as a factor of the time promised."""


@define(eq=False)
class Chain:
    """The blocks one request has named in one group.

    Attributes:
        keys: head first, from position 0 on.
        counted: so many of the leading keys have this request in their history.
        ahead: stretches behind a gap (position -> end, apart from each other and beyond
            ``counted``) that have it too, being inserted by it.
    """

    keys: list[bytes] = field(factory=list)
    counted: int = 0
    ahead: dict[int, int] = field(factory=dict)

    def locate(self, keys: list[bytes]) -> list[tuple[int, list[bytes]]]:
        """Part ``keys`` into stretches that are consecutive here: ``(position, keys)``.

        A key that the request has not named yet continues what comes before it; at the front, the
        chain as a whole.
        """
        at = self._position(keys[0])
        known = len(self.keys) - at
        if self.keys[at : at + len(keys)] == (keys if known >= len(keys) else keys[:known]):
            return [(at, keys)]
        stretches = [(at, keys[:1])]
        for key in keys[1:]:
            start, stretch = stretches[-1]
            follows = start + len(stretch)
            if follows >= len(self.keys) or self.keys[follows] == key:
                stretch.append(key)
            else:
                stretches.append((self._position(key), [key]))
        return stretches

    def _position(self, key: bytes) -> int:
        # Engines offer what comes right behind the blocks that are resident.
        if self.counted < len(self.keys) and self.keys[self.counted] == key:
            return self.counted
        try:
            return self.keys.index(key)
        except ValueError:
            return len(self.keys)

    def has_counted(self, position: int) -> bool:
        """Say whether the block at ``position`` has this request in its history."""
        return position < self.counted or any(
            at <= position < end for at, end in self.ahead.items()
        )

    def mark(self, start: int, end: int) -> None:
        """Note that the blocks from ``start`` to ``end`` have this request in their history."""
        for at in [at for at, stop in self.ahead.items() if at <= end and start <= stop]:
            end = max(end, self.ahead.pop(at))
            start = min(start, at)
        if start <= self.counted:
            self.counted = max(self.counted, end)
        else:
            self.ahead[start] = end

    def recount(self, from_position: int = 0) -> None:
        """Forget what was counted from this position on."""
        self.counted = min(self.counted, from_position)
        self.ahead = {
            at: min(end, from_position) for at, end in self.ahead.items() if at < from_position
        }

    def record(self, keys: list[bytes], start: int) -> list[bytes]:
        """Note that the request has ``keys`` at ``start``; return those it had not named before.

        Positions that nobody has named yet are filled with ``UNKNOWN``, which is never resident.
        Where the engine corrects itself, the chain follows it from the first difference on.
        """
        self.keys.extend([UNKNOWN] * (start - len(self.keys)))
        known = len(self.keys) - start
        if known >= len(keys):
            if self.keys[start : start + len(keys)] == keys:
                return []
        elif self.keys[start:] == keys[:known]:
            fresh = keys[known:]
            self.keys.extend(fresh)
            return fresh
        fresh = []
        for at, key in enumerate(keys, start):
            if at == len(self.keys):
                self.keys.append(key)
            elif self.keys[at] == key:
                continue
            elif self.keys[at] == UNKNOWN:
                self.keys[at] = key
            else:
                del self.keys[at:]
                self.recount(at)
                self.keys.append(key)
            fresh.append(key)
        return fresh


@frozen(eq=False)
class Claim:
    """What a request says of a part of its blocks.

    Attributes:
        floor: what the source role grants.
        end: position behind the part's last block.
    """

    floor: float
    role: str | None
    priority: float
    terms: Terms
    end: float = math.inf


@define(eq=False)
class OpenRequest:
    """One request between ``open`` and ``close``.

    Attributes:
        tick: the clock when it was opened; all it touches is as recent as this.
        claims: what it says, part by part from position 0 on.
        chains: per full-attention group.
        windows: per window group, the keys it has named, True once counted.
    """

    request_id: str
    tick: int
    tags: RequestTags
    whole: Claim
    claims: list[Claim]
    chains: dict[int, Chain] = field(factory=dict)
    windows: dict[int, dict[bytes, bool]] = field(factory=dict)

    def chain(self, group: int) -> Chain:
        chain = self.chains.get(group)
        if chain is None:
            chain = self.chains[group] = Chain()
        return chain

    def claim(self, position: int) -> Claim:
        """Return what the request says of the block at ``position``."""
        if len(self.claims) == 1:
            return self.whole
        return next(claim for claim in self.claims if position < claim.end)


def claims_of(
    tags: RequestTags, floors: Mapping[str, float], now: float | None, per_second: float
) -> tuple[Claim, list[Claim]]:
    """Return what a request says of all its blocks that no span covers, and part by part.

    Without a time, what is said in seconds is left out. ``per_second`` is the rate of requests.
    """
    if tags is UNTAGGED:
        return _UNTAGGED
    whole = _claim(tags, tags.source_type, tags.priority, tags.ttl_s, floors, now, per_second)
    claims: list[Claim] = []
    at = 0
    for span in tags.spans:
        if span.start > at:
            claims.append(evolve(whole, end=span.start))
        claim = _claim(
            tags,
            tags.source_type if span.source_type is None else span.source_type,
            tags.priority if span.priority is None else span.priority,
            tags.ttl_s if span.ttl_s is None else span.ttl_s,
            floors,
            now,
            per_second,
        )
        claims.append(evolve(claim, end=span.end))
        at = span.end
    return whole, [*claims, whole]


def _claim(
    tags: RequestTags,
    role: str | None,
    priority: float,
    ttl_s: float | None,
    floors: Mapping[str, float],
    now: float | None,
    per_second: float,
) -> Claim:
    terms = NO_TERMS if tags.session is None else Terms(tags.session)
    if now is not None:
        back, ttl = tags.expect_reuse_in_s or 0.0, ttl_s or 0.0
        held = max(_SLACK * back, ttl)
        if held > 0.0:
            promised, due = (ttl, math.inf) if ttl == held else (back, now + back)
            terms = Terms(
                owner=tags.session,
                holds_until=now + held,
                promise=promised * per_second,
                due=due,
                pace=per_second,
                expires=math.inf if ttl_s is None else now + ttl_s,
            )
    if tags.pinned:
        priority = max(priority, PINNED_PRIORITY)
    return Claim(floors.get(role or "", 0.0), role, priority, terms)


_NOTHING = Claim(0.0, None, 1.0, NO_TERMS)
_UNTAGGED = (_NOTHING, [_NOTHING])
