# SPDX-License-Identifier: Apache-2.0
"""`evoke-lmcache compose both` in a real vLLM engine on the CPU, as far as LMCache goes there.

LMCache's worker side refuses a CPU: it says that it runs degraded, and answers no lookup. What is
shown here: vLLM takes the composed configuration; both connectors' scheduler sides run under one
MultiConnector; requests with tags for both are served; evoke-vllm's half stores and restores, and
what is restored gives the same tokens. What a working LMCache half adds only a GPU shows.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None:
    pytest.skip("needs vLLM and LMCache: run `nox -s tests-multi`", allow_module_level=True)

from evoke_lmcache.compose import Plan, compose, request_params

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "


def serve(settings: dict) -> dict:
    """Run in a process of its own; see `main` below."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "tests.lmcache.test_multi_connector", json.dumps(settings)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[-1].removeprefix(RESULT)) | {"log": done.stdout + done.stderr}


def test_the_composed_configuration_serves(tmp_path: Path) -> None:
    from tests.end_to_end import tiny_model

    model = str(tiny_model.make(tmp_path / "model"))
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 256) for _ in range(300)] for _ in range(4)]
    plan = Plan(
        what="both", gib=0.02, engine_block=32, block_size=64, chunk_size=64, vllm="0.24.0",
        lmcache="0.5.3", settings={"policy": "scored"},
    )  # fmt: skip
    params = request_params({"source_type": "system", "priority": "2"})
    settings = {"model": model, "prompts": prompts + prompts[:2], "params": params}
    done = serve(settings | {"config": compose(plan).config})
    outputs = done["outputs"]
    assert outputs[4:] == outputs[:2]
    assert done["cached"][:4] == [0] * 4
    assert all(cached >= 192 for cached in done["cached"][4:]), "evoke-vllm restored them"
    assert "LMCacheConnectorV1" in done["log"]
    # If this fails, LMCache has learned to run on a CPU, and the test can ask for more.
    assert "degraded mode" in done["log"]


def main(settings: dict) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=20,
        enable_prefix_caching=True,
        # In one process vLLM 0.24 hands MultiConnector's children their figures unpacked.
        disable_log_stats=True,
        # LMCacheConnectorV1 cannot run under it.
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config=KVTransferConfig(**settings["config"]),
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": settings["params"]},
    )
    outputs, cached = [], []
    for prompt in settings["prompts"]:
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        outputs.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    print(RESULT + json.dumps({"outputs": outputs, "cached": cached}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
