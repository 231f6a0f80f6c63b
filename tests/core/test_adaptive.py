# SPDX-License-Identifier: Apache-2.0
"""policy="adaptive" as an operator meets it: what it keeps, what hints can do to it, what it costs.

Exactness is the conformance suite's subject, the numbers of the index are test_reuse_model's. Here
generated workloads run through a `BlockLedger`, and bounds on hit ratios and on counted operations
must hold. Nothing is timed.
"""

import heapq
import random
import zlib
from bisect import bisect
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import evoke_core.adaptive
import evoke_core.order
from evoke_core import BlockLedger, BlockState, EvokeConfig, RequestTags
from evoke_core.adaptive import AdaptivePolicy
from evoke_core.history import Past
from evoke_core.reuse_model import ReuseIndex, ReuseModel, Table, class_of

NO_TAGS = RequestTags()
LOUD = RequestTags(source_type="system", priority=10.0)
CONFIG = EvokeConfig(policy="adaptive")


class Ask(NamedTuple):
    """One request: its chain, the role it truthfully has, and whose it is."""

    keys: list[bytes]
    role: str
    tenant: str


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}/{at}".encode() for at in range(blocks)]


# --- workloads ------------------------------------------------------------------------------------


def hot_and_cold(rounds: int) -> list[Ask]:
    """W1S: every round two hot contexts and three of six cold ones, each with a new question."""
    asks: list[Ask] = []
    for visit in range(rounds):
        cold = [f"cold{(3 * visit + at) % 6}" for at in range(3)]
        for name in ("hot0", "hot1", *cold):
            question = chain(f"question{len(asks)}", 1)
            role = "system" if name.startswith("hot") else "tool"
            asks.append(Ask(chain(name, 47) + question, role, name))
    return asks


def conversations(users: int, requests: int, seed: int = 0) -> list[Ask]:
    """Users of Zipf's activity; a conversation grows by three blocks a turn, ten turns long."""
    draw = random.Random(seed)
    weights = list(accumulate((rank + 1) ** -0.9 for rank in range(users)))
    turns = [0] * users
    asks = []
    for _ in range(requests):
        user = bisect(weights, draw.random() * weights[-1], hi=users - 1)
        conversation, turn = divmod(turns[user], 10)
        turns[user] += 1
        shared = chain(f"system{(user + conversation) % 5}", 6)
        own = chain(f"user{user}.{conversation}", 3 * (turn + 1))
        asks.append(Ask(shared + own, "user" if user % 3 else "assistant", f"user{user}"))
    return asks


def loop_with_scans(contexts: int, rounds: int) -> list[Ask]:
    """A loop of contexts; after every third of them, blocks that never come again."""
    asks: list[Ask] = []
    for _ in range(rounds):
        for context in range(contexts):
            asks.append(Ask(chain(f"loop{context}", 10), "user", f"loop{context}"))
            if context % 3 == 0:
                asks.append(Ask(chain(f"scan{len(asks)}", 20), "tool", "scans"))
    return asks


def hits(
    asks: Sequence[Ask],
    tags: Sequence[RequestTags],
    capacity: int,
    config: EvokeConfig = CONFIG,
    before_request: Callable[[int], None] = lambda n: None,
) -> list[int]:
    """Run requests one after another; return how many leading blocks each one found."""
    ledger = BlockLedger(capacity, config=config)
    found = []
    for n, (ask, tag) in enumerate(zip(asks, tags, strict=True)):
        before_request(n)
        request = f"r{n}"
        ledger.open(request, tag)
        ledger.touch(request, ask.keys)
        states = [ledger.lookup(request, key) for key in ask.keys]
        hit = states.index(BlockState.ABSENT) if BlockState.ABSENT in states else len(states)
        if hit < len(ask.keys):
            got = ledger.reserve(request, ask.keys[hit:], start=hit)
            ledger.commit(request, got.keys, ticket=got.ticket)
        ledger.close(request)
        found.append(hit)
    return found


def ratio(asks: Sequence[Ask], found: Sequence[int], tenant: str = "") -> float:
    """Block hit ratio, of the tenants whose name begins like this."""
    mine = [at for at, ask in enumerate(asks) if ask.tenant.startswith(tenant)]
    return sum(found[at] for at in mine) / sum(len(asks[at].keys) for at in mine)


# --- what it is for -------------------------------------------------------------------------------


def test_keeps_part_of_a_loop_that_does_not_fit() -> None:
    """Recency gets nothing from a loop of 12 contexts in a pool for 6 and passing scans."""
    asks = loop_with_scans(12, 30)
    tags = [NO_TAGS] * len(asks)
    lru = ratio(asks, hits(asks, tags, 60, EvokeConfig(policy="lru")), "loop")
    adaptive = ratio(asks, hits(asks, tags, 60), "loop")
    assert lru == 0.0
    # At best 6 of 12 contexts are there in every round but the first: 29/30 of a half.
    assert 0.35 < adaptive < 0.5


def test_the_same_calls_give_the_same_hits() -> None:
    asks = conversations(30, 300)
    tags = [RequestTags(source_type=ask.role) for ask in asks]
    assert hits(asks, tags, 200) == hits(asks, tags, 200)


# --- hints ----------------------------------------------------------------------------------------


def shuffled(asks: Sequence[Ask]) -> list[RequestTags]:
    draw = random.Random(1)
    tags = [
        RequestTags(source_type=ask.role, priority=draw.choice([0.25, 1.0, 1.0, 4.0]))
        for ask in asks
    ]
    draw.shuffle(tags)
    return tags


def greedy_tenant(asks: Sequence[Ask]) -> list[RequestTags]:
    """About a quarter of the tenants say that everything of theirs is most important."""
    return [LOUD if zlib.crc32(ask.tenant.encode()) % 4 == 0 else NO_TAGS for ask in asks]


LIES: dict[str, Callable[[Sequence[Ask]], list[RequestTags]]] = {
    "shuffled": shuffled,
    "all at maximum": lambda asks: [LOUD] * len(asks),
    "one tenant claims everything": greedy_tenant,
}

CELLS = [
    pytest.param(hot_and_cold(40), 80, id="hot and cold, tight"),
    pytest.param(hot_and_cold(40), 155, id="hot and cold"),
    # Long enough that a fifth of a point is more than what any disturbance moves by chance.
    pytest.param(conversations(40, 1_000), 250, id="conversations"),
    pytest.param(loop_with_scans(12, 20), 80, id="loop with scans"),
]


@pytest.mark.parametrize(("asks", "capacity"), CELLS)
def test_hints_cannot_hurt(asks: list[Ask], capacity: int) -> None:
    """False ones cost at most a point of the block hit ratio, true ones at most a fifth of it."""
    untagged = ratio(asks, hits(asks, [NO_TAGS] * len(asks), capacity))
    assert untagged > 0.2, "a workload without hits shows nothing"
    true = [RequestTags(source_type=ask.role, session=ask.tenant) for ask in asks]
    lost = {"true": untagged - ratio(asks, hits(asks, true, capacity))}
    for name, lie in LIES.items():
        lost[name] = untagged - ratio(asks, hits(asks, lie(asks), capacity))
    assert lost.pop("true") <= 0.002
    assert max(lost.values()) <= 0.01, lost


def test_hints_that_say_nothing_change_nothing() -> None:
    """The same tags on every request rank every block as no tags do."""
    asks = conversations(40, 300)
    plain = hits(asks, [NO_TAGS] * len(asks), 200)
    assert hits(asks, [LOUD] * len(asks), 200) == plain


def dead_flood(every: int = 1) -> tuple[list[Ask], list[RequestTags]]:
    """A loop that fits, and between its requests a tenant's blocks that never come again."""
    asks: list[Ask] = []
    tags = []
    for visit in range(40):
        for context in range(6):
            asks.append(Ask(chain(f"loop{context}", 10), "user", "quiet"))
            tags.append(NO_TAGS)
            if context % every == 0:
                asks.append(Ask(chain(f"dead{visit}.{context}", 10), "tool", "greedy"))
                tags.append(LOUD)
    return asks, tags


def test_dead_blocks_cannot_starve_the_rest() -> None:
    """Whoever shouts for dead blocks gets what he would get silently, and so do the others."""
    asks, shouting = dead_flood()
    silent = [NO_TAGS] * len(asks)
    quiet = ratio(asks, hits(asks, silent, 80), "quiet")
    assert quiet > 0.9
    assert ratio(asks, hits(asks, shouting, 80), "quiet") > quiet - 0.01
    scored = hits(asks, shouting, 80, EvokeConfig(policy="scored"))
    assert ratio(asks, scored, "quiet") < 0.1, "the seed's formula believes every word"


def finish(stages: Generator[None, None, tuple[ReuseIndex, Table]]) -> tuple[ReuseIndex, Table]:
    """Go through all stages of a relearning at once."""
    while True:
        try:
            next(stages)
        except StopIteration as done:
            return done.value


def test_a_hint_is_worth_what_its_blocks_have_proven() -> None:
    """Blocks of equal past: a hint's factor is its returns over what the past alone promised.

    Six hints make the same promises: one keeps all of them, one a third, four none. Then the record
    of the two is as it should be, and the good and the bad ones are at the bounds.
    """
    policy, model = AdaptivePolicy(CONFIG), ReuseModel()
    blocks = 10_000
    best, middling = ("user", 2.0), ("user", 0.5)
    dead = [("system", 0.5), ("system", 3.0), ("assistant", 0.5), ("assistant", 3.0)]
    returned = dict.fromkeys([best, middling, *dead], 0)
    for clock in range(1, 101):
        policy.advance(clock, 1_000)
        model.tick(clock)
        for role, priority in returned:
            policy.entered(Past(1, clock, 0, role, priority), blocks)
            model.touched(clock, 0, blocks)
        for (role, priority), every in ((best, 1), (middling, 3)):
            if clock > 2 and clock % every == 0:
                assert policy.used(Past(1, clock - 2, 0, role, priority), clock, blocks) == 2
                model.reused(0, clock - 2, 2, blocks)
                returned[role, priority] += blocks
    policy.begin(1_000, 10.0)
    index, chance = finish(model.relearn(1_000, sharp=policy._sharp))
    promised = 100 * blocks * float(chance[0, -1])

    def factor(role: str | None, priority: float, reuse: int = 1) -> float:
        run = SimpleNamespace(
            reuse=reuse, last=99, gap=3, role=role, priority=priority, holding=False
        )
        key = policy.class_key(run, 100)  # type: ignore[arg-type]
        assert policy.index(reuse, 3, 1) == index[class_of(reuse, 3)][1]
        return policy.score(key, 1, 64.0) / policy.index(reuse, 3, 1)

    weight = evoke_core.adaptive._TRUST_WEIGHT
    overall = (sum(returned.values()) + weight) / (6 * promised + weight)
    for hint in returned:
        lift = (returned[hint] + weight) / (promised * overall + weight)
        assert factor(*hint) == pytest.approx(min(2.0, max(0.5, lift)), rel=1e-9)
    assert factor(*best) == 2.0
    assert 1.0 < factor(*middling) < 1.9
    assert {factor(*hint) for hint in dead} == {0.5}

    assert factor("user", 1.0) == factor(None, 2.0) == factor("system", 1.0) == 1.0, "no record"
    assert factor("user", 9.5) == factor("user", 2.0), "how loud does not matter"
    assert factor("user", 2.0, reuse=7) == pytest.approx(2.0), "one for all of a hint's blocks"
    assert factor("a role that nobody configured", 0.5) == factor(None, 0.5)


# --- cost, in operations --------------------------------------------------------------------------


def pushes_per_request(
    monkeypatch: pytest.MonkeyPatch, asks: Sequence[Ask], capacity: int
) -> tuple[float, int]:
    """Count the order's heap pushes over the second half of the requests: mean and maximum."""
    pushes = [0] * len(asks)
    now = 0

    def counting(heap: list[object], entry: object) -> None:
        pushes[now] += 1
        heapq.heappush(heap, entry)  # type: ignore[type-var]

    def remember(n: int) -> None:
        nonlocal now
        now = n

    with monkeypatch.context() as patched:
        patched.setattr(evoke_core.order, "heappush", counting)
        hits(asks, [NO_TAGS] * len(asks), capacity, before_request=remember)
    second = pushes[len(asks) // 2 :]
    return sum(second) / len(second), max(second)


@pytest.mark.parametrize(
    ("small", "large", "capacity"),
    [
        pytest.param(loop_with_scans(12, 20), loop_with_scans(120, 10), 200, id="loop with scans"),
        pytest.param(conversations(20, 300), conversations(200, 3_000), 90, id="conversations"),
    ],
)
def test_a_request_does_not_pay_for_the_size_of_the_pool(
    small: list[Ask], large: list[Ask], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the pool and the population: pushes grow with the occupied cells, no further."""
    mean, most = pushes_per_request(monkeypatch, small, capacity)
    mean_of_large, most_of_large = pushes_per_request(monkeypatch, large, 10 * capacity)
    assert mean > 5, "a pool that is never full shows nothing"
    assert mean_of_large < 1.7 * mean
    assert most_of_large < 2 * most


def test_relearning_is_spread_over_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 256 requests were seen, none pays for more than one stage; then the scores change.

    First after every request, later every 128 at the latest, however long the pool has lived.
    """
    stages: list[int] = []  # clock of each stage
    relearn = ReuseModel.relearn

    def counted(
        self: ReuseModel, capacity: int, *, sharp: bool
    ) -> Generator[None, None, tuple[ReuseIndex, Table]]:
        inner = relearn(self, capacity, sharp=sharp)
        while True:
            stages.append(self.clock)
            try:
                next(inner)
            except StopIteration as done:
                return done.value
            yield

    monkeypatch.setattr(ReuseModel, "relearn", counted)
    policy = AdaptivePolicy(CONFIG)
    changed = []
    for clock in range(1, 3_001):
        if policy.advance(clock, 1_000):
            changed.append(clock)
        if clock == 10:
            assert not stages, "a pool that was never full has nothing to decide"
            policy.begin(1_000, 4.0)
    late = [clock for clock in stages if clock > 256]
    assert len(late) == len(set(late)) > 12
    assert stages.count(10) > 2
    gaps = [b - a for a, b in pairwise(changed)]
    assert gaps[0] == 1
    assert max(gaps) <= 128 + stages.count(10)
    assert changed[-1] > 2_850
