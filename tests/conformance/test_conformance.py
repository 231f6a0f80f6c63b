# SPDX-License-Identifier: Apache-2.0
"""The invariants of the design, on every implementation, with what each declares it can do."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.machine import (
    ConformanceMachine,
    IndexMachine,
    LedgerMachine,
    PolicyMachine,
    VllmMachine,
)


@pytest.fixture
def vllm_out_of_the_collectors_sight() -> Iterator[None]:
    """An imported vLLM is a million objects; without this the collector walks them all day."""
    pytest.importorskip("evoke_vllm.manager")
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(IndexMachine, id="index"),
        pytest.param(LedgerMachine, id="ledger"),
        pytest.param(VllmMachine, id="vllm", marks=pytest.mark.engine),
        pytest.param(PolicyMachine, id="vllm-policy", marks=pytest.mark.engine),
    ],
)
def test_keeps_the_invariants(
    machine: type[ConformanceMachine], request: pytest.FixtureRequest
) -> None:
    if machine in (VllmMachine, PolicyMachine):
        request.getfixturevalue("vllm_out_of_the_collectors_sight")
    if machine is PolicyMachine:
        pytest.importorskip(
            "vllm.v1.kv_offload.cpu.policies.factory",
            reason="vLLM before 0.27 takes no other policy",
        )
    # The number of examples is the profile's; the steps and checks of one are what makes it slow.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(machine, settings=settings(suppress_health_check=slow))
