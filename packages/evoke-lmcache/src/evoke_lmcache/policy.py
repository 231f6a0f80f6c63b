"""LMCache's cache policy interface, for one backend.

The dictionary that LMCache keeps its chunks in tells what comes and goes; the methods here add what
it cannot know. No exception leaves for LMCache, see :mod:`evoke_lmcache.guarded`.
"""

import threading
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy

from evoke_core import EvokeConfig, TagProblem
from evoke_lmcache.guarded import GuardedRetention
from evoke_lmcache.lineage import Lineage
from evoke_lmcache.mapping import ChunkMapping
from evoke_lmcache.metrics import Metrics
from evoke_lmcache.naming import Names
from evoke_lmcache.retention import Retention

logger = init_logger(__name__)


class EvokeCachePolicy(BaseCachePolicy[Any, ChunkMapping]):
    """Decides which chunks one LMCache backend evicts.

    Args:
        config: the operator's settings; defaults if None.
        tokens_per_chunk: LMCache's chunk size.
        lineage, names, lock: shared by the policies of one process.
        backend: the backend's name in the metrics.
    """

    def __init__(
        self,
        config: EvokeConfig | None = None,
        *,
        tokens_per_chunk: int = 256,
        lineage: Lineage | None = None,
        names: Names | None = None,
        lock: "threading.RLock | None" = None,
        backend: str = "unknown",
    ) -> None:
        self.retention = Retention(
            EvokeConfig() if config is None else config,
            tokens_per_chunk=tokens_per_chunk,
            lineage=lineage,
            names=names,
            lock=lock,
            warn=_warn,
        )
        self._metrics = Metrics(backend)
        self.guarded = GuardedRetention(self.retention, self._give_up, self._metrics.show)

    def init_mutable_mapping(self) -> ChunkMapping:
        return self.guarded.mapping

    def _give_up(self, complaint: str) -> None:
        logger.exception(complaint)
        self._metrics.fail()

    def update_on_hit(self, key: Any, cache_dict: Any) -> None:
        self.guarded.hit(key)

    def update_on_put(self, key: Any) -> None:
        self.guarded.put(key)

    def update_on_force_evict(self, key: Any) -> None:
        """The dictionary tells of removals, forced or not."""

    def get_evict_candidates(self, cache_dict: Any, num_candidates: int = 1) -> list[Any]:
        return self.guarded.candidates(cache_dict, num_candidates)


def _warn(problem: TagProblem) -> None:
    logger.warning(
        "request_configs['lmcache.evoke.%s']: %s; ignored, counted, not reported again",
        problem.tag,
        problem.reason,
    )
