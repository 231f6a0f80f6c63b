"""The cost benchmarks measure what they say: the requests are served, the pools are full."""

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench import eviction_cost
from bench.__main__ import main
from bench.eviction_cost import BLOCKS, Conversations, Driver, measure
from bench.memory_cost import weigh
from evoke_core import EvokeConfig
from evoke_vllm.manager import EvokeOffloadingManager


def test_conversations_are_made_from_their_seed_and_return() -> None:
    first, same, other = Conversations(0), Conversations(0), Conversations(1)
    turns = [list(first.turn()) for _ in range(200)]
    assert turns == [list(same.turn()) for _ in range(200)]
    assert turns != [list(other.turn()) for _ in range(200)]
    known: set[bytes] = set()
    returning = 0
    for chain in turns:
        assert len(set(chain)) == len(chain)
        returning += chain[-9] in known
        known.update(chain)
    assert 100 < returning < 190


@pytest.mark.parametrize("name", ["lru", "evoke"])
def test_a_request_stores_what_is_missing_and_restores_the_rest(name: str) -> None:
    manager = CPUOffloadingManager(100) if name == "lru" else EvokeOffloadingManager(100)
    driver = Driver(manager)
    chain = Conversations(0).fresh(40)
    assert [driver.run(chain[:n]) for n in (10, 30, 30, 40)] == [0, 10, 30, 30]


def test_priorities_are_as_many_as_asked_for() -> None:
    manager = EvokeOffloadingManager(1_000)
    driver = Driver(manager, priorities=7)
    conversations = Conversations(0)
    for _ in range(21):
        driver.run(conversations.fresh(2))
    index = manager.ledger.index
    views = [index.describe(key) for key in manager.ledger._ready]
    assert len({view.priority for view in views if view is not None}) == 7


@pytest.mark.parametrize("priorities", [0, 50])
def test_both_managers_serve_the_measured_requests(priorities: int) -> None:
    seconds = measure(4 * BLOCKS, 10, 0, EvokeConfig().policy, priorities)
    assert {kind: set(by_manager) for kind, by_manager in seconds.items()} == {
        "miss": {"lru", "evoke"},
        "hit": {"lru", "evoke"},
    }
    assert all(len(taken) == 10 for each in seconds.values() for taken in each.values())


def test_the_command_replaces_the_pool_or_serves_as_many_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[int, int]] = []

    def slow(blocks: int, requests: int, *_: object) -> dict[str, dict[str, list[float]]]:
        served.append((blocks, requests))
        return {"miss": {"lru": [0.001, 0.002, 0.02], "evoke": [0.003, 0.004, 0.005]}}

    monkeypatch.setattr(eviction_cost, "measure", slow)
    assert main(["eviction-cost"]) == 0
    assert main(["eviction-cost", "--blocks", "5000", "--requests", "20"]) == 0
    assert served == [(10_000, 1_000), (100_000, 1_562), (1_000_000, 15_625), (5_000, 20)]
    lru, evoke = [
        [cell.strip() for cell in line.split("│")[4:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.partition("│")[2].strip().startswith("5,000 ")
    ]
    assert lru == ["7.667", "2.000", "20.000", "1", "1.00"]
    assert evoke == ["4.000", "4.000", "5.000", "0", "2.00"]


@pytest.mark.parametrize("name", ["lru", "evoke"])
def test_a_manager_is_weighed_when_nothing_it_keeps_can_grow(name: str) -> None:
    told: list[tuple[str, int]] = []
    weigh(name, 1_000, 0, EvokeConfig().policy, lambda *now: told.append(now))
    assert {each for each, _ in told} == {name}
    stored = [blocks for _, blocks in told]
    assert stored == sorted(stored)
    assert stored[-1] >= 5_500


def test_the_command_weighs_both_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory-cost", "--blocks", "1000"]) == 0
    [lru] = [line for line in capsys.readouterr().out.splitlines() if "│ stock LRU" in line]
    assert lru.split()[-2] == "1.00"
