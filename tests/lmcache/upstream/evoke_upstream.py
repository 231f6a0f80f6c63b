# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts EVOKE's policy in the place of LMCache's LRU.

For LMCache's own tests (`nox -s upstream-lmcache`): `pytest -p evoke_upstream`. Every backend that
a test builds with `cache_policy: LRU`, the default, gets EVOKE's policy; what it did is reported at
the end, and an error inside it fails the run.
"""

from typing import Any

from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

from evoke_lmcache.plugin import PolicyFactory

_built: list[Any] = []


class _Factory(PolicyFactory):
    def configure(self, engine_config: Any, backend: str = "unknown") -> Any:
        policy = super().configure(engine_config, backend)
        _built.append(policy)
        return policy


POLICY_MAPPING["LRU"] = _Factory()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals = {
        name: sum(getattr(policy.retention.counters, name) for policy in _built)
        for name in ("stored", "evicted", "removed", "hits")
    }
    failed = sum(policy.guarded.failed for policy in _built)
    terminalreporter.write_line(f"EVOKE in place of LRU: {len(_built)} policies, {totals}")
    if failed:
        terminalreporter.write_line(f"EVOKE FAILED INSIDE {failed} policies")


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if any(policy.guarded.failed for policy in _built) and exitstatus == 0:
        session.exitstatus = 1
