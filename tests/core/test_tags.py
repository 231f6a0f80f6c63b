# SPDX-License-Identifier: Apache-2.0
"""RequestTags.parse: hints from strangers are used, bent into range, or reported. Never raised."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from evoke_core import RequestTags, TagProblem
from evoke_core.tags import Span

STEP = 2 ** (1 / 4)
TEXTS = ("source_type", "evoke_session")
TRUTHS = ("pinned", "end_of_session", "no_store")
TIMES = ("ttl_s", "expect_reuse_in_s")
NAMES = (*TEXTS, *TRUTHS, *TIMES, "priority", "spans")
SPAN_TAGS = ("source_type", "priority", "ttl_s")
COUNTED = {*NAMES, *(f"spans.{tag}" for tag in SPAN_TAGS), "unknown", "evoke"}
MOST_SPANS = 32

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)
span_like = st.dictionaries(
    st.sampled_from(["start", "end", *SPAN_TAGS]) | st.text(max_size=4),
    st.integers(-2, 40) | json_like,
    max_size=5,
)
tag_like = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=8), json_like | st.lists(span_like), max_size=5
)


class Hostile(dict):
    """A mapping whose values are worse than wrong."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth in here")


@given(json_like | tag_like, st.integers(1, 64))
@example({"priority": 10**400}, 1)
@example({"ttl_s": 10**400, "expect_reuse_in_s": math.inf}, 1)
@example({"spans": [{"start": 0, "end": 10**400}]}, 16)
@example({"spans": [{"start": 3, "end": 10**30, "ttl_s": math.nan, "priority": 10**400}]}, 7)
@example({"spans": {"start": 0, "end": 3}}, 1)
@example({"spans": [[0, 3], None, {}, {"start": "0", "end": "3"}, {"start": 0.0, "end": 3.0}]}, 1)
@example({"priority": -(10**400)}, 1)
@example({"priority": 5e-324}, 1)
@example({"priority": -0.0}, 1)
@example({"source_type": "x" * 100_000}, 1)
@example({"source_type": "\ud800"}, 1)
@example(Hostile(priority=Hostile()), 1)
@example({"spans": [Hostile(start=Hostile(), end=3)], "pinned": Hostile()}, 1)
@example(Hostile(spans=Hostile(), no_store=[], ttl_s=Hostile()), 1)
def test_never_raises_and_stays_in_range(raw: object, tokens_per_block: int) -> None:
    tags, problems = RequestTags.parse(raw, tokens_per_block=tokens_per_block)
    assert isinstance(tags, RequestTags)
    assert all(isinstance(problem, TagProblem) for problem in problems)
    assert 0.1 / STEP < tags.priority < 10 * STEP
    assert tags.source_type is None or isinstance(tags.source_type, str)
    assert tags.session is None or isinstance(tags.session, str)
    assert len(tags.source_type or "") <= 256
    assert len(tags.session or "") <= 256
    assert all(isinstance(getattr(tags, name), bool) for name in TRUTHS)
    assert all(getattr(tags, name) is None or in_range(getattr(tags, name)) for name in TIMES)
    assert tags.session is not None or not tags.end_of_session
    for span in tags.spans:
        assert 0 <= span.start < span.end
        assert span.priority is None or 0.1 / STEP < span.priority < 10 * STEP
        assert span.ttl_s is None or in_range(span.ttl_s)
        assert len(span.source_type or "") <= 256
    assert all(before.end <= after.start for before, after in pairwise(tags.spans))
    hash((tags, problems))


def in_range(seconds: Any) -> bool:
    return isinstance(seconds, (int, float)) and 0.001 <= seconds <= 86_400.0


@given(tag_like | st.dictionaries(st.text(), json_like).map(lambda flat: {"evoke": flat}))
def test_problems_are_few_and_safe_to_count(raw: dict[str, object]) -> None:
    """A stranger chooses the names and values of tags; he must not choose what we count by."""
    flat = {f"lmcache.evoke.{name}": value for name, value in raw.items()}
    for _, problems in (
        RequestTags.parse(raw),
        RequestTags.from_transfer_params(raw),
        RequestTags.from_transfer_params(flat),
    ):
        for problem in problems:
            assert problem.tag in COUNTED
            assert len(problem.reason) < 40


def test_no_tags() -> None:
    assert RequestTags.parse(None) == (RequestTags(), ())
    assert RequestTags.parse({}) == (RequestTags(), ())
    assert RequestTags() == RequestTags(source_type=None, priority=1.0, session=None)


def test_good_tags_are_taken_without_complaint() -> None:
    raw = {
        "source_type": "user",
        "priority": 2,
        "evoke_session": "conversation-42",
        "spans": [{"start": 4, "end": 8, "source_type": "system", "priority": 4, "ttl_s": 60}],
        "pinned": True,
        "ttl_s": 300,
        "expect_reuse_in_s": 20.5,
        "end_of_session": True,
        "no_store": True,
    }
    tags = RequestTags(
        source_type="user",
        priority=2.0,
        session="conversation-42",
        spans=(Span(start=1, end=2, source_type="system", priority=4.0, ttl_s=60.0),),
        pinned=True,
        ttl_s=300.0,
        expect_reuse_in_s=20.5,
        end_of_session=True,
        no_store=True,
    )
    assert RequestTags.parse(raw, tokens_per_block=4) == (tags, ())
    assert RequestTags.parse(raw | dict.fromkeys(TRUTHS, False))[0].spans[0].start == 4


def test_false_is_the_default() -> None:
    raw = dict.fromkeys(TRUTHS, False) | {"evoke_session": "s"}
    assert RequestTags.parse(raw) == (RequestTags(session="s"), ())


def test_an_unknown_role_is_a_role() -> None:
    assert RequestTags.parse({"source_type": "tool"}) == (RequestTags(source_type="tool"), ())


@pytest.mark.parametrize("raw", ["user", 3, True, [], ["priority", 2], ("source_type",), b"x"])
def test_what_is_no_mapping(raw: object) -> None:
    tags, problems = RequestTags.parse(raw)
    assert tags == RequestTags()
    assert [problem.tag for problem in problems] == ["evoke"]


NO_NUMBERS: tuple[object, ...] = ("2", None, True, [2], math.nan, math.inf, -math.inf, 10**400)
NO_TRUTHS: tuple[object, ...] = ("true", None, 1, 0, [], 1.0)
NO_LISTS: tuple[object, ...] = (None, 3, "0-8", {"start": 0, "end": 8}, True)


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        *[("source_type", value) for value in ("", 3, None, ["user"], b"user", "x" * 257)],
        *[("evoke_session", value) for value in ("", 3, None, {"a": 1}, "x" * 257)],
        *[(tag, value) for tag in ("priority", *TIMES) for value in NO_NUMBERS],
        *[(tag, value) for tag in TRUTHS for value in NO_TRUTHS],
        *[("spans", value) for value in NO_LISTS],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_malformed_tag_is_reported_and_the_rest_is_used(tag: str, value: object) -> None:
    good: dict[str, object] = {
        "source_type": "user",
        "priority": 2.0,
        "evoke_session": "s",
        "ttl_s": 3.0,
        "expect_reuse_in_s": 4.0,
        "no_store": True,
        "spans": [{"start": 0, "end": 3, "source_type": "tool"}],
    }
    tags, problems = RequestTags.parse(good | {tag: value})
    assert [problem.tag for problem in problems] == [tag]
    kept = {name: given for name, given in good.items() if name != tag}
    assert tags == RequestTags.parse(kept)[0]


def test_unknown_tags_are_reported() -> None:
    tags, problems = RequestTags.parse({"prio": 3, "source_type": "user"})
    assert tags == RequestTags(source_type="user")
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("given_priority", "steps"),
    [
        (1, 0),
        (2, 4),
        (0.5, -4),
        (STEP, 1),
        (1.5, 2),  # 2**0.585 is nearer to 2**0.5 than to 2**0.75
        (1.05, 0),
        (1.1, 1),
        (10, 13),
        (0.1, -13),
        (11, 13),
        (1e308, 13),
        (0.01, -13),
        (0, -13),
        (-5, -13),
    ],
)
def test_priority_is_clamped_and_quantised(given_priority: float, steps: int) -> None:
    tags, problems = RequestTags.parse({"priority": given_priority})
    assert tags.priority == 2.0 ** (steps / 4)
    assert bool(problems) == (not 0.1 <= given_priority <= 10)


@given(st.floats(0.1, 10))
def test_quantising_twice_changes_nothing(value: float) -> None:
    once = RequestTags(priority=value).priority
    assert RequestTags(priority=once).priority == once
    assert abs(math.log2(once) - math.log2(value)) <= 1 / 8 + 1e-9


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", TIMES)
@pytest.mark.parametrize(
    ("seconds", "used"),
    [
        (0.001, 0.001),
        (7, 7.0),
        (86_400, 86_400.0),
        (0, 0.001),
        (-3.5, 0.001),
        (86_400.1, 86_400.0),
        (1e300, 86_400.0),
        (10**300, 86_400.0),
    ],
)
def test_times_are_clamped(tag: str, seconds: float, used: float) -> None:
    tags, problems = RequestTags.parse({tag: seconds})
    assert getattr(tags, tag) == used
    complaint = TagProblem(tag, "clamped to [0.001, 86400]")
    assert problems == (() if used == seconds else (complaint,))


def test_a_session_cannot_end_without_being_named() -> None:
    tags, problems = RequestTags.parse({"end_of_session": True, "pinned": True})
    assert tags == RequestTags(pinned=True)
    assert problems == (TagProblem("end_of_session", "no session"),)
    tags, problems = RequestTags.parse({"end_of_session": True, "evoke_session": 3})
    assert tags == RequestTags()
    assert [problem.tag for problem in problems] == ["evoke_session", "end_of_session"]
    assert RequestTags.parse({"end_of_session": False}) == (RequestTags(), ())


# --- spans ----------------------------------------------------------------------------------------

Said = tuple[object, object, object]


def owners(spans: list[dict[str, Any]], tokens_per_block: int, blocks: int) -> list[Said | None]:
    """Whose each block is, token by token: the span that covers most, or the uncovered rest."""
    found: list[Said | None] = []
    for block in range(blocks):
        tokens = range(block * tokens_per_block, (block + 1) * tokens_per_block)
        covers = [sum(span["start"] <= at < span["end"] for at in tokens) for span in spans]
        rest = sum(not any(span["start"] <= at < span["end"] for span in spans) for at in tokens)
        most = max([*covers, rest])
        winner = next((s for s, n in zip(spans, covers, strict=True) if n == most), None)
        found.append(None if winner is None else said_by(winner))
    return found


def said_by(span: dict[str, Any]) -> Said:
    return span.get("source_type"), span.get("priority"), span.get("ttl_s")


def by_block(spans: tuple[Span, ...], blocks: int) -> list[Said | None]:
    found: list[Said | None] = [None] * blocks
    for span in spans:
        for block in range(span.start, min(span.end, blocks)):
            assert found[block] is None, "spans are disjoint"
            found[block] = (span.source_type, span.priority, span.ttl_s)
    return found


@st.composite
def token_spans(draw: st.DrawFn) -> list[dict[str, Any]]:
    spans = []
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, 40))
        spans.append({"start": start, "end": start + draw(st.integers(1, 20))} | draw(span_values))
    return spans


span_values = st.fixed_dictionaries(
    {},
    optional={
        "source_type": st.sampled_from(["a", "b"]),
        "priority": st.sampled_from([0.5, 4.0]),
        "ttl_s": st.sampled_from([1.0, 9.0]),
    },
)


@given(token_spans(), st.integers(1, 9))
@example([{"start": 2, "end": 4, "priority": 4.0}], 4)  # half of a block: before the rest
@example([{"start": 3, "end": 4, "priority": 4.0}], 4)
@example([{"start": 0, "end": 2, "ttl_s": 1.0}, {"start": 2, "end": 4, "ttl_s": 9.0}], 4)
@example([{"start": 2, "end": 4, "ttl_s": 1.0}, {"start": 0, "end": 2, "ttl_s": 9.0}], 4)
@example([{"start": 0, "end": 9, "ttl_s": 1.0}, {"start": 3, "end": 5, "ttl_s": 9.0}], 4)
@example([{"start": at, "end": at + 1, "ttl_s": 1.0} for at in range(0, 9, 2)], 3)
def test_a_block_belongs_to_what_covers_most_of_it(
    spans: list[dict[str, Any]], tokens_per_block: int
) -> None:
    blocks = 61 // tokens_per_block + 1
    tags, problems = RequestTags.parse({"spans": spans}, tokens_per_block=tokens_per_block)
    assert problems == ()
    expected = owners(spans, tokens_per_block, blocks)
    assert by_block(tags.spans, blocks) == expected
    assert all(span.end <= blocks for span in tags.spans)


def test_a_span_of_any_length_costs_nothing() -> None:
    raw = {"spans": [{"start": 1, "end": 10**18, "ttl_s": 5.0}, {"start": 9, "end": 11}]}
    tags, problems = RequestTags.parse(raw, tokens_per_block=2)
    assert problems == ()
    assert by_block(tags.spans, 8) == [(None, None, 5.0)] * 8
    assert tags.spans[-1].end == 10**18 // 2


@pytest.mark.parametrize(
    "span",
    [
        None,
        7,
        "0-8",
        [0, 8],
        {},
        {"start": 0},
        {"end": 8},
        {"start": 8, "end": 8},
        {"start": 9, "end": 8},
        {"start": -1, "end": 8},
        {"start": 0, "end": 8.0},
        {"start": "0", "end": 8},
        {"start": False, "end": 8},
        {"start": 0, "end": True},
        {"start": 0, "end": 8, "pinned": True},
        {"start": 0, "end": 8, 3: 4},
    ],
    ids=repr,
)
def test_a_malformed_span_is_dropped_and_the_others_are_used(span: object) -> None:
    good = {"start": 2, "end": 6, "source_type": "tool"}
    tags, problems = RequestTags.parse({"spans": [span, good, span]})
    assert tags.spans == (Span(start=2, end=6, source_type="tool"),)
    assert problems == (TagProblem("spans", "malformed span"),) * 2


def test_a_spans_own_tags_are_read_like_a_requests() -> None:
    span = {"start": 0, "end": 4, "source_type": 3, "priority": 99, "ttl_s": 0}
    tags, problems = RequestTags.parse({"spans": [span], "source_type": "user"})
    assert tags.spans == (Span(start=0, end=4, priority=2.0**3.25, ttl_s=0.001),)
    assert set(problems) == {
        TagProblem("spans.source_type", "not a text"),
        TagProblem("spans.priority", "clamped to [0.1, 10]"),
        TagProblem("spans.ttl_s", "clamped to [0.001, 86400]"),
    }
    (span_tags, problems) = RequestTags.parse({"spans": [{"start": 0, "end": 4, "ttl_s": "9"}]})
    assert by_block(span_tags.spans, 5) in ([(None, None, None)] * 4 + [None], [None] * 5)
    assert problems == (TagProblem("spans.ttl_s", "not a number"),)


@given(st.floats(0.1, 10.0))
def test_a_spans_priority_is_quantised(priority: float) -> None:
    parsed = RequestTags.parse({"spans": [{"start": 0, "end": 1, "priority": priority}]})[0]
    assert parsed.spans[0].priority == RequestTags(priority=priority).priority
    assert Span(start=0, end=1, priority=priority).priority == parsed.spans[0].priority


def test_spans_beyond_the_most_are_dropped_and_reported_once() -> None:
    spans = [{"start": 2 * at, "end": 2 * at + 1, "ttl_s": 1.0 + at} for at in range(40)]
    tags, problems = RequestTags.parse({"spans": spans})
    assert problems == (TagProblem("spans", "too many"),)
    assert [span.start for span in tags.spans] == [2 * at for at in range(MOST_SPANS)]
    assert RequestTags.parse({"spans": spans[:MOST_SPANS]})[1] == ()


# --- the places where tags stand ------------------------------------------------------------------

whole_request = st.fixed_dictionaries(
    {},
    optional={
        "source_type": st.sampled_from(["user", "tool", "42", "true", '"x"', "[1]"]),
        "evoke_session": st.sampled_from(["s", "42", "null", "{}", "1e3"]),
        "priority": st.floats(0.05, 11) | st.integers(-1, 12),
        "ttl_s": st.floats(0.0, 90_000),
        "expect_reuse_in_s": st.integers(0, 90_000),
        "pinned": st.booleans(),
        "end_of_session": st.booleans(),
        "no_store": st.booleans(),
        "spans": token_spans(),
    },
)


@given(whole_request, st.data(), st.integers(1, 8))
def test_flat_keys_say_the_same_as_the_mapping(
    raw: dict[str, Any], data: st.DataObject, tokens_per_block: int
) -> None:
    """As values or as their JSON text (a text as itself); any part here or there."""
    expected = RequestTags.parse(raw, tokens_per_block=tokens_per_block)
    params: dict[str, Any] = {"max_offload_tokens": 7}
    for tag, value in raw.items():
        place = data.draw(st.sampled_from(["mapping", "value", "text"]), label=tag)
        if place == "mapping":
            params.setdefault("evoke", {})[tag] = value
        elif place == "value" or tag in TEXTS:
            params[f"lmcache.evoke.{tag}"] = value
        else:
            params[f"lmcache.evoke.{tag}"] = json.dumps(value)
    tags, problems = RequestTags.from_transfer_params(params, tokens_per_block=tokens_per_block)
    assert tags == expected[0]
    assert sorted(map(repr, problems)) == sorted(map(repr, expected[1]))


def test_the_mapping_wins_tag_by_tag() -> None:
    params = {
        "evoke": {"priority": 2.0},
        "lmcache.evoke.priority": "8",
        "lmcache.evoke.source_type": "tool",
    }
    assert RequestTags.from_transfer_params(params) == (
        RequestTags(priority=2.0, source_type="tool"),
        (),
    )


@pytest.mark.parametrize("params", [None, 3, "evoke", [], {}, {"other": 1}, {"evoke": None}])
def test_no_tags_anywhere(params: object) -> None:
    assert RequestTags.from_transfer_params(params) == (RequestTags(), ())


def test_flat_keys_are_reported_like_the_others() -> None:
    params = {
        "lmcache.evoke.pinned": "yes",
        "lmcache.evoke.spans": "[{",
        "lmcache.evoke.nonsense": 1,
        "lmcache.evoke.": 1,
        "lmcache.evoke": 1,
        "lmcache.tag.user": "x",
        3: 4,
    }
    tags, problems = RequestTags.from_transfer_params(params)
    assert tags == RequestTags()
    assert sorted(problem.tag for problem in problems) == ["pinned", "spans", "unknown", "unknown"]


@given(st.dictionaries(st.sampled_from([*NAMES, "x"]), json_like, max_size=5), json_like)
def test_nothing_in_the_parameters_raises(flat: dict[str, object], mapping: object) -> None:
    params = {f"lmcache.evoke.{tag}": value for tag, value in flat.items()} | {"evoke": mapping}
    tags, _ = RequestTags.from_transfer_params(params, tokens_per_block=3)
    assert isinstance(tags, RequestTags)


def test_deeply_nested_text_does_not_raise() -> None:
    for tag in ("spans", "priority"):
        for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 5_000, "1e999", "NaN", "-Infinity"):
            params = {f"lmcache.evoke.{tag}": text}
            tags, problems = RequestTags.from_transfer_params(params)
            assert tags == RequestTags()
            assert [problem.tag for problem in problems] == [tag]


@given(whole_request)
def test_what_is_given_describes_the_tags_whole(raw: dict[str, Any]) -> None:
    """`given` names what differs from the default, for a recording."""
    tags = RequestTags.parse(raw)[0]
    said = dict(tags.given())
    assume(said)
    spans = tuple(Span(**span) for span in said.pop("spans", []))
    assert RequestTags(spans=spans, **said) == tags
