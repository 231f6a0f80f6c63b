# SPDX-License-Identifier: Apache-2.0
"""The invariants of the design, on every implementation, with what each declares it can do."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.machine import (
    ConformanceMachine,
    IndexMachine,
    LedgerMachine,
    VllmMachine,
)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(IndexMachine, id="index"),
        pytest.param(LedgerMachine, id="ledger"),
        pytest.param(VllmMachine, id="vllm", marks=pytest.mark.engine),
    ],
)
def test_keeps_the_invariants(machine: type[ConformanceMachine]) -> None:
    # The number of examples is the profile's; the steps and checks of one are what makes it slow.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(machine, settings=settings(suppress_health_check=slow))
