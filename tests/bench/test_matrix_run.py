"""Runs cells against a stand-in for a server: order, resume, interruption, what a cell holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.__main__ import main
from bench.errors import BenchError, UsageProblem
from bench.matrix import run as running_module
from bench.matrix.cells import load_matrix
from bench.matrix.results import Plan, Result
from bench.matrix.run import Pace, duration, run_cells, waiting
from bench.progress import Reporter
from bench.serving.server import Server, ServerConfig
from tests.bench.fake_server import FakeEngine, serving
from tests.bench.matrix import MATRIX, bench, matrix, names

OPEN = """
title = "Open"
why = "for tests"
model = "tiny-random"
[server]
gpu_blocks = 33
max_model_len = 1024
layers = 2
kv_heads = 2
head_size = 32
[[grid]]
workload = "w4"
arms = ["A2"]
budgets = ["50%"]
options = { chats = 3, turns = 2, turn_tokens = 32, per_second = 50.0 }
"""


class Servers:
    """Starts a fake server for each cell; `stop_at` interrupts that many-th boot."""

    def __init__(self) -> None:
        self.booted: list[ServerConfig] = []
        self.engines: list[FakeEngine] = []
        self.alive = 0
        self.fail_at = self.stop_at = 0

    @contextmanager
    def running(self, config: ServerConfig, log: Path, **options: Any) -> Iterator[Server]:
        self.booted.append(config)
        if len(self.booted) == self.fail_at:
            raise BenchError("the server died at boot")
        extra = (config.kv_transfer or {}).get("kv_connector_extra_config", {})
        engine = FakeEngine()
        self.engines.append(engine)
        with serving(engine) as url:
            self.alive += 1
            try:
                if len(self.booted) == self.stop_at:
                    raise KeyboardInterrupt
                yield Server(url, log, 1.0)
            finally:
                self.alive -= 1
        if path := extra.get("bench_profile"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text('{"steps": 4, "calls": 9, "manager_ns": 5, "step_ns": 50}')


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(running_module, "running", made.running)
    return made


@pytest.fixture
def reporter() -> Reporter:
    return Reporter(Console(file=open("/dev/null", "w"), force_terminal=False))


def test_a_run_measures_every_cell_that_can_run(
    tmp_path: Path, servers: Servers, reporter: Reporter
) -> None:
    ready = bench(tmp_path)
    cells = [cell for cell in ready.matrix.cells if cell.part == "primary"]
    run_cells(ready, cells, tmp_path / "out", reporter)
    saved = sorted(path.stem for path in (tmp_path / "out").glob("w*.json"))
    assert saved == [
        "w1s-A1-1.6xhot-seed0",
        "w1s-A1-1.6xhot-seed1",
        "w1s-A2-1.6xhot-seed0",
        "w1s-A2-1.6xhot-seed1",
    ]
    assert [b.kv_transfer["kv_connector_extra_config"]["spec_name"] for b in servers.booted] == [  # type: ignore[index]
        *("Stock", "Evoke", "Stock", "Evoke")
    ]
    cell = Result.load(tmp_path / "out" / "w1s-A2-1.6xhot-seed0.json")
    assert len(cell.rows) == 12
    assert cell.metrics["asked"] == sum(row.asked for row in cell.rows)  # the warm-up is left out
    assert cell.scheduler["steps"] == 4
    assert cell.sizes["tier_blocks"] == int(1.6 * 8)
    assert {row.kind for row in cell.rows} == {"hot", "cold"}
    text = (tmp_path / "out" / "w1s-A2-1.6xhot-seed0.json").read_text()
    assert str(tmp_path) not in text
    assert "127.0.0.1" not in text
    plan = Plan.load(tmp_path / "out")
    assert len(plan.cells) == 6
    [refused] = [p.cannot_run for p in plan.cells if p.arm == "A4"]
    assert refused
    assert all(p.predicted is not None for p in plan.cells if p.arm == "A2")


def test_warm_up_text_is_not_the_workloads(
    tmp_path: Path, servers: Servers, reporter: Reporter
) -> None:
    ready = bench(tmp_path)
    run_cells(ready, ready.matrix.cells[:1], tmp_path / "out", reporter)
    sent = [body["prompt"] for body in servers.engines[0].bodies]
    asked = [list(each.prompt) for each in ready.work(ready.matrix.cells[0]).requests]
    assert sent[-len(asked) :] == asked
    warm = sent[: -len(asked)]
    assert warm
    assert not {tuple(p[:8]) for p in warm} & {tuple(p[:8]) for p in asked}


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, servers: Servers, reporter: Reporter
) -> None:
    ready = bench(tmp_path)
    cells, out = list(ready.matrix.cells[:4]), tmp_path / "out"
    servers.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_cells(ready, cells, out, reporter)
    assert servers.alive == 0
    assert names(waiting(cells, out, ())) == names(cells)[1:]
    first = (out / f"{cells[0].name}.json").read_bytes()
    (out / f"{cells[1].name}.json.part").write_text('{"schema": 1')  # half-written, by a kill
    run_cells(ready, cells, out, reporter)
    assert len(servers.booted) == 2 + 3
    assert waiting(cells, out, ()) == []
    assert (out / f"{cells[0].name}.json").read_bytes() == first
    run_cells(ready, cells, out, reporter)
    assert len(servers.booted) == 5, "finished cells are not repeated"


def test_a_changed_configuration_is_run_again(
    tmp_path: Path, servers: Servers, reporter: Reporter
) -> None:
    out = tmp_path / "out"
    ready = bench(tmp_path)
    run_cells(ready, ready.matrix.cells[:1], out, reporter)
    other = bench(tmp_path, MATRIX.replace("loops = 3", "loops = 4"))
    assert names(waiting(other.matrix.cells[:1], out, ())) == ["w1s-A1-1.6xhot-seed0"]
    slower = bench(tmp_path, MATRIX.replace("seconds = 10", "seconds = 99"))
    assert waiting(slower.matrix.cells[:1], out, ()) == []


def test_a_cell_that_fails_does_not_end_the_run(
    tmp_path: Path, servers: Servers, reporter: Reporter
) -> None:
    ready = bench(tmp_path)
    cells, out = list(ready.matrix.cells[:3]), tmp_path / "out"
    servers.fail_at = 1
    with pytest.raises(BenchError, match=r"1 cells failed, the first: w1s-A1-1\.6xhot-seed0"):
        run_cells(ready, cells, out, reporter)
    assert names(waiting(cells, out, ())) == names(cells)[:1]


def test_an_open_loop_sends_when_due(tmp_path: Path, servers: Servers, reporter: Reporter) -> None:
    ready = bench(tmp_path, OPEN)
    run_cells(ready, ready.matrix.cells, tmp_path / "out", reporter)
    cell = Result.load(tmp_path / "out" / "w4-A2-50pct-seed0.json")
    assert cell.open_loop
    assert len(cell.rows) == len(ready.work(ready.matrix.cells[0]).requests)
    assert all(row.in_gpu is None and row.restored is None for row in cell.rows)
    assert any("Poisson" in note for note in cell.notes)
    assert cell.metrics["asked"] == sum(row.asked for row in cell.rows)


def test_arms_of_a_seed_follow_each_other(tmp_path: Path) -> None:
    cells = matrix(tmp_path).cells
    assert [(c.seed, c.arm) for c in cells[:4]] == [(0, "A1"), (0, "A2"), (1, "A1"), (1, "A2")]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('title = "Small"', "", "title is missing"),
        ("targets", "tragets", "unknown key tragets; did you mean targets?"),
        ('workload = "w1"', 'workload = "w9"', "no workload 'w9'"),
        ('["A0"]', '["A9"]', "no arm 'A9'"),
        ('"1.6x hot"', '"much"', "budget 'much'; allowed"),
        ("layers", "layer", "unknown key server.layer; did you mean layers?"),
        ('arms = ["A4"]', 'arms = ["A1"]', "asked for twice"),
    ],
)
def test_a_wrong_matrix_is_refused_by_name(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageProblem, match=r"small\.toml") as caught:
        matrix(tmp_path, MATRIX.replace(old, new))
    assert problem in caught.value.message


def test_options_that_a_workload_does_not_know(tmp_path: Path) -> None:
    ready = bench(tmp_path, MATRIX.replace("hot = 2", "hat = 2"))
    with pytest.raises(UsageProblem, match="no option 'hat'"):
        ready.work(ready.matrix.cells[0])


def test_a_request_must_fit_the_pool(tmp_path: Path) -> None:
    ready = bench(tmp_path, MATRIX.replace("gpu_blocks = 17", "gpu_blocks = 4"))
    with pytest.raises(UsageProblem, match="does not fit"):
        ready.sizes(ready.matrix.cells[0])


def test_the_matrices_that_come_with_it() -> None:
    cpu = load_matrix("cpu")
    primary = [cell for cell in cpu.cells if cell.part == "primary"]
    assert 70 <= len(primary) <= 85
    for workload in ("w1", "w1s", "w6"):
        kept = [c for c in primary if c.label == workload]
        assert {c.arm for c in kept} >= {"A1", "A2", "A2p"}
        assert len({c.budget for c in kept if c.budget}) == 2
        assert {c.seed for c in kept} == {0, 1, 2}
    assert {c.arm for c in primary} >= {"A0", "A4"}
    assert len(load_matrix("gpu-16gb").cells) == 33
    assert len(load_matrix("gpu-16gb-skew").cells) == 4
    assert {c.arm for c in load_matrix("gpu-16gb").cells} == {"A0", "A1", "A2", "A3", "A4"}
    given = ("trace",)
    assert not any(c.cannot_run(given) for c in load_matrix("gpu-16gb").cells)
    asked = [c for c in load_matrix("gpu-16gb").cells if c.cannot_run(())]
    assert {c.workload for c in asked} == {"w3"}
    published = {r["figure"]: r["value"] for r in load_matrix("gpu-16gb-skew").references[1::2]}
    assert published == {"restored": 0.58, "hot_ttft": 0.42, "score": 0.48}


def test_time_left_learns_from_what_cells_took(tmp_path: Path) -> None:
    cells = matrix(tmp_path).cells[:4]
    pace = Pace(cells)
    assert pace.left(0) == duration(4 * 35)
    pace.took(cells[0], 70)
    assert pace.left(1) == duration(3 * 70)
    assert (duration(89), duration(7500)) == ("89 s", "2 h 05 min")


def test_plan_shows_what_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(MATRIX)
    out = tmp_path / "out"
    assert main(["plan", "--matrix", str(path), "--all", "--results", str(out)]) == 0
    text = capsys.readouterr().out
    assert "cannot run here" in text
    assert "5 of 6 cells to run: about" in text
    assert main(["plan", "--matrix", str(path), "--arms", "A9"]) == 2
    assert "no arm 'A9' in this matrix" in capsys.readouterr().err


def test_a_report_without_cells_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--results", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("Error: ")
