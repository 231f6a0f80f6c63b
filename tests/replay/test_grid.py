"""Grids of cells: budgets, the gap to MIN, processes, and what cannot be asked for."""

import json
import subprocess
import sys
from typing import Any

import pytest

from evoke_core import EvokeConfig
from evoke_core.replay import Budget, ReplayError, generate, make_tier, replay, simulate

W1S = generate("w1s:blocks=5,rounds=8")


@pytest.mark.parametrize(
    ("text", "shown", "blocks"),
    [
        ("10%", "10%", 7),
        ("0.5%", "0.5%", 1),
        ("12", "12", 12),
        (30, "30", 30),
        ("100%", "100%", 80),
    ],
)
def test_budgets(text: Any, shown: str, blocks: int) -> None:
    trace = generate("w1s:blocks=5,rounds=8")  # 8 contexts of 5 blocks and 40 questions
    assert trace.unique_blocks == 80
    budget = Budget.parse("9.9%" if text == "10%" else text)
    assert budget.blocks(trace) == blocks
    assert str(Budget.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "0", "-1%", "1.5", "x", "nan", "inf", "5 %%"])
def test_budgets_that_cannot_be(text: str) -> None:
    with pytest.raises(ReplayError, match="is not allowed; allowed: a number of blocks"):
        Budget.parse(text)


def test_cells_come_as_asked_for_and_equal_single_simulations() -> None:
    [result] = replay(W1S, ["20%", 10], ["arc", "lru", "min"], jobs=1)
    assert [(cell.budget, cell.policy) for cell in result.cells] == [
        (budget, policy) for budget in ("20%", "10") for policy in ("arc", "lru", "min")
    ]
    for cell in result.cells:
        alone = simulate(W1S, make_tier(cell.policy, cell.capacity, W1S))
        assert cell.counts.hit_blocks == alone.hit_blocks
        assert cell.block_hits == alone.hit_blocks / W1S.references


def test_gap_closed() -> None:
    [result] = replay(W1S, ["40%"], ["lru", "wtinylfu", "min"], jobs=1)
    low, mid, high = (cell.block_hits for cell in result.cells)
    assert low < mid < high
    assert [cell.gap_closed for cell in result.cells] == [0, (mid - low) / (high - low), 1]
    [without] = replay(W1S, ["40%"], ["wtinylfu", "min"], jobs=1)
    assert without.cells[0].gap_closed is None
    [full] = replay(W1S, ["100%"], ["lru", "min"], jobs=1)
    assert full.cells[0].gap_closed is None  # there is no gap to close


def test_processes_change_nothing() -> None:
    def ratios(jobs: int) -> list[Any]:
        seen: list[str] = []
        results = replay(
            [W1S, generate("w1:blocks=4,rounds=5")],
            ["10%", "40%"],
            ["scored", "lru", "s3fifo", "min"],
            jobs=jobs,
            gpu_blocks=4,
            chunk=2,
            half="second",
            on_cell=lambda name, cell: seen.append(name),
        )
        assert len(seen) == 16
        cells = [cell for result in results for cell in result.cells]
        return [(c.policy, c.budget, c.block_hits, c.token_hits, c.gap_closed) for c in cells]

    assert ratios(1) == ratios(2)


def test_config_reaches_the_ledger() -> None:
    trace = generate("w1s:blocks=5,rounds=20")
    found = [
        replay(trace, ["30%"], ["scored"], jobs=1, config=config)[0].cells[0].counts.hit_blocks
        for config in (
            EvokeConfig(w_recency=1.0, w_reuse=0.0),
            EvokeConfig(w_recency=0.0, w_reuse=1.0),
        )
    ]
    assert found[0] != found[1]


def test_results_are_json() -> None:
    [result] = replay(W1S, ["40%"], ["lru", "min"], jobs=1)
    copy = json.loads(json.dumps(result.as_dict()))
    assert copy["cells"][1]["gap_closed"] == 1.0
    assert copy["cells"][0]["counts"]["requests"] == len(W1S)
    assert copy["ceiling"] == pytest.approx(1 - W1S.unique_blocks / W1S.references)
    assert result.cell("min", "40%").capacity == 32
    with pytest.raises(KeyError):
        result.cell("min", "41%")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policies": ["best"]}, "unknown policy 'best'; known: "),
        ({"policies": []}, "nothing to replay: no policy"),
        ({"budgets": []}, "nothing to replay: no budget"),
        ({"traces": []}, "nothing to replay: no trace"),
        ({"half": "third"}, "half = 'third' is not allowed"),
        ({"chunk": -1}, "chunk = -1 is not allowed"),
        ({"jobs": -2}, "jobs = -2 is not allowed"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], reason: str) -> None:
    asked: dict[str, Any] = {"traces": W1S, "budgets": ["1%"], "policies": ["lru"], **options}
    with pytest.raises(ReplayError, match=reason):
        replay(**asked)


def test_the_library_needs_no_extra_and_the_command_says_which() -> None:
    program = (
        "import sys\n"
        "for name in ('click', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "import evoke_core.replay\n"
        "from evoke_core.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: click is missing; the command needs the extra: pip install 'evoke-core[cli]'\n"
    )
