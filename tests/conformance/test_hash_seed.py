# SPDX-License-Identifier: Apache-2.0
"""Invariant 6: the same calls give the same decisions, whatever PYTHONHASHSEED, on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "tier", ["ledger", pytest.param("vllm", marks=pytest.mark.engine)]
)
def test_decisions_do_not_follow_the_hash_seed(tier: str) -> None:
    logs = [_run(tier, seed) for seed in ("0", "1", "4242")]
    assert logs[0].count(b"evicted [b") > 100, "a run that evicts nothing shows nothing"
    assert logs[0] == logs[1] == logs[2]


def _run(tier: str, hash_seed: str) -> bytes:
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance.scenario", tier],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    ).stdout
