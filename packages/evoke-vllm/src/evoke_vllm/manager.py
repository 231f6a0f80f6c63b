"""vLLM's ``OffloadingManager`` interface, translated to the block ledger. It holds no policy.

What it adds to the ledger is only what vLLM says differently: groups are the last four bytes of a
key, tags travel in ``kv_transfer_params["evoke"]``, completions come as sets, and events and gauges
have vLLM's types.

Guarantees: ``lookup`` and ``touch`` never evict; ``prepare_store`` never returns ``None`` (the
scheduler would retry it every step) but grants what fits from the head; nothing that a client or a
late completion says raises. The one exception is deliberate: ``prepare_load`` of a block that was
never reported as stored raises, because any slot it could name would feed wrong data to the model.
"""

import time
from collections.abc import Collection, Iterable
from itertools import groupby
from operator import itemgetter
from typing import cast

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from evoke_core import BlockLedger, BlockState, EvokeConfig, RequestTags, TagProblem

logger = init_logger(__name__)

TAGS_KEY = "evoke"
_group_bytes = itemgetter(slice(-4, None))
_STATES = {BlockState.ABSENT: False, BlockState.PENDING: None, BlockState.READY: True}


class EvokeOffloadingManager(OffloadingManager):
    """Decides which blocks vLLM's CPU tier keeps.

    Args:
        num_blocks: slots of the tier.
        enable_events: collect stored and removed events for ``take_events``.
        store_threshold: requests that must name a block before it is stored; below 2: one.
        max_tracker_size: blocks whose naming is counted for ``store_threshold``.
        config: the operator's settings; defaults if None.
        window_groups: KV-cache groups without full attention, whose blocks have no parents.

    Raises:
        ValueError: a size below its minimum.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        config: EvokeConfig | None = None,
        window_groups: Iterable[int] = (),
    ) -> None:
        self.ledger = BlockLedger(
            num_blocks,
            config=config,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            window_groups=window_groups,
        )
        self._events_enabled = enable_events
        self._counts_skips = store_threshold > 1
        self._skips_reported = 0
        self._warned: set[TagProblem] = set()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        params = req_context.kv_transfer_params
        raw = params.get(TAGS_KEY) if isinstance(params, dict) else None
        tags, problems = RequestTags.parse(raw)
        if problems:
            self._report(problems)
        self.ledger.open(req_context.req_id, tags, time.monotonic())
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.ledger.close(req_context.req_id)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return _STATES[self.ledger.lookup(req_context.req_id, key)]

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._announce(req_context)
        for group, part in _by_group(keys):
            self.ledger.touch(req_context.req_id, part, group=group)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        slots = self.ledger.acquire(req_context.req_id, keys)
        if slots is None:
            raise RuntimeError(
                f"request {req_context.req_id}: asked to load blocks that are not stored; "
                "the engine must look blocks up before it loads them"
            )
        return CPULoadStoreSpec(slots)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.ledger.release(req_context.req_id, keys)

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        self._announce(req_context)
        granted: list[OffloadKey] = []
        slots: list[int] = []
        evicted: list[OffloadKey] = []
        request_id = req_context.req_id
        offered = [
            (group, start, stretch)
            for group, part in _by_group(keys)
            for start, stretch in self.ledger.index.locate(request_id, part, group=group)
        ]
        if len(offered) > 1:
            # All named before any is stored, so that none makes room for another.
            for group, start, stretch in offered:
                self.ledger.touch(request_id, stretch, group=group, start=start)
        for group, start, stretch in offered:
            reservation = self.ledger.reserve(request_id, stretch, group=group, start=start)
            granted += cast(list[OffloadKey], reservation.keys)
            slots += reservation.slots
            evicted += cast(list[OffloadKey], reservation.evicted)
        return PrepareStoreOutput(granted, CPULoadStoreSpec(slots), evicted)

    @override
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if success:
            self.ledger.commit(req_context.req_id, keys)
        else:
            self.ledger.abort(req_context.req_id, keys)

    @override
    def reset_cache(self) -> None:
        self.ledger.reset()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        # Drained even when nobody wants events, so that decisions do not pile up.
        decisions = self.ledger.drain_decisions()
        if not self._events_enabled:
            return []
        # Like the stock manager, a reset announces nothing: the connector drops its own records.
        return [
            OffloadingEvent(
                keys=cast(list[OffloadKey], decision.keys),
                medium=CPULoadStoreSpec.medium(),
                removed=decision.kind == "evicted",
            )
            for decision in decisions
            if decision.kind in ("stored", "evicted") and decision.reason != "reset"
        ]

    @override
    def get_stats(self) -> OffloadingConnectorStats:
        ledger = self.ledger.stats
        stats = OffloadingConnectorStats()
        in_transfer = (ledger.pending + ledger.held) / ledger.capacity if ledger.capacity else 0.0
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, in_transfer)
        if self._counts_skips:
            skipped = ledger.below_threshold - self._skips_reported
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, skipped)
            self._skips_reported = ledger.below_threshold
        return stats

    def _announce(self, req_context: ReqContext) -> None:
        """Open a request that the engine did not announce."""
        if not self.ledger.index.is_open(req_context.req_id):
            self.on_new_request(req_context)

    def _report(self, problems: Iterable[TagProblem]) -> None:
        """Count unusable tags; warn once per kind, so that a client cannot flood the log."""
        self.ledger.note_tag_problems(problems)
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                logger.warning(
                    "kv_transfer_params['%s']: %s: %s; ignored, counted, not reported again",
                    TAGS_KEY,
                    problem.tag,
                    problem.reason,
                )


def _by_group(keys: Collection[OffloadKey]) -> list[tuple[int, list[bytes]]]:
    """Part keys that may mix KV-cache groups into one list per run of equal groups."""
    parts = list(keys)
    if not parts:
        return []
    if len(set(map(_group_bytes, parts))) == 1:
        return [(get_offload_group_idx(parts[0]), parts)]
    return [(group, list(part)) for group, part in groupby(parts, get_offload_group_idx)]
