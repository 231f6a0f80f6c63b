# SPDX-License-Identifier: Apache-2.0
"""RequestTags.parse: hints from strangers are used, bent into range, or reported. Never raised."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evoke_core import RequestTags, TagProblem

STEP = 2 ** (1 / 4)
NAMES = ("source_type", "priority", "evoke_session")

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)
tag_like = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), json_like, max_size=5)


class Hostile(dict):
    """A mapping whose values are worse than wrong."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth in here")


@given(json_like | tag_like)
@example({"priority": 10**400})
@example({"priority": -(10**400)})
@example({"priority": 5e-324})
@example({"priority": -0.0})
@example({"source_type": "x" * 100_000})
@example({"source_type": "\ud800"})
@example(Hostile(priority=Hostile()))
def test_never_raises_and_stays_in_range(raw: object) -> None:
    tags, problems = RequestTags.parse(raw)
    assert isinstance(tags, RequestTags)
    assert all(isinstance(problem, TagProblem) for problem in problems)
    assert 0.1 / STEP < tags.priority < 10 * STEP
    assert tags.source_type is None or isinstance(tags.source_type, str)
    assert tags.session is None or isinstance(tags.session, str)
    assert len(tags.source_type or "") <= 256
    assert len(tags.session or "") <= 256
    hash((tags, problems))


@given(tag_like)
def test_problems_are_few_and_safe_to_count(raw: dict[str, object]) -> None:
    """A stranger chooses the names and values of tags; he must not choose what we count by."""
    for problem in RequestTags.parse(raw)[1]:
        assert problem.tag in {*NAMES, "unknown", "evoke"}
        assert len(problem.reason) < 40


def test_no_tags() -> None:
    assert RequestTags.parse(None) == (RequestTags(), ())
    assert RequestTags.parse({}) == (RequestTags(), ())
    assert RequestTags() == RequestTags(source_type=None, priority=1.0, session=None)


def test_good_tags_are_taken_without_complaint() -> None:
    raw = {"source_type": "user", "priority": 2, "evoke_session": "conversation-42"}
    tags = RequestTags(source_type="user", priority=2.0, session="conversation-42")
    assert RequestTags.parse(raw) == (tags, ())


def test_an_unknown_role_is_a_role() -> None:
    assert RequestTags.parse({"source_type": "tool"}) == (RequestTags(source_type="tool"), ())


@pytest.mark.parametrize("raw", ["user", 3, True, [], ["priority", 2], ("source_type",), b"x"])
def test_what_is_no_mapping(raw: object) -> None:
    tags, problems = RequestTags.parse(raw)
    assert tags == RequestTags()
    assert [problem.tag for problem in problems] == ["evoke"]


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        *[("source_type", value) for value in ("", 3, None, ["user"], b"user", "x" * 257)],
        *[("evoke_session", value) for value in ("", 3, None, {"a": 1}, "x" * 257)],
        *[
            ("priority", value)
            for value in ("2", None, True, [2], math.nan, math.inf, -math.inf, 10**400)
        ],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_malformed_tag_is_reported_and_the_rest_is_used(tag: str, value: object) -> None:
    good = {"source_type": "user", "priority": 2.0, "evoke_session": "s"}
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
