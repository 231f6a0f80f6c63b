# SPDX-License-Identifier: Apache-2.0
"""Window blocks that no hit can use are counted, exactly."""

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

import vllm.version
from packaging.version import Version
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from evoke_core import Decision
from evoke_vllm import metrics
from evoke_vllm.hybrid import WindowUse
from evoke_vllm.manager import EvokeOffloadingManager
from tests.vllm.conversations import ARMS, conversations, share_restored
from tests.vllm.shapes import create_spec, full, window

pytestmark = pytest.mark.engine


def decision(kind: Any, content: int, group: int, reason: str = "") -> Decision:
    key = bytes([content]) * 32 + group.to_bytes(4, "big")
    return Decision(kind=kind, keys=[key], reason=reason, age=0, role=None, group=group)


def test_counted_as_by_hand() -> None:
    """Two groups of full attention, two windows; everything comes and goes at random."""
    use = WindowUse(windows={1, 3}, full={0, 2})
    rng = random.Random(0)
    there: set[tuple[int, int]] = set()
    shown = set()
    for _ in range(3_000):
        block = (rng.randrange(6), rng.randrange(4))
        kind = "evicted" if block in there else "stored"
        use.decided([decision(kind, *block, "capacity" if kind == "evicted" else "")])
        there ^= {block}
        unneeded = [
            (content, group)
            for content, group in there
            if group in {1, 3} and not {(content, 0), (content, 2)} <= there
        ]
        assert use.unneeded == len(unneeded)
        shown.add(use.unneeded)
        if rng.random() < 0.005:
            use.decided([decision("evicted", 9, 0, "reset")])
            there.clear()
            assert use.unneeded == 0
    assert len(shown) > 5


def test_only_for_hybrids_with_blocks_of_one_size() -> None:
    assert WindowUse.of({1}, {0: 16, 1: 16}) is not None
    assert WindowUse.of(set(), {0: 16}) is None
    assert WindowUse.of({0}, {0: 16}) is None
    assert WindowUse.of({1}, {0: 16, 1: 32}) is None
    assert WindowUse.of({1}, {}) is None


def test_the_share_is_reported_for_a_hybrid_model() -> None:
    """Two window blocks are stored of a prompt whose full-attention blocks are not all there."""
    manager = EvokeOffloadingManager(8, window_groups=[1], group_tokens={0: 4, 1: 4})
    keys = {group: [make_offload_key(bytes([n]) * 32, group) for n in range(4)] for group in (0, 1)}
    context = ReqContext("r")
    manager.on_new_request(context)
    manager.touch(keys[0], context)
    offer = [*keys[0][:3], *keys[1][2:]]
    assert manager.prepare_store(offer, context).keys_to_store == offer
    manager.complete_store(set(offer), context)
    stats: Any = manager.get_stats()
    assert stats.data["data"][metrics.UNNEEDED_RATIO][()] == 1 / 8
    manager.prepare_store(keys[0][3:], context)
    manager.complete_store(set(keys[0][3:]), context)
    stats = manager.get_stats()
    assert stats.data["data"][metrics.UNNEEDED_RATIO][()] == 0


def test_the_engines_groups_are_known() -> None:
    stats: Any = create_spec(layers=[full(), window()]).get_manager().get_stats()
    assert stats.data["data"][metrics.UNNEEDED_RATIO][()] == 0
    stats = create_spec().get_manager().get_stats()
    assert metrics.UNNEEDED_RATIO not in stats.data["data"]


@pytest.mark.parametrize("scans", [0.0, 0.5])
def test_conversations_are_kept_under_lru_as_by_stock(scans: float) -> None:
    """What the README advises for hybrid models. Blocks of a chain and its windows go together."""
    prompts = conversations(0, 200, scans=scans)
    stock, ours = (share_restored(prompts, 150, ARMS[name]) for name in ("stock LRU", "lru"))
    assert stock > 0.2
    assert ours > stock - 0.01


@pytest.mark.parametrize("named", [None, "adaptive"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_policy_of_a_hybrid_model_is_lru_where_windows_are_kept_at_ends(
    hybrid: bool, named: str | None
) -> None:
    layers = [full(), window()] if hybrid else [full()]
    extra = {"evoke": {"policy": named}} if named else {}
    manager = create_spec(extra=extra, layers=layers).get_manager()
    at_ends = Version(vllm.version.__version__.split("+")[0]) >= Version("0.30")
    expected = "lru" if hybrid and at_ends and named is None else "adaptive"
    assert manager.ledger.index.config.policy == expected
