"""A runtime small enough to read: prefix caching in a pool of blocks, LMCache behind it.

A prompt is answered as an engine does it: the leading blocks that the pool has are used, those that
LMCache has beyond them are restored into the pool, the rest is computed and stored. Blocks are
computed one by one, always from a block's beginning to its end, so the arithmetic of a block does
not depend on how many of those before it were reused: answers repeat to the bit, and any difference
is the restored bytes'.

Guarantees: the pool never holds more than its slots; blocks of the running request stay in it; the
last token of a prompt is always computed.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from evoke_core import chain_keys
from evoke_lmcache import register
from gates.lmcache.connector import PoolConnector

_GIB = 2**30
_instances = itertools.count()


@frozen
class Reply:
    """An answer, and where its prompt's tokens came from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    in_pool: int
    restored: int


class Model:
    """A causal language model in float32."""

    def __init__(self, folder: Path) -> None:
        disable_progress_bar()  # of weights that load in a second
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._model.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.layers: int = config.num_hidden_layers
        self.heads_and_size: tuple[int, int] = (config.num_key_value_heads, size)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Append tokens; return the log-probabilities of the next one."""
        ids = torch.tensor([list(tokens)])
        logits = self._model(input_ids=ids, cache=cache, logits_to_keep=1).logits
        return torch.log_softmax(logits[0, -1], dim=-1)


class Runtime:
    """A model with a pool of `slots` blocks, and LMCache where `engine` is given.

    Args:
        pool: shape (slots, layers, 2, block, heads, size); keys, then values.
        connector: the engine's.
    """

    def __init__(
        self, model: Model, pool: torch.Tensor, engine: Any, connector: PoolConnector | None
    ) -> None:
        self._model = model
        self._pool = pool
        self._block = pool.shape[3]
        self._engine = engine
        self.connector = connector
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # key -> slot, least recent first
        self._free = list(range(pool.shape[0]))
        self._requests = itertools.count()

    def answer(self, prompt: Sequence[int], answer_tokens: int) -> Reply:
        """Answer a prompt with exactly so many greedy tokens."""
        tokens = list(prompt)
        keys = chain_keys(tokens, self._block)
        reusable = keys[: (len(tokens) - 1) // self._block]
        slots = self._take(reusable)
        in_pool = len(slots)
        found = self._restore(tokens, keys, slots, len(reusable))
        cache = self._cache(slots)
        logprobs = self._compute(tokens, keys, slots, cache)
        if self._engine is not None:
            mask = torch.ones(len(keys) * self._block, dtype=torch.bool)
            mask[: found * self._block] = False
            if mask.any():
                self._engine.store(
                    tokens=tokens[: len(mask)], mask=mask, slots=slots, context=keys[0]
                )
        chosen, given = [], []
        for _ in range(answer_tokens):
            token = int(logprobs.argmax())
            chosen.append(token)
            given.append(float(logprobs[token]))
            if len(chosen) < answer_tokens:
                logprobs = self._model.run([token], cache)
        restored = max(0, found - in_pool)
        return Reply(tuple(chosen), tuple(given), in_pool * self._block, restored * self._block)

    def _take(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading keys that the pool has."""
        held = list(itertools.takewhile(self._slots.__contains__, keys))
        for key in reversed(held):  # a head outlives its tail
            self._slots.move_to_end(key)
        return [self._slots[key] for key in held]

    def _place(self, key: bytes, own: Sequence[bytes]) -> int:
        """Return a slot for a new block; the least recent one that is not the request's goes."""
        if key in self._slots:
            return self._slots[key]
        if not self._free:
            mine = set(own)
            victim = next(each for each in self._slots if each not in mine)
            self._free.append(self._slots.pop(victim))
        slot = self._slots[key] = self._free.pop()
        return slot

    def _restore(
        self, tokens: list[int], keys: Sequence[bytes], slots: list[int], most: int
    ) -> int:
        """Restore what LMCache has beyond `slots`, which grows; return the blocks it has."""
        if self._engine is None or most == 0:
            return 0
        request = f"r{next(self._requests)}"
        asked = tokens[: most * self._block]
        found = self._engine.lookup(tokens=asked, lookup_id=request, pin=True) // self._block
        have = len(slots)
        if found > have:
            slots += [self._place(key, keys) for key in keys[have:found]]
            mask = torch.ones(found * self._block, dtype=torch.bool)
            mask[: have * self._block] = False
            got = self._engine.retrieve(
                tokens=asked[: len(mask)], mask=mask, req_id=request, slots=slots, context=keys[0]
            )
            assert int(got.sum()) == (found - have) * self._block
        self._engine.lookup_unpin(request)
        return int(found)

    def _cache(self, slots: Sequence[int]) -> DynamicCache:
        """Return the model's cache with the blocks in these slots."""
        cache = DynamicCache()
        if slots:
            blocks = self._pool[list(slots)]  # (blocks, layers, 2, block, heads, size)
            for layer in range(self._model.layers):
                kv = blocks[:, layer].transpose(0, 1).flatten(1, 2)  # (2, tokens, heads, size)
                keys, values = kv.transpose(1, 2).unsqueeze(1)  # (1, heads, tokens, size) each
                cache.update(keys.contiguous(), values.contiguous(), layer)
        return cache

    def _compute(
        self, tokens: list[int], keys: Sequence[bytes], slots: list[int], cache: DynamicCache
    ) -> torch.Tensor:
        """Compute the rest of the prompt, block by block; full blocks go into the pool."""
        logprobs = torch.empty(0)
        for start in range(len(slots) * self._block, len(tokens), self._block):
            end = min(start + self._block, len(tokens))
            logprobs = self._model.run(tokens[start:end], cache)
            if end - start == self._block:
                slot = self._place(keys[len(slots)], keys)
                slots.append(slot)
                for layer, held in enumerate(cache.layers):
                    self._pool[slot, layer, 0] = held.keys[0, :, start:end].transpose(0, 1)
                    self._pool[slot, layer, 1] = held.values[0, :, start:end].transpose(0, 1)
        return logprobs


@contextmanager
def serving(
    model: Model,
    block_size: int,
    pool_blocks: int,
    *,
    policy: str | None,
    tier_blocks: int = 0,
    settings: dict[str, Any] | None = None,
    damage: str | None = None,
) -> Iterator[Runtime]:
    """A runtime; with `policy` it has LMCache behind it, with `tier_blocks` chunks of memory.

    `settings` is LMCache's ``extra_config``.
    """
    shape = (model.layers, 2, block_size, *model.heads_and_size)
    pool = torch.zeros((pool_blocks, *shape), dtype=torch.float32)
    if policy is None:
        yield Runtime(model, pool, None, None)
        return
    register()
    name = f"evoke-gate-{next(_instances)}"
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=block_size,
        max_local_cpu_size=(tier_blocks + 0.5) * pool[0].nbytes / _GIB,
        cache_policy=policy,
        lmcache_instance_id=name,
        save_unfull_chunk=False,
        extra_config=settings or {},
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=shape,
    )
    connector = PoolConnector(pool, damage)
    try:
        engine = LMCacheEngineBuilder.get_or_create(
            name, config, metadata, connector, lambda tensor, rank: None, lambda it, rank: it
        )
        engine.post_init()
        yield Runtime(model, pool, engine, connector)
    finally:
        LMCacheEngineBuilder.destroy(name)
