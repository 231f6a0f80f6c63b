"""EVOKE as the primary tier of vLLM's tiering: CPU memory in front of files or remote stores.

``EvokeTieringSpec`` is the stock ``TieringOffloadingSpec`` with EVOKE's manager in the place of the
primary tier's. Secondary tiers, their configuration (``secondary_tiers``) and all transfers between
the tiers are stock: whatever is stored in the primary tier is also written to the secondary ones,
and a block that only they have is promoted, that is, read back into the primary tier.

What differs from a single tier:
- A promotion is asked for inside ``lookup``. Where it cannot be granted the answer must be "full"
  (the block is then a miss): anything else makes the engine ask again at every step, for ever.
- It makes room, so it must know what the request's own chain is. Up to vLLM 0.30 the engine names
  the chain only after the first look; until then it is what has been looked up, in that order.
- A block behind one that the primary tier lacks is not promoted: no orphans here either.
- The tiering manager does not announce requests to its primary tier; they are opened when they are
  first seen.
"""

from collections.abc import Collection
from typing import Any

import torch
from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from evoke_core import ConfigError
from evoke_core.index import MAX_OPEN_REQUESTS
from evoke_vllm import chains, compat
from evoke_vllm.host import HostWorkerMixin
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.settings import EXTRA, check_room, check_sizes, integer, load_config
from evoke_vllm.spec import MetricsMixin, manager_arguments

logger = init_logger(__name__)


class EvokePrimaryTier(EvokeOffloadingManager):
    """EVOKE's manager with the interface that the tiering manager wants of its primary tier.

    Args:
        memory: the stock primary tier, whose memory this one takes over.
        given: as for ``EvokeOffloadingManager``.
    """

    def __init__(self, memory: Any, **given: Any) -> None:
        super().__init__(**given)
        self._memory = memory
        self._num_chunks = self._num_blocks = self.ledger.capacity  # the tiering manager's metrics
        # In order; None: the request's chain has been named.
        self._looked: dict[str, dict[OffloadKey, None] | None] = {}

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
        self._announce(req_context)
        if not compat.HAS_POSITIONS:
            while len(self._looked) >= MAX_OPEN_REQUESTS:  # an engine that never ends them
                del self._looked[next(iter(self._looked))]
            looked = self._looked.setdefault(req_context.req_id, {})
            if looked is not None:
                looked[key] = None
        return super().lookup(key, req_context)

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._looked[req_context.req_id] = None
        super().touch(keys, req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._looked.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for blocks that a secondary tier has.

        ``None``: they stay where they are.
        """
        if looked := self._looked.get(req_context.req_id):
            for group, part in chains.by_group(looked):
                self.ledger.touch(req_context.req_id, part, group=group)
        output = self.prepare_store(keys, req_context)
        return output if output.keys_to_store else None

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """A promotion has ended."""
        self.complete_store(keys, req_context, success)

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hold blocks while a secondary tier copies them; that is no use of them."""
        return self._hold(keys, req_context)

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A secondary tier has copied them."""
        self.complete_load(keys, req_context)

    def get_kv_memoryview(self) -> memoryview:
        """The primary tier's memory, ``(slots, bytes)``."""
        return self._memory.get_kv_memoryview()

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._memory.shutdown()


class EvokeTieringSpec(MetricsMixin, HostWorkerMixin, TieringOffloadingSpec):
    """vLLM's tiering with EVOKE deciding what the primary tier keeps.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """

    def __init__(self, *given: Any) -> None:
        self._given = compat.Given.read(*given)
        extra = self._given.extra
        self._evoke_config = load_config(extra, self._given.window_groups)
        check_sizes(self._given)
        if integer(extra, "store_threshold", 0, least=0) > 1:
            raise ConfigError(
                f"store_threshold = {extra['store_threshold']!r} (from {EXTRA}) is not allowed; "
                "allowed: 0 or 1 with tiers, whose secondary ones want every block"
            )
        super().__init__(*given)
        check_room(self)
        self._evoke_made = False

    @override
    def get_manager(self) -> OffloadingManager:
        manager: Any = super().get_manager()
        if not self._evoke_made:
            self._evoke_made = True
            manager.primary_tier = EvokePrimaryTier(
                manager.primary_tier, **manager_arguments(self, self._given, self._evoke_config)
            )
            logger.info(
                "EVOKE keeps up to %d blocks of %d bytes in the primary tier; policy %s",
                compat.slots(self),
                compat.bytes_per_slot(self),
                self._evoke_config.policy,
            )
        return manager

    @override
    def host_tier(self, pages: list[int]) -> list[torch.Tensor]:
        """On a CPU too, the primary tier lies where the secondary ones can reach it."""
        self._host_region = compat.shared_region(self)
        return [compat.region_view(self._host_region, page) for page in pages]
