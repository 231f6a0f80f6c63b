"""vLLM's ``OffloadingManager`` interface, translated to the block ledger. It holds no policy.

What it adds to the ledger is only what vLLM says differently: groups are the last four bytes of a
key, tags travel in ``kv_transfer_params``, completions come as sets, and events and metrics have
vLLM's types. What the ledger decided is drained in one place and handed on from there: to events,
metrics and the recorder.

Guarantees: ``lookup`` and ``touch`` never evict; ``prepare_store`` never returns ``None`` (the
scheduler would retry it every step) but grants what fits from the head; nothing that a client or a
late completion says raises. The one exception is deliberate: ``prepare_load`` of a block that was
never reported as stored raises, because any slot it could name would feed wrong data to the model.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

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
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from evoke_core import BlockLedger, Decision, EvokeConfig, TagProblem
from evoke_core.ledger import MAX_DECISIONS
from evoke_core.recording import Recorder
from evoke_core.tags import MAPPING_KEY
from evoke_vllm import chains, compat
from evoke_vllm.hints import read_tags
from evoke_vllm.hybrid import WindowUse
from evoke_vllm.lookups import Lookups, Request
from evoke_vllm.metrics import ManagerMetrics

logger = init_logger(__name__)


class EvokeOffloadingManager(OffloadingManager):
    """Decides which blocks vLLM's CPU tier keeps.

    Args:
        num_blocks: slots of the tier.
        enable_events: collect stored and removed events for ``take_events``.
        store_threshold: requests that must name a block before it is stored; below 2: one.
        max_tracker_size: blocks whose naming is counted for ``store_threshold``.
        config: the operator's settings; defaults if None.
        window_groups: KV-cache groups without full attention, whose blocks have no parents.
        tokens_per_block: tokens of one block of the tier; clients give spans in tokens.
        recorder: told everything that a replay needs; closed by ``shutdown``.
        group_tokens: tokens of an offloaded block, by group, where the engine says at which token
            a block ends (vLLM 0.31 and later).
        info: facts of the configuration that the engine publishes (vLLM 0.33 and later).

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
        tokens_per_block: int = 1,
        recorder: Recorder | None = None,
        group_tokens: Mapping[int, int] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        windows = frozenset(window_groups)
        tokens = group_tokens or {}
        self.ledger = BlockLedger(
            num_blocks,
            config=config,
            tokens_per_block=tokens_per_block,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            window_groups=chains.window_groups(windows, tokens),
        )
        self._positions = (
            chains.Positions(self.ledger.index, self.ledger.touch, windows, tokens)
            if compat.HAS_POSITIONS
            else None
        )
        self._windows = windows
        self._info = info
        self._tokens_per_block = tokens_per_block
        self._metrics = ManagerMetrics(
            self.ledger,
            self.ledger.index.config.source_floors,
            WindowUse.of(windows, tokens),
        )
        self._recorder = recorder
        main_group = next(group for group in range(len(windows) + 1) if group not in windows)
        self._lookups = Lookups(main_group, self._settled)
        self._looking: ReqContext | None = None  # whose blocks are being looked up
        self._looking_from: OffloadKey | None = None
        self._events_enabled = enable_events
        self._events: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._counts_skips = store_threshold > 1
        self._skips_reported = 0
        self._warned: set[TagProblem] = set()
        self._changes = 1  # calls that may have changed something
        self._shown = self._told = 0  # of them, in metrics and in events
        self._since_reset: set[str] | None = None  # requests opened since; None: no reset yet

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._changes += 1
        tags, problems = read_tags(req_context, self._tokens_per_block)
        if problems:
            self._report(problems)
        now = time.monotonic()  # the one time that this request has
        self.ledger.open(req_context.req_id, tags, now)
        if self._since_reset is not None:
            self._since_reset.add(req_context.req_id)
        self._lookups.opened(req_context.req_id, tags)
        if self._recorder is not None:
            self._recorder.opened(req_context.req_id, now, tags)
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._changes += 1
        self._settle(req_context)
        self.ledger.close(req_context.req_id)
        if self._since_reset is not None:
            self._since_reset.discard(req_context.req_id)
        if self._recorder is not None:
            self._recorder.closed(req_context.req_id)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
        if req_context is not self._looking:
            self._looking = req_context
            self._looking_from = key
            if self._positions is not None:
                self._positions.follow(req_context)
                self._lookups.looked(req_context.req_id, key)
        return compat.LOOKUP[self.ledger.lookup(req_context.req_id, key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Which tier a block comes from (vLLM 0.32 and later): this one."""
        return compat.LOAD_SOURCE

    def on_schedule_end(self, *context: Any) -> None:
        """A step has been planned: whoever is looked at next is looked at anew."""
        self._looking = None

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._changes += 1
        self._announce(req_context)
        for group, part in chains.by_group(keys):
            if group == self._lookups.group:
                looked_up = req_context is self._looking
                first = self._looking_from if looked_up else None
                self._lookups.named(req_context.req_id, part, first)
                self._looking = None
            self.ledger.touch(req_context.req_id, part, group=group)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        if self._positions is not None:
            self._announce(req_context)
            self._name(req_context)
            for group, part in self._parts(keys, req_context):
                if group in self._windows:  # chains are followed as a whole
                    self.ledger.touch(req_context.req_id, part, group=group)
        self._lookups.loading(req_context.req_id, keys)
        return self._hold(keys, req_context)

    def _hold(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._changes += 1
        slots = self.ledger.acquire(req_context.req_id, keys)
        if slots is None:
            raise RuntimeError(
                f"request {req_context.req_id}: asked to load blocks that are not stored; "
                "the engine must look blocks up before it loads them"
            )
        return CPULoadStoreSpec(slots)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._changes += 1
        self.ledger.release(req_context.req_id, keys)

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        self._changes += 1
        self._announce(req_context)
        self._settle(req_context)
        granted: list[OffloadKey] = []
        slots: list[int] = []
        evicted: list[OffloadKey] = []
        request_id = req_context.req_id
        offered = [
            (group, start, stretch)
            for group, part in self._parts(keys, req_context)
            if group not in self._windows or self._has_its_windows(request_id)
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
        if self._recorder is not None:
            for group, start, stretch in offered:
                self._recorder.offered(request_id, stretch, group=group, start=start)
            self._drain(request_id)
        return PrepareStoreOutput(granted, CPULoadStoreSpec(slots), evicted)

    @override
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._changes += 1
        if success:
            self.ledger.commit(req_context.req_id, keys)
        else:
            self.ledger.abort(req_context.req_id, keys)
        if self._recorder is not None:
            self._drain()

    @override
    def reset_cache(self) -> None:
        self._changes += 1
        self.ledger.reset()
        self._since_reset = set()
        if self._recorder is not None:
            self._drain()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._told == self._changes:
            return ()
        self._told = self._changes
        self._drain()
        # Like the stock manager, a reset announces nothing: the connector drops its own records.
        events = [
            OffloadingEvent(
                keys=cast(list[OffloadKey], keys),
                medium=compat.CPU_MEDIUM,
                **compat.EVENT_KINDS[decision.kind],
            )
            for decision in self._events
            if decision.kind in compat.EVENT_KINDS and decision.reason != "reset"
            if (keys := self._named(decision))
        ]
        self._events.clear()
        return events

    def _named(self, decision: Decision) -> list[bytes]:
        """The blocks an event names: of a failed write those that nobody writes again by now."""
        if decision.kind == "aborted":
            return [key for key in decision.keys if key not in self.ledger.index]
        return decision.keys

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """Facts of the configuration (vLLM 0.33 and later)."""
        return [{} if self._info is None else self._info]

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call; None, as for most decoding steps, if nothing did.

        With ``store_threshold`` every step has a report, of 0 skips if need be, as stock has.
        """
        if self._shown == self._changes and not self._counts_skips:
            return None
        self._shown = self._changes
        self._drain()
        if self._recorder is not None:
            self._metrics.recording_dropped(self._recorder.lost)
        stats = OffloadingConnectorStats()
        ledger = self._metrics.flush(stats)
        for name, blocks in compat.usage(writing=ledger.pending, reading=ledger.held).items():
            stats.set_gauge(name, blocks / ledger.capacity if ledger.capacity else 0.0)
        if self._counts_skips:
            skipped = ledger.below_threshold - self._skips_reported
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, skipped)
            self._skips_reported = ledger.below_threshold
        return stats

    @override
    def shutdown(self) -> None:
        self._drain()
        if self._recorder is not None:
            self._recorder.close()

    def _drain(self, request_id: str | None = None) -> None:
        """Hand on what the ledger decided, ``request_id`` if it was for that request.

        Everything is taken whether somebody wants it or not, so that nothing piles up.
        """
        reuses = self.ledger.drain_reuses()
        if reuses:
            self._metrics.reused(reuses)
        decisions = self.ledger.drain_decisions()
        if not decisions:
            return
        self._metrics.decided(decisions)
        if self._events_enabled:
            self._events.extend(decisions)
        if self._recorder is not None:
            self._recorder.decisions(decisions, request_id)

    def _settled(self, request: Request, start: int, found: int) -> None:
        """It is known what a request found from position ``start`` of its prompt on."""
        assert request.keys is not None
        self._changes += 1
        self._metrics.looked_up(request.tags, start, len(request.keys) - start, found)
        if self._recorder is not None:
            self._recorder.prompt(
                request.request_id,
                request.keys,
                group=self._lookups.group,
                tier_start=start,
                found=found,
            )

    def _announce(self, req_context: ReqContext) -> None:
        """Open a request that the engine did not announce."""
        if not self.ledger.index.is_open(req_context.req_id):
            self.on_new_request(req_context)
        if self._positions is not None:
            self._positions.follow(req_context)

    def _name(self, req_context: ReqContext) -> None:
        """Say which blocks a request has, where nobody calls ``touch``."""
        if self._positions is not None and self._lookups.waits(req_context.req_id):
            keys = self._positions.chain(req_context, self._lookups.group)
            if keys:
                self._lookups.listed(req_context.req_id, keys)

    def _settle(self, req_context: ReqContext) -> None:
        """Whatever a request has not loaded by now it did not find."""
        self._name(req_context)
        self._lookups.settled(req_context.req_id)

    def _has_its_windows(self, request_id: str) -> bool:
        """Say whether what a request offers of its windows can still be its own.

        After a reset vLLM offers all blocks of a running request anew, those too that its window
        has left and whose memory others have by now (0.25 to 0.33; up to 0.24 its engine dies).
        """
        return self._since_reset is None or request_id in self._since_reset

    def _parts(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> list[tuple[int, list[bytes]]]:
        """Part keys by group; only models with windows may mix in partial tails."""
        if self._positions is not None and self._windows:
            return self._positions.parts(keys, req_context)
        return chains.by_group(keys)

    def _report(self, problems: Iterable[TagProblem]) -> None:
        """Count unusable tags; warn once per kind, so that a client cannot flood the log."""
        self.ledger.note_tag_problems(problems)
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                logger.warning(
                    "kv_transfer_params['%s']: %s: %s; ignored, counted, not reported again",
                    MAPPING_KEY,
                    problem.tag,
                    problem.reason,
                )
