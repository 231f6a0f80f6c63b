"""evoke-lmcache: EVOKE's retention policy inside LMCache.

In-process (``LMCacheConnectorV1``): ``cache_policy: EVOKE``, see :mod:`evoke_lmcache.plugin`, or
the storage plugin ``evoke``, see :mod:`evoke_lmcache.storage_plugin`. LMCache's server:
:mod:`evoke_lmcache.server_module`. Both beside evoke-vllm: ``evoke-lmcache compose``.

Importing this package needs no LMCache; using what it exports does.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoke_lmcache.plugin import register
    from evoke_lmcache.policy import EvokeCachePolicy

__all__ = ["EvokeCachePolicy", "register", "vllm_plugin"]


def vllm_plugin() -> None:
    """Make ``cache_policy: EVOKE`` known where LMCache is installed; vLLM calls this at start."""
    if importlib.util.find_spec("lmcache") is not None:
        from evoke_lmcache.plugin import register

        register()


def __getattr__(name: str) -> Any:
    if name == "EvokeCachePolicy":
        from evoke_lmcache.policy import EvokeCachePolicy

        return EvokeCachePolicy
    if name == "register":
        from evoke_lmcache.plugin import register

        return register
    raise AttributeError(name)
