"""The entry point: stock vLLM builds ``EvokeOffloadingSpec`` through its own spec factory.

Sizing, block layout and the GPU workers are the stock CPU spec's. This spec reads the settings,
refuses wrong ones with one line before anything is allocated, and puts EVOKE's manager in place of
the stock one.
"""

from typing import Any

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingMetricMetadata
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from evoke_core import EvokeConfig
from evoke_vllm import compat, metrics
from evoke_vllm.host import HostWorkerMixin
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.recording import open_recorder
from evoke_vllm.settings import SOURCE, check_room, check_sizes, integer, load_config

logger = init_logger(__name__)


class MetricsMixin(CPUOffloadingSpec):
    """Announces the manager's metrics beside the stock spec's; mixed in ahead of it."""

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {**super().build_metric_definitions(extra_config), **metrics.definitions()}


class EvokeOffloadingSpec(MetricsMixin, HostWorkerMixin):
    """vLLM's CPU offloading tier with EVOKE deciding what it keeps.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """

    def __init__(self, *given: Any) -> None:
        self._given = compat.Given.read(*given)
        extra = self._given.extra
        self._evoke_config = load_config(extra, self._given.window_groups)
        self._store_threshold = integer(extra, "store_threshold", 0, least=0)
        self._max_tracker_size = integer(extra, "max_tracker_size", 64_000, least=1)
        check_sizes(self._given)
        super().__init__(*given)
        check_room(self)
        self._evoke_manager: EvokeOffloadingManager | None = None

    @override
    def get_manager(self) -> OffloadingManager:
        if self._evoke_manager is None:
            config = self._evoke_config
            self._evoke_manager = EvokeOffloadingManager(
                store_threshold=self._store_threshold,
                max_tracker_size=self._max_tracker_size,
                **manager_arguments(self, self._given, config, self._store_threshold),
            )
            logger.info(
                "EVOKE keeps up to %d blocks of %d bytes; policy %s, w_recency %g, w_reuse %g, "
                "recency_half_life %s, store_threshold %d",
                compat.slots(self),
                compat.bytes_per_slot(self),
                config.policy,
                config.w_recency,
                config.w_reuse,
                config.recency_half_life,
                self._store_threshold,
            )
        return self._evoke_manager


def manager_arguments(
    spec: Any, given: compat.Given, config: EvokeConfig, store_threshold: int = 0
) -> dict[str, Any]:
    """What a manager is told of the spec that makes it; opens the recording that it writes."""
    group_tokens = given.group_tokens(compat.blocks_per_slot(spec))
    full = [group for group in group_tokens if group not in given.window_groups]
    tokens_per_block = group_tokens[(full or list(group_tokens))[0]]
    return {
        "num_blocks": compat.slots(spec),
        "enable_events": spec.kv_events_config.enable_kv_cache_events,
        "config": config,
        "window_groups": given.window_groups,
        "tokens_per_block": tokens_per_block,
        "recorder": open_recorder(
            config,
            source=SOURCE,
            tokens_per_block=tokens_per_block,
            capacity=compat.slots(spec),
            bytes_per_block=compat.bytes_per_slot(spec),
            window_groups=sorted(given.window_groups),
            store_threshold=store_threshold,
        ),
        "group_tokens": group_tokens,
        "info": compat.info(spec),
    }
