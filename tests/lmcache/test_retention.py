# SPDX-License-Identifier: Apache-2.0
"""Requests, chains and evictions, from what LMCache does to its dictionary."""

import random
import threading
from typing import Any

import pytest

from evoke_core import EvokeConfig, TagProblem
from evoke_lmcache.lineage import ROOT, Lineage
from evoke_lmcache.naming import Names
from evoke_lmcache.retention import MAX_STREAMS, PATIENCE
from tests.lmcache.backend import Backend, Key, LayerKey, Object, check, keys, number

SYSTEM = {"lmcache.evoke.source_type": "system", "lmcache.evoke.priority": "4"}


# --- chains ---


def test_stores_without_lookups_are_chains_of_their_own() -> None:
    backend = Backend(20)
    backend.store("abcd")
    backend.store("wxyz")
    assert [backend.parent(path) for path in ("a", "ab", "abc", "abcd")] == [None, "a", "ab", "abc"]
    assert [backend.parent(path) for path in ("w", "wx", "wxy", "wxyz")] == [None, "w", "wx", "wxy"]
    check(backend)


def test_a_tail_goes_before_its_head() -> None:
    backend = Backend(6)
    backend.store("abcdef")
    backend.store("xy")
    assert backend.evicted == ["abcdef", "abcde"]


def test_what_a_request_adds_follows_what_it_found() -> None:
    backend = Backend(20)
    backend.serve("abc")
    assert backend.serve("abcde") == 3
    assert backend.parent("abcd") == "abc"
    assert backend.retention.counters.requests == 2


def test_a_chunked_prefill_is_one_request() -> None:
    backend = Backend(20)
    backend.serve("ab")
    found = backend.look_up("abcdefgh")
    backend.unpin("abcdefgh", found)
    for end in (4, 6, 8):
        backend.store("abcdefgh"[:end], start=end - 2)
    assert backend.retention.counters.requests == 2
    assert [backend.parent("abcdefgh"[:n]) for n in (3, 5, 7)] == ["ab", "abcd", "abcdef"]


def test_a_request_that_finds_nothing_is_one_request() -> None:
    backend = Backend(20)
    backend.look_up("abcd")
    assert backend.guarded.candidates(backend.chunks, 1) == []
    assert backend.retention.counters.requests == 1
    backend.store("ab")
    backend.store("abcd", start=2)
    assert backend.retention.counters.requests == 1


def test_prefills_that_alternate_are_told_apart_by_their_lookups() -> None:
    """A step stores four chunks, and the prompts take turns."""
    backend = Backend(60)
    first, second, third = "abcdefghij", "klmnopqrs", "tuvwx"
    backend.look_up(first)
    backend.store(first[:4])
    backend.store(first[:8], start=4)
    backend.look_up(second)
    backend.store(second[:2])  # new requests are stored first in a step,
    backend.store(first, start=8)  # the rest of the one that was running after them
    backend.store(second[:6], start=2)
    backend.look_up(third)
    backend.store(third[:1])
    backend.store(second, start=6)
    backend.store(third, start=1)
    for path in (first, second, third):
        parents = [backend.parent(path[:n]) for n in range(1, len(path) + 1)]
        assert parents == [None, *(path[:n] for n in range(1, len(path)))]
    assert backend.retention.counters.requests == 3
    check(backend)


def test_one_prefill_after_another() -> None:
    """Nothing else is running: whatever the sizes, the newest goes on."""
    backend = Backend(80)
    for path, step in (("abcdefgh", 8), ("ijklmnop", 3), ("qrst", 4), ("uvwxyz", 2)):
        backend.look_up(path)
        for start in range(0, len(path), step):
            backend.store(path[: start + step], start=start)
        parents = [backend.parent(path[:n]) for n in range(1, len(path) + 1)]
        assert parents == [None, *(path[:n] for n in range(1, len(path)))]


def test_prefills_that_alternate_are_told_apart_by_their_tags() -> None:
    backend = Backend(40)
    first, second = ({"lmcache.evoke.evoke_session": name} for name in ("one", "two"))
    backend.look_up("abcdef", first)
    backend.look_up("uvwxyz", second)
    for end in (2, 4, 6):
        backend.store("uvwxyz"[:end], dict(second), start=end - 2)
        backend.store("abcdef"[:end], dict(first), start=end - 2)
    for path in ("abcdef", "uvwxyz"):
        assert [backend.parent(path[:n]) for n in range(2, 7)] == [path[:n] for n in range(1, 6)]
    assert backend.retention.counters.requests == 2


@pytest.mark.parametrize("busy", [False, True])
def test_prefills_with_equal_tags_are_told_apart_by_the_object_they_come_with(busy: bool) -> None:
    """Where one process schedules and stores, all stores of a request carry one object.

    ``busy``: what was put last is still referenced when the other request stores.
    """
    backend = Backend(40)
    first, second = ({"lmcache.evoke.source_type": "user"} for _ in range(2))
    backend.look_up("abcdef", dict(first))
    backend.look_up("uvwxyz", dict(second))
    backend.store("uv", second)
    backend.store("ab", first)
    for end in (4, 6):
        for path, tags in (("uvwxyz", second), ("abcdef", first)):
            for thing in dict.values(backend.chunks):
                thing.references = 2 if busy else 1
            backend.store(path[:end], tags, start=end - 2)
    for path in ("abcdef", "uvwxyz"):
        assert [backend.parent(path[:n]) for n in range(2, 7)] == [path[:n] for n in range(1, 6)]
    assert backend.retention.counters.requests == 2
    check(backend)


def test_what_no_policy_can_know() -> None:
    """Equal tags, a new object each time, prefills that take turns out of any scheduler's order:
    the guess is wrong, costs no chunk, and a lookup puts it right."""
    backend = Backend(40)
    tags = {"lmcache.evoke.source_type": "user"}
    backend.look_up("abcdef", dict(tags))
    backend.look_up("uvwxyz", dict(tags))
    backend.store("ab", dict(tags))
    backend.store("uv", dict(tags))
    backend.store("abcd", dict(tags), start=2)
    assert backend.parent("abc") == "uv"  # the newest request's
    backend.store("uvwx", dict(tags), start=2)
    check(backend)
    assert backend.look_up("abcd", dict(tags)) == backend.look_up("uvwx", dict(tags)) == 4
    assert backend.guarded.candidates(backend.chunks, 0) == []
    assert [backend.parent("abcd"[:n]) for n in range(1, 5)] == [None, "a", "ab", "abc"]
    assert [backend.parent("uvwx"[:n]) for n in range(1, 5)] == [None, "u", "uv", "uvw"]
    check(backend)


@pytest.mark.parametrize("tags", [None, {"lmcache.evoke.evoke_session": "one"}])
@pytest.mark.parametrize("how", ["pinned", "referenced"])
def test_a_chunk_that_somebody_reads_is_no_batch_that_goes_on(
    tags: dict[str, str] | None, how: str
) -> None:
    """The chunk that was put last is in use, and another request stores its next chunk."""
    backend = Backend(20)
    backend.look_up("abc", tags)
    backend.store("ab", tags)
    backend.look_up("w", {"lmcache.evoke.evoke_session": "two"})
    backend.store("w", {"lmcache.evoke.evoke_session": "two"})
    [reader] = [thing for key, thing in dict.items(backend.chunks) if key.path == "w"]
    reader.pins += how == "pinned"
    reader.references += how == "referenced"
    backend.store("abc", tags, start=2)
    assert backend.parent("abc") == "ab"


def test_a_wrong_guess_is_put_right_by_the_next_lookup() -> None:
    backend = Backend(40)
    backend.look_up("abcdef")
    backend.look_up("uvwxyz")
    backend.store("ab")
    backend.store("uv")
    backend.store("abcdef", start=2)  # it seems to continue the newest, which is not its own
    assert backend.parent("abc") == "uv"
    backend.look_up("abcdef")
    backend.look_up("?")
    parents = [backend.parent("abcdef"[:n]) for n in range(1, 7)]
    assert parents == [None, "a", "ab", "abc", "abcd", "abcde"]
    assert [backend.position("abcdef"[:n]) for n in range(1, 7)] == list(range(6))
    assert backend.retention.counters.refiled > 0
    check(backend)


def test_another_threads_lookup_says_where_a_prompt_begins() -> None:
    backend = Backend(40)
    backend.serve("abcd")
    looking = threading.Thread(target=backend.look_up, args=("uvw",))
    looking.start()
    looking.join()
    backend.store("uvw")
    assert backend.parent("u") is None


def test_layers_of_a_chunk_are_one_chunk() -> None:
    backend = Backend(100)

    def layer(path: str, n: int) -> LayerKey:
        return LayerKey(number(path), path, layer_id=n)

    assert layer("a", 0) not in backend.chunks  # the lookup
    for path in ("a", "ab", "abc"):  # the store asks for all of it first, then goes by layers
        assert layer(path, 0) not in backend.chunks
    for n in range(3):
        for path in ("a", "ab", "abc"):
            backend.put(layer(path, n), Object())
    assert len(backend.retention) == 3
    assert backend.parent("abc") == "ab"
    assert layer("z", 0) not in backend.chunks  # somebody else wants memory
    assert backend.guarded.candidates(backend.chunks, 64) == [
        layer(path, 0) for path in ("abc", "ab", "a")
    ]
    dict.__getitem__(backend.chunks, layer("abc", 2)).pins += 1
    assert backend.guarded.candidates(backend.chunks, 64) == []
    dict.__getitem__(backend.chunks, layer("abc", 2)).pins -= 1
    assert backend.guarded.candidates(backend.chunks, 1) == [layer("abc", 0)]
    for n in range(3):
        assert len(backend.retention) == 3
        backend.chunks.pop(layer("abc", n))
    assert len(backend.retention) == 2
    assert backend.retention.counters.evicted == 1
    check(backend)


# --- uses ---


def test_a_lookup_counts_once_and_a_look_not_at_all() -> None:
    backend = Backend(20)
    backend.serve("abc")
    name = backend._name("ab")
    index = backend.retention.index

    def reuse() -> int:
        backend.retention._close_run()
        view = index.describe(name)
        assert view is not None
        return view.reuse

    assert reuse() == 1
    for key in keys("abc"):
        assert key in backend.chunks
    assert reuse() == 1
    backend.look_up("abc")
    assert reuse() == 2
    backend.look_up("abc")
    assert reuse() == 3


def test_reading_after_a_lookup_is_the_same_use() -> None:
    """The disk backend reports hits a second time, head first, when it has read the chunks."""
    backend = Backend(20, disk=True)
    backend.store("abc")
    backend.written()
    backend.look_up("abc")
    for key in keys("abc"):
        assert key in backend.chunks
        backend.guarded.hit(key)
    backend.retention._close_run()
    view = backend.retention.index.describe(backend._name("b"[:0] + "ab"))
    assert view is not None
    assert view.reuse == 2


def test_hits_head_first_are_one_use_too() -> None:
    backend = Backend(20)
    backend.store("abcd")
    for key in keys("abcd"):
        backend.guarded.hit(key)
    backend.look_up("?")
    assert backend.retention.counters.requests == 2
    assert backend.parent("abcd") == "abc"


# --- the disk: announced first, there later ---


@pytest.mark.parametrize("order", [list, lambda written: written[::-1]], ids=["in order", "not"])
def test_a_chunk_is_resident_when_it_is_written(order: Any) -> None:
    backend = Backend(20, disk=True)
    backend.store("abcd")
    assert len(backend.retention) == 0
    backend.written(order)
    assert [backend.parent("abcd"[:n]) for n in (1, 2, 3, 4)] == [None, "a", "ab", "abc"]
    assert backend.order() == ["abcd", "abc", "ab", "a"]
    check(backend)


def test_a_disk_learns_from_the_memory_what_comes_before() -> None:
    lineage, names, lock = Lineage(), Names(), threading.RLock()
    shared: dict[str, Any] = {"lineage": lineage, "names": names, "lock": lock}
    memory, disk = Backend(20, **shared), Backend(20, disk=True, **shared)
    memory.serve("ab")
    found = memory.look_up("abcd")
    disk.look_up("abcd")  # asked for what the memory misses, and misses it
    memory.unpin("abcd", found)
    memory.store("abcd", start=2)
    disk.store("abcd", start=2)
    disk.written()
    assert disk.position("abc") == 2
    assert disk.position("abcd") == 3


# --- evicting ---


def test_a_tagged_prefix_outlives_what_passes_through() -> None:
    backend = Backend(12)
    backend.serve("sys" + "t", SYSTEM)
    for n in range(30):
        backend.serve(f"{chr(200 + n)}pqr")
    assert backend.look_up("sys") == 3


def test_candidates_change_nothing() -> None:
    backend = Backend(12)
    for n in range(4):
        backend.serve(f"{n}bc")
    first = backend.guarded.candidates(backend.chunks, 64)
    assert len(first) == 9  # the newest request's own chain is left alone
    assert backend.guarded.candidates(backend.chunks, 64) == first
    assert backend.guarded.candidates(backend.chunks, 2) == first[:2]
    check(backend)


def test_what_is_held_stays_and_so_does_what_it_needs() -> None:
    backend = Backend(8)
    backend.serve("abcd")
    assert backend.look_up("abc") == 3
    for n in range(6):
        backend.serve(f"{n}xy")
    assert backend.resident() >= {"a", "ab", "abc"}
    backend.unpin("abc", 3)
    for n in range(6, 12):
        backend.serve(f"{n}xy")
    assert not backend.resident() & {"a", "ab", "abc"}


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    backend = Backend(8)
    backend.serve("xyz")
    path = "abcdefghijkl"
    backend.look_up(path)
    stored = backend.store(path[:4]) + backend.store(path[:8], start=4)
    stored += backend.store(path, start=8)
    assert stored == 8
    assert backend.resident() == {path[:n] for n in range(1, 9)}


def test_a_chain_that_fills_the_pool_does_not_keep_others_out() -> None:
    backend = Backend(8)
    backend.serve("abcdefgh")
    assert backend.serve("xyz") == 0
    assert backend.resident() == {"x", "xy", "xyz", "a", "ab", "abc", "abcd", "abcde"}


def test_whoever_stores_without_a_lookup_is_served_in_the_end() -> None:
    backend = Backend(4)
    backend.look_up("abcd")
    backend.store("abcd")
    tries = [backend.store("x") for _ in range(PATIENCE)]
    assert tries == [0] * (PATIENCE - 1) + [1]


def test_evicted_is_remembered_and_removed_is_not() -> None:
    backend = Backend(4)
    backend.serve("abcd")
    backend.serve("xy")
    assert backend.retention.index.ghosts == 2
    backend.remove(keys("ab")[-1])
    assert backend.retention.index.ghosts == 2
    assert backend.retention.counters.evicted == 2
    assert backend.retention.counters.removed == 1
    check(backend)


# --- tags ---


def test_bad_tags_are_counted_and_reported_once() -> None:
    told: list[TagProblem] = []
    backend = Backend(40, warn=told.append)
    for n in range(3):
        backend.serve(f"{n}b", {"lmcache.evoke.priority": "high", "lmcache.evoke.spans": "[[["})
    assert len(told) == len(backend.retention.tags_ignored) == 2
    assert set(backend.retention.tags_ignored.values()) == {3}
    check(backend)


def test_times_are_ignored_where_ranks_decide_apart() -> None:
    backend = Backend(40, clock=lambda: 5.0)
    timed = {"lmcache.evoke.ttl_s": "60"}
    backend.serve("ab", timed)
    assert not backend.retention.tags_ignored
    assert backend.retention.index.now == 5.0
    backend.serve("xy", timed, world_size=2)
    [(problem, count)] = backend.retention.tags_ignored.items()
    assert (problem.tag, count) == ("ttl_s", 1)


def test_chunks_past_their_time_go_first() -> None:
    now = [0.0]
    backend = Backend(6, clock=lambda: now[0])
    backend.serve("abc", {"lmcache.evoke.ttl_s": "10", "lmcache.evoke.priority": "10"})
    backend.serve("xyz")
    now[0] = 11.0
    backend.serve("q")
    assert backend.evicted == ["abc"]


def test_a_session_that_ends_leaves_first() -> None:
    session = {"lmcache.evoke.evoke_session": "s"}
    last = session | {"lmcache.evoke.end_of_session": "true"}
    backend = Backend(8)
    backend.serve("abc", session)
    backend.serve("abcd", last)
    backend.serve("xyz")
    backend.serve("pq")
    assert backend.evicted == ["abcd"]
    check(backend)


def test_spans_are_read_in_chunks() -> None:
    backend = Backend(6, tokens_per_chunk=100)
    spans = '[{"start": 0, "end": 200, "source_type": "system", "priority": 10}]'
    backend.serve("abcd", {"lmcache.evoke.spans": spans})
    for n in range(8):
        backend.serve(f"{n}x")
    assert backend.resident() >= {"a", "ab"}
    assert not backend.resident() & {"abc", "abcd"}


# --- limits ---


def test_requests_kept_open_are_bounded() -> None:
    backend = Backend(10_000)
    for n in range(MAX_STREAMS + 40):
        backend.serve(f"{chr(1000 + n)}b")
    assert backend.retention.index.open_requests == MAX_STREAMS
    assert len(backend.retention._tails) <= MAX_STREAMS


def test_links_are_bounded_and_chains_end() -> None:
    lineage = Lineage(limit=3)
    lineage.learn(b"a", ROOT, sure=True)
    for child, parent in ((b"b", b"a"), (b"c", b"b")):
        lineage.learn(child, parent, sure=True)
    assert lineage.chain(b"c") == ([b"a", b"b", b"c"], True)
    lineage.learn(b"d", b"c", sure=False)
    assert len(lineage) == 3
    assert lineage.chain(b"d") == ([b"a", b"b", b"c", b"d"], False)
    lineage.learn(b"b", b"d", sure=True)  # nonsense, and still it ends
    assert lineage.chain(b"d")[0][-1] == b"d"


def test_identity_tags_make_names_of_their_own() -> None:
    names = Names()
    plain, tagged = Key(7, "a"), Key(7, "a", tags=(("tenant", "x"),))
    assert names.name(plain) != names.name(tagged)
    assert names.name(plain) != names.name(Key(7, "a", worker_id=1))
    assert names.name(Key(-7, "a")) != names.name(plain)
    assert names.name("some other key") == names.name("some other key")


# --- nothing leaves ---


def test_an_error_inside_leaves_first_in_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(6)
    backend.serve("abc")
    monkeypatch.setattr(backend.retention.index, "insert", lambda *args, **kwargs: 1 / 0)
    backend.serve("xyz")
    backend.serve("pq")
    assert len(backend.complaints) == 1
    assert backend.evicted == ["a", "ab"]
    assert backend.guarded.failed


def test_the_dictionary_is_a_dictionary() -> None:
    backend = Backend(10)
    chunks = backend.chunks
    a, b, c, d = keys("abcd")
    chunks[a] = one = Object()
    assert chunks.setdefault(a, Object()) is one
    assert isinstance(chunks.setdefault(b, Object()), Object)
    chunks.update({c: Object()})
    chunks |= {d: Object()}
    check(backend)
    assert list(chunks) == [a, b, c, d]
    assert chunks.popitem()[0] == d
    del chunks[c]
    assert chunks.pop(c, None) is None
    with pytest.raises(KeyError):
        chunks.pop(c)
    with pytest.raises(KeyError):
        chunks[c]
    with pytest.raises(KeyError):
        del chunks[c]
    check(backend)
    chunks.clear()
    check(backend)
    assert len(backend.retention) == 0


# --- at random ---


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("policy", ["scored", "adaptive", "lru"])
def test_the_index_follows_the_dictionary_whatever_happens(policy: str, disk: bool) -> None:
    draw = random.Random(f"{policy} {disk}")
    backend = Backend(24, disk=disk, settings=EvokeConfig(policy=policy))
    pinned: list[tuple[str, int]] = []
    tags = [None, SYSTEM, {"lmcache.evoke.evoke_session": "s"}, {"lmcache.evoke.pinned": "true"}]
    for _ in range(1_500):
        path = "".join(draw.choices("abc", k=draw.randint(1, 9)))
        configs = draw.choice(tags)
        act = draw.random()
        if act < 0.5:
            backend.serve(path, configs)
        elif act < 0.65:
            pinned.append((path, backend.look_up(path, configs)))
        elif act < 0.8:
            backend.store(path, configs, start=draw.randint(0, len(path) - 1))
        elif act < 0.9:
            backend.remove(keys(path)[-1])
        elif act < 0.98:
            backend.written(lambda found: draw.sample(found, len(found)))
        elif draw.random() < 0.2:
            backend.chunks.clear()
            pinned.clear()
        while len(pinned) > 3:
            backend.unpin(*pinned.pop(0))
        backend.retention._close_run()
        check(backend)
    assert len(backend.evicted) > 100
