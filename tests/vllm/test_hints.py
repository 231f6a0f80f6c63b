# SPDX-License-Identifier: Apache-2.0
"""Where tags are found in a request's context, which count, and that nothing there raises."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from evoke_core import RequestTags, Span
from evoke_vllm.hints import ACTION_TYPE, MAX_ACTIONS, read_tags
from evoke_vllm.manager import EvokeOffloadingManager

pytestmark = pytest.mark.engine


def context(params: Any = None, **hints: Any) -> Any:
    return SimpleNamespace(req_id="r", kv_transfer_params=params, **hints)


def action(payload: Any, action_type: str = ACTION_TYPE) -> Any:
    """As vLLM 0.31 defines an action: a struct."""
    return SimpleNamespace(
        action_id="1", action_type=action_type, action_version="1.0", payload=payload
    )


def envelope(*actions: Any) -> Any:
    return SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))


def test_mapping_and_flat_keys() -> None:
    tags, problems = read_tags(
        context(
            {
                "evoke": {"priority": 2},
                "lmcache.evoke.priority": "8",
                "lmcache.evoke.pinned": "true",
                "lmcache.evoke.source_type": "user",
                "lmcache.other": "is not ours",
                "do_remote_decode": False,
            }
        ),
        32,
    )
    assert tags == RequestTags(priority=2, pinned=True, source_type="user")
    assert problems == ()


def test_spans_are_handed_on_in_blocks() -> None:
    spans = [{"start": 0, "end": 100, "source_type": "system"}]
    tags, _ = read_tags(context({"evoke": {"spans": spans}}), 32)
    assert tags.spans == (Span(0, 3, "system"),)


@pytest.mark.parametrize(
    "hints",
    [
        envelope(action({"pinned": True, "priority": 4})),
        envelope(action({"priority": 9}, "kv.retain"), action({"pinned": True, "priority": 4})),
        {"actions": [vars(action({"pinned": True, "priority": 4}))]},
        {"evoke": {"pinned": True, "priority": 4}},
    ],
)
def test_an_envelope_counts_where_the_client_says_nothing(hints: Any) -> None:
    assert read_tags(context(kv_hints=hints), 1)[0] == RequestTags(pinned=True, priority=4)
    for params in ({"evoke": {"priority": 2}}, {"lmcache.evoke.priority": "2"}):
        tags, problems = read_tags(context(params, kv_hints=hints), 1)
        assert tags == RequestTags(pinned=True, priority=2)
        assert problems == ()


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "hints",
    [
        None,
        7,
        "evoke",
        [],
        {},
        {"evoke": "pinned"},
        {"actions": 3},
        {"actions": [None, 7, {}, {"action_type": ACTION_TYPE}]},
        envelope(action(None), action([1]), action({7: True})),
        envelope(Hostile()),
        Hostile(),
        SimpleNamespace(actions=None),
    ],
    ids=repr,
)
def test_an_envelope_without_tags_of_ours(hints: Any) -> None:
    assert read_tags(context(kv_hints=hints), 1) == (RequestTags(), ())
    assert read_tags(context({"evoke": {"priority": 2}}, kv_hints=hints), 1)[0].priority == 2


def test_of_a_long_envelope_only_so_much_is_read() -> None:
    hints = envelope(*[action({"priority": 2})] * MAX_ACTIONS, action({"priority": 8}))
    assert read_tags(context(kv_hints=hints), 1)[0].priority == 2


def test_an_envelopes_malformed_tags_are_counted() -> None:
    _, problems = read_tags(context(kv_hints={"evoke": {"ttl_s": "soon", "colour": 1}}), 1)
    assert [(problem.tag, problem.reason) for problem in problems] == [
        ("ttl_s", "not a number"),
        ("unknown", "unknown tag"),
    ]


def test_tags_of_an_envelope_reach_the_manager() -> None:
    manager = EvokeOffloadingManager(8)
    ctx = context(kv_hints=envelope(action({"source_type": "system"})))
    manager.on_new_request(ctx)
    assert manager.ledger.index.tags("r") == RequestTags(source_type="system")
