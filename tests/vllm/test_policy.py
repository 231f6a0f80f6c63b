# SPDX-License-Identifier: Apache-2.0
"""EvokeCachePolicy where vLLM puts it: in the stock manager of the stock spec, by configuration."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")
pytest.importorskip(
    "vllm.v1.kv_offload.cpu.policies.factory", reason="vLLM before 0.27 takes no other policy"
)

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies import base

from evoke_core import ConfigError
from evoke_vllm.compat import HAS_POSITIONS
from evoke_vllm.policy import MAX_OPEN, EvokeCachePolicy
from tests.vllm.engine import MiniEngine
from tests.vllm.shapes import BLOCK, HIT

pytestmark = pytest.mark.engine

new_block = getattr(base, "ChunkStatus", None) or base.BlockStatus  # in 0.27

STOCK = {
    "spec_name": "CPUOffloadingSpec",
    "spec_module_path": ...,
    "eviction_policy": "EvokeCachePolicy",
    "cache_policy_module_path": "evoke_vllm.policy",
}


def stock(blocks: int, **given: Any) -> tuple[MiniEngine, EvokeCachePolicy]:
    mini = MiniEngine(blocks, extra=STOCK, **given)
    assert type(mini.manager) is CPUOffloadingManager
    policy = mini.manager._policy
    assert type(policy) is EvokeCachePolicy
    return mini, policy


def test_the_stock_spec_takes_it_by_configuration() -> None:
    mini, policy = stock(20)
    assert mini.run("abcdefgh") == 0
    assert mini.run("abcdefgh") == 8 * BLOCK
    assert mini.run("abcdXY") == 4 * BLOCK
    assert len(policy.index) == 10
    key = policy.index.candidates(20)[-1]  # the head goes last
    view = policy.index.describe(key)
    assert view is not None
    assert (view.position, view.reuse) == (0, 3)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "lru")
    _, policy = stock(8)
    assert policy.index.config.policy == "lru"
    monkeypatch.setenv("EVOKE_POLICY", "mru")
    with pytest.raises(ConfigError, match="EVOKE_POLICY"):
        stock(8)
    monkeypatch.setenv("EVOKE_POLICY", "scored")
    monkeypatch.setenv("EVOKE_W_REUSE", "0.1")
    monkeypatch.setenv("EVOKE_W_ATTENTION", "0.2")
    with pytest.raises(ConfigError, match=r"EVOKE_W_ATTENTION.*allowed: 0"):
        stock(8)


def test_tags_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_POLICY", "scored")
    mini, policy = stock(8)
    mini.run("ab", params={"evoke": {"source_type": "system", "priority": 2.0}})
    for text in ("cdef", "ghij", "klmn"):
        mini.run(text)
    views = map(policy.index.describe, policy.index.candidates(8))
    assert {view.role for view in views if view is not None} == {None, "system"}
    assert mini.run("ab") == 2 * BLOCK


@pytest.mark.parametrize("window", [False, True])
def test_heads_outlive_tails_under_pressure(window: bool) -> None:
    """Whatever is evicted, what stays of a context can be restored from its head on."""
    mini, policy = stock(12, window=window)
    assert policy._windows == ({1} if window else set())
    texts = ["abcd", "efgh", "ijkl", "mnop"]
    for n in range(40):
        mini.run(texts[mini.random.randrange(4)] + "xyz"[: n % 3])
        for key in policy._blocks:
            view = policy.index.describe(key)
            assert view is not None
            if view.group == 0 and view.position:
                assert policy.index.parent(key) is not None
    assert mini.restored > 0
    assert policy.index.held == 0


def test_exactly_n_or_none_and_then_nothing_has_changed() -> None:
    mini, policy = stock(6)
    mini.run("abc")
    mini.run("xyz")
    keys = set(policy._blocks)
    before = policy.index.candidates(6)
    assert policy.evict(0, set()) == []
    assert policy.evict(7, set()) is None
    assert policy.evict(1, keys) is None
    assert policy.index.candidates(6) == before
    assert set(policy._blocks) == keys
    gone = policy.evict(1, set())
    assert gone is not None
    assert [key for key, _ in gone] == before[:1]
    assert set(policy._blocks) == keys - {before[0]}


def chain(text: str) -> list[Any]:
    return [text[: end + 1].encode().ljust(16, b"-") + bytes(4) for end in range(len(text))]


def store(policy: EvokeCachePolicy, request: str, keys: list[Any], *, announced: bool) -> None:
    """What the manager does with new keys where there is room."""
    context = ReqContext(request)
    (policy.on_store_miss if announced else policy.touch)(keys, context)
    for slot, key in enumerate(keys):
        block = new_block(slot)
        policy.insert(key, block)
        block.ref_cnt = 0
        policy.mark_evictable(key)


@pytest.mark.parametrize("announced", [False, True])
def test_a_request_that_stores_late_does_not_evict_its_own_chain(announced: bool) -> None:
    """Another request has named the same blocks since, and is over."""
    policy = EvokeCachePolicy(4, window_groups=())
    policy.touch(chain("abcd"), ReqContext("late"))
    store(policy, "other", chain("xyz"), announced=announced)
    policy.touch(chain("abcd"), ReqContext("between"))
    store(policy, "between", chain("a"), announced=announced)
    policy.on_request_finished((), set(), set(), ReqContext("between"))
    (policy.on_store_miss if announced else policy.touch)(chain("abcd")[1:], ReqContext("late"))
    assert policy.evict(4, set(chain("abcd")[1:])) is None  # for that, "a" would have to go
    gone = policy.evict(3, set(chain("abcd")[1:]))
    assert gone is not None
    assert [key for key, _ in gone] == chain("xyz")[::-1]


class Offering:
    """The stock manager alone, and requests that name their blocks as vLLM's scheduler does."""

    def __init__(self, blocks: int) -> None:
        self.manager: Any = CPUOffloadingManager(blocks, "EvokeCachePolicy", "evoke_vllm.policy")
        self.policy: EvokeCachePolicy = self.manager._policy
        self.named: dict[str, list[Any]] = {}

    def request(self, name: str, text: str) -> ReqContext:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        self.named[name] = chain(text)
        if HAS_POSITIONS:
            for n, key in enumerate(chain(text), 1):
                context.set_offload_key_position(key, n * BLOCK)
        self.touch(context)
        return context

    def touch(self, context: ReqContext) -> None:
        if not HAS_POSITIONS:  # from 0.31 on nobody does
            self.manager.touch(self.named[context.req_id], context)

    def store(self, context: ReqContext, keys: list[Any]) -> list[Any] | None:
        got = self.manager.prepare_store(keys, context)
        if got is None:
            return None
        self.touch(context)
        self.manager.complete_store(set(got.keys_to_store), context)
        return list(got.keys_to_store)

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def heads(self, keys: list[Any]) -> list[Any]:
        """Each block's position and parent, by what the policy took its place to be."""
        index = self.policy.index
        views = map(index.describe, keys)
        return [view and (view.position, index.parent(view.key)) for view in views]


def in_place(text: str) -> list[Any]:
    return list(enumerate([None, *chain(text)][: len(text)]))


def test_what_is_offered_again_is_filed_under_the_request_that_stores_it() -> None:
    """From 0.31 on a second offer is not announced; another request has offered in between."""
    tier = Offering(4)
    first = tier.request("first", "abcd")
    writing = tier.manager.prepare_store(chain("abcd"), first).keys_to_store
    late, between = tier.request("late", "xyz"), tier.request("between", "k")
    assert tier.store(late, chain("xyz")) is None
    assert tier.store(between, chain("k")) is None
    tier.manager.complete_store(set(writing), first)
    assert tier.store(late, chain("xyz")) == chain("xyz")
    assert tier.heads(chain("xyz")) == in_place("xyz")


def test_a_block_that_went_comes_back_to_its_place() -> None:
    """Its request stored it before, and from 0.31 on names it to nobody again."""
    tier = Offering(4)
    first = tier.request("first", "abcd")
    tier.store(first, chain("abcd"))
    other = tier.request("other", "xy")
    assert tier.store(other, chain("xy")) == chain("xy")
    assert tier.heads(chain("abcd")) == [*in_place("ab"), None, None]
    tier.touch(first)  # as it is looked at again
    assert tier.store(first, chain("abcd")[-2:]) == chain("abcd")[-2:]
    assert tier.heads(chain("abcd")) == in_place("abcd")


def test_a_use_counts_of_a_block_that_another_request_stored_meanwhile() -> None:
    tier = Offering(8)
    slow = tier.request("slow", "abcd")
    tier.store(slow, chain("a"))
    quick = tier.request("quick", "abcd")
    assert tier.store(quick, chain("abcd")) == chain("abcd")[1:]
    tier.end(quick)
    tier.touch(slow)
    assert tier.store(slow, chain("abcd")) == []
    tier.end(slow)
    views = map(tier.policy.index.describe, chain("abcd"))
    assert [view.reuse for view in views if view is not None] == [2, 2, 2, 2]


def test_a_failed_store_leaves_nothing() -> None:
    mini, policy = stock(6)
    context = ReqContext("r")
    keys: Any = [bytes([n]) * 32 + bytes(4) for n in range(3)]
    mini.manager.on_new_request(context)
    output = mini.manager.prepare_store(keys, context)
    assert output.keys_to_store == keys
    mini.manager.complete_store(keys[1:], context, success=False)
    mini.manager.complete_store(keys[:1], context)
    assert [mini.manager.lookup(key, context) == HIT for key in keys] == [True, False, False]
    assert (len(policy.index), policy.index.held) == (1, 0)
    mini.manager.reset_cache()
    assert len(policy.index) == 0


def test_requests_that_nobody_ends_do_not_pile_up() -> None:
    policy = EvokeCachePolicy(4, window_groups=())
    for n in range(MAX_OPEN + 50):
        policy.touch([bytes([n % 256]) * 36], ReqContext(f"r{n}"))
    assert policy.index.open_requests == MAX_OPEN
