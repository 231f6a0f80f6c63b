"""What differs between vLLM 0.24.0 and 0.33.0, in one place; nothing else here asks for a version.

Differences are found by capability, so that releases between the tested ones work too:

    since  what changed                                 what hides it
    -----  -------------------------------------------  -----------------------------------------
    0.25   lookup answers with an enum                  LOOKUP
    0.25   a worker object replaces handler pairs       HAS_WORKERS, TransferResult, WorkerBase
    0.26   a spec is made from one OffloadingConfig     Given.read
    0.26   block_size_factor -> blocks_per_chunk, ...   blocks_per_slot, bytes_per_slot
    0.27   a medium is an enum, not text                CPU_MEDIUM
    0.27   gauges for reads and writes apart            usage
    0.27   an out-of-tree policy for the stock manager  (evoke_vllm.policy)
    0.30   num_blocks -> num_chunks                     slots, shared_region, region_view
    0.30   windows are kept where a prompt ended only   default_policy
    0.31   touch is not called; contexts have positions HAS_POSITIONS, positions
    0.32   a hit names the tier that it came from       LOAD_SOURCE
    0.33   groups say how far their attention reaches   Given.read
    0.33   events of failed stores                      EVENT_KINDS

Raises:
    UntestedVersionError: on import, for a vLLM outside the tested range.
"""

import inspect
import sys
from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen
from vllm.version import __version__ as vllm_version

from evoke_core import BlockState
from evoke_vllm import versions

versions.check(vllm_version)

from vllm.config import CacheConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402
from vllm.v1.kv_offload.cpu.common import (  # noqa: E402
    CPULoadStoreSpec,
    CPUOffloadingMetrics,
)

# --- what the manager says ------------------------------------------------------------------------

LOOKUP: Mapping[BlockState, Any]
"""What ``lookup`` answers."""

if hasattr(base, "LookupResult"):
    LOOKUP = {
        BlockState.ABSENT: base.LookupResult.MISS,
        BlockState.PENDING: base.LookupResult.HIT_PENDING,
        BlockState.READY: base.LookupResult.HIT,
    }
else:
    LOOKUP = {BlockState.ABSENT: False, BlockState.PENDING: None, BlockState.READY: True}

CPU_MEDIUM: Any = base.Medium.CPU if hasattr(base, "Medium") else CPULoadStoreSpec.medium()
"""The medium of this tier's events."""

EVENT_KINDS: dict[str, dict[str, bool]] = {
    "stored": {"removed": False},
    "evicted": {"removed": True},
}
"""Which of the ledger's decisions are events, and how an event says so."""

if "metadata_only" in base.OffloadingEvent.__dataclass_fields__:
    EVENT_KINDS["aborted"] = {"removed": True, "metadata_only": True}


def usage(*, writing: int, reading: int) -> dict[str, int]:
    """Blocks in transfer, under the names of the gauges that show their share of the tier."""
    gauges = {"CPU_CACHE_USAGE_PERC": writing + reading}
    if hasattr(CPUOffloadingMetrics, "CPU_CACHE_WRITE_USAGE_PERC"):
        gauges |= {
            "CPU_CACHE_WRITE_USAGE_PERC": writing,
            "CPU_CACHE_READ_USAGE_PERC": reading,
        }
    return {getattr(CPUOffloadingMetrics, name): blocks for name, blocks in gauges.items()}


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    LOAD_SOURCE: Any = None
else:
    LOAD_SOURCE = CacheHitSource.HOST

# --- what the manager is told ---------------------------------------------------------------------

HAS_POSITIONS = hasattr(base.ReqContext, "get_offload_key_position")
"""A request's context holds the key of every block it names, and nobody calls ``touch``."""


def positions(context: base.ReqContext) -> Mapping[bytes, int]:
    """The token at which each block of the request ends, in the order in which it was named."""
    return getattr(context, "_offload_key_positions", None) or {}


def default_policy(window_groups: Collection[int]) -> str:
    """The policy where none is named.

    Where windows are kept only at the ends of prompts, a hit takes a conversation's whole chain and
    its last window, and ``adaptive``, which drops ends, can lose what it kept.
    """
    return "lru" if _WINDOWS_AT_ENDS and window_groups else "adaptive"


_WINDOWS_AT_ENDS = hasattr(CacheConfig, "prefix_cache_retention_interval")


# --- the spec -------------------------------------------------------------------------------------


@frozen
class Given:
    """What a spec is made from, whichever way it is handed over.

    Attributes:
        extra: ``kv_connector_extra_config``.
        engine_block_sizes: tokens of an engine block, per KV-cache group.
        window_groups: groups without full attention.
        group_ids: the number of each offloaded group, as keys carry it.
    """

    extra: Mapping[str, Any]
    engine_block_sizes: tuple[int, ...]
    window_groups: frozenset[int]
    group_ids: tuple[int, ...]

    def group_tokens(self, factor: int) -> dict[int, int]:
        """Tokens of an offloaded block of ``factor`` engine blocks, by group."""
        sizes = zip(self.group_ids, self.engine_block_sizes, strict=True)
        return {group: size * factor for group, size in sizes}

    @classmethod
    def read(cls, *given: Any) -> "Given":
        """Read the arguments of ``OffloadingSpec.__init__``."""
        if len(given) == 1:
            return cls._of_offloading_config(given[0])
        vllm_config, kv_cache_config = given
        groups = kv_cache_config.kv_cache_groups
        return cls(
            extra=vllm_config.kv_transfer_config.kv_connector_extra_config,
            engine_block_sizes=tuple(group.kv_cache_spec.block_size for group in groups),
            window_groups=_windows(kv_cache_config),
            group_ids=tuple(range(len(groups))),
        )

    @classmethod
    def _of_offloading_config(cls, config: Any) -> "Given":
        ids = tuple(getattr(group, "group_id", at) for at, group in enumerate(config.groups))
        if all(hasattr(group, "sliding_window_size_in_chunks") for group in config.groups):
            windows = frozenset(
                number
                for number, group in zip(ids, config.groups, strict=True)
                if group.sliding_window_size_in_chunks is not None
            )
        else:
            windows = _windows(_callers_kv_cache_config())
        return cls(
            extra=config.extra_config,
            engine_block_sizes=tuple(group.tokens_per_block for group in config.groups),
            window_groups=windows,
            group_ids=ids,
        )


def _windows(kv_cache_config: KVCacheConfig | None) -> frozenset[int]:
    """Groups whose blocks do not need all blocks before them."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    return frozenset(
        number
        for number, group in enumerate(groups)
        if not isinstance(_one_layer(group.kv_cache_spec), FullAttentionSpec)
    )


def _one_layer(spec: Any) -> Any:
    """A spec that bundles layers of one type stands for any of them."""
    bundled = getattr(spec, "kv_cache_specs", None)
    return next(iter(bundled.values())) if bundled else spec


def callers_window_groups() -> frozenset[int]:
    """Groups without full attention of the connector that makes a manager or a policy.

    For what vLLM makes without telling it anything of the model.
    """
    return _windows(_callers_kv_cache_config())


def _callers_kv_cache_config() -> KVCacheConfig | None:
    """The KV-cache configuration that the connector is being made with.

    vLLM 0.26 to 0.32 tell a spec nothing of how far a group's attention reaches, and taking a
    window for a chain would refuse most of its blocks. The connector that makes the spec has the
    answer in its own argument of this name.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("kv_cache_config")
        if isinstance(found, KVCacheConfig):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def slots(spec: Any) -> int:
    """How many offloaded blocks the tier of a stock CPU spec holds."""
    return spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks


def blocks_per_slot(spec: Any) -> int:
    """Engine blocks in an offloaded one."""
    return spec.blocks_per_chunk if hasattr(spec, "blocks_per_chunk") else spec.block_size_factor


def bytes_per_slot(spec: Any) -> int:
    """Bytes of an offloaded block over all ranks, padding included."""
    if hasattr(spec, "kv_bytes_per_chunk"):
        return spec.kv_bytes_per_chunk
    return spec.kv_bytes_per_offloaded_block


def info(spec: Any) -> Mapping[str, Any] | None:
    """What the stock manager reports of its configuration; None before 0.33."""
    facts = getattr(spec, "cpu_info", None)
    return None if facts is None else facts.as_config_info()


def shared_region(spec: Any) -> Any:
    """This rank's view of the memory that a tiering spec shares among its processes."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    asked = inspect.signature(SharedOffloadRegion.__init__).parameters
    given = {
        "engine_id": lambda: spec.config.engine_id,
        "instance_id": lambda: spec.vllm_config.instance_id,
        "num_chunks": lambda: slots(spec),
        "num_blocks": lambda: slots(spec),
        "kv_bytes_per_chunk": lambda: bytes_per_slot(spec),
        "kv_bytes_per_block": lambda: bytes_per_slot(spec),
    }
    parallel = spec.config.parallel if hasattr(spec, "config") else spec.vllm_config.parallel_config
    return SharedOffloadRegion(
        rank=parallel.rank,
        cpu_page_size=spec.cpu_page_size_per_worker,
        **{name: value() for name, value in given.items() if name in asked},
    )


def region_view(region: Any, page: int) -> Any:
    """The next tensor ``(slots, page)`` of this rank's part of a shared region."""
    view = getattr(region, "create_next_worker_view", None) or region.create_next_view
    return view(page)


# --- the worker -----------------------------------------------------------------------------------

HAS_WORKERS = hasattr(base, "OffloadingWorker")
"""A spec gives ``get_worker``; else ``get_handlers``, one per direction."""

if HAS_WORKERS:
    from vllm.v1.kv_offload.base import OffloadingWorker as WorkerBase
    from vllm.v1.kv_offload.base import TransferResult
else:
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler as WorkerBase
    from vllm.v1.kv_offload.worker.worker import TransferResult

HAS_DIRECTIONS = "transfer_type" in TransferResult.__dataclass_fields__
"""A result says between which media it ran."""

__all__ = [
    "CPU_MEDIUM",
    "EVENT_KINDS",
    "HAS_DIRECTIONS",
    "HAS_POSITIONS",
    "HAS_WORKERS",
    "LOAD_SOURCE",
    "LOOKUP",
    "Given",
    "TransferResult",
    "WorkerBase",
    "blocks_per_slot",
    "bytes_per_slot",
    "callers_window_groups",
    "default_policy",
    "info",
    "positions",
    "region_view",
    "shared_region",
    "slots",
    "usage",
]
