# SPDX-License-Identifier: Apache-2.0
"""Long runs under the adaptive policy, decision by decision against the brute-force reference.

The state machine's examples are short: what a policy has learned after a few hundred requests,
relearning that is spread over several of them, ghosts that fall out of the memory and hints that
have a record only come up here.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from evoke_core import BlockLedger, EvokeConfig
from evoke_core.adaptive import AdaptivePolicy
from tests.conformance.adapters import LedgerTier, Offer, Tier, keys_of, snapshot
from tests.conformance.reference import ReferenceLedger, Rules

WINDOW = 1


@dataclass(frozen=True)
class Life:
    """A pool and the requests that come to it."""

    seed: int
    capacity: int
    longest: int  # blocks of a chain
    contexts: int
    requests: int
    ghosts_at_least: int
    windows: bool = False

    def policy(self, config: EvokeConfig) -> AdaptivePolicy:
        policy = AdaptivePolicy(config)
        policy.ghosts_at_least = self.ghosts_at_least
        return policy

    def tiers(self) -> tuple[LedgerTier, LedgerTier]:
        """The ledger and its reference, each with a policy of its own."""
        config = EvokeConfig(policy="adaptive", ghost_factor=1)
        groups = frozenset({WINDOW} if self.windows else ())
        rules = Rules(policy="adaptive", ghost_factor=1, window_groups=groups)
        ledger = BlockLedger(
            self.capacity, config=config, policy=self.policy(config), window_groups=groups
        )
        reference = ReferenceLedger(self.capacity, rules, learner=self.policy(config))
        return LedgerTier(ledger), LedgerTier(reference)

    def paths(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Loops of some contexts, a Zipf of others, growth, scans; tags true, false and none."""
        draw = random.Random(self.seed)
        letters = [chr(ord("a") + at) for at in range(200)]
        contexts = ["".join(draw.choices(letters, k=self.longest)) for _ in range(self.contexts)]
        for n in range(self.requests):
            kind = draw.random()
            if kind < 0.4:
                path = contexts[n % (self.contexts // 2)]
            elif kind < 0.8:
                path = contexts[min(int(draw.paretovariate(0.7)), self.contexts) - 1]
                path = path[: draw.randint(1, self.longest)]
            else:
                path = "".join(draw.choices(letters, k=draw.randint(1, self.longest)))
            tags: dict[str, object] = {}
            if draw.random() < 0.6:
                tags["source_type"] = draw.choice(["system", "user", "tool"])
            if draw.random() < 0.3:
                tags["priority"] = draw.choice([0.3, 4.0])
            yield path, tags


LIVES = [
    pytest.param(Life(1, 24, 8, 8, 520, ghosts_at_least=1_024), id="chains"),
    pytest.param(Life(2, 40, 8, 12, 420, ghosts_at_least=7), id="little memory"),
    pytest.param(Life(3, 40, 2, 60, 420, ghosts_at_least=100), id="many contexts"),
    pytest.param(Life(4, 24, 6, 8, 300, ghosts_at_least=30, windows=True), id="window group"),
]


@pytest.mark.parametrize("life", LIVES)
def test_every_decision_is_the_references(life: Life) -> None:
    draw = random.Random(life.seed)
    tier, model = life.tiers()
    groups = (0, WINDOW) if life.windows else (0,)
    open_requests: list[tuple[str, str, int]] = []
    refused = evicted = 0
    known: set[bytes] = set()
    for n, (path, tags) in enumerate(life.paths()):
        if n == 200:
            tier.reset()
            model.reset()
        request = f"r{n}"
        known |= {key for group in groups for key in keys_of(path, group)}
        for side in (tier, model):
            side.open(request, tags, float(n))
            for group in groups:
                side.touch(request, keys_of(path, group), group, 0)
        open_requests.append((request, path, 0))
        while open_requests and (len(open_requests) > 3 or draw.random() < 0.7):
            # Chunk by chunk, requests interleaved, some end before they have offered all.
            at = draw.randrange(len(open_requests))
            request, path, start = open_requests.pop(at)
            end = min(len(path), start + draw.randint(1, life.longest))
            offers = [Offer(group, start, keys_of(path, group)[start:end]) for group in groups]
            stored = store(tier, request, offers)
            assert stored == store(model, request, offers), f"request {n}"
            refused += sum(len(offer.keys) for offer in offers) - len(stored[0])
            evicted += len(stored[1])
            if end < len(path) and draw.random() < 0.9:
                open_requests.append((request, path, end))
            else:
                tier.close(request)
                model.close(request)
        assert tier.index.candidates(life.capacity) == model.index.candidates(life.capacity)
        if n % 50 == 0:
            assert snapshot(tier, known) == snapshot(model, known)
    policy, learner = tier.index._policy, model.index.learner
    assert policy._scores == learner._scores
    assert policy._sharp == (life.longest > 2), "both kinds of index have decided"
    assert len(set(policy._trust(policy._index[:, 0]))) > 2, "hints have records"
    assert evicted > 100
    assert refused > 100


def store(tier: Tier, request: str, offers: list[Offer]) -> tuple[list[bytes], list[bytes]]:
    """Offer, and finish at once: what was stored and what was evicted for it, in order."""
    got = tier.store(request, offers)
    tier.finish(request, got.keys, got.tickets or None, True)
    return got.keys, got.evicted
