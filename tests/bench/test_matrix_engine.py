"""The short matrix on real servers, with a tiny random model: from nothing to a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ROOT
from bench.matrix.results import Plan, load_cells

pytestmark = pytest.mark.engine

_LIMIT_S = 1200


def _bench(*args: object) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "bench", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "EVOKE_POLICY": "lru"},  # must not reach the servers
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
    return process.stdout


def test_the_short_matrix_from_nothing_to_a_report(tmp_path: Path) -> None:
    run = ("run", "--matrix", "cpu-short", "--cache", tmp_path / "cache", "--results", tmp_path)
    _bench(*run)
    cells = {cell.cell: cell for cell in load_cells(tmp_path)}
    plan = Plan.load(tmp_path)
    assert cells.keys() == {planned.cell for planned in plan.cells}
    assert {planned.digest for planned in plan.cells} == {c.digest for c in cells.values()}

    lru, evoke = cells["w1s-A1-1.6xhot-seed0"], cells["w1s-A2-1.6xhot-seed0"]
    assert evoke.metrics["restored"] > lru.metrics["restored"]
    assert [r.answer for r in evoke.rows] == [r.answer for r in lru.rows]
    for cell in cells.values():
        assert cell.metrics["asked"] == sum(row.asked for row in cell.rows)
        assert 0 < cell.scheduler["manager_ns"] < cell.scheduler["step_ns"]
        assert cell.scheduler["lookup_ns"] > 0
    chats = cells["w4-A2-50pct-seed0"]
    assert chats.open_loop
    found = chats.metrics["in_gpu"] + chats.metrics["restored"]
    assert sum(row.cached for row in chats.rows) == found > 0

    assert "0 cells to run, 4 finished" in _bench(*run)
    _bench("report", "--matrix", "cpu-short", "--results", tmp_path)
    assert "Primary grid: 4 of 4 cells" in (tmp_path / "REPORT.md").read_text()
    assert "<svg" in (tmp_path / "REPORT.html").read_text()
    assert "better" in _bench("compare", "A2", "A1", "--results", tmp_path)
    for path in tmp_path.glob("w*.json"):
        assert str(tmp_path) not in json.dumps(json.loads(path.read_text()))
