"""Between the runtime's pool of blocks and LMCache's memory, with damage where it is asked for.

Guarantees: what is stored is copied out of the pool, what is restored is copied into it, nothing
else is touched; bytes are counted both ways. A damaged connector hurts one block of every restore,
as `gates.damage` does behind vLLM:

* `flip`: all bits of the high byte of one value of the last block are inverted.
* `swap`: the last block holds what another context's last restored block holds.
* `stale`: the last block keeps what its place in the pool held before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector

KINDS = ("flip", "swap", "stale")
_VALUE_AT = 16  # which value of a block is flipped


class PoolConnector(MockGPUConnector):
    """Copies blocks of `pool`, of shape (slots, layers, 2, block, heads, size).

    Every call names the `slots` of a prompt's blocks, head first, and the `context` it belongs to.
    """

    def __init__(self, pool: torch.Tensor, damage: str | None = None) -> None:
        super().__init__(tuple(pool.shape[1:]))
        if damage is not None and damage not in KINDS:
            raise ValueError(f"damage must be one of {', '.join(KINDS)}, not {damage!r}")
        self.stored_bytes = self.restored_bytes = 0
        self._pool = pool
        self._block = pool.shape[3]
        self._damage = damage
        self._last: dict[bytes, torch.Tensor] = {}  # context -> its last restored block, as it was

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **named: Any
    ) -> None:
        """Store blocks: from the pool into LMCache's memory."""
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            assert end - start == self._block
            block = self._pool[named["slots"][start // self._block]]
            memory.tensor.view(block.shape).copy_(block)
            self.stored_bytes += block.nbytes

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **named: Any
    ) -> None:
        """Restore blocks: from LMCache's memory into the pool."""
        if not memory_objs:
            return
        slots = [named["slots"][start // self._block] for start in starts]
        before = self._pool[slots[-1]].clone()
        for memory, slot in zip(memory_objs, slots, strict=True):
            block = self._pool[slot]
            block.copy_(memory.tensor.view(block.shape))
            self.restored_bytes += block.nbytes
        self._hurt(slots[-1], before, named["context"])

    def _hurt(self, slot: int, before: torch.Tensor, context: bytes) -> None:
        block = self._pool[slot]
        if self._damage == "flip":
            size = block.element_size()
            block.view(-1).view(torch.int8)[(_VALUE_AT + 1) * size - 1] ^= -1  # little-endian
        elif self._damage == "stale":
            block.copy_(before)
        elif self._damage == "swap":
            others = [content for other, content in self._last.items() if other != context]
            self._last.pop(context, None)
            self._last[context] = block.clone()
            if others:
                block.copy_(others[-1])
