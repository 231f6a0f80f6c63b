# SPDX-License-Identifier: Apache-2.0
"""Invariant 6: the same calls give the same decisions, whatever PYTHONHASHSEED, on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REASONS = (b"expired", b"session share", b"capacity")


@pytest.mark.parametrize(
    ("tier", "policy", "hash_seeds"),
    [
        pytest.param("ledger", "scored", ["0", "1", "4242"], id="ledger-scored"),
        pytest.param("ledger", "adaptive", ["0", "1", "4242"], id="ledger-adaptive"),
        pytest.param("vllm", "adaptive", ["0", "1"], id="vllm", marks=pytest.mark.engine),
    ],
)
def test_decisions_do_not_follow_the_hash_seed(
    tier: str, policy: str, hash_seeds: list[str]
) -> None:
    path = os.pathsep.join([str(ROOT), *sys.path])
    quiet = {"VLLM_CONFIGURE_LOGGING": "0"}  # its lines go to stdout and carry the time
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.scenario", tier, policy],
            cwd=ROOT,
            env=os.environ | quiet | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
        )
        for seed in hash_seeds
    ]
    logs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    assert logs[0].count(b"evicted [b") > 100, "a run that evicts nothing shows nothing"
    if tier == "ledger":
        assert all(logs[0].count(b"\n%s b'" % reason) > 30 for reason in REASONS)
    assert logs.count(logs[0]) == len(logs)
