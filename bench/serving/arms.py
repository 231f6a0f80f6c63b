"""The arms of a comparison: one engine, one GPU pool, different answers to memory pressure.

`reference` never evicts: the same engine with a GPU pool large enough for everything the run
asks for, and no tier at all. A small pool with a huge tier would never lose a block either, but
its answers would pass through the very store and restore path that they are meant to judge, and
its TTFT would include restores; plain GPU hits are the honest ideal for both.
`lru` is the stock tier policy. On vLLM's CPU backend the stock tier has no worker, so both tier
arms copy blocks with evoke-vllm's host-memory worker: only the policy differs between them.
`evoke` runs with every option at its default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arm:
    """A named way to serve.

    `spec` is the tier's spec class and module, None for no tier; `records`: it can write down what
    its tier did.
    """

    name: str
    title: str
    spec: tuple[str, str] | None
    records: bool = False

    def kv_transfer(
        self, tier_bytes: int, recording: Path | None = None
    ) -> Mapping[str, Any] | None:
        """Return the engine's KV transfer configuration for a tier of `tier_bytes`, or None."""
        if self.spec is None:
            return None
        spec_name, module = self.spec
        extra: dict[str, Any] = {
            "spec_name": spec_name,
            "spec_module_path": module,
            "cpu_bytes_to_use": tier_bytes,
        }
        if self.records and recording is not None:
            extra["evoke"] = {"record_trace": str(recording)}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


ARMS = {
    arm.name: arm
    for arm in (
        Arm("reference", "never evicting", None),
        Arm("lru", "stock LRU tier", ("HostOffloadingSpec", "evoke_vllm.host")),
        Arm("evoke", "EVOKE tier", ("EvokeOffloadingSpec", "evoke_vllm.spec"), records=True),
    )
}
