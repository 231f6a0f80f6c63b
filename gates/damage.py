"""EVOKE's spec with a worker that damages what it restores, on purpose: the negative controls.

`kv_connector_extra_config["gate_damage"]` holds the `kind` of damage and `value_bytes`, the size of
a number in the KV cache. In every load of a worker, one block is hurt:

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

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        settings = extra_config(given[0])[DAMAGE_KEY]
        self._kind, self._value_bytes = settings["kind"], settings["value_bytes"]
        if self._kind not in KINDS:
            raise ValueError(f"{DAMAGE_KEY} must be one of {', '.join(KINDS)}, not {self._kind!r}")
        logger.warning("%s %s in every restore; a negative control", MARK, self._kind)

    def get_handlers(self, kv_caches: Any) -> Iterator[Any]:
        """vLLM 0.24: one handler for each direction."""
        damage = Damage(self._kind, engine_tensors(kv_caches), self._value_bytes)
        for source, target, handler in super().get_handlers(kv_caches):
            damage.wrap_handler(handler, store=source.medium() == "GPU")
            yield source, target, handler

    def get_worker(self, kv_caches: Any) -> Any:
        """vLLM 0.25 and later: one worker for both directions."""
        worker = super().get_worker(kv_caches)
        Damage(self._kind, engine_tensors(kv_caches), self._value_bytes).wrap_worker(worker)
        return worker


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

    def wrap_handler(self, handler: Any, *, store: bool) -> None:
        """Stand before a handler of one direction; stores are only watched."""
        submit = handler.transfer_async

        def transfer_async(job_id: int, spec: tuple[Any, Any]) -> bool:
            if store:
                self._forget(spec[1])
            else:
                self._prepare(job_id, *spec)
            submitted: bool = submit(job_id, spec)
            return submitted

        handler.transfer_async = transfer_async
        if not store:
            self._wrap_finished(handler)

    def wrap_worker(self, worker: Any) -> None:
        """Stand before a worker of both directions."""
        load, store = worker.submit_load, worker.submit_store

        def submit_load(job_id: int, source: Any, target: Any, *rest: Any, **named: Any) -> bool:
            self._prepare(job_id, source, target)
            submitted: bool = load(job_id, source, target, *rest, **named)
            return submitted

        def submit_store(job_id: int, source: Any, target: Any, *rest: Any, **named: Any) -> bool:
            self._forget(target)
            submitted: bool = store(job_id, source, target, *rest, **named)
            return submitted

        worker.submit_load, worker.submit_store = submit_load, submit_store
        self._wrap_finished(worker)

    def _wrap_finished(self, worker: Any) -> None:
        finished = worker.get_finished

        def get_finished() -> list[Any]:
            results: list[Any] = finished()
            for result in results:
                self._finish(result.job_id)
            return results

        worker.get_finished = get_finished

    def _forget(self, target: Any) -> None:
        """Undo the exchanges of slots that are written anew."""
        for slot in map(int, target.block_ids):
            if (other := self._exchanged.pop(slot, None)) is not None:
                del self._exchanged[other]
            self._earlier = [slots for slots in self._earlier if slot not in slots]

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
        source.block_ids = np.asarray(read, dtype=np.asarray(source.block_ids).dtype)
        self._earlier = [*self._earlier[-63:], slots]


def extra_config(given: Any) -> dict[str, Any]:
    """Return `kv_connector_extra_config`, from what a spec is made from in any vLLM.

    `given` is its first argument: vLLM's whole configuration, since 0.26 the offloading one.
    """
    if hasattr(given, "extra_config"):
        return dict(given.extra_config)
    return dict(given.kv_transfer_config.kv_connector_extra_config)


def engine_tensors(kv_caches: Any) -> list[torch.Tensor]:
    """Return the engine's KV tensors as bytes, ``(blocks, page bytes)``."""
    return [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
