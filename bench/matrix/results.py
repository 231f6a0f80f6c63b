"""What one cell measured, as a JSON file, and what was planned, as another: all a report needs.

A file names versions and the class of machine; never a host, a path or a port. It is written beside
its place and renamed when complete, so a cell that was broken off is never taken for finished.
Another schema is refused by name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from bench.errors import BenchError

SCHEMA = 1
PLAN = "matrix.json"


@dataclass(frozen=True)
class Row:
    """One request. Tokens of the prompt: `asked`, `cached` (not computed), `in_gpu`, `restored`.

    In an open loop `in_gpu` and `restored` are None: they are known for the server only.
    `score` is None where nothing was expected.
    """

    context: str
    kind: str
    loop: int
    asked: int
    cached: int
    in_gpu: int | None
    restored: int | None
    ttft_s: float
    latency_s: float
    answer: str
    score: float | None = None


@dataclass(frozen=True)
class Result:
    """One cell. `metrics`: the server's counters over the measured requests, tokens and bytes.

    `scheduler`: what overhead.py counted, empty without a profile. `configuration` is what the
    cell's digest covers; `sizes` what it came to.
    """

    matrix: str
    cell: str
    workload: str
    label: str
    arm: str
    budget: str
    seed: int
    digest: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    configuration: Mapping[str, Any]
    sizes: Mapping[str, Any]
    open_loop: bool
    boot_s: float
    wall_s: float
    metrics: Mapping[str, int]
    scheduler: Mapping[str, int]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def group(self) -> tuple[str, str]:
        """Return what this cell can be compared within: workload and budget."""
        return self.label, self.budget

    def save(self, folder: Path) -> Path:
        """Write the cell into `folder`, one request a line; an older file is replaced at once."""
        content = {"schema": SCHEMA, **asdict(self)}
        rows = content.pop("rows")
        head = json.dumps(content, indent=1)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        path = folder / f"{self.cell}.json"
        _write(path, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a cell; BenchError names the file if it is not one of this schema."""
        content = _read(path)
        try:
            content["rows"] = tuple(Row(**row) for row in content["rows"])
            content["notes"] = tuple(content["notes"])
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise BenchError(f"{path} is not a cell of this bench: {error}") from None


@dataclass(frozen=True)
class Planned:
    """A cell as it was planned: why it cannot run here, and what a simulation says it restores."""

    cell: str
    label: str
    arm: str
    budget: str
    seed: int
    part: str
    digest: str
    cannot_run: str | None = None
    predicted: float | None = None
    predicted_hot: float | None = None


@dataclass(frozen=True)
class Plan:
    """A matrix as it was planned; lies beside its cells."""

    matrix: str
    title: str
    why: str
    model: str
    targets: bool
    references: tuple[Mapping[str, Any], ...]
    cells: tuple[Planned, ...]

    def save(self, folder: Path) -> Path:
        """Write the plan into `folder`, one cell a line."""
        content = {"schema": SCHEMA, **asdict(self)}
        cells = content.pop("cells")
        head = json.dumps(content, indent=1)
        lines = ",\n".join("  " + json.dumps(cell) for cell in cells)
        path = folder / PLAN
        _write(path, f'{head[:-2]},\n "cells": [\n{lines}\n ]\n}}\n')
        return path

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the plan in a folder; BenchError where there is none of this schema."""
        content = _read(folder / PLAN)
        try:
            content["cells"] = tuple(Planned(**cell) for cell in content["cells"])
            content["references"] = tuple(content["references"])
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise BenchError(f"{folder / PLAN} is not a plan of this bench: {error}") from None


def load_cells(folder: Path) -> list[Result]:
    """Read every finished cell in a folder, by name."""
    return [Result.load(path) for path in sorted(folder.glob("*.json")) if path.name != PLAN]


def finished(folder: Path, name: str, digest: str) -> bool:
    """Return whether a cell's file is there, whole, and of this configuration."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return False
    try:
        return Result.load(path).digest == digest
    except BenchError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"{path} is not a file of this bench: {reason}") from None
    return content


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    draft.replace(path)
