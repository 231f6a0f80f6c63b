"""What every test shares: the hypothesis profiles, and skipping engine tests where there is none.

Guarantees: under CI the drawn examples are the same on every run; a test marked `engine` runs
where a vLLM distribution is installed and is skipped, with that reason, anywhere else.
"""

import importlib.metadata
import os

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2_000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


def _vllm_installed() -> bool:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `engine` where vLLM is not installed."""
    if _vllm_installed():
        return
    skip = pytest.mark.skip(reason="no vLLM here: run `nox -s tests-vllm`")
    for item in items:
        if "engine" in item.keywords:
            item.add_marker(skip)
