"""The workloads by name. Each is one module with one function `make(ask: Ask) -> Work`."""

from collections.abc import Callable
from importlib import import_module

from bench.errors import UsageProblem
from bench.matrix.workloads.work import Ask, Work

NAMES = {
    "w1": "uniform revisits of long contexts",
    "w1s": "a hot set revisited, cold scans between",
    "w2": "long-range understanding, JSON answers",
    "w3": "recorded agent sessions",
    "w4": "multi-turn chats, open loop",
    "w5": "many tenants behind one system prompt",
    "w6": "the budget below the hot set",
}
NEEDS = {"w3": "trace"}
"""Workloads that cannot be made without a file, and the option that points at it."""


def make_work(name: str, ask: Ask) -> Work:
    """Return a workload's requests; UsageProblem for an unknown name or a wrong option."""
    if name not in NAMES:
        raise UsageProblem(f"no workload {name!r}; there are {', '.join(NAMES)}")
    make: Callable[[Ask], Work] = import_module(f"bench.matrix.workloads.{name}").make
    work = make(ask)
    if unknown := sorted(set(ask.options) - ask.read):
        raise UsageProblem(f"workload {name} has no option {unknown[0]!r}")
    return work
