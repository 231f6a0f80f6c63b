"""Serve prompts with a real vLLM engine in this process, and print what happened as JSON.

Run as a program: ``python engine.py SETTINGS``, where SETTINGS is a JSON object with ``model`` (a
folder), ``blocks`` (of the engine's own pool), ``extra`` (``kv_connector_extra_config``, or null
for no tier), ``prompts`` (token ids), ``tokens`` (to generate) and ``parallel`` (vLLM's sizes, if
there is more than one rank). An engine belongs in a process of its own: it keeps global state, and
its end must take everything with it.
"""

import json
import os
import sys

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
RESULT = "RESULT "
BLOCK_SIZE = 32


def run(settings: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if settings["extra"] is not None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=settings["extra"],
        )
    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=settings["blocks"],
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        **settings.get("parallel", {}),
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=settings["tokens"],
        ignore_eos=True,
        detokenize=False,
        extra_args=settings.get("extra_args"),
    )
    outputs = []
    for prompt in settings["prompts"]:  # one at a time: the order of requests is the workload
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        outputs.append(output)
    probes = sys.modules.get("tests.end_to_end.probes")
    return {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "bytes": probes.BYTES if probes else None,
    }


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    result = run(json.loads(sys.argv[1]))
    print(RESULT + json.dumps(result), flush=True)
    os._exit(0)  # nothing of the engine is worth waiting for
