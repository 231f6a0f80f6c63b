# SPDX-License-Identifier: Apache-2.0
"""A short random life on each kind of engine; `nox -s soak` lives long ones."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

from tests.vllm.soak import LIVES, Soak

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("life", LIVES, ids=lambda life: ", ".join(map(str, life.items())))
def test_a_random_life(life: dict[str, Any]) -> None:
    soak = Soak(11, **life)
    soak.live(500)
    for what in ("aborted", "failed stores", "resets", "preempted", "restored", "evicted"):
        assert soak.seen[what] > 0, f"nothing was {what}: the run shows nothing"
