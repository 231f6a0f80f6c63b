"""Every tag, over HTTP, against a real server: what it changes, and that it does not without it.

Each test begins with an empty tier of six contexts. A *scan* asks about eight that never return:
what survives it was kept for a reason.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.tier import BLOCK, CONTEXT, TIER, Prompt, Tier, serving

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    """One server for all: ranked by the score, half a tier for each session, MultiConnector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # resets over HTTP
        folder = tmp_path_factory.mktemp("tags")
        settings = {"policy": "scored", "recency_half_life": 8, "max_session_fraction": 0.5}
        with serving(folder, multi=True, **settings) as tier:
            yield tier


@pytest.fixture
def tier(server: Tier) -> Tier:
    server.reset()
    return server


def survives(tier: Tier, tags: dict[str, Any] | None = None, **params: Any) -> int:
    """Blocks of a context, asked about once with these tags, that are left after a scan."""
    context = tier.fresh()
    tier.ask(context, tags, **params)
    tier.scan()
    return tier.recall(context)


def test_without_tags_a_scan_takes_everything(tier: Tier) -> None:
    assert survives(tier) == 0


@pytest.mark.parametrize(
    "tags",
    [
        {"source_type": "system"},
        {"priority": 8},
        {"pinned": True},
        {"expect_reuse_in_s": 600},
        {"ttl_s": 600},
        {"spans": [{"start": 0, "end": CONTEXT * BLOCK, "priority": 8}]},
    ],
    ids=lambda tags: next(iter(tags)),
)
def test_what_keeps_a_context(tier: Tier, tags: dict[str, Any]) -> None:
    assert survives(tier, tags) == CONTEXT
    tier.reset()
    flat: dict[str, Any] = {
        f"lmcache.evoke.{tag}": value if isinstance(value, str) else json.dumps(value)
        for tag, value in tags.items()
    }
    assert survives(tier, **flat) == CONTEXT


@pytest.mark.parametrize(
    "tags",
    [
        {"source_type": "nobody knows"},
        {"priority": "high"},
        {"pinned": "yes"},
        {"expect_reuse_in_s": [600]},
        {"spans": [{"start": 9, "end": 3, "priority": 8}, 7]},
        {"evoke_session": 12, "end_of_session": True},
        {"no_store": 0, "ttl_s": "NaN"},
        {"hold": True},
        [1, 2],
        "pinned",
    ],
    ids=str,
)
def test_what_cannot_be_used_changes_nothing(tier: Tier, tags: Any) -> None:
    assert survives(tier, evoke=tags) == 0
    context = tier.fresh()
    tier.ask(context, evoke=tags)
    assert tier.recall(context) == CONTEXT


def test_pins_have_a_limit(tier: Tier) -> None:
    """A quarter of the tier, 12 blocks: the newest pin whole, the head of the one before."""
    first, second = tier.fresh(), tier.fresh()
    tier.ask(first, {"pinned": True})
    tier.ask(second, {"pinned": True})
    tier.scan(40, priority=10)
    assert tier.recall(second) == CONTEXT
    assert tier.recall(first) == TIER // 4 - CONTEXT


def test_spans_protect_the_system_part(tier: Tier) -> None:
    system = {"start": 0, "end": 3 * BLOCK + 20, "source_type": "system", "priority": 4}
    assert survives(tier, {"spans": [system]}) == 4
    system["end"] = 3 * BLOCK + 12
    tier.reset()
    assert survives(tier, {"spans": [system]}) == 3


def fill(tier: Tier, *contexts: Prompt) -> None:
    """Make the tier exactly full with contexts that come after these."""
    tier.scan(TIER // CONTEXT - len(contexts))


@pytest.mark.parametrize("told", [False, True])
def test_after_its_ttl_a_block_is_the_first_to_go(tier: Tier, told: bool) -> None:
    old, short = tier.fresh(), tier.fresh()
    tier.ask(old)
    fill(tier, old, short)
    tier.ask(short, {"ttl_s": 0.2} if told else None)
    time.sleep(0.3)
    tier.ask(tier.fresh())
    assert tier.recall(old) == (CONTEXT if told else 0)
    assert tier.recall(short) == (0 if told else CONTEXT)


def test_a_promise_that_is_not_kept_falls_back(tier: Tier) -> None:
    context = tier.fresh()
    tier.ask(context, {"expect_reuse_in_s": 0.2})
    time.sleep(0.3)
    tier.scan()
    assert tier.recall(context) == 0


@pytest.mark.parametrize("told", [False, True])
def test_the_end_of_a_session_frees_what_was_its_own(tier: Tier, told: bool) -> None:
    shared, own, old = tier.fresh(4), tier.fresh(4), tier.fresh()
    tier.ask(old)
    tier.ask(shared + tier.fresh(4), {"evoke_session": "other"})
    tier.scan(3)
    tier.ask(shared + own, {"evoke_session": "mine", "end_of_session": told})
    tier.ask(tier.fresh())  # room for half of it
    assert tier.recall(shared + own) == (4 if told else CONTEXT)
    assert tier.recall(old) == (CONTEXT if told else 4)


@pytest.mark.parametrize("told", [False, True])
def test_no_store_stores_nothing_new(tier: Tier, told: bool) -> None:
    context = tier.fresh()
    before = tier.stored()
    tier.ask(context, {"no_store": told})
    assert tier.stored() - before == (0 if told else CONTEXT)
    assert tier.recall(context) == (0 if told else CONTEXT)


@pytest.mark.parametrize("told", [False, True])
def test_a_session_over_its_share_gives_its_own_blocks(tier: Tier, told: bool) -> None:
    context = tier.fresh()
    tier.ask(context, {"evoke_session": "quiet"} if told else None)
    tier.scan(9, **({"evoke_session": "greedy"} if told else {}))
    assert tier.recall(context) == (CONTEXT if told else 0)
