"""What a matrix holds: grids of workload × arms × budgets × seeds, as cells with a name each.

A matrix is a TOML file; a wrong one is refused with one line that names the file and the key. A
cell's digest covers everything that decides what is measured, so that a finished cell is repeated
when its configuration changes and never otherwise.
"""

import json
import re
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.errors import UsageProblem
from bench.matrix.arms import ARMS
from bench.matrix.workloads import NAMES, NEEDS
from bench.matrix.workloads.work import Work

FOLDER = Path(__file__).resolve().parent
CODE = 1
"""Raised when a change of this bench makes earlier cells incomparable."""

_GIB = 2**30
_BUDGET = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>x hot|%| GiB)")
_SERVER = {
    "device": "cpu",
    "dtype": "float32",
    "kv_dtype": "",
    "block_size": 32,
    "gpu_blocks": 17,
    "max_model_len": 512,
    "max_batched_tokens": 256,
    "max_seqs": 8,
    "layers": 0,
    "kv_heads": 0,
    "head_size": 0,
    "options": [],
}
_GRID = ("workload", "label", "arms", "budgets", "seeds", "options", "server", "part", "seconds")
_MATRIX = ("title", "why", "model", "server", "grid", "reference", "targets")


@dataclass(frozen=True)
class Budget:
    """The tier's room: a multiple of the hot set, a share of the working set, or GiB."""

    text: str

    def __post_init__(self) -> None:
        if self.text and not _BUDGET.fullmatch(self.text):
            raise ValueError(f"budget {self.text!r}; allowed: '1.6x hot', '55%', '3 GiB'")

    def blocks(self, work: Work, block_bytes: int) -> int:
        """Return the room in blocks of the tier, at least one."""
        match = _BUDGET.fullmatch(self.text)
        if match is None:
            return 0
        number, unit = float(match["number"]), match["unit"]
        if unit == " GiB":
            return max(1, int(number * _GIB) // block_bytes)
        if unit == "%":
            return max(1, int(number / 100 * work.all_blocks))
        if not work.hot_blocks:
            raise UsageProblem(f"budget {self.text!r}: this workload has no hot set")
        return max(1, int(number * work.hot_blocks))

    @property
    def slug(self) -> str:
        """Return the budget as a part of a file name."""
        return self.text.replace("%", "pct").replace(" ", "") or "none"


@dataclass(frozen=True)
class Cell:
    """One arm, workload, budget and seed. `label` names the workload with these options."""

    matrix: str
    model: str
    workload: str
    label: str
    arm: str
    budget: str
    seed: int
    part: str
    options: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 120.0

    @property
    def name(self) -> str:
        """Return the name of the cell's file, without its ending."""
        return f"{self.label}-{self.arm}-{Budget(self.budget).slug}-seed{self.seed}"

    @property
    def device(self) -> str:
        """Return what the engine runs on."""
        return str(self.server["device"])

    def cannot_run(self, files: Container[str]) -> str | None:
        """Return why the cell cannot run on its device or without a file, or None.

        `files`: names of the options that point at one.
        """
        needed = NEEDS.get(self.workload)
        if needed is not None and needed not in files:
            return f"no file was given with --{needed}"
        return ARMS[self.arm].refused_on(self.device)

    def configuration(self) -> dict[str, Any]:
        """Return what decides the measurement; what only plans it is left out."""
        return {
            "code": CODE,
            "model": self.model,
            "workload": self.workload,
            "arm": self.arm,
            "budget": self.budget,
            "seed": self.seed,
            "options": dict(self.options),
            "server": dict(self.server),
        }

    @property
    def digest(self) -> str:
        """Return what identifies the measurement."""
        text = json.dumps(self.configuration(), sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Matrix:
    """All cells in the order they run, and what is published elsewhere to compare with.

    The arms of one workload, budget and seed follow each other: what else the machine does disturbs
    them alike. `targets`: whether the report judges the CPU matrix's targets.
    """

    name: str
    title: str
    why: str
    model: str
    cells: tuple[Cell, ...]
    references: tuple[Mapping[str, Any], ...] = ()
    targets: bool = False

    @property
    def parts(self) -> list[str]:
        """Return the names of the parts, in order."""
        return list(dict.fromkeys(cell.part for cell in self.cells))


def load_matrix(name: str) -> Matrix:
    """Return the matrix in the TOML file at this path, or of this name among those here."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        names = sorted(each.stem for each in FOLDER.glob("*.toml"))
        close = get_close_matches(Path(name).stem, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        raise UsageProblem(f"no matrix {name!r}; {hint}")
    try:
        return _build(path.stem, tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"matrix {path.name}: {error}") from None


def _build(name: str, content: Mapping[str, Any]) -> Matrix:
    _known(content, _MATRIX, "")
    for key in ("title", "why", "model", "grid"):
        if key not in content:
            raise ValueError(f"{key} is missing")
    server = {**_SERVER, **_known(content.get("server", {}), _SERVER, "server.")}
    cells: list[Cell] = []
    for grid in content["grid"]:
        cells += _cells(name, content["model"], grid, server)
    twice = {cell.name for cell in cells if sum(c.name == cell.name for c in cells) > 1}
    if twice:
        raise ValueError(
            f"cell {min(twice)} is asked for twice; a grid may have a label of its own"
        )
    return Matrix(
        name,
        content["title"],
        content["why"].strip(),
        content["model"],
        tuple(cells),
        tuple(content.get("reference", ())),
        bool(content.get("targets", False)),
    )


def _cells(
    matrix: str, model: str, grid: Mapping[str, Any], server: Mapping[str, Any]
) -> list[Cell]:
    _known(grid, _GRID, "grid.")
    workload = grid["workload"]
    if workload not in NAMES:
        raise ValueError(f"no workload {workload!r}; there are {', '.join(NAMES)}")
    for arm in grid["arms"]:
        if arm not in ARMS:
            raise ValueError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    budgets = [Budget(text) for text in grid.get("budgets", [""])]
    served = {**server, **_known(grid.get("server", {}), _SERVER, "grid.server.")}
    return [
        Cell(
            matrix=matrix,
            model=model,
            workload=workload,
            label=grid.get("label", workload),
            arm=arm,
            budget=budget.text,
            seed=seed,
            part=grid.get("part", "primary"),
            options=dict(grid.get("options", {})),
            server=served,
            seconds=float(grid.get("seconds", 120)),
        )
        for budget in budgets
        for seed in grid.get("seeds", [0])
        for arm in grid["arms"]
    ]


def _known(table: Any, names: Sequence[str] | Mapping[str, Any], at: str) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{at or 'the file'} must be a table")
    for key in table:
        if key not in names:
            close = get_close_matches(key, list(names), 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"unknown key {at}{key}; {hint}")
    return table
