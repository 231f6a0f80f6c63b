"""EVOKE's spec with a worker that damages what it restores, on purpose: the negative controls.

`kv_connector_extra_config["gate_damage"]` names the damage. In every load of a worker, one block
is hurt:

* `flip`: all bits of the high byte of one value of the load's last block are inverted.
* `swap`: the slot of the load's last block and a slot of another context's load are exchanged,
  for this load and all that follow. Blocks of one context are no use here: a block carries its
  position with it, and attention does not care in which order it reads them.
* `stale`: the load's last block keeps what its place in the engine's pool held before.

The damage is done at the boundary that vLLM gives to a worker (a transfer's specs, the engine's
tensors), so it works on any device and with whatever moves the blocks underneath.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from evoke_vllm.spec import EvokeOffloadingSpec

logger = init_logger(__name__)

DAMAGE_KEY = "gate_damage"
KINDS = ("flip", "swap", "stale")
MARK = "gate damage:"
_VALUE_AT = 16  # which value of a block's page is flipped


class DamagedSpec(EvokeOffloadingSpec):
    """EVOKE's tier behind a worker that cannot be trusted."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        cache = getattr(vllm_config, "cache_config", None)
        dtype = str(getattr(cache, "cache_dtype", "auto"))
        self._value_bytes = 1 if "fp8" in dtype else vllm_config.model_config.dtype.itemsize
        self._kind = vllm_config.kv_transfer_config.kv_connector_extra_config[DAMAGE_KEY]
        if self._kind not in KINDS:
            raise ValueError(f"{DAMAGE_KEY} must be one of {', '.join(KINDS)}, not {self._kind!r}")
        logger.warning("%s %s in every restore; a negative control", MARK, self._kind)

    def get_handlers(self, kv_caches: Any) -> Iterator[Any]:
        """vLLM 0.24: one handler for each direction."""
        damage = Damage(self._kind, engine_tensors(kv_caches), self._value_bytes)
        for source, target, handler in super().get_handlers(kv_caches):
            if source.medium() != "GPU":
                damage.wrap_handler(handler)
            else:
                damage.watch_stores(handler)
            yield source, target, handler


class Damage:
    """Hurts one block in every load; `engine` are the engine's tensors, ``(blocks, bytes)``."""

    def __init__(self, kind: str, engine: list[torch.Tensor], value_bytes: int) -> None:
        self._kind = kind
        self._engine = engine
        self._high_byte = (_VALUE_AT + 1) * value_bytes - 1  # little-endian
        self._pending: dict[int, Callable[[], None]] = {}
        self._exchanged: dict[int, int] = {}
        self._earlier: list[list[int]] = []
        self.done = 0

    def wrap_handler(self, handler: Any) -> None:
        """Damage the loads of `handler`, which moves blocks from the tier to the engine."""
        submit, finished = handler.transfer_async, handler.get_finished

        def transfer_async(job_id: int, spec: tuple[Any, Any]) -> bool:
            source, target = spec
            self._prepare(job_id, source, target)
            submitted: bool = submit(job_id, spec)
            return submitted

        def get_finished() -> list[Any]:
            results: list[Any] = finished()
            for result in results:
                self._finish(result.job_id)
            return results

        handler.transfer_async, handler.get_finished = transfer_async, get_finished

    def watch_stores(self, handler: Any) -> None:
        """Forget exchanges of slots that are written anew."""
        submit = handler.transfer_async

        def transfer_async(job_id: int, spec: tuple[Any, Any]) -> bool:
            for slot in spec[1].block_ids.tolist():
                if (other := self._exchanged.pop(slot, None)) is not None:
                    del self._exchanged[other]
                self._earlier = [slots for slots in self._earlier if slot not in slots]
            submitted: bool = submit(job_id, spec)
            return submitted

        handler.transfer_async = transfer_async

    def _prepare(self, job_id: int, source: Any, target: Any) -> None:
        row = int(target.block_ids[-1])
        if self._kind == "flip":
            self._pending[job_id] = lambda: self._flip(row)
        elif self._kind == "stale":
            before = [tensor[row].clone() for tensor in self._engine]
            self._pending[job_id] = lambda: self._put_back(row, before)
        else:
            self._exchange(source)

    def _finish(self, job_id: int) -> None:
        if hurt := self._pending.pop(job_id, None):
            hurt()
            self.done += 1

    def _flip(self, row: int) -> None:
        self._engine[0][row, self._high_byte] ^= -1

    def _put_back(self, row: int, before: list[torch.Tensor]) -> None:
        for tensor, content in zip(self._engine, before, strict=True):
            tensor[row] = content

    def _exchange(self, source: Any) -> None:
        slots = [int(slot) for slot in source.block_ids]
        last = slots[-1]
        others = [o for o in reversed(self._earlier) if o[-1] not in slots and last not in o]
        free = [o[-1] for o in others if o[-1] not in self._exchanged]
        if last not in self._exchanged and free:
            self._exchanged |= {last: free[0], free[0]: last}
        read = [self._exchanged.get(slot, slot) for slot in slots]
        self.done += read != slots
        source.block_ids = np.asarray(read, dtype=source.block_ids.dtype)
        self._earlier = [*self._earlier[-63:], slots]


def engine_tensors(kv_caches: Any) -> list[torch.Tensor]:
    """Return the engine's KV tensors as bytes, ``(blocks, page bytes)``."""
    return [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
