# SPDX-License-Identifier: Apache-2.0
"""One manager for all ranks: what the scheduler does while workers are late, or requests leave.

vLLM's own scheduler, with a world of two where it matters: a transfer has ended when both ranks
have said so. Every block that is read is checked (`engine.py`).
"""

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from tests.vllm.engine import Engine, Transfer, tokens_of
from tests.vllm.shapes import BLOCK, PAGE, create_spec

pytestmark = pytest.mark.engine


def warm(engine: Engine, text: str = "abcdefgh") -> None:
    """A prompt is in the tier and not in the engine's own pool."""
    engine.add("warm", tokens_of(text))
    engine.drain()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()


def quiet(engine: Engine) -> None:
    engine.report = lambda transfer: True
    engine.drain()
    stats = engine.manager.ledger.stats
    assert (stats.open_requests, stats.pending, stats.held) == (0, 0, 0)


def test_a_block_of_two_ranks_is_budgeted_for_both() -> None:
    budget = {"cpu_bytes_to_use": 8 * PAGE}
    one, two = (create_spec(budget, ranks=ranks).get_manager() for ranks in (1, 2))
    assert (one.ledger.capacity, two.ledger.capacity) == (8, 4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_store_is_readable_when_both_ranks_have_written_it(asynchronous: bool) -> None:
    engine = Engine(20, ranks=2, asynchronous=asynchronous)
    told: list[int] = []

    def once(transfer: Transfer) -> bool:
        told.append(transfer.job)
        return len(told) == 1

    engine.report = once
    engine.add("r", tokens_of("abcd"))
    for _ in range(6):
        engine.step()
    assert engine.transfers[0].ranks_left == 1, "one rank of two has reported"
    assert engine.manager.ledger.stats.pending == 4
    quiet(engine)
    assert engine.manager.ledger.stats.resident == 4
    assert engine.manager.ledger.stats.late == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_completion_after_the_request_has_ended(asynchronous: bool) -> None:
    engine = Engine(20, asynchronous=asynchronous)
    engine.report = lambda transfer: False
    engine.add("r", tokens_of("abcd"))
    for _ in range(6):
        engine.step()
    assert "r" not in engine.scheduler.requests
    assert engine.manager.ledger.stats.pending == 4
    quiet(engine)
    assert engine.manager.ledger.stats.resident == 4
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.add("again", tokens_of("abcd"))
    engine.drain()
    assert engine.hits == {"again": 4 * BLOCK}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_abort_while_loading(ranks: int) -> None:
    engine = Engine(20, ranks=ranks)
    warm(engine)
    engine.report = lambda transfer: False
    engine.add("r", tokens_of("abcdefgh"))
    engine.step()
    assert [transfer.load for transfer in engine.transfers] == [True]
    assert engine.manager.ledger.stats.held == 8
    engine.abort("r")
    for _ in range(3):
        engine.step()
    assert engine.manager.ledger.stats.held == 8, "the workers are still reading"
    quiet(engine)
    assert engine.manager.ledger.stats.resident == 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_requests_go_on_with_the_right_blocks(asynchronous: bool) -> None:
    """Two long answers in a pool for one and a half: the younger starts over, from the tier.

    They end inside a block: vLLM 0.27 stores one that the last token completes, and nobody computes
    the keys and values of that token.
    """
    everything = {"offload_prompt_only": False}
    engine = Engine(40, gpu_blocks=14, asynchronous=asynchronous, extra=everything)
    for name, text in (("one", "abcdef"), ("two", "uvwxyz")):
        engine.add(name, tokens_of(text), answer=5 * BLOCK + 1)
    engine.drain()
    assert engine.preempted > 0
    assert engine.restored > 0
    quiet(engine)


def test_a_reset_with_transfers_under_way() -> None:
    engine = Engine(20)
    if not engine.resets_in_flight:
        pytest.skip("this vLLM dies of it by itself (a KeyError in its scheduler, fixed later)")
    engine.report = lambda transfer: transfer.load
    engine.add("running", tokens_of("abcd"), answer=3 * BLOCK)
    for _ in range(3):
        engine.step()
    assert engine.manager.ledger.stats.pending == 4
    engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.manager.ledger.stats.resident == 0
    quiet(engine)
    assert engine.manager.ledger.stats.resident == 4, "it stored its prompt again"


def test_two_requests_wait_for_one_write() -> None:
    """A block that is being written is waited for, not computed again."""
    engine = Engine(20)
    writing: list[Transfer] = []
    engine.report = lambda transfer: transfer.load or bool(writing)
    engine.add("first", tokens_of("abcd"))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    for name in ("second", "third"):
        engine.add(name, tokens_of("abcd"))
    for _ in range(4):
        engine.step()
    assert engine.hits == {}
    writing.extend(engine.transfers)
    engine.drain()
    assert engine.hits["second"] == 4 * BLOCK
    quiet(engine)
