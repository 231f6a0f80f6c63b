# SPDX-License-Identifier: Apache-2.0
"""The host-memory worker copies exactly the bytes it is told to, and no others."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here: run `nox -s tests-vllm`")

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from evoke_vllm import compat
from evoke_vllm.host import HostCopies, HostWorker
from tests.vllm.shapes import PAGE, create_spec

pytestmark = pytest.mark.engine

ENGINE_BLOCKS, SLOTS = 24, 6


class Worker:
    """Two engine tensors of different page sizes, two KV-cache groups that share the first."""

    def __init__(self, factor: int) -> None:
        shapes = ((ENGINE_BLOCKS, 12), (ENGINE_BLOCKS, 5))
        self.tensors = [torch.zeros(shape, dtype=torch.int8) for shape in shapes]
        self.refs = [
            [CanonicalKVCacheRef(0, 12), CanonicalKVCacheRef(1, 5)],
            [CanonicalKVCacheRef(0, 8)],  # padded: the last 4 bytes are not this group's
        ]
        tier = [torch.zeros((SLOTS, factor * page), dtype=torch.int8) for _, page in shapes]
        self._worker = HostWorker(HostCopies(self.tensors, tier, factor, self.refs))
        self._jobs = 0

    def fill(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.random_(-128, 128, generator=generator)
        return [tensor.clone() for tensor in self.tensors]

    def store(self, engine: GPULoadStoreSpec, slots: list[int]) -> None:
        self._finish(self._worker.submit_store(self._jobs, engine, CPULoadStoreSpec(slots)), engine)

    def load(self, slots: list[int], engine: GPULoadStoreSpec) -> None:
        self._finish(self._worker.submit_load(self._jobs, CPULoadStoreSpec(slots), engine), engine)

    def _finish(self, submitted: bool, engine: GPULoadStoreSpec) -> None:
        (result,) = self._worker.get_finished()
        pages = [sum(ref.page_size_bytes for ref in refs) for refs in self.refs]
        expected = sum(n * page for n, page in zip(engine.group_sizes, pages, strict=True))
        assert (submitted, result.job_id, result.success) == (True, self._jobs, True)
        assert result.transfer_size == expected
        assert self._worker.get_finished() == []
        self._jobs += 1


@given(st.integers(1, 4), st.data())
def test_what_was_stored_comes_back(factor: int, data: st.DataObject) -> None:
    """Groups start anywhere within an offloaded block and end anywhere."""
    worker = Worker(factor)
    sizes, firsts, slots_needed = [], [], 0
    for _ in range(2):
        size = data.draw(st.integers(0, 2 * factor), label="blocks")
        first = data.draw(st.integers(0, 3 * factor), label="first")
        if size:
            slots_needed += -(-(first % factor + size) // factor)
        sizes.append(size)
        firsts.append(first)
    numbers = st.permutations(range(ENGINE_BLOCKS))
    source = data.draw(numbers, label="from")[: sum(sizes)]
    target = data.draw(numbers, label="to")[: sum(sizes)]
    slots = data.draw(st.permutations(range(SLOTS)), label="slots")[:slots_needed]

    written = worker.fill(1)
    worker.store(GPULoadStoreSpec(source, sizes, firsts), slots)
    assert all(map(torch.equal, worker.tensors, written)), "storing only reads the engine's side"

    before = worker.fill(2)
    worker.load(slots, GPULoadStoreSpec(target, sizes, firsts))
    expected = [tensor.clone() for tensor in before]
    at = 0
    for group, size in enumerate(sizes):
        for old, new in zip(source[at : at + size], target[at : at + size], strict=True):
            for ref in worker.refs[group]:
                page = slice(0, ref.page_size_bytes)
                expected[ref.tensor_idx][new, page] = written[ref.tensor_idx][old, page]
        at += size
    assert all(map(torch.equal, worker.tensors, expected))


def test_a_load_may_begin_inside_a_stored_block() -> None:
    """Store one whole offloaded block of three; load its last two."""
    worker = Worker(3)
    written = worker.fill(1)
    worker.store(GPULoadStoreSpec([4, 5, 6], [3, 0], [0, 0]), [2])
    worker.fill(2)
    worker.load([2], GPULoadStoreSpec([10, 11], [2, 0], [1, 0]))
    for tensor, old in zip(worker.tensors, written, strict=True):
        assert torch.equal(tensor[[10, 11]], old[[5, 6]])


def test_slots_do_not_overlap() -> None:
    worker = Worker(2)
    written = worker.fill(1)
    blocks = list(range(2 * SLOTS))
    worker.store(GPULoadStoreSpec(blocks, [len(blocks), 0], [0, 0]), list(range(SLOTS)))
    worker.fill(2)
    worker.load(list(range(SLOTS)), GPULoadStoreSpec(blocks, [len(blocks), 0], [0, 0]))
    for tensor, old in zip(worker.tensors, written, strict=True):
        assert torch.equal(tensor[blocks], old[blocks])


def test_a_spec_gives_the_worker_that_this_vllm_asks_for() -> None:
    """One object for both directions since 0.25, a handler for each before."""
    spec: Any = create_spec({"cpu_bytes_to_use": SLOTS * PAGE})
    tensor = torch.arange(ENGINE_BLOCKS * PAGE, dtype=torch.int32).to(torch.int8)
    tensor = tensor.view(ENGINE_BLOCKS, PAGE)
    before = tensor.clone()
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]]
    )
    with pytest.MonkeyPatch.context() as patch:  # the stock wheel sees no platform at all
        patch.setattr(type(current_platform), "is_cpu", lambda platform: True)
        if compat.HAS_WORKERS:
            worker = spec.get_worker(caches)
            store, load = worker.submit_store, worker.submit_load
        else:
            handlers = list(spec.get_handlers(caches))
            assert [(source.medium(), target.medium()) for source, target, _ in handlers] == [
                ("GPU", "CPU"),
                ("CPU", "GPU"),
            ]
            store, load = (
                lambda job, source, target, by=by: by.transfer_async(job, (source, target))
                for *_, by in handlers
            )
    engine = GPULoadStoreSpec([4, 9], [2], [0])
    assert store(0, engine, CPULoadStoreSpec([5, 0]))
    tensor.zero_()
    assert load(1, CPULoadStoreSpec([5, 0]), engine)
    assert torch.equal(tensor[[4, 9]], before[[4, 9]])
    assert int(tensor.ne(0).any(dim=1).sum()) == 2
