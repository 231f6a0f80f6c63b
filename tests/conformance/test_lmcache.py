# SPDX-License-Identifier: Apache-2.0
"""The invariants of the design on LMCache's cache policy. Needs no LMCache."""

import pytest

pytest.importorskip("evoke_lmcache.retention", reason="evoke-lmcache is not installed here")

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.lmcache_machine import LmcacheMachine


def test_keeps_the_invariants() -> None:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        LmcacheMachine, settings=settings(suppress_health_check=slow, report_multiple_bugs=False)
    )
