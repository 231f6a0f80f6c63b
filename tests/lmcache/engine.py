# SPDX-License-Identifier: Apache-2.0
"""The real LMCache engine on CPU tensors, driven the way its vLLM connector drives it.

A request is looked up (which pins what is found), its hit chunks are retrieved and unpinned, the
rest is stored from the first missing chunk on. The connector writes into every chunk bytes that
follow from its tokens, so that what is read back can be checked.

A chunk is 4,096 bytes, the allocator's alignment: a pool of n chunks holds n chunks.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from evoke_lmcache import register

CHUNK = 16
LAYERS, KV, HEADS, SIZE = 2, 2, 2, 16
CHUNK_BYTES = LAYERS * KV * CHUNK * HEADS * SIZE * 2
GIB = 1024**3

_instances = itertools.count()


class TokenConnector(MockGPUConnector):
    """A GPU whose KV values follow from the tokens: written on store, collected on retrieve."""

    def __init__(self) -> None:
        super().__init__((LAYERS, KV, CHUNK, HEADS, SIZE))
        self.read: dict[int, torch.Tensor] = {}

    def batched_from_gpu(
        self, memory_objs: list[Any], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            memory.tensor.copy_(values(kwargs["prompt"][start:end], memory.tensor.shape))

    def batched_to_gpu(
        self, memory_objs: list[Any], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        for memory, start in zip(memory_objs, starts, strict=True):
            self.read[start] = memory.tensor.clone()


def values(tokens: Sequence[int], shape: torch.Size) -> torch.Tensor:
    """The KV values of some tokens: random, but the same for the same tokens."""
    seed = hash(tuple(tokens)) & (2**31 - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=generator).to(torch.float16)


class Engine:
    """An LMCache engine with a pool of so many chunks.

    Attributes:
        cpu: LMCache's CPU backend.
    """

    def __init__(self, built: Any, connector: TokenConnector) -> None:
        self.built = built
        self.connector = connector
        self._requests = itertools.count()

    @property
    def backends(self) -> dict[str, Any]:
        return dict(self.built.storage_manager.storage_backends)

    @property
    def cpu(self) -> Any:
        return self.backends["LocalCPUBackend"]

    def hits(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are there. A look that nobody counts."""
        return int(self.built.lookup(tokens=list(tokens)))

    def store(
        self, tokens: Sequence[int], configs: dict[str, str] | None = None, *, start: int = 0
    ) -> None:
        """Store the chunks of ``tokens[start:]``."""
        prompt = list(tokens)
        mask = torch.ones(len(prompt), dtype=torch.bool)
        mask[:start] = False
        self.built.store(
            tokens=prompt,
            mask=mask,
            prompt=prompt,
            request_configs=dict(configs) if configs else None,
        )

    def look_up(self, tokens: Sequence[int], configs: dict[str, str] | None = None) -> "Lookup":
        """What the scheduler does with a new request: look up and pin."""
        request = f"r{next(self._requests)}"
        hits = self.built.lookup(
            tokens=list(tokens),
            lookup_id=request,
            pin=True,
            request_configs=dict(configs) if configs else None,
        )
        return Lookup(request, int(hits))

    def retrieve(
        self, lookup: "Lookup", tokens: Sequence[int], configs: dict[str, str] | None = None
    ) -> None:
        """Read back what was found, and compare it with what was written."""
        prompt = list(tokens)
        if lookup.hits:
            self.connector.read.clear()
            found = self.built.retrieve(
                tokens=prompt[: lookup.hits],
                req_id=lookup.request,
                request_configs=dict(configs) if configs else None,
            )
            assert int(found.sum()) == lookup.hits
            for start, tensor in self.connector.read.items():
                assert torch.equal(tensor, values(prompt[start : start + CHUNK], tensor.shape))
            assert len(self.connector.read) == -(-lookup.hits // CHUNK)
        self.built.lookup_unpin(lookup.request)

    def serve(
        self,
        tokens: Sequence[int],
        configs: dict[str, str] | None = None,
        *,
        step: int | None = None,
    ) -> int:
        """Serve one request; return its hit tokens. ``step``: tokens per chunk of prefill."""
        lookup = self.look_up(tokens, configs)
        self.retrieve(lookup, tokens, configs)
        start = lookup.hits
        while start < len(tokens):
            end = len(tokens) if step is None else min(len(tokens), start + step)
            self.store(tokens[:end], configs, start=start)
            start = end
        return lookup.hits


class Lookup:
    """A request that was looked up: its id, and so many hit tokens."""

    def __init__(self, request: str, hits: int) -> None:
        self.request = request
        self.hits = hits


def metadata() -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(LAYERS, KV, CHUNK, HEADS, SIZE),
    )


@contextmanager
def engine(policy: str, chunks: int, *, plugin: bool = False, **settings: Any) -> Iterator[Engine]:
    """An engine under ``cache_policy: policy`` with a CPU pool of ``chunks``.

    ``plugin``: with the storage plugin ``evoke``.
    """
    register()
    name = f"evoke-test-{next(_instances)}"
    if plugin:
        settings["storage_plugins"] = ["evoke"]
        settings["extra_config"] = {
            "storage_plugin.evoke.module_path": "evoke_lmcache.storage_plugin",
            "storage_plugin.evoke.class_name": "EvokeStoragePlugin",
            **settings.get("extra_config", {}),
        }
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=(chunks + 0.5) * CHUNK_BYTES / GIB,
        cache_policy=policy,
        lmcache_instance_id=name,
        save_unfull_chunk=False,
        **settings,
    )
    connector = TokenConnector()
    try:
        built = LMCacheEngineBuilder.get_or_create(
            name, config, metadata(), connector, lambda tensor, rank: None, lambda it, rank: it
        )
        built.post_init()
        yield Engine(built, connector)
    finally:
        LMCacheEngineBuilder.destroy(name)


def prompt(name: str, chunks: int) -> list[int]:
    """A prompt of so many chunks that shares nothing with another name's."""
    base = sum(byte << (8 * at) for at, byte in enumerate(name.encode()[-3:])) << 12
    return [base + n for n in range(chunks * CHUNK)]
