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
    config = EvokeConfig(policy=policy, ghost_factor=2, max_session_fraction=0.3)
    if name == "vllm":
        from evoke_vllm.manager import EvokeOffloadingManager

        manager = EvokeOffloadingManager(
            CAPACITY, enable_events=True, config=config, window_groups=(1,)
        )
        return VllmTier(manager)
    return SetLedgerTier(BlockLedger(CAPACITY, config=config, window_groups=(1,)))


def structure(rng: random.Random, cut: int) -> dict[str, Any]:
    """Whose a request is, and what it declares of its blocks and of their times."""
    tags: dict[str, Any] = {"evoke_session": f"session {rng.randrange(5)}"}
    for tag, value, chance in (
        ("spans", [{"start": 0, "end": cut, "source_type": "system", "ttl_s": 30.0}], 0.2),
        ("pinned", True, 0.05),
        ("ttl_s", rng.choice([1.0, 15.0]), 0.15),
        ("expect_reuse_in_s", rng.choice([2.0, 10.0]), 0.3),
        ("end_of_session", True, 0.05),
        ("no_store", True, 0.02),
    ):
        if rng.random() < chance:
            tags[tag] = value
    return tags


def run(tier: Tier, seed: int = 7) -> list[str]:
    rng = random.Random(seed)
    hot = ["".join(rng.choices("abc", k=12)) for _ in range(6)]
    writing: list[tuple[str, list[bytes]]] = []
    reading: list[tuple[str, list[bytes]]] = []
    log = []
    now = 0.0
    for n in range(REQUESTS):
        request = f"r{n}"
        cut = rng.randrange(1, 12)
        path = rng.choice(hot)[:cut] + "".join(rng.choices("abcd", k=rng.randrange(0, 8)))
        role, priority = rng.choice(["user", "tool", None]), rng.choice([1.0, 2.0])
        tags = {"priority": priority} | ({"source_type": role} if role else {})
        tags |= structure(rng, cut)
        now += rng.choice([0.0, 0.4, 1.0, 20.0])
        tier.open(request, tags, now)
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
            log += [f"{why.reason} {why.key!r}" for why in got.why]
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
