# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts EVOKE in the place of what vLLM's own tests make; see `run.py`.

`EVOKE_UPSTREAM_MODE` says what is put there, `EVOKE_UPSTREAM_RESULT` where the outcomes go.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

MODE = os.environ["EVOKE_UPSTREAM_MODE"]
UTILS = "tests.v1.kv_connector.unit.offloading_connector.utils"
outcomes: dict[str, str] = {}


def pytest_configure(config: Any) -> None:
    """Before any of their modules is imported."""
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's own")
    if MODE == "manager":
        _put_manager()
    elif MODE == "policy":
        _put_policy()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Their mock managers are made when a test begins: ours stands behind them."""
    if MODE != "manager":
        return
    try:
        utils: Any = importlib.import_module(
            "tests.v1.kv_connector.unit.offloading_connector.utils"
        )
    except ImportError:
        return
    stock: Any = utils.MockOffloadingSpec

    class Behind(stock):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            scripted = vars(self)["manager"]
            ours = _manager(64)
            behind = MagicMock(spec=type(ours).__mro__[1], wraps=ours)
            for name, child in scripted._mock_children.items():
                getattr(behind, name).return_value = child.return_value
            behind.prepare_load = scripted.prepare_load
            self.manager = behind

    Behind.__name__ = stock.__name__
    utils.MockOffloadingSpec = Behind


def pytest_runtest_logreport(report: Any) -> None:
    """A test has passed when all of its phases have."""
    if report.outcome != "passed" or report.when == "call":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Hand over what came out."""
    Path(os.environ["EVOKE_UPSTREAM_RESULT"]).write_text(json.dumps(outcomes))


def _manager(slots: int, **given: Any) -> Any:
    from evoke_core import EvokeConfig
    from evoke_vllm.manager import EvokeOffloadingManager

    config = EvokeConfig(policy="lru")
    return EvokeOffloadingManager(slots, config=config, window_groups=_windows(), **given)


def _windows() -> list[int]:
    """What an engine would say: the windows among the groups of the test that makes a manager."""
    from evoke_vllm import compat

    frame = sys._getframe(1)
    while frame is not None:
        groups = frame.f_locals.get("groups")
        if isinstance(groups, list) and groups and hasattr(groups[0], "kv_cache_spec"):
            made: Any = SimpleNamespace(kv_cache_groups=groups)
            return sorted(compat._windows(made))
        frame = frame.f_back  # type: ignore[assignment]
    return []


def _put_manager() -> None:
    """Our manager for the stock one under LRU, and our primary tier for the stock one."""
    from vllm.v1.kv_offload.cpu import manager as cpu
    from vllm.v1.kv_offload.tiering import manager as tiering

    from evoke_core import EvokeConfig
    from evoke_vllm.tiering import EvokePrimaryTier

    stock: Any = cpu.CPUOffloadingManager
    stock_primary: Any = tiering.CPUPrimaryTierOffloadingManager

    class Manager(stock):
        def __new__(cls, *args: Any, **given: Any) -> Any:
            if cls is not Manager or given.get("cache_policy", "lru") != "lru":
                made = object.__new__(stock)
                made.__init__(*args, **given)
                return made
            slots: Any = args[0] if args else given.get("num_chunks", given.get("num_blocks"))
            info = given.get("info")
            return _manager(
                slots,
                enable_events=given.get("enable_events", False),
                store_threshold=given.get("store_threshold", 1),
                max_tracker_size=given.get("max_tracker_size", 64_000),
                info=None if info is None else info.as_config_info(),
            )

    class Primary(stock_primary):
        def __new__(cls, *args: Any, **given: Any) -> Any:
            memory = object.__new__(stock_primary)
            memory.__init__(*args, **given)
            if given.get("cache_policy", "lru") != "lru":
                return memory
            slots: Any = args[0] if args else given.get("num_chunks", given.get("num_blocks"))
            info = given.get("info")
            return EvokePrimaryTier(
                memory,
                num_blocks=slots,
                enable_events=given.get("enable_events", False),
                config=EvokeConfig(policy="lru"),
                info=None if info is None else info.as_config_info(),
            )

    cpu.CPUOffloadingManager = Manager
    tiering.CPUPrimaryTierOffloadingManager = Primary


def _put_policy() -> None:
    """Our policy for the stock one called "lru"."""
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    from evoke_vllm.policy import EvokeCachePolicy

    CachePolicyFactory._registry["lru"] = lambda: EvokeCachePolicy
