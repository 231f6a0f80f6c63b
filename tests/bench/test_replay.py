"""The replay's report follows from saved results alone, and its verdicts from the numbers in it."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from attrs import evolve

from bench.__main__ import main
from bench.errors import BenchError, UsageProblem
from bench.replay import cli, pace
from bench.replay.hints import CLAIMS
from bench.replay.plots import draw
from bench.replay.report import render
from bench.replay.results import Document, Pace, load, load_all
from bench.replay.run import cells, run
from bench.replay.targets import Verdict, duels, losses, lru_budget, points, verdicts
from bench.replay.workloads import Workload, find_traces, workloads
from evoke_core import RequestTags
from evoke_core.replay import Cell, Counts, TraceResult, generate

CLAMPED = RequestTags(priority=10.0).priority


def workload(slug: str, **changes: object) -> Workload:
    small = Workload(
        slug=slug,
        title=f"Small {slug}",
        kind="recorded",
        named=True,
        budgets=("20%", "40%"),
        settings={"shape": "w1s:blocks=5"},
        load=lambda: generate("w1s:blocks=5,rounds=6"),
        hinted=True,
        curve=("10%", "20%", "3%"),
    )
    return replace(small, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    counted: list[None] = []
    found = []
    for each in (
        workload("recording"),
        workload("shape", kind="shape", loops=True, curve=(), hinted=False),
        workload("fresh", kind="shape", named=False, curve=(), hinted=False),
    ):
        before = len(counted)
        found.append(run(each, jobs=1, quick=False, on_cell=lambda: counted.append(None)))
        assert len(counted) - before == cells(each, quick=False)
    return found


def result(hits: dict[str, dict[str, int]]) -> TraceResult:
    """Return a result with these hits of 1,000 blocks, by budget (= capacity) and policy."""
    made = [
        Cell(policy, budget, int(budget), Counts(blocks=1000, hit_blocks=found))
        for budget, by_policy in hits.items()
        for policy, found in by_policy.items()
    ]
    return TraceResult("t", 1, 1000, 500, 512, 0, made)


def rivals(best: int, ours: int) -> dict[str, int]:
    others = {"lru": best - 9, "arc": best, "s3fifo": 1, "wtinylfu": 0, "wtinylfu20": 2}
    return {"adaptive": ours, "scored": 3, **others, "min": 900}


def verdict(documents: list[Document], start: str) -> Verdict:
    [found] = [each for each in verdicts(documents) if each.target.startswith(start)]
    return found


def test_documents_survive_a_file(documents: list[Document], tmp_path: Path) -> None:
    for document in documents:
        assert load(document.save(tmp_path)) == document
    assert [each.slug for each in load_all(tmp_path)] == ["recording", "shape", "fresh"]
    text = (tmp_path / "recording.json").read_text()
    assert str(Path.home()) not in text
    content = json.loads(text)
    assert {"schema", "date", "machine", "versions", "settings"} <= set(content)


def test_files_from_before_the_pace_was_kept_still_load(
    documents: list[Document], tmp_path: Path
) -> None:
    path = documents[0].save(tmp_path)
    content = json.loads(path.read_text())
    del content["pace"]
    path.write_text(json.dumps(content | {"loop_seconds": 1.5}))
    assert load(path) == replace(documents[0], pace=[])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BenchError, match=r"other\.json is not a result of this benchmark"):
        load_all(tmp_path)


def test_the_report_is_a_pure_function_of_the_files(
    documents: list[Document], tmp_path: Path
) -> None:
    for document in documents:
        document.save(tmp_path)
    text = render(load_all(tmp_path), "pictures")
    assert text == render(documents, "pictures")
    assert text.index("## Recorded traces") < text.index("## Shapes the defaults")
    assert text.index("## Shapes the defaults") < text.index("## Fresh shapes")
    assert "(pictures/story.png)" in text
    assert "(pictures/recording.png)" in text
    whole = documents[0].whole
    assert f"**{whole.cell('adaptive', '20%').block_hits:.4f}**" in text
    for each in verdicts(documents):
        assert f"| {each.target} | {each.found} |" in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, rows  # a table with a ragged edge


def test_the_report_copes_with_parts_missing(documents: list[Document]) -> None:
    text = render([replace(documents[1])], "p")
    assert "## Recorded traces" in text
    assert "not replayed | not known |" in text
    assert "## Hints" not in text
    assert "story.png" not in text


def test_pictures_show_recorded_traces(documents: list[Document], tmp_path: Path) -> None:
    drawn = draw(documents, tmp_path)
    assert sorted(path.name for path in drawn) == ["recording.png", "story.png"]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
    assert draw(documents[1:], tmp_path) == []


def test_the_best_rival_of_each_cell() -> None:
    small, large = duels("t", result({"10": rivals(200, 250), "20": rivals(300, 294)}))
    assert (small.rival, small.best, small.capacity) == ("arc", 0.2, 10)
    assert (points(small.margin), points(large.margin)) == ("+5.00", "-0.60")
    assert points(-1e-9) == "+0.00"


@pytest.mark.parametrize(
    ("kind", "ours", "holds"),
    [
        ("recorded", 295, True),
        ("recorded", 294, False),
        ("shape", 290, True),
        ("shape", 289, False),
    ],
)
def test_a_deficit_is_judged_by_its_kind(
    documents: list[Document], kind: str, ours: int, holds: bool
) -> None:
    whole = result({"10": rivals(200, 250), "20": rivals(300, ours)})
    document = replace(documents[0], kind=kind, whole=whole, second=None, hints={}, title="T")
    start = "recorded, whole: never" if kind == "recorded" else "shapes and phases: never"
    found = verdict([document], start)
    assert found.holds is holds
    assert f"(T, 20, arc); {int(not holds)} of 2 cells fail" in found.found


@pytest.mark.parametrize(("ours", "holds"), [((201, 301, 9), True), ((201, 300, 9), False)])
def test_two_cells_of_three(documents: list[Document], ours: tuple[int, ...], holds: bool) -> None:
    bests = (200, 300, 400)
    whole = result(
        {
            str(at): rivals(best, our)
            for at, (best, our) in enumerate(zip(bests, ours, strict=True), 1)
        }
    )
    document = replace(documents[0], whole=whole, second=None, hints={})
    assert verdict([document], "recorded, whole: above").holds is holds


def test_the_gap_is_a_mean_over_cells_that_have_one(documents: list[Document]) -> None:
    def closed(*shares: float | None) -> Document:
        whole = result({str(at + 1): rivals(200, 250) for at in range(len(shares))})
        by_budget = {str(at + 1): share for at, share in enumerate(shares)}
        made = [evolve(cell, gap_closed=by_budget[cell.budget]) for cell in whole.cells]
        return replace(documents[0], whole=evolve(whole, cells=made), second=None, hints={})

    found = verdict([closed(0.1, None, 0.2)], "recorded, whole: mean")
    assert (found.found, found.holds) == ("0.150 over 2 cells", True)
    assert verdict([closed(0.1, 0.19)], "recorded, whole: mean").holds is False
    assert verdict([closed(None)], "recorded, whole: mean").holds is None


@pytest.mark.parametrize(("lost", "holds"), [(10, True), (11, False)])
def test_hints_that_cost(documents: list[Document], lost: int, holds: bool) -> None:
    whole = result({"10": rivals(200, 250)})
    tagged = result({"10": rivals(200, 250 - lost)})
    document = replace(documents[0], whole=whole, hints={"shuffled": tagged}, title="T")
    assert losses(document, "shuffled") == [("10", pytest.approx(lost / 1000))]
    found = verdict([document], "hints (shuffled")
    assert found.holds is holds
    assert "(T, 10, shuffled), 1 cells" in found.found
    assert verdict([document], "hints (truthful").holds is None


def test_memory_that_lru_would_need() -> None:
    sweep = result({"100": {"lru": 100}, "400": {"lru": 300}, "800": {"lru": 300}})
    assert lru_budget(sweep, 0.1) == pytest.approx(100)
    assert lru_budget(sweep, 0.2) == pytest.approx(200)  # half way, sizes on a logarithmic scale
    assert lru_budget(sweep, 0.3) == pytest.approx(400)
    assert lru_budget(sweep, 0.31) is None
    assert lru_budget(sweep, 0.09) is None


def test_the_pace_is_measured_on_whole_recorded_traces(documents: list[Document]) -> None:
    recorded, *shapes = documents
    assert [each.budget for each in recorded.pace] == ["20%", "40%"]
    for each in recorded.pace:
        assert len(each.replayed) == len(each.looped) == pace.ROUNDS
        assert min(each.replayed + each.looped) > 0.0
    assert [each.pace for each in shapes] == [[], []]
    text = render(documents, "p")
    assert f"Small recording {recorded.pace[0].times:.2f} (20%)" in text
    assert "Small shape" not in text.rpartition("bare loop")[2]


def test_a_loop_that_finds_other_blocks_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_loop", lambda chains, capacity: 7)
    with pytest.raises(BenchError, match=r"w1s, 20%: the replay of lru found \d+ .* loop 7$"):
        pace.measure(generate("w1s"), ["20%"], on_budget=lambda: None)


@pytest.mark.parametrize(("slowest", "holds"), [(3.0, True), (3.1, False), (None, None)])
def test_the_pace_is_judged_by_its_worst_cell(
    documents: list[Document], slowest: float | None, holds: bool | None
) -> None:
    paces = []
    if slowest is not None:  # medians: one disturbed turn does not decide
        paces = [Pace("10", [2.0], [1.0]), Pace("20", [9.0, slowest, 1.0], [1.0, 1.0, 1.0])]
    found = verdict([replace(documents[0], pace=paces, title="T")], "`lru` takes")
    assert found.holds is holds
    if slowest is not None:
        assert found.found == f"worst {slowest:.2f} times (T, 20), 2 cells"


def test_claims_are_what_they_say() -> None:
    trace = generate("w1:contexts=40,rounds=2,blocks=2")
    tags = {name: [claim(trace, at) for at in range(80)] for name, claim in CLAIMS.items()}
    assert {each.source_type for each in tags["truthful"]} == {None}
    assert {each.session for each in tags["truthful"]} == set(trace.sessions)
    assert {(each.source_type, each.priority) for each in tags["all at maximum"]} == {
        ("system", CLAMPED)
    }
    greedy = {each.session for each in tags["one greedy tenant"] if each.priority == CLAMPED}
    assert 0 < len(greedy) < 15
    for each in tags["one greedy tenant"]:
        assert (each.priority == CLAMPED) == (each.session in greedy)
    assert len({(each.source_type, each.priority) for each in tags["shuffled"]}) > 10


def write(path: Path, record: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(record).encode() + b"\n"))
    return path


def test_traces_are_told_apart(tmp_path: Path) -> None:
    calls = [{"timestamp": at, "hash_ids": [1, at + 2], "input_length": 1024} for at in range(2)]
    write(tmp_path / "m" / "conversation_trace.jsonl.gz", {**calls[0], "output_length": 1})
    write(tmp_path / "m" / "other.jsonl.gz", {**calls[1], "output_length": 1})
    write(tmp_path / "c" / "sessions.jsonl.gz", {"requests": []})
    write(tmp_path / "a" / "calls.jsonl.gz", {"input": "x" * 400, "timestamp": 0})
    (tmp_path / "NOTE.md").write_text("no trace")
    found = workloads(find_traces(tmp_path))
    recorded = {each.slug: each.named for each in found if each.kind == "recorded"}
    assert recorded == {
        "agent-calls": False,
        "conversation": True,
        "other": False,
        "sessions-80": True,
        "sessions-all": True,
    }
    assert [each.slug for each in found if each.kind == "phase"] == ["phases"]
    assert len({each.slug for each in found}) == len(found)
    assert next(each for each in found if each.slug == "other").load().unique_blocks == 2
    assert {each.kind for each in workloads([])} == {"shape", "watched"}


@pytest.mark.parametrize("content", [b"", b"no JSON\n", b"[1]\n", b"\x1f\x8bx"])
def test_files_that_are_no_traces(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageProblem, match=r"x\.jsonl"):
        workloads([path])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cli, "PUBLISHED", tmp_path / "published")
    monkeypatch.setattr(cli, "REPORT", tmp_path / "REPLAY.md")
    monkeypatch.setattr(cli, "TRACES", tmp_path / "none")
    monkeypatch.setattr(
        cli,
        "workloads",
        lambda paths: [workload("one", budgets=("30%",), hinted=False, curve=("30%",))],
    )
    return tmp_path


def test_the_command_replays_and_renders(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--jobs", "1"]) == 0
    assert "no recorded traces found" in capsys.readouterr().out
    report = folders / "REPLAY.md"
    text = report.read_text()
    assert "(published/one.png)" in text
    report.unlink()
    assert main(["replay", "--render"]) == 0
    assert report.read_text() == text
    assert {path.name for path in (folders / "published").iterdir()} == {
        "one.json",
        "one.png",
        "story.png",
    }


def test_what_cannot_be_replayed(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no/such/trace"]) == 2
    assert capsys.readouterr().err == "Error: no such trace or folder: no/such/trace\n"
    assert main(["replay", "--render"]) == 2
    assert "no results to render" in capsys.readouterr().err
