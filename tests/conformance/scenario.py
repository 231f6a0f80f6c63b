# SPDX-License-Identifier: Apache-2.0
"""A fixed pseudo-random run that prints every decision.

`python -m tests.conformance.scenario ledger|vllm adaptive|scored`

Completions are handed over as sets of bytes, whose order follows PYTHONHASHSEED. Nothing printed
may follow it. The run goes through the ledger or the vLLM manager, under the policy named.
"""

import random
import sys
from collections.abc import Iterable
from typing import Any

from evoke_core import BlockLedger, EvokeConfig
from tests.conformance.adapters import LedgerTier, Offer, Tier, VllmTier, keys_of

CAPACITY, REQUESTS = 40, 400


class SetLedgerTier(LedgerTier):
    """A ledger whose engine finishes transfers in whatever order a set has."""

    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None:
        end = self.ledger.commit if ok else self.ledger.abort
        end(request_id, set(keys))


def make(name: str, policy: str) -> Tier:
    config = EvokeConfig(policy=policy, ghost_factor=2)
    if name == "vllm":
        from evoke_vllm.manager import EvokeOffloadingManager

        manager = EvokeOffloadingManager(
            CAPACITY, enable_events=True, config=config, window_groups=(1,)
        )
        return VllmTier(manager)
    return SetLedgerTier(BlockLedger(CAPACITY, config=config, window_groups=(1,)))


def run(tier: Tier, seed: int = 7) -> list[str]:
    rng = random.Random(seed)
    hot = ["".join(rng.choices("abc", k=12)) for _ in range(6)]
    writing: list[tuple[str, list[bytes]]] = []
    reading: list[tuple[str, list[bytes]]] = []
    log = []
    for n in range(REQUESTS):
        request = f"r{n}"
        cut = rng.randrange(1, 12)
        path = rng.choice(hot)[:cut] + "".join(rng.choices("abcd", k=rng.randrange(0, 8)))
        role, priority = rng.choice(["user", "tool", None]), rng.choice([1.0, 2.0])
        tags = {"priority": priority} | ({"source_type": role} if role else {})
        tier.open(request, tags, float(n))
        for group in (0, 1):
            tier.touch(request, keys_of(path, group), group, 0)
        ready = []
        for key in keys_of(path):
            if tier.lookup(request, key) != "READY":
                break
            ready.append(key)
        if ready and rng.random() < 0.7:
            log.append(f"load {tier.acquire(request, ready)}")
            reading.append((request, ready))
        for start in range(len(ready), len(path), 5):
            offers = [Offer(g, start, keys_of(path, g)[start : start + 5]) for g in (0, 1)]
            got = tier.store(request, offers)
            log.append(f"store {got.keys} {got.slots} evicted {got.evicted}")
            if got.keys:
                writing.append((request, got.keys))
        while len(writing) > 2:
            who, keys = writing.pop(rng.randrange(len(writing)))
            tier.finish(who, keys, None, rng.random() < 0.85)
        while len(reading) > 2:
            tier.release(*reading.pop(rng.randrange(len(reading))))
        tier.close(request)
        log += [
            f"{kind} {keys if kind == 'evicted' else sorted(keys)}" for kind, keys in tier.events()
        ]
        log.append(f"order {tier.index.candidates(CAPACITY)}")
        if n % 150 == 149:
            tier.reset()
            writing.clear()
            reading.clear()
    return log


if __name__ == "__main__":
    print("\n".join(run(make(*sys.argv[1:]))))
