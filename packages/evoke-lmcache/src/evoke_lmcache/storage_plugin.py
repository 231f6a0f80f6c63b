"""LMCache's storage plugin ``evoke``: the policy without vLLM, by configuration alone.

    storage_plugins: ["evoke"]
    extra_config:
      storage_plugin.evoke.module_path: evoke_lmcache.storage_plugin
      storage_plugin.evoke.class_name: EvokeStoragePlugin
      evoke: {...}

LMCache builds storage plugins after its own backends. This one stores nothing: it gives the CPU
backend, while that is still empty, EVOKE's policy, and then answers every question with "not here".
A backend that already has the policy (``cache_policy: EVOKE``) gets the settings of this
configuration.

LMCache shows a plugin the CPU backend only. A disk backend keeps the policy that ``cache_policy``
names; where that is not ``EVOKE``, the log says so.
"""

from collections.abc import Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface

from evoke_lmcache.plugin import NAME, register

logger = init_logger(__name__)


class EvokeStoragePlugin(StorageBackendInterface):
    """A backend that holds nothing. See the module's docstring."""

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(dst_device)
        self.config = config
        self.local_cpu_backend = local_cpu_backend
        if local_cpu_backend is None:  # the scheduler's side of the connector holds no chunks
            return
        policy = register().configure(config, type(local_cpu_backend).__name__)
        with local_cpu_backend.cpu_lock:
            if len(local_cpu_backend.hot_cache):
                logger.error("EVOKE came too late: the CPU backend already holds chunks")
                return
            local_cpu_backend.cache_policy = policy
            local_cpu_backend.hot_cache = policy.init_mutable_mapping()
        named = str(getattr(config, "cache_policy", "")).upper()
        if getattr(config, "local_disk", None) and named != NAME:
            logger.warning(
                "EVOKE decides for the CPU backend; the disk backend keeps cache_policy %s. Call "
                "evoke_lmcache.register() before LMCache starts and set cache_policy: EVOKE to "
                "have both",
                named,
            )

    def __str__(self) -> str:
        return self.__class__.__name__

    def contains(self, key: Any, pin: bool = False) -> bool:
        return False

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        return 0

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        return 0

    def exists_in_put_tasks(self, key: Any) -> bool:
        return False

    def batched_submit_put_task(self, keys: Any, objs: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing is stored here."""

    def get_blocking(self, key: Any) -> None:
        return None

    def get_non_blocking(self, key: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        return [None] * len(keys)

    def pin(self, key: Any) -> bool:
        return False

    def unpin(self, key: Any) -> bool:
        return False

    def remove(self, key: Any, force: bool = True) -> bool:
        return False

    def batched_remove(self, keys: Any, force: bool = True) -> int:
        return 0

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """There is nothing to release."""
