"""A transformers cache that stays within a budget: blocks leave it and come back elsewhere.

The tokens in the cache always stand at positions 0, 1, 2, ...: where a block leaves, the blocks
behind it close the gap, and a block that comes back lands at the end. Either way its keys are
turned on by :class:`evoke_core.rope.Rope`; nothing is computed again. Values move as they are.

Guarantees: never more than ``budget`` tokens; the model sees no gap and no position twice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from transformers import DynamicCache

from evoke_core.rope import Rope

Array = npt.NDArray[Any]


class OverBudget(RuntimeError):
    """More tokens were to enter the cache than it may hold: its owner made no room."""


@frozen
class Block:
    """A stretch of tokens that leaves, stays and comes back as one."""

    key: bytes
    tokens: int


@frozen(eq=False)
class StoredBlock:
    """A block outside the cache.

    Attributes:
        keys, values: float32, shape (layers, heads, tokens, head_dim).
        position: where its first token stood when it left; the keys are rotated for that.
    """

    block: Block
    keys: Array
    values: Array
    position: int


class BoundedCache:
    """See the module's docstring. One sequence; every layer has full attention.

    Args:
        model: a causal language model of transformers with a rotary embedding, in float32.
        budget: tokens that it may hold; None: any number.
    """

    def __init__(self, model: Any, budget: int | None = None) -> None:
        self.budget = budget
        self.dynamic = DynamicCache()
        self.blocks: list[Block] = []
        self.most = 0
        rotary = model.model.rotary_emb
        self._rope = Rope(
            rotary.inv_freq.numpy(), model.config.head_dim, float(rotary.attention_scaling)
        )

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return int(self.dynamic.get_seq_length())

    @property
    def unnamed(self) -> int:
        """Tokens at the end that belong to no block yet."""
        return self.tokens - sum(block.tokens for block in self.blocks)

    def expect(self, tokens: int) -> None:
        """Check that so many more tokens may enter; call it before the model runs.

        Raises:
            OverBudget: they do not fit.
        """
        if self.budget is not None and self.tokens + tokens > self.budget:
            raise OverBudget(f"{self.tokens} + {tokens} tokens, the budget is {self.budget}")
        self.most = max(self.most, self.tokens + tokens)

    def name(self, blocks: Sequence[Block]) -> None:
        """Say which blocks the unnamed tokens at the end are, in order.

        Raises:
            ValueError: they are not as many tokens.
        """
        if sum(block.tokens for block in blocks) != self.unnamed:
            raise ValueError(f"the blocks do not make up {self.unnamed} tokens")
        self.blocks.extend(blocks)

    def evict(self, keys: Sequence[bytes]) -> list[StoredBlock]:
        """Take blocks out, in the cache's order; what stands behind them moves up."""
        leaving = set(keys)
        stored: list[StoredBlock] = []
        kept: list[int] = []
        at = 0
        for block in self.blocks:
            here = range(at, at + block.tokens)
            if block.key in leaving:
                stored.append(self._store(block, at))
            else:
                kept.extend(here)
            at += block.tokens
        kept.extend(range(at, self.tokens))
        self.blocks = [block for block in self.blocks if block.key not in leaving]
        if stored:
            self._keep(np.array(kept, dtype=np.int64))
        return stored

    def restore(self, stored: Sequence[StoredBlock]) -> None:
        """Land blocks at the end, in the order given.

        Raises:
            OverBudget: they do not fit.
            ValueError: there are unnamed tokens at the end, which they would separate.
        """
        if not stored:
            return
        if self.unnamed:
            raise ValueError(f"{self.unnamed} tokens at the end belong to no block yet")
        self.expect(sum(each.block.tokens for each in stored))
        old = np.concatenate([each.position + np.arange(each.block.tokens) for each in stored])
        new = self.tokens + np.arange(len(old))
        keys = self._rope.reanchor(np.concatenate([each.keys for each in stored], axis=2), old, new)
        values = np.concatenate([each.values for each in stored], axis=2)
        for layer in range(len(keys)):
            self.dynamic.update(
                torch.from_numpy(keys[layer][None]), torch.from_numpy(values[layer][None]), layer
            )
        self.blocks.extend(each.block for each in stored)

    def _store(self, block: Block, at: int) -> StoredBlock:
        def copied(name: str) -> Array:
            parts = [
                getattr(layer, name)[0, :, at : at + block.tokens] for layer in self.dynamic.layers
            ]
            return torch.stack(parts).numpy()

        return StoredBlock(block, copied("keys"), copied("values"), at)

    def _keep(self, kept: Array) -> None:
        """Keep the tokens at these positions, rising, and move them together."""
        first = int((kept == np.arange(len(kept))).sum())  # those before the first gap stay put
        index, moving = torch.from_numpy(kept), kept[first:]
        layers = self.dynamic.layers
        keys = torch.stack([layer.keys[0].index_select(1, index) for layer in layers]).numpy()
        new = np.arange(first, len(kept))
        keys[:, :, first:] = self._rope.reanchor(keys[:, :, first:], moving, new)
        for layer, turned in zip(layers, keys, strict=True):
            layer.keys = torch.from_numpy(turned[None])
            layer.values = layer.values.index_select(2, index)
