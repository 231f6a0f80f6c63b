# SPDX-License-Identifier: Apache-2.0
"""EVOKE as the primary tier of vLLM's tiering, with files behind it that are written and read.

vLLM's own scheduler, tiering manager and file-system tier run; the engine's memory and the primary
tier are real bytes, so that a block is right exactly when its bytes went to a file and came back.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

import numpy as np
from vllm.v1.kv_offload.base import ReqContext

from evoke_core import BlockState, ConfigError
from evoke_vllm import compat
from evoke_vllm.tiering import EvokePrimaryTier
from tests.vllm.engine import MiniEngine, tokens_of
from tests.vllm.shapes import BLOCK, PAGE, create_spec

pytestmark = pytest.mark.engine

TIERING = {"spec_name": "EvokeTieringSpec", "spec_module_path": "evoke_vllm.tiering"}


def files(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1}]


class TieredEngine(MiniEngine):
    """The tier's memory is the primary tier's own: numbers are written into it as bytes."""

    def __init__(self, blocks: int, folder: Path, **given: Any) -> None:
        extra = TIERING | {"secondary_tiers": files(folder)}
        super().__init__(blocks, extra=extra, **given)
        view = self.manager.primary_tier.get_kv_memoryview()
        rows = np.frombuffer(view, dtype=np.int64).reshape(blocks, -1)
        self.tier = rows[:, 0]
        rows[:] = -1

    def step(self) -> None:
        super().step()
        if self.manager.has_pending_work():
            time.sleep(0.002)  # files take their time

    @property
    def idle(self) -> bool:
        return super().idle and not self.manager.has_pending_work()

    def close(self) -> None:
        self.tier = np.zeros(0, dtype=np.int64)
        self.connector.shutdown()

    @property
    def primary(self) -> EvokePrimaryTier:
        tier = self.manager.primary_tier
        assert type(tier) is EvokePrimaryTier
        return tier


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    made: list[TieredEngine] = []

    def make(blocks: int, **given: Any) -> TieredEngine:
        made.append(TieredEngine(blocks, tmp_path / "kv", **given))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def written(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*.bin") if path.stat().st_size >= PAGE)


def test_what_left_the_primary_tier_comes_back_from_files(engines: Any, tmp_path: Path) -> None:
    mini = engines(6, seed=1)
    assert mini.run("abcd") == 0
    assert written(tmp_path) == 4
    for _ in range(4):  # push it out of the primary tier
        mini.run("uvwxyz")
    assert mini.primary.ledger.stats.evicted > 0
    assert mini.run("abcd") == 4 * BLOCK
    assert mini.restored >= 4
    stats = mini.primary.ledger.stats
    assert (stats.open_requests, stats.pending, stats.held) == (0, 0, 0)
    assert stats.resident + stats.free == stats.capacity


def test_another_engine_finds_the_files(engines: Any) -> None:
    engines(6, seed=1).run("abcd")
    other = engines(6, seed=2)
    assert other.primary.ledger.stats.resident == 0
    assert other.run("abcdef") == 4 * BLOCK


def test_a_promotion_that_does_not_fit_is_a_miss_and_not_a_loop(engines: Any) -> None:
    """The engine asks at every step for what is said to be on its way."""
    mini = engines(8, seed=1)
    mini.run("abcdefgh")
    small = engines(3, seed=2)
    request = small.add("r", tokens_of("abcdefgh"))
    for _ in range(400):
        small.step()
        if request.is_finished():
            break
        time.sleep(0.002)  # whether a file is there is looked up in the background, too
    assert request.is_finished()
    small.finish_transfers()
    assert small.hits.get("r", 0) <= 3 * BLOCK
    stats = small.primary.ledger.stats
    assert (stats.pending, stats.held) == (0, 0)


def test_many_requests_through_both_tiers(engines: Any) -> None:
    """Every restored block holds what was computed for it, wherever it has been."""
    mini = engines(8, seed=3)
    prompts = ["abcdef", "abcxyz", "mnopqr", "mnopst", "uvwxyz", "ghijkl"]
    restored = 0
    for n in range(48):
        restored += mini.run(mini.random.choice(prompts), chunk=mini.random.choice([2, 8]))
        if n == 24:
            mini.connector.reset_cache()
    assert restored > 20 * BLOCK
    assert mini.primary.ledger.stats.evicted > 0


def test_a_refused_promotion_says_full(tmp_path: Path) -> None:
    """Whatever the reason of a refusal, the tiering manager must not wait for it."""
    spec = create_spec(TIERING | {"cpu_bytes_to_use": 2 * PAGE, "secondary_tiers": []})
    manager: Any = spec.get_manager()
    try:
        primary = manager.primary_tier
        context = ReqContext("r")
        keys = [bytes([n]) * 32 + bytes(4) for n in range(5)]
        missing, found = compat.LOOKUP[BlockState.ABSENT], compat.LOOKUP[BlockState.READY]
        assert [primary.lookup(key, context) for key in keys] == [missing] * 5
        if compat.HAS_POSITIONS:
            for at, key in enumerate(keys):
                context.set_offload_key_position(key, (at + 1) * BLOCK)
        for key in keys[:2]:  # up to 0.30 what was looked up is the chain, until it is named
            assert primary.prepare_write([key], context).keys_to_store == [key]
            primary.complete_write({key}, context)
        if not compat.HAS_POSITIONS:
            primary.touch(keys, context)
        assert primary.prepare_write([keys[2]], context) is None  # its own chain fills the tier
        assert primary.prepare_write([keys[4]], context) is None  # behind a gap
        assert [primary.lookup(key, context) for key in keys] == [found] * 2 + [missing] * 3
        primary.on_request_finished(context)
        assert primary.ledger.stats.open_requests == 0
    finally:
        manager.shutdown()


def test_a_cascade_holds_blocks_and_is_no_reuse(tmp_path: Path) -> None:
    spec = create_spec(TIERING | {"cpu_bytes_to_use": 2 * PAGE, "secondary_tiers": []})
    manager: Any = spec.get_manager()
    try:
        primary = manager.primary_tier
        context = ReqContext("r")
        key = bytes(36)
        if compat.HAS_POSITIONS:
            context.set_offload_key_position(key, BLOCK)
        primary.lookup(key, context)
        primary.prepare_store([key], context)
        primary.complete_store({key}, context)
        before = primary.ledger.index.describe(key).reuse
        spec_read = primary.prepare_read([key], context)
        assert primary.ledger.stats.held == 1
        assert len(spec_read.block_ids) == 1
        primary.complete_read([key], context)
        view = primary.ledger.index.describe(key)
        assert (view.held, view.reuse) == (0, before)
    finally:
        manager.shutdown()


def test_a_threshold_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="store_threshold = 3") as caught:
        create_spec(TIERING | {"store_threshold": 3})
    assert "\n" not in str(caught.value)
