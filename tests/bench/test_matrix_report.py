"""The report follows from saved cells alone: tables, targets, the page, the README's headline."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ROOT
from bench.errors import BenchError
from bench.matrix.compare import compare_arms, compare_folders
from bench.matrix.figures import CACHED, HOT_RESTORED, RESTORED, difference, value
from bench.matrix.page import render_page
from bench.matrix.readme import BEGIN, END, fill, headline
from bench.matrix.report import render
from bench.matrix.results import Plan, Planned, Result, finished, load_cells
from bench.matrix.targets import Verdict, verdicts
from tests.bench.matrix import plan_of, result, row

PUBLISHED = ROOT / "bench" / "published" / "cpu"
LRU = (row("hot", 8, 1.0), row("cold", 0, 1.1)) * 6
OURS = (row("hot", 60, 0.3), row("cold", 0, 1.1)) * 6


def cells() -> list[Result]:
    found = []
    for seed in range(3):
        found += [result("A1", LRU, seed), result("A2", OURS, seed)]
    return [*found, result("A0", tuple(replace(r, restored=0) for r in LRU))]


def verdict(found: list[Result], target: str, where: str = "w1s, 1.6x hot") -> Verdict:
    [one] = [v for v in verdicts(found) if v.target.startswith(target) and v.where == where]
    return one


def test_cells_and_plans_survive_a_file(tmp_path: Path) -> None:
    for cell in cells():
        assert Result.load(cell.save(tmp_path)) == cell
    plan = plan_of(cells())
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    assert sorted(c.cell for c in load_cells(tmp_path)) == sorted(c.cell for c in cells())
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BenchError, match=r"other\.json is not a"):
        load_cells(tmp_path)


def test_only_a_whole_file_of_this_configuration_is_finished(tmp_path: Path) -> None:
    cell = result("A2", OURS)
    path = cell.save(tmp_path)
    assert finished(tmp_path, cell.cell, "d")
    assert not finished(tmp_path, cell.cell, "another")
    assert not finished(tmp_path, "w1s-A1", "d")
    path.write_text(path.read_text()[:200])
    assert not finished(tmp_path, cell.cell, "d")


def test_figures_are_what_the_rows_say() -> None:
    runs = {0: result("A2", OURS)}
    hot, every, cached = (value(runs, f) for f in (HOT_RESTORED, RESTORED, CACHED))
    assert hot is not None
    assert every is not None
    assert cached is not None
    assert hot.value == pytest.approx(60 / 80)
    assert every.value == pytest.approx(60 / 160)
    assert cached.value == pytest.approx(100 / 200)


def test_an_open_loop_takes_the_servers_totals() -> None:
    rows = tuple(replace(r, in_gpu=None, restored=None) for r in OURS)
    found = value({0: result("A2", rows, open_loop=True)}, RESTORED)
    assert found is not None
    assert found.value == pytest.approx(40 / 80)


def test_without_a_tier_nothing_is_restored_or_missed() -> None:
    assert value({0: result("A0", LRU)}, RESTORED) is None


def test_cells_that_asked_something_else_are_not_compared() -> None:
    with pytest.raises(BenchError, match="did not ask the same"):
        difference({0: result("A2", OURS)}, {0: result("A1", LRU[1:])}, RESTORED)


def test_targets_are_met_by_what_meets_them() -> None:
    found = cells()
    assert verdict(found, "hot restore hits at least 30").holds is True  # 75% against 10%
    assert verdict(found, "all requests' restore hits").holds is True
    assert verdict(found, "hot mean TTFT at most half").holds is True  # 0.3 s against 1.0 s
    assert verdict(found, "answers with the tier").holds is True
    assert verdict(found, "manager time per step", "all").found.startswith("1.00 times")
    assert verdict(found, "manager time below 1%", "all").found == "0.200%"
    assert verdict(found, "no loss", "w3").holds is None


@pytest.mark.parametrize(
    ("target", "where", "rows", "more"),
    [
        ("hot restore hits at least 30", None, (row("hot", 31, 0.3), row("cold", 0, 1.1)) * 6, {}),
        ("all requests' restore hits", None, LRU, {}),
        ("hot mean TTFT at most half", None, (row("hot", 60, 0.51), row("cold", 0, 1.1)) * 6, {}),
        ("answers with the tier", None, tuple(replace(r, score=0.5) for r in OURS), {}),
        ("manager time per step", "all", OURS, {"manager_ns": 4_100_000}),
        ("manager time below 1%", "all", OURS, {"manager_ns": 11_000_000}),
    ],
)
def test_targets_are_missed(
    target: str, where: str | None, rows: tuple, more: dict[str, int]
) -> None:
    found = []
    for cell in cells():
        if cell.arm == "A2":
            cell = replace(cell, rows=rows, scheduler={**cell.scheduler, **more})
        found.append(cell)
    assert verdict(found, target, where or "w1s, 1.6x hot").holds is False


@pytest.mark.parametrize(("ours", "holds"), [(8, True), (7, True), (4, False)])
def test_no_loss_allows_three_points(ours: int, holds: bool) -> None:
    found = []
    for seed in range(2):
        found.append(result("A1", (row("all", 8),) * 8, seed, label="w5", workload="w5"))
        found.append(result("A2", (row("all", ours),) * 8, seed, label="w5", workload="w5"))
    assert verdict(found, "no loss", "w5, 1.6x hot").holds is holds


def test_the_report_says_what_ran_and_what_did_not() -> None:
    unrun = (
        Planned("x", "w1s", "A4", "1.6x hot", 0, "primary", "d", "no GPU"),
        Planned("y", "w1", "A1a", "55%", 0, "secondary", "d"),
    )
    reference = {
        "workload": "w1s",
        "budget": "1.6x hot",
        "arm": "A2",
        "figure": "restored",
        "value": 0.58,
    }
    plan = plan_of(cells(), *unrun, references=(reference,))
    text = render(plan, cells())
    assert "Primary grid: 7 of 8 cells; secondary grid: 0 of 1 cells" in text
    assert "cannot run here: no GPU" in text
    assert "| secondary | w1 55% | A1a: stock tier, ARC | 0 | not run |" in text
    assert "75.0% (75.0 to 75.0)" in text
    assert "| A2 minus A1, 1.6x hot |" in text
    assert "| 58.0% | 37.5% (" in text
    assert "50.0%, hot 60.0%" in text  # predicted
    assert "manager" in text
    assert str(Path.home()) not in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1, rows  # a table with a ragged edge


def test_the_page_needs_nothing_else() -> None:
    page = render_page(plan_of(cells()), cells())
    assert page == render_page(plan_of(cells()), cells())
    assert "<svg" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "75%" in page
    assert page.count("<table") == page.count("</table>")


def test_a_report_of_nothing_says_so() -> None:
    plan = plan_of([], Planned("y", "w1", "A1", "55%", 0, "primary", "d"))
    assert "No cell of this matrix has been measured yet" in render(plan, [])
    assert "No cell" in render_page(plan, [])


def test_comparing_arms_and_folders() -> None:
    found = {line[1]: line for line in compare_arms(cells(), "A2", "A1")}
    assert found["restore hits, hot"][6] == "better"
    assert found["hot TTFT"][6] == "better"
    assert found["answers right"][6] == "not significant"
    assert {line[6] for line in compare_arms(cells(), "A1", "A2")} == {"worse", "not significant"}
    assert compare_arms(cells(), "A2", "A0")
    assert {line[6] for line in compare_folders(cells(), cells())} == {"not significant"}


def test_the_headline_goes_between_its_markers() -> None:
    found = cells()
    text = fill(f"before\n{BEGIN}\nold\n{END}\nafter\n", plan_of(found), found)
    assert "old" not in text
    assert "| W1S, 1.6x hot | EVOKE | 37.5% | 75.0% | 0.30 s | 100.0% |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert fill(text, plan_of(found), found) == text
    with pytest.raises(BenchError, match="markers"):
        fill("none", plan_of(found), found)


def test_the_readme_and_the_report_follow_from_the_published_cells() -> None:
    """What is committed is what the published cells give, to the letter."""
    readme = (ROOT / "README.md").read_text()
    if not PUBLISHED.is_dir():
        assert f"{BEGIN}\nNot measured yet.\n{END}" in readme
        return
    plan, found = Plan.load(PUBLISHED), load_cells(PUBLISHED)
    assert fill(readme, plan, found) == readme
    assert headline(plan, found) in readme
    assert (ROOT / "bench" / "REPORT.md").read_text() == render(plan, found)
    for path in PUBLISHED.glob("*.json"):
        assert "127.0.0.1" not in path.read_text()
        json.loads(path.read_text())
