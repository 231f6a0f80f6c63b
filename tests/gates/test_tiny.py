"""The gate's short version: real servers, a tiny random model, and all negative controls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gates import ROOT
from gates.compare import load_verdict

pytestmark = pytest.mark.engine

_LIMIT_S = 1500


def test_the_tiny_profile_passes_and_each_damaged_worker_is_seen(tmp_path: Path) -> None:
    args = ["run", "--profile", "tiny", "--cache", tmp_path / "cache", "--results", tmp_path]
    process = subprocess.run(
        [sys.executable, "-m", "gates", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "EVOKE_POLICY": "lru"},  # must not reach the servers
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
    verdict = load_verdict(tmp_path / "verdict.json")
    assert verdict["verdict"] == "pass"
    assert verdict["counts"]["divergences"] == 0
    assert verdict["counts"]["restored_probes"] >= 20
    for negative in verdict["negative_controls"].values():
        assert negative["verdict"] == "fail"
        assert negative["restored_divergences"] >= 5
