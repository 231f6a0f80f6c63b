"""MIN against an exhaustive search over everything a cache could keep."""

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from evoke_core.replay import Trace, TraceBuilder, make_tier, simulate
from evoke_core.replay.trace import HEAD

PROMPTS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6)


def tree(prompts: list[str]) -> Trace:
    builder = TraceBuilder("t", 1)
    for time, prompt in enumerate(prompts):
        builder.add(float(time), builder.extend(HEAD, prompt))
    return builder.build()


def best(trace: Trace, capacity: int) -> int:
    """The most block hits that any sequence of decisions has, prefix-closed or not."""
    chains = [trace.chain(at) for at in range(len(trace))]

    @cache
    def most(request: int, kept: frozenset[int]) -> int:
        if request == len(chains):
            return 0
        hits = 0
        for block in chains[request]:
            if block not in kept:
                break
            hits += 1
        pool = sorted(kept | set(chains[request]))
        size = min(capacity, len(pool))
        later = (most(request + 1, frozenset(keep)) for keep in combinations(pool, size))
        return hits + max(later)

    return most(0, frozenset())


@given(PROMPTS, st.integers(1, 4))
def test_nothing_can_do_better_and_min_does_as_well(prompts: list[str], capacity: int) -> None:
    trace = tree(prompts)
    found = simulate(trace, make_tier("min", capacity, trace))
    assert found.hit_blocks == best(trace, capacity)


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=30), st.integers(1, 12)
)
def test_no_policy_beats_min(prompts: list[str], capacity: int) -> None:
    trace = tree(prompts)
    ceiling = simulate(trace, make_tier("min", capacity, trace)).hit_blocks
    for policy in ("lru", "ledger-lru", "scored", "arc", "s3fifo", "wtinylfu", "wtinylfu20"):
        assert simulate(trace, make_tier(policy, capacity, trace)).hit_blocks <= ceiling, policy


def test_worked_example() -> None:
    # ab, ac, ab, ac with room for 2: keep a and b, then a and either; b of the third is a hit.
    trace = tree(["ab", "ac", "ab", "ac"])
    hits: list[int] = []
    simulate(trace, make_tier("min", 2, trace), on_request=lambda _, found: hits.append(found))
    assert hits == [0, 1, 2, 1]


def test_a_cache_that_holds_all_misses_each_block_once() -> None:
    trace = tree(["abc", "abd", "b", "abc"])
    found = simulate(trace, make_tier("min", 100, trace))
    assert found.hit_blocks == trace.references - trace.unique_blocks
