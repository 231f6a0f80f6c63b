"""The table and the closing line follow from saved runs alone."""

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ROOT
from bench.demo.report import Table, answers_line, make_table, restore_rate, role_lines
from bench.demo.results import Row, Run
from bench.envelope import machine, versions
from bench.errors import BenchError

TITLES = {"reference": "never evicting", "lru": "stock LRU", "evoke": "EVOKE"}


def row(kind: str, loop: int, in_gpu: int, restored: int, ttft_s: float) -> Row:
    return Row(
        context=f"{kind}-1",
        kind=kind,
        loop=loop,
        asked=100,
        in_gpu=in_gpu,
        queried=100 - in_gpu,
        restored=restored,
        ttft_s=ttft_s,
        latency_s=ttft_s + 1,
        token_ids=(1, 2),
    )


ROWS = (
    row("hot", 1, 0, 0, 1.0),
    row("cold", 1, 0, 0, 3.0),
    row("hot", 2, 50, 20, 0.6),
    row("cold", 2, 0, 0, 3.0),
    row("hot", 3, 20, 60, 0.2),
    row("cold", 3, 0, 0, 3.0),
)


def run(arm: str, rows: tuple[Row, ...] = ROWS, seed: int = 0) -> Run:
    return Run(
        arm=arm,
        workload="hot-cold",
        seed=seed,
        date="2025-01-02T03:04:05+00:00",
        wall_s=61.4,
        boot_s=30.0,
        configuration={"tier_blocks": 57},
        versions={"python": "3.11"},
        machine={"cores": 2},
        notes=("a note",),
        rows=rows,
    )


def without_tier(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(replace(r, queried=0, restored=0, in_gpu=80) for r in rows)


def cells(table: Table, line: int = 0) -> dict[str, str]:
    return dict(zip(table.headers, table.lines[line], strict=True))


def test_every_column_of_one_seed() -> None:
    assert cells(make_table([run("lru")], TITLES)) == {
        "arm": "stock LRU",
        "restore hits, all": "15%",  # 80 of 530
        "restore hits, hot": "35%",  # 80 of 230
        "hot from loop 3": "75%",  # 60 of 80
        "hot TTFT": "0.60 s",
        "hot TTFT, last loop": "0.20 s",
        "p50 TTFT": "2.00 s",
        "prefill tokens avoided": "150",
        "wall time": "61 s",
    }


def test_arms_in_order_and_no_rate_without_a_tier() -> None:
    runs = [run("evoke"), run("lru"), run("reference", without_tier(ROWS))]
    table = make_table(runs, TITLES)
    assert [line[0] for line in table.lines] == ["never evicting", "stock LRU", "EVOKE"]
    reference = cells(table)
    assert reference["restore hits, all"] == reference["hot from loop 3"] == "-"
    assert reference["prefill tokens avoided"] == "480"


def test_a_tier_that_never_hits_has_the_rate_zero() -> None:
    assert restore_rate([row("hot", 1, 0, 0, 1.0)]) == 0.0


def test_several_seeds_give_mean_and_range() -> None:
    better = tuple(replace(r, restored=100 - r.in_gpu) for r in ROWS)
    shown = cells(make_table([run("evoke"), run("evoke", better, seed=1)], TITLES))
    assert shown["hot from loop 3"] == "88% (75-100)"
    assert shown["wall time"] == "61 s (61-61)"


def test_one_class_of_requests_has_no_hot_columns() -> None:
    rows = tuple(replace(r, kind="trace", loop=1) for r in ROWS)
    table = make_table([run("lru", rows)], TITLES)
    assert not any("hot" in header for header in table.headers)
    assert cells(table)["mean TTFT"] == "1.80 s"


def test_markdown() -> None:
    table = Table(("arm", "x"), (("a", "1"), ("b", "2")))
    assert table.markdown() == "| arm | x |\n| --- | ---: |\n| a | 1 |\n| b | 2 |"


def test_equal_answers() -> None:
    runs = [run("reference"), run("lru"), run("evoke")]
    assert answers_line(runs) == "Answers: all 12 equal the reference's, token for token."


def test_different_answers_are_named() -> None:
    wrong = (*ROWS[:2], replace(ROWS[2], token_ids=(1, 3)), *ROWS[3:])
    runs = [run("reference"), run("reference", seed=1), run("lru"), run("evoke", wrong, seed=1)]
    assert answers_line(runs) == (
        "Answers: 1 of 12 DIFFER from the reference's: evoke seed 1 request 3 (hot-1)"
    )


def test_answers_need_the_reference() -> None:
    assert "not compared" in answers_line([run("lru"), run("evoke")])


def test_hits_by_source_role() -> None:
    first = replace(run("evoke"), by_role={"system": (100, 50), "user": (90, 0)})
    second = replace(run("evoke", seed=1), by_role={"system": (1_900, 950), "other": (8, 2)})
    assert role_lines([run("lru"), first, second], TITLES) == [
        "EVOKE, restore hits by source role: other 25% (2 of 8 blocks), "
        "system 50% (1,000 of 2,000 blocks), user 0% (0 of 90 blocks)"
    ]
    assert role_lines([run("lru"), run("reference")], TITLES) == []


@pytest.mark.parametrize("by_role", [{}, {"system": (12, 3)}])
def test_saved_run_is_loaded_unchanged(by_role: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    saved = replace(run("lru", seed=2), by_role=by_role)
    path = saved.save(tmp_path / "deep" / "er")
    assert path.name == "hot-cold-lru-seed2.json"
    assert Run.load(path) == saved


def test_runs_published_before_there_were_roles_are_loaded() -> None:
    published = ROOT / "bench" / "published" / "demo"
    assert all(Run.load(path).rows for path in published.rglob("*.json"))


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = run("lru").save(tmp_path)
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    other = tmp_path / "other.json"
    other.write_text("[]")
    for bad in (newer, other, tmp_path / "none.json"):
        with pytest.raises(BenchError, match=bad.name):
            Run.load(bad)


def test_machine_is_a_class_not_a_host() -> None:
    described = json.dumps([machine(), versions()])
    assert machine()["cores"] == os.cpu_count()
    assert versions()["python"] == platform.python_version()
    assert platform.node() not in described
    assert str(Path.home()) not in described
