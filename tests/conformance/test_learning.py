# SPDX-License-Identifier: Apache-2.0
"""Long runs, decision by decision against the brute-force reference.

The state machine's examples are short: what the adaptive policy has learned after a few hundred
requests, relearning that is spread over several of them, ghosts that fall out of the memory, hints
and promises that have a record, and sessions that fill a pool only come up here.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from evoke_core import BlockLedger, EvokeConfig
from evoke_core.adaptive import AdaptivePolicy
from tests.conformance.adapters import LedgerTier, Offer, Tier, Why, keys_of, snapshot
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
    policy: str = "adaptive"
    tagged: bool = False  # with all tags, else roles and priorities only
    max_pinned_fraction: float = 0.25
    max_session_fraction: float = 1.0

    def learner(self, config: EvokeConfig) -> AdaptivePolicy | None:
        if self.policy != "adaptive":
            return None
        policy = AdaptivePolicy(config)
        policy.ghosts_at_least = self.ghosts_at_least
        return policy

    def tiers(self) -> tuple[LedgerTier, LedgerTier]:
        """The ledger and its reference, each with a policy of its own."""
        shared: dict[str, Any] = {
            "policy": self.policy,
            "ghost_factor": 1,
            "max_pinned_fraction": self.max_pinned_fraction,
            "max_session_fraction": self.max_session_fraction,
        }
        config = EvokeConfig(**shared)
        groups = frozenset({WINDOW} if self.windows else ())
        rules = Rules(window_groups=groups, **shared)
        ledger = BlockLedger(
            self.capacity, config=config, policy=self.learner(config), window_groups=groups
        )
        reference = ReferenceLedger(self.capacity, rules, learner=self.learner(config))
        return LedgerTier(ledger), LedgerTier(reference)

    def times(self) -> Iterator[float | None]:
        """About two requests a second; breaks, bursts, a clock that lags, and sometimes none."""
        draw = random.Random(self.seed + 1_000)
        now = 1_000.0
        while True:
            kind = draw.random()
            if kind < 0.01:
                now += 100_000.0
            elif kind < 0.7:
                now += draw.expovariate(2.0)
            yield None if kind > 0.99 else now - 2.0 if kind > 0.97 else now

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
            if self.tagged:
                tags |= self._all_tags(draw, contexts, path)
            yield path, tags

    def _all_tags(self, draw: random.Random, contexts: list[str], path: str) -> dict[str, object]:
        """A context is a session's, mostly; the promise of one in three contexts is kept."""
        tags: dict[str, object] = {}
        session = next((at for at, each in enumerate(contexts) if each[0] == path[0]), 0)
        if draw.random() < 0.9:
            tags["evoke_session"] = f"s{session % 5}"
            tags["end_of_session"] = draw.random() < 0.03
        if draw.random() < 0.2:
            start = draw.randrange(self.longest)
            span: dict[str, object] = {"start": start, "end": start + draw.randint(1, 4)}
            span[draw.choice(["ttl_s", "priority"])] = draw.choice([0.5, 3.0, 9.0])
            span["source_type"] = draw.choice(["system", "user", "tool"])
            tags["spans"] = [span, {"start": 0, "end": 1, "priority": 2.0}]
        if draw.random() < 0.15:
            tags["ttl_s"] = draw.choice([0.5, 3.0, 20.0, 300.0])
        if draw.random() < 0.3:
            tags["expect_reuse_in_s"] = draw.choice([0.5, 4.0, 4.0, 30.0])
        tags["pinned"] = draw.random() < 0.04
        tags["no_store"] = draw.random() < 0.03
        return tags


LIVES = [
    pytest.param(Life(1, 24, 8, 8, 520, ghosts_at_least=1_024), id="chains"),
    pytest.param(Life(2, 40, 8, 12, 420, ghosts_at_least=7), id="little memory"),
    pytest.param(Life(3, 40, 2, 60, 420, ghosts_at_least=100), id="many contexts"),
    pytest.param(Life(4, 24, 6, 8, 300, ghosts_at_least=30, windows=True), id="window group"),
    pytest.param(
        Life(5, 40, 6, 12, 500, 100, tagged=True, max_session_fraction=0.2), id="all tags"
    ),
    pytest.param(
        Life(6, 30, 6, 8, 300, 30, windows=True, tagged=True, max_session_fraction=0.5),
        id="all tags, window group",
    ),
    pytest.param(
        Life(7, 40, 6, 12, 500, 0, policy="scored", tagged=True, max_session_fraction=0.2),
        id="all tags, scored",
    ),
    pytest.param(
        Life(8, 40, 6, 12, 300, 0, policy="lru", tagged=True, max_pinned_fraction=1.0),
        id="all tags, lru",
    ),
]


@pytest.mark.parametrize("life", LIVES)
def test_every_decision_is_the_references(life: Life) -> None:
    draw = random.Random(life.seed)
    tier, model = life.tiers()
    groups = (0, WINDOW) if life.windows else (0,)
    times = life.times()
    reasons: Counter[str] = Counter()
    most_pinned = 0
    open_requests: list[tuple[str, str, int]] = []
    refused = evicted = 0
    known: set[bytes] = set()
    for n, (path, tags) in enumerate(life.paths()):
        if n == 200:
            tier.reset()
            model.reset()
        request, now = f"r{n}", next(times)
        known |= {key for group in groups for key in keys_of(path, group)}
        for side in (tier, model):
            side.open(request, tags, now)
            for group in groups:
                side.touch(request, keys_of(path, group), group, 0)
        open_requests.append((request, path, 0))
        while open_requests and (len(open_requests) > 3 or draw.random() < 0.7):
            # Chunk by chunk, requests interleaved, some end before they have offered all.
            at = draw.randrange(len(open_requests))
            request, path, start = open_requests.pop(at)
            end = min(len(path), start + draw.randint(1, life.longest))
            offers = [Offer(group, start, keys_of(path, group)[start:end]) for group in groups]
            keys, why = store(tier, request, offers)
            assert (keys, why) == store(model, request, offers), f"request {n}"
            refused += sum(len(offer.keys) for offer in offers) - len(keys)
            evicted += len(why)
            reasons.update(told.reason for told in why)
            if end < len(path) and draw.random() < 0.9:
                open_requests.append((request, path, end))
            else:
                tier.close(request)
                model.close(request)
        assert tier.index.candidates(life.capacity) == model.index.candidates(life.capacity)
        pins = len(model.index.pins())
        assert tier.ledger.stats.pinned == pins <= model.index.pin_limit()
        most_pinned = max(most_pinned, pins)
        if n % 50 == 0:
            assert snapshot(tier, known) == snapshot(model, known)
    assert evicted > 100
    assert refused > 100
    if life.tagged:
        assert most_pinned == min(model.index.pin_limit(), most_pinned) > 3
        expected = {"expired", "capacity"} | (
            {"session share"} if life.max_session_fraction < 1 else set()
        )
        assert set(reasons) == expected
        assert min(reasons.values()) > 10
    if life.policy == "adaptive":
        learned_the_same(life, tier.index._policy, model.index.learner)


def learned_the_same(life: Life, policy: AdaptivePolicy, learner: AdaptivePolicy) -> None:
    cells = range(policy._cells)  # scores are computed when they are asked for
    assert [policy._score(cell) for cell in cells] == [learner._score(cell) for cell in cells]
    assert policy._skill == learner._skill
    assert policy._settled == learner._settled
    assert policy._kept == learner._kept
    assert policy._sharp == (life.longest > 2), "both kinds of index have decided"
    assert len(set(policy._trusts)) > 2, "hints have records"
    if life.tagged:
        kept = policy._held_true > 5
        broken = policy._judged - policy._held_true > 5
        assert (kept & broken).sum() > 1, "promises have records"


def store(tier: Tier, request: str, offers: list[Offer]) -> tuple[list[bytes], list[Why]]:
    """Offer, and finish at once: what was stored and what was evicted for it, in order."""
    got = tier.store(request, offers)
    tier.finish(request, got.keys, got.tickets or None, True)
    assert [told.key for told in got.why] == got.evicted
    return got.keys, got.why
