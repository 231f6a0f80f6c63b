"""What one arm did with one seed, as a JSON file: everything the report is rendered from.

A file names versions and the class of machine, never a host or a path. `load` refuses another
schema version. Token counts per request come from the server's counters; times are seconds.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.errors import BenchError

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One request. `asked`, `in_gpu`, `queried` (from the tier), `restored` are prompt tokens."""

    context: str
    kind: str
    loop: int
    asked: int
    in_gpu: int
    queried: int
    restored: int
    ttft_s: float
    latency_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One arm, one seed: the rows in the order they were sent, and what they ran on.

    `by_role`: by source role, blocks that the tier was asked for and that it restored, as its own
    metrics tell; empty where there are none.
    """

    arm: str
    workload: str
    seed: int
    date: str
    wall_s: float
    boot_s: float
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    by_role: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Return the name this run is saved under."""
        return f"{self.workload}-{self.arm}-seed{self.seed}.json"

    @property
    def recording_name(self) -> str:
        """Return the name of what the server recorded, if its tier does that."""
        return f"{self.workload}-{self.arm}-seed{self.seed}.recording.jsonl"

    def save(self, folder: Path) -> Path:
        """Write the run into `folder` and return the file; an older one is replaced."""
        path = folder / self.file_name
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a saved run; BenchError names the file if it is not one of this schema."""
        try:
            content = json.loads(path.read_text())
            if content.pop("schema") != SCHEMA:
                raise ValueError(f"schema is not {SCHEMA}")
            rows = content.pop("rows")
            content["rows"] = tuple(Row(**{**r, "token_ids": tuple(r["token_ids"])}) for r in rows)
            content["notes"] = tuple(content["notes"])
            by_role = content.get("by_role", {}).items()
            content["by_role"] = {role: (asked, found) for role, (asked, found) in by_role}
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} is not a result of this demo: {error}") from None
