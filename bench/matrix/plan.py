"""What a matrix would run, how long that takes, and what a simulation says it will find."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.matrix.arms import ARMS
from bench.matrix.cells import Cell
from bench.matrix.predict import Prediction, predict
from bench.matrix.results import Plan, Planned
from bench.matrix.workloads import NEEDS
from bench.progress import Reporter

if TYPE_CHECKING:
    from bench.matrix.run import Bench


def make_plan(bench: "Bench", reporter: Reporter) -> Plan:
    """Return the plan of a whole matrix, predictions included."""
    matrix = bench.matrix
    with reporter.counting("predicting", len(matrix.cells)) as advance:
        cells = [_planned(bench, cell, advance) for cell in matrix.cells]
    return Plan(
        matrix=matrix.name,
        title=matrix.title,
        why=matrix.why,
        model=matrix.model,
        targets=matrix.targets,
        references=matrix.references,
        cells=tuple(cells),
    )


def _planned(bench: "Bench", cell: Cell, advance: Callable[[], None]) -> Planned:
    foreseen = _predict(bench, cell)
    advance()
    return Planned(
        cell=cell.name,
        label=cell.label,
        arm=cell.arm,
        budget=cell.budget,
        seed=cell.seed,
        part=cell.part,
        digest=cell.digest,
        cannot_run=cell.cannot_run(bench.files),
        predicted=None if foreseen is None else foreseen.restored,
        predicted_hot=None if foreseen is None else foreseen.hot,
    )


def _predict(bench: "Bench", cell: Cell) -> Prediction | None:
    arm = ARMS[cell.arm]
    if arm.policy is None or not cell.budget or _lacks_file(bench, cell):
        return None
    sizes = bench.sizes(cell)
    return predict(
        bench.work(cell),
        arm.policy,
        tier_blocks=sizes.tier_blocks,
        gpu_blocks=sizes.gpu_blocks,
        threshold=arm.threshold,
    )


def _lacks_file(bench: "Bench", cell: Cell) -> bool:
    needed = NEEDS.get(cell.workload)
    return needed is not None and needed not in bench.files


def groups(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """Return the cells by what their servers have in common: workload, budget and arm."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        key = f"{cell.label}, {ARMS[cell.arm].title}" + (f", {cell.budget}" if cell.budget else "")
        found.setdefault(key, []).append(cell)
    return list(found.items())
