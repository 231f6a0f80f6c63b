"""The arms: one engine, one pool, different answers to memory pressure.

A0 has no tier: what leaves the engine's pool is computed again. A1 and A1a are the stock tier with
LRU and ARC, A2 is EVOKE with every option at its default, A2p the seed's published formula, A1t and
A2t are A1 and A2 with `store_threshold` 2. A3 is EVOKE and LMCache side by side, each with half the
bytes, A4 LMCache alone.

All tier arms but A3 and A4 run behind the same host-memory worker where the engine is on a CPU, and
with the same profiler of manager calls (overhead.py): only the policy differs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError

_GIB = 2**30
_SPECS = "bench.matrix.overhead"


@dataclass(frozen=True)
class Arm:
    """A named way to serve.

    `spec`: class of overhead.py; `policy` is what predict.py simulates; `lmcache`: what is composed
    with LMCache. `extra` goes to the spec.
    """

    name: str
    title: str
    spec: str | None = None
    policy: str | None = None
    lmcache: str | None = None
    extra: Mapping[str, Any] | None = None

    @property
    def has_tier(self) -> bool:
        """Whether anything is kept outside the engine's pool."""
        return self.spec is not None or self.lmcache is not None

    @property
    def threshold(self) -> int:
        """How many requests must name a block before it is stored; below 2: one."""
        return int((self.extra or {}).get("store_threshold", 0))

    def refused_on(self, device: str) -> str | None:
        """Return why this arm cannot run on a device, or None."""
        if self.lmcache is not None and device == "cpu":
            return "LMCache's connector for vLLM refuses an engine on a CPU"
        return None

    def kv_transfer(
        self, tier_bytes: int, block_size: int, profile: Path | None
    ) -> Mapping[str, Any] | None:
        """Return the engine's KV transfer configuration; `profile`: where overhead is written."""
        if self.lmcache is not None:
            return _compose(self.lmcache, tier_bytes, block_size)
        if self.spec is None:
            return None
        extra: dict[str, Any] = {
            "spec_name": self.spec,
            "spec_module_path": _SPECS,
            "cpu_bytes_to_use": tier_bytes,
            **(self.extra or {}),
        }
        if profile is not None:
            extra["bench_profile"] = str(profile)
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def environment(self, tier_bytes: int) -> dict[str, str]:
        """Return variables that the arm's server needs: LMCache's room and policy."""
        if self.lmcache is None:
            return {}
        share = tier_bytes / _GIB / (2 if self.lmcache == "both" else 1)
        evoke = {"LMCACHE_CACHE_POLICY": "EVOKE"} if self.lmcache == "both" else {}
        return {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{share:.3f}",
            "LMCACHE_TRACK_USAGE": "false",
            **evoke,
        }


ARMS = {
    arm.name: arm
    for arm in (
        Arm("A0", "stock vLLM, no tier"),
        Arm("A1", "stock tier, LRU", "Stock", "lru"),
        Arm("A1a", "stock tier, ARC", "Stock", "arc", extra={"eviction_policy": "arc"}),
        Arm("A1t", "stock tier, LRU, threshold 2", "Stock", extra={"store_threshold": 2}),
        Arm("A2", "EVOKE", "Evoke", "adaptive"),
        Arm("A2p", "the published formula", "Published", "published"),
        Arm("A2t", "EVOKE, threshold 2", "Evoke", "adaptive", extra={"store_threshold": 2}),
        Arm("A3", "EVOKE beside LMCache", lmcache="both"),
        Arm("A4", "LMCache alone", lmcache="lmcache"),
    )
}
BASELINE, OURS, NO_TIER = "A1", "A2", "A0"


def _compose(what: str, tier_bytes: int, block_size: int) -> Mapping[str, Any]:
    """Return what evoke-lmcache composes; A4 is LMCache with its own policy."""
    if what == "lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    try:
        from evoke_lmcache.compose import Plan, compose
    except ImportError:
        raise BenchError("arm A3 needs evoke-lmcache beside vLLM and LMCache") from None
    plan = Plan(what=what, gib=tier_bytes / _GIB, engine_block=block_size)
    composed: dict[str, Any] = json.loads(json.dumps(compose(plan).config))
    return composed
