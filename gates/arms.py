"""The arms of a gate, and how each is served.

`baseline` never evicts: its pool holds everything the workload asks for, and there is no tier.
`control` has the small pool and no tier: what leaves the pool is computed again. `evoke` and
`lru` have the small pool and a tier of the same size, with every option at its default;
`evoke-scored` admits every block, so that it evicts and reuses slots all the time where the default
policy would rather refuse. The negative controls are `evoke` behind a worker that damages what it
restores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UsageProblem
from bench.serving import arms as serving
from bench.serving.server import MeasuredConfig
from gates.profiles import Profile
from gates.sizing import Sizes

_GIB = 2**30


@dataclass(frozen=True)
class Arm:
    """A named way to serve; `tier` names an arm of bench.serving, None for no tier."""

    name: str
    title: str
    tier: str | None
    evicts: bool = True
    damage: str | None = None
    policy: str | None = None

    @property
    def judged(self) -> bool:
        """Whether the gate answers for this arm: it is EVOKE, and undamaged."""
        return self.tier == "evoke" and self.damage is None

    def kv_transfer(self, tier_bytes: int, value_bytes: int) -> dict[str, Any] | None:
        """Return the engine's KV transfer configuration, or None; sizes in bytes."""
        if self.tier is None:
            return None
        transfer = dict(serving.ARMS[self.tier].kv_transfer(tier_bytes) or {})
        extra = dict(transfer["kv_connector_extra_config"])
        if self.policy is not None:
            extra["evoke"] = {"policy": self.policy}
        if self.damage is not None:
            extra |= {"spec_name": "DamagedSpec", "spec_module_path": "gates.damage"}
            extra["gate_damage"] = {"kind": self.damage, "value_bytes": value_bytes}
        return {**transfer, "kv_connector_extra_config": extra}


ARMS = {
    arm.name: arm
    for arm in (  # profiles.ARM_NAMES lists them
        Arm("baseline", "never evicting", None, evicts=False),
        Arm("evoke", "EVOKE tier", "evoke"),
        Arm("control", "recomputed, no tier", None),
        Arm("evoke-scored", "EVOKE tier, every block admitted", "evoke", policy="scored"),
        Arm("lru", "stock LRU tier", "lru"),
    )
}
NEGATIVES = {
    arm.name: arm
    for arm in (
        Arm("flip", "a restored value's high byte flipped", "evoke", damage="flip"),
        Arm("swap", "two restored blocks swapped", "evoke", damage="swap"),
        Arm("stale", "a stale block restored", "evoke", damage="stale"),
    )
}


def find_arm(name: str) -> Arm:
    """Return the arm or negative control of this name; UsageProblem where there is none."""
    arm = ARMS.get(name) or NEGATIVES.get(name)
    if arm is None:
        raise UsageProblem(f"no arm {name!r}; there are {', '.join([*ARMS, *NEGATIVES])}")
    return arm


def server_config(arm: Arm, profile: Profile, sizes: Sizes, model: Path) -> MeasuredConfig:
    """Return what `arm` is served with."""
    pools = profile.pools
    gpu_blocks = pools.pool_blocks if arm.evicts else sizes.baseline_blocks
    options = list(pools.options)
    if profile.model.kv_dtype:
        options += ["--kv-cache-dtype", profile.model.kv_dtype]
    if pools.device == "cuda":
        options += ["--gpu-memory-utilization", str(pools.usable_share)]
    return MeasuredConfig(
        model=model,
        gpu_blocks=gpu_blocks,
        max_model_len=pools.max_model_len,
        block_size=pools.block_size,
        max_batched_tokens=pools.max_batched_tokens,
        max_seqs=pools.max_seqs,
        dtype=profile.model.dtype,
        kv_space_gib=max(1, -(-gpu_blocks * sizes.block_bytes // _GIB)),
        kv_transfer=arm.kv_transfer(sizes.tier_bytes, profile.model.value_bytes),
        options=tuple(options),
    )
