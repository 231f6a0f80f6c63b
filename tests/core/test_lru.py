# SPDX-License-Identifier: Apache-2.0
"""policy="lru" is least recently used, leaf-first: on whole chains, an OrderedDict of requests."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from evoke_core import EvokeConfig, RetentionIndex


def chain(name: int) -> list[bytes]:
    return [b"%d/%d" % (name, depth) for depth in range(1 + name % 4)]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_equals_an_ordered_dict_on_chains(names: list[int], capacity: int) -> None:
    """Requests that walk whole chains: blocks leave oldest chain first, tails before heads."""
    index = RetentionIndex(EvokeConfig(policy="lru"))
    lru: OrderedDict[bytes, None] = OrderedDict()
    for n, name in enumerate(names):
        keys = chain(name)
        if len(keys) > capacity:
            continue
        index.open(f"r{n}")
        index.touch(f"r{n}", keys)
        for key in reversed(keys):
            if key in lru:
                lru.move_to_end(key)
        missing = sum(key not in lru for key in keys)
        expected = []
        while len(lru) + missing > capacity:
            expected.append(lru.popitem(last=False)[0])
        excess = len(index) + missing - capacity
        evicted = [key for batch in index.evict(excess, protect=f"r{n}") for key in batch.keys]
        assert evicted == expected
        index.insert(f"r{n}", keys)
        index.close(f"r{n}")
        for key in reversed(keys):
            lru[key] = None
            lru.move_to_end(key)
        assert index.candidates(capacity) == list(lru)


def test_tags_do_not_matter_to_lru() -> None:
    from evoke_core import RequestTags

    index = RetentionIndex(EvokeConfig(policy="lru"))
    index.open("vip", RequestTags(source_type="system", priority=10.0))
    index.insert("vip", [b"old"])
    index.open("plain")
    index.insert("plain", [b"new"])
    assert index.candidates(2) == [b"old", b"new"]
