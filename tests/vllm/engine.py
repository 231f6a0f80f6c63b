# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's own scheduler and offloading connector, our spec and manager.

Requests are announced, scheduled, preempted, finished and aborted by vLLM's `Scheduler` (or its
asynchronous one); what the workers do is played here. "Computing" a block writes a number that
follows from its content hash into the engine's memory, a transfer copies numbers between the two
memories, and before every step each block that a request relies on is checked: a block restored
from the wrong slot, or before it was written, is found at once.

Transfers take as long as the caller likes. Each is copied when a worker would be handed it (stores
after the step, loads before it) and reported to the scheduler by every rank in its own time.
"""

import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm import shapes
from tests.vllm.shapes import BLOCK, GPU_BLOCKS, PAGE

UNWRITTEN = -1


@dataclass
class Transfer:
    """A job of the connector's, as the workers see it."""

    job: int
    request: str
    load: bool
    ranks_left: int
    flush: bool = False


def _number(content: bytes, group: int) -> int:
    return int.from_bytes(content[:7], "big") * 8 + group


@cache
def _seed_hashes() -> None:
    """Once for all engines of a process, so that they name equal blocks alike."""
    init_none_hash(sha256)


class Engine:
    """A scheduler, a connector, and workers that move numbers.

    Args:
        blocks: slots of the tier.
        layers: the KV-cache groups; one of full attention if None.
        extra: more of `kv_connector_extra_config`.
        gpu_blocks: blocks of the engine's own pool.
        ranks: workers that have to report a transfer.
        asynchronous: with vLLM's asynchronous scheduler, a step is scheduled before the one before
            it has been answered.
        late: given a random source, says whether a rank reports a finished transfer now.
    """

    def __init__(
        self,
        blocks: int,
        *,
        factor: int = 1,
        layers: Sequence[Any] | None = None,
        extra: dict[str, Any] | None = None,
        gpu_blocks: int = GPU_BLOCKS,
        ranks: int = 1,
        asynchronous: bool = False,
        max_num_seqs: int = 8,
        step_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        given = {"cpu_bytes_to_use": blocks * factor * PAGE * ranks}
        if factor > 1:
            given["block_size"] = factor * BLOCK
        config = shapes.vllm_config(
            given | (extra or {}),
            ranks=ranks,
            async_scheduling=asynchronous,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
        )
        caches = shapes.kv_cache_config(layers, gpu_blocks)
        config.cache_config.num_gpu_blocks = gpu_blocks
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler: Any = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
        self.connector: Any = self.scheduler.connector.connector_scheduler
        self.manager: Any = self.connector.manager
        self.groups = len(caches.kv_cache_groups)
        self.factor = factor
        self.ranks = ranks
        self.asynchronous = asynchronous
        self.random = random.Random(seed)
        # Before, a request kept the jobs that a reset had dropped, and its next one was a KeyError.
        self.resets_in_flight = "transfer_jobs.clear()" in inspect.getsource(type(self.connector))
        self.report: Callable[[Transfer], bool] = lambda transfer: True
        self.memory = np.full(gpu_blocks, UNWRITTEN, dtype=np.int64)
        self.tier = np.full(blocks * factor, UNWRITTEN, dtype=np.int64)
        self.transfers: list[Transfer] = []
        self.on_finished: Callable[[Request], None] = lambda request: None
        self.restored = self.stored = self.preempted = 0
        self.hits: dict[str, int] = {}
        self._unanswered: tuple[Any, ModelRunnerOutput] | None = None
        _seed_hashes()
        self._hasher = get_request_block_hasher(hash_block, sha256)

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        answer: int = 1,
        params: dict[str, Any] | None = None,
    ) -> Request:
        """A request arrives; it ends after `answer` tokens."""
        sampling = SamplingParams(
            max_tokens=answer,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        sampling.update_from_generation_config({}, 0)
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def idle(self) -> bool:
        """Nothing to schedule, nothing under way."""
        return not (self.scheduler.requests or self.transfers or self._unanswered)

    # --- steps ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, load, compute, store, answer."""
        output = self.scheduler.schedule()
        if self.asynchronous and self._unanswered:
            self._answer(*self._unanswered)
            self._unanswered = None
        sampling = self._who_samples(output)
        self.preempted += len(output.preempted_req_ids or ())
        meta = output.kv_connector_metadata
        flush = meta.jobs_to_flush or ()
        for job, planned in meta.store_jobs.items():
            if job in flush:  # of blocks that this very step gives to others
                self._store(job, planned)
        for transfer in self.transfers:
            transfer.flush |= transfer.job in flush
        for job, planned in meta.load_jobs.items():
            self._load(job, planned)
        self._compute(output)
        for job, planned in meta.store_jobs.items():
            if job not in flush:
                self._store(job, planned)
        result = self._result(output, sampling)
        if self.asynchronous and output.num_scheduled_tokens:
            self._unanswered = (output, result)
        else:
            self._answer(output, result)

    def drain(self, steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if self.idle and not self.scheduler.finished_req_ids:
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps: {list(self.scheduler.requests)}")

    def _answer(self, output: Any, result: ModelRunnerOutput) -> None:
        before = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        for name, request in before.items():
            if name not in self.scheduler.requests:
                self.on_finished(request)

    def _who_samples(self, output: Any) -> dict[str, bool]:
        sampling = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)
            waiting = getattr(request, "num_output_placeholders", 0) if self.asynchronous else 0
            sampling[name] = request is not None and (
                request.num_computed_tokens == request.num_tokens + max(0, waiting - 1)
            )
        return sampling

    def _result(self, output: Any, sampling: dict[str, bool]) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[
                [self.random.randrange(1, 5)] if sampling[name] else [] for name in names
            ],
            kv_connector_output=self._reports(),
        )

    def _reports(self) -> KVConnectorOutput:
        completed: dict[int, int] = {}
        received: set[str] = set()
        left = []
        for transfer in self.transfers:
            told = 0
            for _ in range(transfer.ranks_left):
                told += transfer.flush or self.report(transfer)
            if told:
                completed[transfer.job] = told
                transfer.ranks_left -= told
            if transfer.ranks_left:
                left.append(transfer)
            elif transfer.load:
                received.add(transfer.request)
        self.transfers = left
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=completed),
        )

    # --- memory ---------------------------------------------------------------------------------

    def content(self, request: Request, group: int, at: int) -> int:
        """The number that stands for the request's engine block `at` of a group."""
        return _number(request.block_hashes[at], group)

    def _compute(self, output: Any) -> None:
        """Check what is relied on, then write what is new."""
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(name)
            if request is None:  # aborted since it was scheduled
                continue
            after = min(request.num_computed_tokens, request.num_tokens)
            first = (request.num_computed_tokens - tokens) // BLOCK
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, table in enumerate(tables):
                for at in range(min(first, len(table))):
                    if table[at]:  # 0: out of the window
                        found = self.memory[table[at]]
                        assert found == self.content(request, group, at), (
                            f"{name}: block {at} of group {group} is not what it should be"
                        )
                for at in range(first, min(after // BLOCK, len(table))):
                    if table[at]:
                        self.memory[table[at]] = self.content(request, group, at)
                if after % BLOCK and after // BLOCK < len(table) and table[after // BLOCK]:
                    self.memory[table[after // BLOCK]] = UNWRITTEN

    def _rows(self, engine: GPULoadStoreSpec, tier: Any) -> tuple[np.ndarray, np.ndarray]:
        """The engine's and the tier's rows of a transfer, one for each engine block."""
        rows, at, slot_at = [], 0, 0
        for size, first in zip(engine.group_sizes, engine.block_indices, strict=True):
            if not size:
                continue
            skip = first % self.factor
            slots = -(-(skip + size) // self.factor)
            ids = np.asarray(tier.block_ids[slot_at : slot_at + slots], dtype=np.int64)
            all_rows = (ids[:, None] * self.factor + np.arange(self.factor)).ravel()
            rows.append(all_rows[skip : skip + size])
            at, slot_at = at + size, slot_at + slots
        assert slot_at == len(tier.block_ids)
        ids = np.asarray(engine.block_ids, dtype=np.int64)
        assert at == len(ids)
        return ids, np.concatenate(rows) if rows else ids

    def _specs(self, planned: Any, load: bool) -> tuple[Any, Any]:
        source, target = getattr(planned, "transfer_spec", None) or (
            planned.src_spec,
            planned.dst_spec,
        )
        return (target, source) if load else (source, target)

    def _load(self, job: int, planned: Any) -> None:
        engine, tier = self._specs(planned, load=True)
        ids, rows = self._rows(engine, tier)
        assert (self.tier[rows] != UNWRITTEN).all(), "a slot is read that was never written"
        self.memory[ids] = self.tier[rows]
        self.restored += len(ids)
        self.hits[planned.req_id] = engine.group_sizes[0] * BLOCK
        self.transfers.append(Transfer(job, planned.req_id, True, self.ranks))

    def _store(self, job: int, planned: Any) -> None:
        ids, rows = self._rows(*self._specs(planned, load=False))
        named = {_number(key[:-4], key[-1]) for key in self.connector._jobs[job].keys}
        assert named <= set(self.memory[ids].tolist()), "stored under the key of another block"
        self.tier[rows] = self.memory[ids]
        self.stored += len(ids)
        self.transfers.append(Transfer(job, planned.req_id, False, self.ranks))


class MiniEngine(Engine):
    """One request after the other; a prompt is text, one character an engine block."""

    def __init__(self, blocks: int, *, window: bool = False, **given: Any) -> None:
        if window:
            given["layers"] = [shapes.full(), shapes.window()]
        super().__init__(blocks, **given)
        self._requests = 0

    def run(
        self,
        text: str,
        *,
        chunk: int = 8,
        params: dict[str, Any] | None = None,
        report: bool = True,
    ) -> int:
        """Serve one prompt from a cold GPU cache; return the tokens that the tier restored.

        Without `report`, what it stored is reported only when somebody waits for it.
        """
        self._requests += 1
        self.forget_gpu_cache()
        self.scheduler.max_num_scheduled_tokens = chunk * BLOCK
        name = f"r{self._requests}"
        request = self.add(name, tokens_of(text), params=params)
        waited = 0
        self.report = lambda transfer: report or transfer.load or waited > 3
        while name in self.scheduler.requests:
            before = request.num_computed_tokens
            self.step()
            waited = 0 if request.num_computed_tokens > before else waited + 1
        self.step()
        if report:
            self.finish_transfers()
        return self.hits.get(name, 0)

    def finish_transfers(self) -> None:
        """The workers report all they have copied."""
        self.report = lambda transfer: True
        self.drain()

    def forget_gpu_cache(self) -> None:
        """Nothing is found in the engine's own pool from now on."""
        assert not self.scheduler.running
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()


def tokens_of(text: Iterable[str]) -> list[int]:
    """Every character fills an engine block."""
    return [ord(character) for character in text for _ in range(BLOCK)]
