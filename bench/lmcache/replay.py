"""A recorded trace through the real LMCache engine, on CPU tensors with a mock GPU.

`python -m bench.lmcache.replay TRACE [--budget 0.05,0.15,0.4]`

Each call of the trace is one request: it is looked up, which pins what is found, the rest is stored
in steps of a chunked prefill, and it is unpinned. A token is four characters of the prompt's text.
Hit tokens are what the engine's own lookups say. Nothing is tagged. A budget is a share of the
trace's distinct chunks. The pool, the allocator, the lookups and the eviction are LMCache's.
"""

import argparse
import gzip
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import EngineType
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import CreateGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from bench.lmcache.results import document, table, write
from evoke_lmcache import register

CHUNK = 256
STEP = 2048
CHARS_PER_TOKEN = 4
CHUNK_BYTES = 4096
SHAPE = (1, 2, CHUNK, 1, 4)  # layers, K and V, tokens, heads, size: 4,096 bytes in float16
POLICIES = ("LRU", "LFU", "EVOKE")
_instances = itertools.count()


def prompts(path: Path) -> Iterator[list[int]]:
    """The prompts of a trace of agents' calls, as token ids."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            given = json.loads(line)["input"]
            text = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
            size = CHARS_PER_TOKEN
            yield [
                int.from_bytes(blake2b(text[at : at + size].encode(), digest_size=3).digest())
                for at in range(0, len(text) - size + 1, size)
            ]


def distinct_chunks(trace: Sequence[list[int]]) -> int:
    seen = set()
    for prompt in trace:
        digest = b""
        for at in range(0, len(prompt) - CHUNK + 1, CHUNK):
            digest = blake2b(digest + repr(prompt[at : at + CHUNK]).encode()).digest()
            seen.add(digest)
    return len(seen)


def replay(trace: Sequence[list[int]], policy: str, chunks: int) -> dict[str, Any]:
    """Serve the trace with a pool of so many chunks; return tokens asked for and found."""
    register()
    name = f"evoke-replay-{next(_instances)}"
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=(chunks + 0.5) * CHUNK_BYTES / 1024**3,
        cache_policy=policy,
        lmcache_instance_id=name,
        save_unfull_chunk=False,
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=SHAPE,
    )
    connector = CreateGPUConnector(config, metadata, EngineType.MOCK)
    engine = LMCacheEngineBuilder.get_or_create(
        name, config, metadata, connector, lambda tensor, rank: None, lambda it, rank: it
    )
    engine.post_init()
    asked = found = requests_hit = 0
    started = time.perf_counter()
    try:
        for n, prompt in enumerate(trace):
            hits = int(engine.lookup(tokens=prompt, lookup_id=f"r{n}", pin=True))
            engine.lookup_unpin(f"r{n}")
            asked += len(prompt)
            found += hits
            requests_hit += hits > 0
            for end in range(hits + STEP, len(prompt) + STEP, STEP):
                end = min(end, len(prompt))
                start = (end - 1 - hits) // STEP * STEP + hits
                mask = torch.ones(end, dtype=torch.bool)
                mask[:start] = False
                engine.store(tokens=prompt[:end], mask=mask)
        held = len(engine.storage_manager.local_cpu_backend.hot_cache)
    finally:
        LMCacheEngineBuilder.destroy(name)
    return {
        "policy": policy,
        "chunks": chunks,
        "held": held,
        "tokens": asked,
        "hit_tokens": found,
        "requests_hit": requests_hit,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.lmcache.replay", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", default="0.05,0.15,0.4", help="shares of the distinct chunks")
    parser.add_argument("--results", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    trace = list(prompts(options.trace))
    distinct = distinct_chunks(trace)
    print(f"{len(trace)} requests, {distinct:,} distinct chunks of {CHUNK} tokens", flush=True)
    results = []
    for share in map(float, options.budget.split(",")):
        for policy in POLICIES:
            results.append(replay(trace, policy, max(1, int(share * distinct))))
            print(json.dumps(results[-1]), flush=True)
    if options.results:
        settings = {
            "requests": len(trace),
            "distinct_chunks": distinct,
            "chunk_tokens": CHUNK,
            "step_tokens": STEP,
            "characters_per_token": CHARS_PER_TOKEN,
        }
        write(options.results, document(options.trace, settings, results))
    print(table(results, distinct))
    return 0


if __name__ == "__main__":
    sys.exit(main())
