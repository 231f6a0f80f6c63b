"""A workload's results as a JSON file: everything the report is rendered from.

A file says when, on which class of machine, with which versions and settings; never a host or a
path. Another schema is refused.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.errors import BenchError
from evoke_core.replay import Cell, Counts, TraceResult

SCHEMA = 1


@dataclass(frozen=True)
class Pace:
    """Seconds that the replay of `lru` and a bare loop over an ordered dictionary took in turns."""

    budget: str
    replayed: list[float]
    looped: list[float]

    @property
    def times(self) -> float:
        """How many times as long the replay took: the median over the turns."""
        return median(
            replay / loop for replay, loop in zip(self.replayed, self.looped, strict=True)
        )


@dataclass(frozen=True)
class Document:
    """One workload. `second` counts the second half only, after the first has warmed the tier.

    `hints` holds replays with tags by what was claimed, `sweep` LRU at many budgets, `curve` some
    policies at many budgets, `pace` the speed of `lru` at the budgets of `whole` (nothing where it
    was not measured).
    """

    slug: str
    title: str
    kind: str
    named: bool
    loops: bool
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    whole: TraceResult
    second: TraceResult | None
    hints: dict[str, TraceResult]
    sweep: TraceResult | None
    curve: TraceResult | None
    pace: list[Pace]

    def save(self, folder: Path) -> Path:
        """Write `<slug>.json` and return it; an older one is replaced."""
        plain = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("whole", "second", "hints", "sweep", "curve", "pace")
        }
        content = {
            "schema": SCHEMA,
            **plain,
            "whole": self.whole.as_dict(),
            "second": self.second and self.second.as_dict(),
            "hints": {name: result.as_dict() for name, result in self.hints.items()},
            "sweep": self.sweep and self.sweep.as_dict(),
            "curve": self.curve and self.curve.as_dict(),
            "pace": [asdict(each) for each in self.pace],
        }
        path = folder / f"{self.slug}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def load(path: Path) -> Document:
    """Read one file; BenchError names it if it is not one of this schema."""
    try:
        content = json.loads(path.read_text())
        if content.pop("schema") != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA}")
        for name in ("whole", "second", "sweep", "curve"):
            content[name] = content[name] and _result(content[name])
        content["hints"] = {name: _result(each) for name, each in content["hints"].items()}
        content.pop("loop_seconds", None)  # of older files, in which pace was measured otherwise
        content["pace"] = [Pace(**each) for each in content.get("pace", ())]
        return Document(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path} is not a result of this benchmark: {error}") from None


def load_all(folder: Path) -> list[Document]:
    """Read a folder: recorded traces first, then phases, then shapes; named ones before others."""
    kinds = ("recorded", "phase", "shape", "watched")
    found: Iterable[Document] = map(load, folder.glob("*.json"))
    return sorted(found, key=lambda each: (kinds.index(each.kind), not each.named, each.slug))


def _result(content: dict[str, Any]) -> TraceResult:
    cells = [
        Cell(
            policy=cell["policy"],
            budget=cell["budget"],
            capacity=cell["capacity"],
            counts=Counts(**cell["counts"]),
            gap_closed=cell["gap_closed"],
        )
        for cell in content["cells"]
    ]
    given = {key: value for key, value in content.items() if key not in ("cells", "ceiling")}
    return TraceResult(**given, cells=cells)
