"""The whole path in a real engine: vLLM's scheduler stores, evicts, restores; tokens stay the same.

The prompts cycle through more context than the engine's own pool holds, so that every context is
pushed out before it returns, and through less than the tier holds. Greedy decoding in float32 must
then give the tokens of an engine that never evicts.
"""

import json
import os
import random
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.end_to_end import engine, tiny_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
CONTEXTS, LENGTH, ROUNDS = 6, 200, 3
SMALL_POOL = 17  # blocks of 32 tokens: room for two contexts
LARGE_POOL = 100
TIER_BYTES = 64 * 1024 * 1024
TIMEOUT = 240
CORRUPT_VARIABLE = "TEST_CORRUPT_RESTORES"


def _prompts() -> list[list[int]]:
    source = random.Random(7)
    contexts = [
        [source.randrange(2, tiny_model.VOCABULARY) for _ in range(LENGTH)] for _ in range(CONTEXTS)
    ]
    return contexts * ROUNDS


def _serve(
    model: Path,
    blocks: int,
    extra: dict | None,
    environment: dict[str, str] | None = None,
    **settings: object,
) -> dict:
    """Run one engine in a process group of its own; end the whole group whatever happens."""
    given = {
        "model": str(model),
        "blocks": blocks,
        "extra": extra,
        "prompts": _prompts(),
        "tokens": 8,
        **settings,
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, engine.__file__, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for line in output.splitlines():
        if line.startswith(engine.RESULT):
            return json.loads(line.removeprefix(engine.RESULT))
    pytest.fail(f"the engine gave no result; its last lines:\n{output[-3000:]}")


def _tier(**evoke: object) -> dict:
    return {
        "spec_name": "ProbedSpec",
        "spec_module_path": "tests.end_to_end.probes",
        "cpu_bytes_to_use": TIER_BYTES,
        "evoke": evoke,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> dict:
    return _serve(model, LARGE_POOL, None)


def test_restored_blocks_give_the_reference_tokens(model: Path, reference: dict) -> None:
    tags = {"kv_transfer_params": {"evoke": {"source_type": "user", "priority": 1.5}}}
    result = _serve(model, SMALL_POOL, _tier(), extra_args=tags)
    full_blocks = LENGTH // engine.BLOCK_SIZE * engine.BLOCK_SIZE
    assert result["cached"][:CONTEXTS] == [0] * CONTEXTS
    assert result["cached"][CONTEXTS:] == [full_blocks] * CONTEXTS * (ROUNDS - 1)
    assert result["bytes"]["stored"] > 0
    # Each context is stored once and restored whenever it returns.
    assert result["bytes"]["restored"] == result["bytes"]["stored"] * (ROUNDS - 1)
    assert result["outputs"] == reference["outputs"]


def test_a_corrupted_restore_does_not_pass_unnoticed(model: Path, reference: dict) -> None:
    result = _serve(model, SMALL_POOL, _tier(), {CORRUPT_VARIABLE: "1"})
    assert result["bytes"]["restored"] > 0
    assert result["outputs"][:CONTEXTS] == reference["outputs"][:CONTEXTS]
    assert result["outputs"] != reference["outputs"]


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_restore_their_shares(model: Path, reference: dict, parallel: str) -> None:
    """One manager, a worker with a tier of its own in each rank, half of every block in each."""
    if parallel.startswith("pipeline") and not metadata.version("vllm").startswith("0.24."):
        pytest.skip("vLLM's own CPU runner fails with two stages since (intermediate_tensors)")
    tier = _tier() | {"spec_name": "EvokeOffloadingSpec", "spec_module_path": "evoke_vllm.spec"}
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = _serve(model, SMALL_POOL, tier, binding, parallel={parallel: 2}, tokens=2)
    full_blocks = LENGTH // engine.BLOCK_SIZE * engine.BLOCK_SIZE
    assert result["cached"][CONTEXTS:] == [full_blocks] * CONTEXTS * (ROUNDS - 1)
    assert result["outputs"] == [tokens[:2] for tokens in reference["outputs"]]


def test_a_wrong_setting_stops_the_start_with_one_line(model: Path) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        _serve(model, SMALL_POOL, _tier(w_recencey=0.5))
    last = str(failure.value).splitlines()[-1]
    assert "unknown key 'w_recencey'" in last
    assert "did you mean w_recency" in last
