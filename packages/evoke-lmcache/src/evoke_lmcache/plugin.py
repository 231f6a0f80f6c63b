"""How LMCache finds the policy by its name, ``EVOKE``.

vLLM has :func:`register` called through the entry point group ``vllm.general_plugins``, in the
engine core and in every worker; elsewhere a program calls it before it builds an engine. From then
on ``cache_policy: EVOKE`` works, for every backend of LMCache that has a cache policy.
"""

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

from evoke_core import ConfigError
from evoke_lmcache.lineage import Lineage
from evoke_lmcache.naming import Names
from evoke_lmcache.policy import EvokeCachePolicy
from evoke_lmcache.settings import load_config

logger = init_logger(__name__)

NAME = "EVOKE"


class PolicyFactory:
    """Builds the policies of one process, which share what they know of the chunks.

    LMCache builds one policy per backend and worker and passes nothing to it. The settings are
    those of the configuration that the backend under construction was given, else those that
    LMCache's vLLM integration has loaded, or those handed to :meth:`configure`.
    """

    def __init__(self) -> None:
        self._lineage = Lineage()
        self._names = Names()
        self._lock = threading.RLock()

    def __call__(self) -> EvokeCachePolicy:
        config, backend = _asking_backend()
        return self.configure(config or _loaded_config(), backend)

    def configure(self, engine_config: Any, backend: str = "unknown") -> EvokeCachePolicy:
        """Build a policy for an LMCache configuration (None: settings from the environment only).

        ``backend`` names it in the metrics.

        Raises:
            SystemExit: a setting that cannot be honoured. LMCache would log any other exception
                and run without its cache, or with another policy.
        """
        extra = getattr(engine_config, "extra_config", None)
        tokens = getattr(engine_config, "chunk_size", None)
        try:
            config = load_config(extra, say=logger.info)
        except ConfigError as error:
            logger.error("EVOKE: %s", error)
            _let_the_process_end()
            raise SystemExit(f"EVOKE: {error}") from None
        policy = EvokeCachePolicy(
            config,
            tokens_per_chunk=tokens if isinstance(tokens, int) and tokens > 0 else 256,
            lineage=self._lineage,
            names=self._names,
            lock=self._lock,
            backend=backend,
        )
        logger.info(
            "EVOKE decides what this backend evicts; policy %s, w_recency %g, w_reuse %g, "
            "recency_half_life %s",
            config.policy,
            config.w_recency,
            config.w_reuse,
            config.recency_half_life,
        )
        return policy


def register() -> PolicyFactory:
    """Make ``cache_policy: EVOKE`` known to LMCache; a second call changes nothing."""
    factory = POLICY_MAPPING.get(NAME)
    if not isinstance(factory, PolicyFactory):
        factory = PolicyFactory()
        POLICY_MAPPING[NAME] = factory
    return factory


def _let_the_process_end() -> None:
    """Stop the event loop of the storage manager that is being built.

    It runs in a thread that Python would wait for for ever.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        loop = getattr(frame.f_locals.get("self"), "loop", None)
        if isinstance(loop, asyncio.AbstractEventLoop):
            loop.call_soon_threadsafe(loop.stop)


def _asking_backend() -> tuple[Any, str]:
    """Return the configuration in the hands of the constructor that asks for a policy, if any, and
    the class of what it constructs."""
    frame: FrameType | None = sys._getframe(2)  # above the factory
    while frame is not None and frame.f_code.co_name != "__init__":
        frame = frame.f_back
    if frame is None:
        return None, "unknown"
    given, backend = frame.f_locals.get("config"), type(frame.f_locals.get("self")).__name__
    return (given, backend) if hasattr(given, "cache_policy") else (None, "unknown")


def _loaded_config() -> Any:
    """Return the configuration that LMCache's vLLM integration works with; None elsewhere.

    Looked up, not asked for: asking would load one where there is none.
    """
    module = sys.modules.get("lmcache.integration.vllm.utils")
    return getattr(module, "_config_instance", None)
