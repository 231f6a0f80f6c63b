"""The entry point: stock vLLM builds ``EvokeOffloadingSpec`` through its own spec factory.

Sizing, block layout and the GPU workers are the stock CPU spec's. This spec reads the settings,
refuses wrong ones with one line before anything is allocated, and puts EVOKE's manager in place of
the stock one.
"""

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingMetricMetadata

from evoke_core import ConfigError, EvokeConfig
from evoke_vllm import metrics
from evoke_vllm.host import HostWorkerMixin
from evoke_vllm.manager import EvokeOffloadingManager
from evoke_vllm.recording import open_recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

EXTRA = "kv_connector_extra_config"
CONFIG_KEY = "evoke"
SOURCE = f"{EXTRA}['{CONFIG_KEY}']"


class EvokeOffloadingSpec(HostWorkerMixin):
    """vLLM's CPU offloading tier with EVOKE deciding what it keeps.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {**super().build_metric_definitions(extra_config), **metrics.definitions()}

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._evoke_config = load_config(extra)
        self._store_threshold = _integer(extra, "store_threshold", 0, least=0)
        self._max_tracker_size = _integer(extra, "max_tracker_size", 64_000, least=1)
        _check_sizes(extra, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config)
        if self.num_blocks < 1:
            raise ConfigError(
                f"cpu_bytes_to_use = {extra['cpu_bytes_to_use']!r} (from {EXTRA}) is not allowed; "
                f"allowed: at least one block, {self.kv_bytes_per_offloaded_block} bytes"
            )
        self._evoke_manager: EvokeOffloadingManager | None = None

    @override
    def get_manager(self) -> OffloadingManager:
        if self._evoke_manager is None:
            config = self._evoke_config
            windows = [
                index
                for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
                if not isinstance(group.kv_cache_spec, FullAttentionSpec)
            ]
            tokens_per_block = self._tokens_per_block(windows)
            self._evoke_manager = EvokeOffloadingManager(
                self.num_blocks,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=self._store_threshold,
                max_tracker_size=self._max_tracker_size,
                config=config,
                window_groups=windows,
                tokens_per_block=tokens_per_block,
                recorder=open_recorder(
                    config,
                    source=SOURCE,
                    tokens_per_block=tokens_per_block,
                    capacity=self.num_blocks,
                    bytes_per_block=self.kv_bytes_per_offloaded_block,
                    window_groups=windows,
                    store_threshold=self._store_threshold,
                ),
            )
            logger.info(
                "EVOKE keeps up to %d blocks of %d bytes; policy %s, w_recency %g, w_reuse %g, "
                "recency_half_life %s, store_threshold %d",
                self.num_blocks,
                self.kv_bytes_per_offloaded_block,
                config.policy,
                config.w_recency,
                config.w_reuse,
                config.recency_half_life,
                self._store_threshold,
            )
        return self._evoke_manager

    def _tokens_per_block(self, windows: Collection[int]) -> int:
        """Return the tokens of a block in the first group with full attention, if there is one."""
        groups = range(len(self.gpu_block_size))
        group = next((group for group in groups if group not in windows), 0)
        return self.gpu_block_size[group] * self.block_size_factor


def load_config(extra: dict[str, Any]) -> EvokeConfig:
    """Read the settings from vLLM's extra configuration and the environment.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """
    config = EvokeConfig.load(extra.get(CONFIG_KEY), source=SOURCE, say=logger.info)
    for name in ("w_attention", "w_coherence"):
        if value := getattr(config, name):
            variable = f"EVOKE_{name.upper()}"
            origin = f"environment variable {variable}" if variable in os.environ else SOURCE
            raise ConfigError(
                f"{name} = {value!r} (from {origin}) is not allowed; allowed: 0, because vLLM "
                f"tells an offloading manager nothing about {name.removeprefix('w_')}"
            )
    return config


def _integer(extra: dict[str, Any], name: str, default: int, *, least: int) -> int:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} = {value!r} (from {EXTRA}) is not allowed; allowed: an integer of at least "
            f"{least}"
        )
    return value


def _check_sizes(extra: dict[str, Any], kv_cache_config: KVCacheConfig) -> None:
    """Refuse sizes on which the stock spec would stop without saying why."""
    budget = extra.get("cpu_bytes_to_use")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise ConfigError(
            f"cpu_bytes_to_use = {budget!r} (from {EXTRA}) is not allowed; allowed: a positive "
            "number of bytes"
        )
    block_size = extra.get("block_size")
    if block_size is None:
        return
    engine_sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if (
        isinstance(block_size, bool)
        or not isinstance(block_size, int)
        or block_size < 1
        or len(engine_sizes) != 1
        or block_size % max(engine_sizes)
    ):
        raise ConfigError(
            f"block_size = {block_size!r} (from {EXTRA}) is not allowed; allowed: a multiple of "
            f"the engine's block size, {', '.join(map(str, sorted(engine_sizes)))} tokens, "
            "and only where all KV-cache groups share one"
        )
