# SPDX-License-Identifier: Apache-2.0
"""One line where vLLM is outside the tested range; window groups are found on every version."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

import vllm.version
from vllm.v1.kv_cache_interface import MambaSpec

import evoke_vllm.compat
from evoke_vllm import versions
from tests.vllm import shapes
from tests.vllm.engine import Engine

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.24.0", "0.24.1+cpu", "0.29.3", "0.33.9.dev3+gabc", "dev"])
def test_inside(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "0.34.0rc1", "1.0"])
def test_outside(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(versions.UntestedVersionError) as caught:
        versions.check(version)
    message = str(caught.value)
    assert "\n" not in message
    for word in (version, versions.TESTED[0], versions.TESTED[-1], versions.OVERRIDE):
        assert word in message
    monkeypatch.setenv(versions.OVERRIDE, "1")
    versions.check(version)


def test_the_message_comes_before_anything_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", "0.99.0")
    with pytest.raises(versions.UntestedVersionError):
        importlib.reload(evoke_vllm.compat)
    monkeypatch.undo()
    importlib.reload(evoke_vllm.compat)


def test_nox_tests_what_the_package_says() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    (listed,) = re.findall(r"^VLLMS = \((.*?)\)", noxfile, re.MULTILINE)
    assert tuple(re.findall(r'"([^"]+)"', listed)) == versions.TESTED


@pytest.mark.parametrize(
    ("layers", "windows"),
    [
        (["full"], set()),
        (["full", "window"], {1}),
        (["window", "full", "window"], {0, 2}),
    ],
)
def test_windows_are_found_through_the_connector(layers: list[str], windows: set[int]) -> None:
    """As in an engine: vLLM's connector makes the spec, and tells it what this release tells."""
    made: Any = [getattr(shapes, layer)() for layer in layers]
    manager = Engine(8, layers=made).manager
    for group in range(len(layers)):
        assert (group in manager.ledger.index._window_groups) == (group in windows)


def test_a_recurrent_group_is_a_window() -> None:
    state = MambaSpec(block_size=shapes.BLOCK, shapes=((4, 4),), dtypes=(shapes.torch.float32,))
    caches = shapes.kv_cache_config([shapes.full(), state])
    assert evoke_vllm.compat._windows(caches) == {1}
