"""The flight recorder of a server: opened from the operator's settings, or refused in one line."""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import asdict

from evoke_core import ConfigError, EvokeConfig
from evoke_core.recording import Recorder

_DISTRIBUTIONS = ("vllm", "evoke-core", "evoke-vllm")


def open_recorder(config: EvokeConfig, *, source: str, **header: Any) -> Recorder | None:
    """Begin the recording that the settings ask for; None if they ask for none.

    Engines that share the settings (data parallelism) write to files beside each other.

    Args:
        config: the operator's settings.
        source: where they came from, for the error.
        header: what a replay has to know of the tier.

    Raises:
        ConfigError: nothing can be written at the path.
    """
    if config.record_trace is None:
        return None
    path = Path(config.record_trace)
    if problem := _problem(path):
        variable = "EVOKE_RECORD_TRACE"
        origin = f"environment variable {variable}" if variable in os.environ else source
        raise ConfigError(
            f"record_trace = {config.record_trace!r} (from {origin}) is not allowed: {problem}; "
            "allowed: the path of a file that this process can write"
        )
    return Recorder(
        path,
        header={
            "runtime": "vllm",
            "versions": _versions(),
            "policy": config.policy,
            "config": _settings(config),
            **header,
        },
        max_bytes=int(config.record_trace_mib * 2**20),
    )


def _problem(path: Path) -> str | None:
    """Say why nothing can be written at ``path``; missing folders are made."""
    if path.is_dir():
        return "it is a folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"its folder cannot be made ({error.strerror})"
    place = path if path.exists() else path.parent
    return None if os.access(place, os.W_OK) else "it cannot be written"


def _settings(config: EvokeConfig) -> Mapping[str, Any]:
    """Return the settings that a replay needs; where the recording lies is nobody's business."""
    given = asdict(config)
    return {name: value for name, value in given.items() if not name.startswith("record_")}


def _versions() -> Mapping[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
