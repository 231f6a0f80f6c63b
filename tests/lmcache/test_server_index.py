# SPDX-License-Identifier: Apache-2.0
"""Chunks, requests and lost events of an LMCache server. Needs no LMCache."""

import random

from attrs import define

from evoke_core import EvokeConfig, TagProblem
from evoke_lmcache.server_index import MAX_CHAINS, ServerIndex, name_of, name_of_key

SPACE = ("model", "")
SYSTEM = {"lmcache.evoke.source_type": "system", "lmcache.evoke.priority": "4"}


@define(frozen=True)
class Key:
    """What LMCache's ``ObjectKey`` is to the index."""

    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


def hashes(path: str) -> list[bytes]:
    """One letter is one chunk; a hash names all that comes before it."""
    return [path[: n + 1].encode() for n in range(len(path))]


def keys(path: str, ranks: int = 1) -> list[Key]:
    return [Key(digest, kv_rank=rank) for digest in hashes(path) for rank in range(ranks)]


def new(policy: str = "scored", **options: object) -> ServerIndex:
    config = EvokeConfig(policy=policy, recency_half_life=16.0)
    return ServerIndex(config, **options)  # type: ignore[arg-type]


def serve(index: ServerIndex, path: str, params: dict[str, str] | None = None) -> None:
    request = f"r{index.counters.requests}"
    index.lookup(request, SPACE, hashes(path), params, 0.0)
    index.written(key for key in keys(path) if not index._knows(key))
    index.ended(request)
    index.accessed(reversed(keys(path)))


def order(index: ServerIndex, n: int = 99) -> list[str]:
    return [objects[0].chunk_hash.decode() for _, objects in index.candidates(n)]


def evict(index: ServerIndex, n: int = 1) -> list[str]:
    gone = []
    for name, objects in index.candidates(n):
        index.leaving(name)
        index.gone(objects)
        gone.append(objects[0].chunk_hash.decode())
    return gone


def test_the_tail_goes_before_the_head() -> None:
    index = new()
    serve(index, "abcd")
    serve(index, "abxy")
    assert evict(index, 2) == ["abcd", "abc"]
    assert index.counters.evicted == 2
    assert index.index.ghosts == 2


def test_a_tagged_prefix_goes_last() -> None:
    index = new()
    serve(index, "sys", SYSTEM)
    for n in range(5):
        serve(index, f"{n}ab")
    assert order(index)[-3:] == ["sys", "sy", "s"]


def test_objects_of_a_chunk_go_together() -> None:
    index = new()
    index.lookup("r", SPACE, hashes("ab"), None, 0.0)
    index.written(keys("ab", ranks=2))
    index.ended("r")
    [(name, objects)] = index.candidates(1)
    assert objects == keys("ab", ranks=2)[2:]
    index.leaving(name)
    index.gone(objects[:1])
    assert len(index) == 2
    index.gone(objects)
    assert len(index) == 1


def test_open_requests_are_spared_while_there_is_anything_else() -> None:
    index = new()
    serve(index, "abc", SYSTEM)
    index.lookup("open", SPACE, hashes("xyz"), None, 0.0)
    index.written(keys("xyz"))
    assert evict(index, 3) == ["abc", "ab", "a"]
    assert evict(index, 3) == ["xyz", "xy", "x"]


def test_what_is_read_is_passed_over_for_a_while() -> None:
    index = new()
    serve(index, "ab")
    [(name, _)] = index.candidates(1)
    index.leaving(name)
    index.lock(name)
    assert index.candidates(9) == []
    index.unlock()
    assert order(index) == ["ab", "a"]


def test_models_and_salts_are_apart() -> None:
    index = new()
    index.lookup("r", ("model", "tenant"), hashes("ab"), None, 0.0)
    index.written([Key(digest, cache_salt="tenant") for digest in hashes("ab")])
    assert index.counters.found == 0
    index.lookup("s", SPACE, hashes("ab"), None, 0.0)
    assert index.counters.found == 0
    index.lookup("t", ("model", "tenant"), hashes("ab"), None, 0.0)
    assert index.counters.found == 2
    assert name_of_key(Key(b"a", cache_salt="t")) == name_of(("model", "t"), b"a")


def test_writes_that_were_lost_are_found_when_the_chunks_are_used() -> None:
    index = new()
    index.lookup("r", SPACE, hashes("abc"), None, 0.0)
    index.ended("r")
    index.accessed(reversed(keys("abc")))
    assert index.counters.recovered == 3
    assert order(index) == ["abc", "ab", "a"]


def test_evictions_that_were_lost_are_found_when_deleting_fails() -> None:
    index = new()
    serve(index, "abc")
    for name, _ in index.candidates(2):
        index.leaving(name)
        index.stale(name)
    assert order(index) == ["a"]
    assert index.counters.stale == 2


def test_lookups_that_were_lost_leave_chains_of_what_was_written_together() -> None:
    index = new()
    index.written(keys("abc"))
    assert order(index) == ["abc", "ab", "a"]
    index.lookup("r", SPACE, hashes("abcd"), None, 0.0)
    index.written(keys("abcd")[3:])
    index.ended("r")
    assert order(index) == ["abcd", "abc", "ab", "a"]


def test_what_a_request_generates_follows_its_prompt() -> None:
    index = new()
    index.lookup("r", SPACE, hashes("ab"), None, 0.0)
    index.written(keys("ab"))
    index.ended("r")
    index.written(keys("abcd")[2:])  # beyond what was looked up
    index.lookup("s", SPACE, hashes("abcd"), None, 0.0)
    index.ended("s")
    assert index.counters.found == 4


def test_bad_tags_are_counted_and_reported_once() -> None:
    told: list[TagProblem] = []
    index = new(warn=told.append)
    for _ in range(3):
        serve(index, "a", {"lmcache.evoke.priority": "high"})
    assert len(told) == 1
    assert list(index.tags_ignored.values()) == [3]


def test_requests_that_never_end_are_bounded() -> None:
    index = new("lru")
    for n in range(MAX_CHAINS + 10):
        index.lookup(f"r{n}", SPACE, hashes("ab"), None, 0.0)
    assert index.index.open_requests == MAX_CHAINS
    assert len(index._open) == 2


def test_any_order_of_events_leaves_a_sound_index() -> None:
    draw = random.Random(3)
    index = new("adaptive")
    there: set[Key] = set()
    for step in range(3_000):
        path = "".join(draw.choices("abc", k=draw.randint(1, 7)))
        act = draw.random()
        if act < 0.3:
            index.lookup(f"r{step % 20}", SPACE, hashes(path), draw.choice([None, SYSTEM]), step)
        elif act < 0.5:
            fresh = keys(path, ranks=2)
            there |= set(fresh)
            if draw.random() < 0.8:  # otherwise lost
                index.written(fresh)
        elif act < 0.65:
            index.ended(f"r{step % 20}")
            index.accessed(draw.sample(keys(path, 2), len(path)))
        elif act < 0.75:
            lost = draw.sample(sorted(there, key=repr), len(there) // 3)
            there -= set(lost)
            if draw.random() < 0.8:
                index.gone(lost)
        else:
            for name, objects in index.candidates(4):
                index.leaving(name)
                if there & set(objects):
                    there -= set(objects)
                    index.gone(objects)
                else:
                    index.stale(name)
        assert len(index.index) == len(index)
    while chunks := index.candidates(8):
        for name, _ in chunks:
            index.stale(name)
    assert len(index) == 0
