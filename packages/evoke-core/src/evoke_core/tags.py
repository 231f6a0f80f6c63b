"""What a client says about its request. Hints from strangers: read with care, never trusted.

``RequestTags.parse`` accepts anything and never raises. A malformed tag is left at its default and
reported as a :class:`TagProblem`; the adapter counts problems and warns once per kind.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import field, fields, frozen

from evoke_core.spans import MAX_PRIORITY, MIN_PRIORITY, Span, in_blocks, quantise_priority

MIN_SECONDS = 0.001
MAX_SECONDS = 86_400.0
"""Shortest and longest time of ``ttl_s`` and ``expect_reuse_in_s``."""

MAX_TEXT = 256
"""Longest accepted ``source_type`` or ``evoke_session``, in characters."""

MAX_SPANS = 32
MAPPING_KEY = "evoke"
FLAT_PREFIX = "lmcache.evoke."


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
        session: groups requests of one conversation.
        spans: parts of the prompt described apart, in blocks, sorted and disjoint.
        pinned: keep the request's blocks, as far as the pool's share for pins goes.
        ttl_s: seconds for which the blocks keep their value; then they are the first to go.
        expect_reuse_in_s: seconds after which the request's blocks will be needed again.
        end_of_session: after this request, nobody needs what only its session used.
        no_store: store nothing new of this request.
    """

    source_type: str | None = None
    priority: float = field(default=1.0, converter=quantise_priority)
    session: str | None = None
    spans: tuple[Span, ...] = ()
    pinned: bool = False
    ttl_s: float | None = None
    expect_reuse_in_s: float | None = None
    end_of_session: bool = False
    no_store: bool = False

    @classmethod
    def parse(
        cls, raw: Any, *, tokens_per_block: int = 1
    ) -> tuple["RequestTags", tuple[TagProblem, ...]]:
        """Read a client's ``evoke`` mapping. Never raises; ``None`` means no tags."""
        if raw is None:
            return UNTAGGED, ()
        if not isinstance(raw, Mapping):
            return UNTAGGED, (TagProblem(MAPPING_KEY, "not a mapping"),)
        problems: list[TagProblem] = []
        accepted = _read(raw, _REQUEST, "", problems)
        spans = accepted.pop("spans", ())
        if accepted.get("end_of_session") and "session" not in accepted:
            problems.append(TagProblem("end_of_session", "no session"))
            del accepted["end_of_session"]
        if spans:
            accepted["spans"] = in_blocks(spans, tokens_per_block)
        return (cls(**accepted) if accepted else UNTAGGED), tuple(problems)

    @classmethod
    def from_transfer_params(
        cls, params: Any, *, tokens_per_block: int = 1
    ) -> tuple["RequestTags", tuple[TagProblem, ...]]:
        """Read the tags from an engine's per-request parameters. Never raises.

        They stand in the mapping ``evoke``, or flat as ``lmcache.evoke.<tag>`` with the value or
        its JSON text, so that one request serves engines that hand on strings only. Where a tag is
        given twice, the mapping's counts.
        """
        if not isinstance(params, Mapping):
            return UNTAGGED, ()
        flat = {
            tag: value if tag in _TEXTS else _decode(value)
            for name, value in params.items()
            if isinstance(name, str) and (tag := name.removeprefix(FLAT_PREFIX)) != name
        }
        raw = params.get(MAPPING_KEY)
        if flat and (raw is None or isinstance(raw, Mapping)):
            raw = {**flat, **(raw or {})}
        return cls.parse(raw, tokens_per_block=tokens_per_block)

    def roles(self, start: int, end: int) -> Iterator[tuple[str | None, int]]:
        """Yield the source roles of the blocks from ``start`` to ``end - 1``, each with how many.

        In order; blocks beside each other may be told apart although their roles are the same.
        """
        at = start
        for span in self.spans:
            low, high = max(span.start, at), min(span.end, end)
            if high <= low:
                continue
            if low > at:
                yield self.source_type, low - at
            yield self.source_type if span.source_type is None else span.source_type, high - low
            at = high
        if end > at:
            yield self.source_type, end - at

    @property
    def in_seconds(self) -> tuple[str, ...]:
        """The tags that speak of seconds."""
        ttl = self.ttl_s is not None or any(span.ttl_s is not None for span in self.spans)
        reuse = self.expect_reuse_in_s is not None
        return ("ttl_s",) * ttl + ("expect_reuse_in_s",) * reuse

    def given(self) -> dict[str, Any]:
        """Return what differs from no tags, by attribute; spans as mappings, in blocks."""
        said = {
            attribute.name: value
            for attribute in fields(RequestTags)
            if (value := getattr(self, attribute.name)) != getattr(UNTAGGED, attribute.name)
        }
        if self.spans:
            said["spans"] = [
                {name: value for name, value in _span_items(span) if value is not None}
                for span in self.spans
            ]
        return said


UNTAGGED = RequestTags()


def _span_items(span: Span) -> list[tuple[str, Any]]:
    return [(attribute.name, getattr(span, attribute.name)) for attribute in fields(Span)]


# --- one reader for each kind of value: (accepted value, complaint); None: not usable ---

_Reader = Callable[[Any], tuple[Any, str | None]]


def _text(value: Any) -> tuple[Any, str | None]:
    if not isinstance(value, str) or not value:
        return None, "not a text"
    return (None, "too long") if len(value) > MAX_TEXT else (value, None)


def _truth(value: Any) -> tuple[Any, str | None]:
    return (value, None) if isinstance(value, bool) else (None, "not a boolean")


def _number(low: float, high: float) -> _Reader:
    def read(value: Any) -> tuple[Any, str | None]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None, "not a number"
        if not _finite(value):
            return None, "not finite"
        if low <= value <= high:
            return float(value), None
        return min(high, max(low, value)), f"clamped to [{low:g}, {high:g}]"

    return read


_SECONDS = _number(MIN_SECONDS, MAX_SECONDS)
_PRIORITY = _number(MIN_PRIORITY, MAX_PRIORITY)

_SPAN: Mapping[str, tuple[str, _Reader]] = {
    "source_type": ("source_type", _text),
    "priority": ("priority", _PRIORITY),
    "ttl_s": ("ttl_s", _SECONDS),
}
_REQUEST: Mapping[str, tuple[str, _Reader]] = {
    **_SPAN,
    "evoke_session": ("session", _text),
    "expect_reuse_in_s": ("expect_reuse_in_s", _SECONDS),
    "pinned": ("pinned", _truth),
    "end_of_session": ("end_of_session", _truth),
    "no_store": ("no_store", _truth),
}
_TEXTS = [tag for tag, (_, reader) in _REQUEST.items() if reader is _text]
TAGS = (*_REQUEST, "spans")
"""Every tag a client may give."""


def _read(
    raw: Mapping[Any, Any],
    readers: Mapping[str, tuple[str, _Reader]],
    prefix: str,
    problems: list[TagProblem],
) -> dict[str, Any]:
    """Return the usable tags of a mapping by attribute name; append what was wrong."""
    accepted: dict[str, Any] = {}
    for tag, value in raw.items():
        if isinstance(tag, str) and tag in readers:
            name, reader = readers[tag]
            usable, complaint = reader(value)
            if usable is not None:
                accepted[name] = usable
            if complaint is not None:
                problems.append(TagProblem(prefix + tag, complaint))
        elif tag == "spans" and readers is _REQUEST:
            accepted["spans"] = _read_spans(value, problems)
        else:
            # The tag's name comes from a stranger: counting it would grow without bound.
            problems.append(TagProblem("unknown", "unknown tag"))
    return accepted


def _read_spans(value: Any, problems: list[TagProblem]) -> list[Span]:
    """Return the usable spans, in tokens."""
    if not isinstance(value, (list, tuple)):
        problems.append(TagProblem("spans", "not a list"))
        return []
    if len(value) > MAX_SPANS:
        problems.append(TagProblem("spans", "too many"))
    spans = []
    for given in value[:MAX_SPANS]:
        if not _is_span(given):
            problems.append(TagProblem("spans", "malformed span"))
            continue
        said = {tag: given[tag] for tag in given if tag not in ("start", "end")}
        accepted = _read(said, _SPAN, "spans.", problems)
        spans.append(Span(given["start"], given["end"], **accepted))
    return spans


def _is_span(given: Any) -> bool:
    return (
        isinstance(given, Mapping)
        and all(isinstance(tag, str) and (tag in _SPAN or tag in ("start", "end")) for tag in given)
        and all(
            isinstance(given.get(end), int) and not isinstance(given[end], bool)
            for end in ("start", "end")
        )
        and 0 <= given["start"] < given["end"]
    )


def _decode(value: Any) -> Any:
    """Read a flat value: JSON text where it is that, else the text itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False
