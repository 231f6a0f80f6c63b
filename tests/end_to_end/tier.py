"""A real server with a tiny model and EVOKE's tier, and a client that asks it about contexts.

`Tier` speaks HTTP as any client of the server would. A *context* is a prompt of whole blocks that
nobody else has; asking about it adds a short tail. What a request found is read from the server's
own counters, so requests go one at a time.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.client import Client
from bench.serving.server import Server, ServerConfig, running
from tests.end_to_end import tiny_model

BLOCK = 32
CONTEXT = 8  # blocks of a context
TIER = 48  # blocks of the tier: six contexts
GPU = 13  # one is the engine's own: one request, and a bit of the one before
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK  # keys, values; layers, heads, head size, float32

Prompt = list[int]
Samples = dict[tuple[tuple[str, str], ...], float]
"""A metric's values by their labels, (name, value) pairs."""


class Tier:
    """One server's tier, seen through HTTP. It counts the requests that it sends."""

    def __init__(self, server: Server, client: Client) -> None:
        self.url = server.url
        self._client = client
        self._random = random.Random(4)
        self.requests = 0

    def fresh(self, blocks: int = CONTEXT) -> Prompt:
        """A context that nobody has asked about."""
        return [self._random.randrange(2, tiny_model.VOCABULARY) for _ in range(blocks * BLOCK)]

    def ask(self, context: Prompt, tags: Mapping[str, Any] | None = None, **params: Any) -> int:
        """Ask about a context; return how many of its blocks came from the tier."""
        if tags:
            params["evoke"] = tags
        prompt = [*context, *self._tail()]
        cache = self._client.complete(prompt, 1, params or None).cache
        self.requests += 1
        return cache.restored // BLOCK

    def scan(self, contexts: int = TIER // CONTEXT + 2, **tags: Any) -> None:
        """Contexts that are asked about once: more than the tier holds, unless said otherwise."""
        for _ in range(contexts):
            self.ask(self.fresh(), tags)

    def push_out_of_the_gpu(self) -> None:
        """Fill the GPU's pool with what the tier is told not to store."""
        self.scan(2, no_store=True)

    def recall(self, context: Prompt) -> int:
        """How many blocks of a context the tier has, leaving it as it is but for this use."""
        self.push_out_of_the_gpu()
        return self.ask(context, {"no_store": True})

    def stored(self) -> int:
        """Blocks that the tier has stored so far, by its own metrics."""
        self.push_out_of_the_gpu()  # more steps: what is under way is done, and told
        return int(total(self.metrics()["vllm:kv_offload_evoke_stored_blocks_total"]))

    def reset(self) -> None:
        """Empty GPU pool and tier. The server is idle: nobody else asks it."""
        for _ in range(2):  # the last transfer may be under way
            answer = httpx.post(f"{self.url}/reset_prefix_cache?reset_external=true", timeout=30)
            answer.raise_for_status()

    def metrics(self) -> dict[str, Samples]:
        """Every metric's values by its labels, without those that all of the server's have."""
        found: dict[str, Samples] = {}
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        for family in text_string_to_metric_families(text):
            found.setdefault(family.name, {})
            for sample in family.samples:
                labels = tuple(
                    (name, value)
                    for name, value in sample.labels.items()
                    if name not in ("engine", "model_name")
                )
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def _tail(self) -> Prompt:
        return [self._random.randrange(2, tiny_model.VOCABULARY) for _ in range(5)]


@contextmanager
def serving(folder: Path, *options: str, multi: bool = False, **evoke: Any) -> Iterator[Tier]:
    """A server with a tier of `TIER` blocks and these settings, until the block ends.

    `multi`: its connector is one of those that a MultiConnector has.
    """
    extra = {
        "spec_name": "EvokeOffloadingSpec",
        "spec_module_path": "evoke_vllm.spec",
        "cpu_bytes_to_use": TIER * BLOCK_BYTES,
        "self_describing_kv_events": True,
        "evoke": evoke,
    }
    kv_transfer: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if multi:
        kv_transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [kv_transfer]},
        }
    config = ServerConfig(
        model=tiny_model.make_tokenizer(tiny_model.make(folder / "model")),
        gpu_blocks=GPU,
        max_model_len=(GPU - 1) * BLOCK,
        kv_space_gib=1,
        kv_transfer=kv_transfer,
        options=options,
    )
    with running(config, folder / "server.log") as server, Client(server) as client:
        yield Tier(server, client)


def total(samples: Samples) -> float:
    return sum(samples.values())
