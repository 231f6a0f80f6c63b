# SPDX-License-Identifier: Apache-2.0
"""The gate of evoke-lmcache: its runtime, its damaged connectors, and all of it on a tiny model."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed here")

import torch

from bench.serving.tiny_model import prepare_tiny_model
from gates import __main__ as program
from gates.compare import load_verdict
from gates.lmcache.connector import PoolConnector
from gates.lmcache.runtime import Model, serving

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(prepare_tiny_model(tmp_path_factory.mktemp("cache")))


def prompt(name: int, blocks: int, more: int = 3) -> list[int]:
    return [(name * 37 + at * 11) % 250 for at in range(blocks * BLOCK + more)]


# --- the runtime ---


def test_a_small_pool_without_a_tier_gives_the_same_answers(model: Model) -> None:
    prompts = [prompt(n % 3, 4) for n in range(7)]
    with serving(model, BLOCK, 40, policy=None) as runtime:
        roomy = [runtime.answer(each, 4) for each in prompts]
    with serving(model, BLOCK, 6, policy=None) as runtime:
        small = [runtime.answer(each, 4) for each in prompts]
    assert [r.token_ids for r in small] == [r.token_ids for r in roomy]
    assert [r.logprobs for r in small] == [r.logprobs for r in roomy]  # to the bit
    assert [r.in_pool for r in roomy] == [0, 0, 0, *[4 * BLOCK] * 4]
    assert all(r.in_pool == 0 for r in small)
    assert all(r.restored == 0 for r in roomy + small)


def test_answers_are_the_models_own(model: Model) -> None:
    """Block by block from the pool, against all at once without one."""
    from transformers import DynamicCache

    tokens = prompt(1, 3)
    with serving(model, BLOCK, 8, policy=None) as runtime:
        runtime.answer(tokens, 1)
        reply = runtime.answer(tokens, 1)
    assert reply.in_pool == 3 * BLOCK
    logprobs = model.run(tokens, DynamicCache())
    assert reply.token_ids == (int(logprobs.argmax()),)
    assert reply.logprobs[0] == pytest.approx(float(logprobs.max()), abs=1e-4)


def test_the_last_token_is_computed_even_if_every_block_is_known(model: Model) -> None:
    tokens = prompt(1, 3, more=0)
    with serving(model, BLOCK, 8, policy=None) as runtime:
        first = runtime.answer(tokens, 2)
        again = runtime.answer(tokens, 2)
    assert again.in_pool == 2 * BLOCK
    assert again.logprobs == first.logprobs


def test_what_the_pool_lost_comes_back_from_lmcache(model: Model) -> None:
    prompts = [prompt(n % 3, 4) for n in range(6)]
    with serving(model, BLOCK, 6, policy="EVOKE", tier_blocks=16) as runtime:
        replies = [runtime.answer(each, 4) for each in prompts]
        assert runtime.connector is not None
        assert runtime.connector.stored_bytes > 0
        blocks = runtime.connector.restored_bytes // (BLOCK * 2 * 2 * 2 * 32 * 4)
    assert [r.restored for r in replies] == [0, 0, 0, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK]
    assert blocks == 12
    assert [r.logprobs for r in replies[3:]] == [r.logprobs for r in replies[:3]]


# --- damage ---


def copied(damage: str | None, contexts: list[bytes]) -> Iterator[tuple[list[float], list[float]]]:
    """Restore two blocks for each context; yield what was meant and what the pool has."""
    pool = torch.zeros((4, 1, 2, 2, 1, 8))
    connector = PoolConnector(pool, damage)
    for n, context in enumerate(contexts, 1):
        memory = [
            SimpleNamespace(tensor=torch.full(pool.shape[1:], 10.0 * n + k)) for k in range(2)
        ]
        connector.batched_to_gpu(memory, [0, 2], [2, 4], slots=[n % 2, 2 + n % 2], context=context)
        means = [10.0 * n, 10.0 * n + 1]
        has = [pool[slot].flatten() for slot in (n % 2, 2 + n % 2)]
        yield means, [float(v[0]) if bool((v == v[0]).all()) else float("nan") for v in has]
    assert connector.restored_bytes == len(contexts) * 2 * pool[0].nbytes


def test_without_damage_everything_arrives() -> None:
    for means, has in copied(None, [b"a", b"b", b"a"]):
        assert has == means


def test_a_flip_changes_one_value_of_the_last_block() -> None:
    for means, has in copied("flip", [b"a", b"b"]):
        assert has[0] == means[0]
        assert has[1] != has[1]  # no longer all the same


def test_a_stale_block_is_what_was_there() -> None:
    assert [has for _, has in copied("stale", [b"a", b"b", b"a"])] == [
        [10.0, 0.0],
        [20.0, 0.0],
        [30.0, 0.0],
    ]


def test_a_swap_takes_another_contexts_block() -> None:
    assert [has for _, has in copied("swap", [b"a", b"a", b"b", b"a"])] == [
        [10.0, 11.0],  # nobody to swap with yet
        [20.0, 21.0],
        [30.0, 21.0],
        [40.0, 31.0],
    ]


def test_an_unknown_damage_is_refused() -> None:
    with pytest.raises(ValueError, match="damage must be one of flip, swap, stale, not 'fire'"):
        PoolConnector(torch.zeros((1, 1, 2, 2, 1, 4)), "fire")


# --- the whole gate ---


def test_the_tiny_profile_passes_and_each_damaged_connector_is_seen(tmp_path: Path) -> None:
    args = ["run", "--package", "lmcache", "--profile", "tiny", "--results", str(tmp_path)]
    assert program.main([*args, "--cache", str(tmp_path / "cache")]) == 0
    verdict = load_verdict(tmp_path / "verdict.json")
    assert verdict["profile"] == "lmcache-tiny"
    assert verdict["counts"]["divergences"] == 0
    assert verdict["counts"]["largest_logprob_difference"] == 0
    assert verdict["counts"]["restored_probes"] >= 20
    for negative in verdict["negative_controls"].values():
        assert negative["verdict"] == "fail"
        assert negative["restored_divergences"] >= 5
