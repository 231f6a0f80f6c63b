"""Rivals, on sequences worked out by hand from their papers' rules."""

from collections.abc import Iterable

import pytest

from evoke_core.replay.rivals import RIVALS
from evoke_core.replay.rivals.arc import Arc
from evoke_core.replay.rivals.lru import PlainLru
from evoke_core.replay.rivals.s3fifo import S3Fifo
from evoke_core.replay.rivals.wtinylfu import RecentUses, WTinyLfu
from evoke_core.replay.tiers import BlockCache, BlockTier


def feed(cache: BlockCache, *blocks: int) -> None:
    for block in blocks:
        cache.access(block)
        cache.settle()


def resident(cache: BlockCache, blocks: Iterable[int] = range(100)) -> set[int]:
    return {block for block in blocks if block in cache}


def test_lru_drops_the_least_recent() -> None:
    cache = PlainLru(2)
    feed(cache, 1, 2, 1, 3)
    assert resident(cache) == {1, 3}


def test_lru_lets_a_request_overflow_until_it_is_through() -> None:
    cache = PlainLru(2)
    for block in (3, 2, 1):
        cache.access(block)
    cache.settle()
    assert resident(cache) == {1, 2}


def test_arc_moves_its_target_by_ghost_hits() -> None:
    cache = Arc(2)
    feed(cache, 1, 2, 1)  # 1 was seen again, 2 once
    feed(cache, 3)
    assert resident(cache) == {1, 3}  # the once-seen list gives way: its target is 0
    feed(cache, 2)  # a ghost of that list: its target is 1 now, so the other list gives way
    assert resident(cache) == {2, 3}
    feed(cache, 1)  # a ghost of the other list: the target is 0 again
    assert resident(cache) == {1, 2}


def test_arc_forgets_ghosts_beyond_its_directory() -> None:
    cache = Arc(2)
    feed(cache, 1, 2, 3, 4, 5)  # seen once only: what leaves a full list leaves no ghost
    assert resident(cache) == {4, 5}
    feed(cache, 1)
    assert resident(cache) == {1, 5}  # as if never seen


def test_s3fifo_filters_remembers_and_gives_another_round() -> None:
    cache = S3Fifo(3)  # small queue of 1, main of 2, ghosts of 2
    feed(cache, 1, 2, 3, 4)
    assert resident(cache) == {2, 3, 4}  # 1 was used once: a ghost
    feed(cache, 1)
    assert resident(cache) == {1, 3, 4}  # remembered: into the main queue; 2 is a ghost
    feed(cache, 3, 3, 5)
    assert resident(cache) == {1, 3, 5}  # 3 was used twice more: into the main queue; 4 went
    feed(cache, 6)
    assert resident(cache) == {1, 3, 6}
    feed(cache, 2)
    assert resident(cache) == {1, 2, 3}  # the ghosts are 5 and 6 by now: 2 is new
    feed(cache, 1, 5)  # 5 comes back to the main queue, 2 leaves the small one
    assert resident(cache) == {1, 3, 5}
    feed(cache, 7)  # the small queue is empty: main gives 1 another round, 3 goes
    assert resident(cache) == {1, 5, 7}


def test_wtinylfu_admits_what_was_used_more_than_its_victim() -> None:
    cache = WTinyLfu(5, window=0.2)  # window of 1, main of 4 with 3 protected
    feed(cache, 1, 2, 3, 4, 5)
    assert resident(cache) == {1, 2, 3, 4, 5}
    feed(cache, 6)
    assert resident(cache) == {1, 2, 3, 4, 6}  # 5 was used as often as 1: not admitted
    feed(cache, 5)
    assert resident(cache) == {1, 2, 3, 4, 5}
    feed(cache, 6)
    assert resident(cache) == {2, 3, 4, 5, 6}  # 5, used twice, replaces 1
    feed(cache, 2, 3, 4, 5)  # all are protected in turn, which sends 2 back to probation
    feed(cache, 7)
    assert resident(cache) == {2, 3, 4, 5, 7}  # 6 was used as often as 2
    feed(cache, 7, 7, 8)
    assert resident(cache) == {3, 4, 5, 7, 8}  # 7, used three times, replaces 2


def test_recent_uses_are_halved() -> None:
    uses = RecentUses(1)  # every 10 uses
    for block in (1, 1, 1, 1, 1, 2, 2, 2, 3):
        uses.add(block)
    assert [uses[block] for block in (1, 2, 3, 4)] == [5, 3, 1, 0]
    uses.add(1)
    assert [uses[block] for block in (1, 2, 3)] == [3, 1, 0]
    for _ in range(9):
        uses.add(1)
    assert uses[1] == 12
    for _ in range(2 * 10):
        uses.add(1)
    assert uses[1] <= 15


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 50])
def test_no_rival_exceeds_its_capacity_or_loses_what_fits(name: str, capacity: int) -> None:
    cache = RIVALS[name](capacity)
    state = 1
    for _ in range(3000):
        state = state * 48271 % 2147483647
        feed(cache, state % 80 if state % 3 else state % 10)
        assert len(resident(cache)) <= capacity
    small = RIVALS[name](50)
    feed(small, *(block for _ in range(3) for block in range(40)))
    assert resident(small) == set(range(40))


def test_requests_are_accessed_tail_first_and_each_block_once() -> None:
    seen: list[int] = []

    class Recorder(PlainLru):
        def access(self, block: int) -> None:
            seen.append(block)
            super().access(block)

    tier = BlockTier(Recorder(10))
    assert tier.begin(0, [1, 2, 3], 0) == 0
    tier.offer([1, 2, 3], 0, 2)
    tier.offer([1, 2, 3], 2, 3)
    assert seen == [2, 1, 3]
    assert tier.begin(1, [1, 2, 4], 0) == 2
    tier.offer([1, 2, 4], 2, 3)
    assert seen[3:] == [4, 2, 1]
    assert tier.begin(2, [9, 2, 3], 1) == 2  # from position 1 on, whatever comes before
