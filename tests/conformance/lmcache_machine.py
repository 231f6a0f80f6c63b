# SPDX-License-Identifier: Apache-2.0
"""The conformance suite for LMCache's cache policy: the same reference, another engine.

An LMCache backend owns its memory, evicts one chunk at a time while a request allocates, and tells
its policy of keys only. The machine is that engine (`tests/lmcache/backend.py`): it knows which
request does what, and tells the brute-force reference so, while the policy under test has to find
out. After every step both must show the same chunks with the same history in the same order of
eviction.

Left out is exactly what the calls that LMCache makes do not tell, so that no policy can know it:

- Which of two requests with equal tags does something. Here each request has a tag of its own.
- That a batch was refused in the middle and a later part of the prompt stored all the same: a gap.
  Here what there was no memory for comes again.
- Whether a lone question on the storing thread comes from the next store or from an onlooker. Here
  onlookers and lookups have a thread of their own, as in LMCache.
- That a request has ended. Here it is over, if it ends its session, when the next one comes.

What is guessed there, and that a wrong guess is put right, the package's own tests show.

Numbers in comments are those of the invariants in the design.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evoke_core import EvokeConfig, RequestTags
from evoke_core.adaptive import AdaptivePolicy
from evoke_lmcache.retention import PATIENCE
from tests.conformance.machine import malformed_tags, pick, pieces, setups, steps, tag_sets
from tests.conformance.reference import ReferenceIndex, View
from tests.lmcache.backend import Backend, Object, check, keys


@dataclass
class Asked:
    """A request as the engine knows it.

    `told`: the id under which the reference knows it; None while it does not.
    `named`: so many of its chunks the reference has been told of.
    """

    path: str
    configs: dict[str, Any]
    tags: Any
    offered: int = 0
    told: str | None = None
    named: int = 0
    pins: int = 0


class LmcacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Asked] = []
        self.newest: Asked | None = None
        self.refusals = 0
        self.opened = 0
        self.now = 0.0
        self.in_the_air: set[str] = set()
        self.lookups = ThreadPoolExecutor(1)

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        setup = data.draw(setups(admits=False, signals=False, small_memory=False), label="setup")
        rules, config = setup.rules, setup.config
        self.backend = Backend(
            setup.capacity, settings=config, clock=lambda: self.now, tokens_per_chunk=1
        )
        learner = AdaptivePolicy(config) if config.policy == "adaptive" else None
        without_windows = replace(rules, window_groups=frozenset())  # LMCache has none
        self.model = ReferenceIndex(without_windows, learner)
        self.config: EvokeConfig = config

    def names(self, path: str) -> list[bytes]:
        return [self.backend.retention._names.name(key) for key in keys(path)]

    def elsewhere(self, act: Any, *args: Any) -> Any:
        """LMCache's connector looks up on a thread of its own, and stores on another."""
        return self.lookups.submit(act, *args).result()

    def teardown(self) -> None:
        self.lookups.shutdown()

    # --- what the reference is told ---

    def tell(self, request: Asked, upto: int) -> None:
        """The request is known to use its first ``upto`` chunks."""
        if request.told is None:
            for other in self.requests:
                if other.told is not None and other.tags.end_of_session:
                    self.model.close(other.told)
                    other.told, other.named = None, 0
            self.opened += 1
            request.told, request.named = f"m{self.opened}", 0
            self.model.open(request.told, request.tags, self.now)
        if upto > request.named:
            part = self.names(request.path)[request.named : upto]
            self.model.touch(request.told, part, start=request.named)
            request.named = upto

    def settle(self) -> None:
        assert self.backend.guarded.candidates(self.backend.chunks, 0) == []

    # --- what the engine does ---

    @rule(fork=pick, keep=st.integers(0, 9), tail=pieces, tags=tag_sets | malformed_tags)
    def arrive(self, fork: int, keep: int, tail: str, tags: Any) -> None:
        """A new request, or one like an earlier one, is looked up; what is found is pinned."""
        path = tail
        if self.requests:
            path = (self.requests[fork % len(self.requests)].path[:keep] + tail)[:11]
        configs = {"lmcache.request": str(len(self.requests))}
        if isinstance(tags, dict):
            configs |= {
                f"lmcache.evoke.{tag}": value if isinstance(value, str) else json.dumps(value)
                for tag, value in tags.items()
            }
        request = Asked(path, configs, RequestTags.from_transfer_params(configs)[0])
        self.requests.append(request)
        request.pins = self.elsewhere(self.backend.look_up, path, dict(configs))
        self.settle()
        request.offered = request.pins
        self.tell(request, max(1, request.pins))
        self.newest = request if request.pins < len(path) else None

    @precondition(lambda self: self.requests)
    @rule(which=pick, size=st.integers(1, 8))
    def store(self, which: int, size: int) -> None:
        """The next chunks of a request's prefill: memory first, evicting; then they are put.

        What there was no memory for comes again: of a gap a policy could not know.
        """
        request = self.requests[which % len(self.requests)]
        if request.told is None:
            return  # it has ended its session, and another request has come: it is over
        start = request.offered
        end = min(start + size, len(request.path))
        batch: list[tuple[Any, Object]] = []
        for key in keys(request.path, dict(request.configs))[start:end]:
            if not self.make_room(len(batch)):
                break
            batch.append((key, Object(references=2)))
        request.offered = start + len(batch)
        for position, (key, thing) in enumerate(batch, start):
            if not dict.__contains__(self.backend.chunks, key):
                self.tell(request, position + 1)
                assert request.told is not None
                self.model.insert(request.told, self.names(key.path)[-1:], start=position)
                self.came(key.path)
                self.newest = request
            elif request.told is not None:
                self.tell(request, position + 1)  # others have stored it; it is used all the same
            self.backend.put(key, thing)
        for _, thing in batch:
            thing.references -= 1
        self.settle()

    def make_room(self, wanted: int) -> bool:
        backend = self.backend
        while len(backend.chunks) + wanted >= backend.capacity:
            got = backend.guarded.candidates(backend.chunks, 1)
            expected = self.expected()
            assert [self.names(key.path)[-1] for key in got] == expected  # 3
            if not got:
                return False
            [victim] = got
            assert victim in backend.chunks
            backend.chunks.pop(victim)
            self.model.drop(expected[0], "capacity")
            self.gone(victim.path)
        return True

    def expected(self) -> list[bytes]:
        free = {
            self.names(key.path)[-1]
            for key, thing in dict.items(self.backend.chunks)
            if thing.can_evict
        }
        own = None if self.newest is None else self.newest.told
        found = self.model.candidates(1, free.__contains__, protect=own)
        if found:
            self.refusals = 0
        elif own is not None:
            self.refusals += 1
            if self.refusals >= PATIENCE:
                self.refusals = 0
                found = self.model.candidates(1, free.__contains__)
        return found

    @precondition(lambda self: any(request.pins for request in self.requests))
    @rule(which=pick)
    def unpin(self, which: int) -> None:
        pinned = [request for request in self.requests if request.pins]
        request = pinned[which % len(pinned)]
        self.backend.unpin(request.path, request.pins)
        request.pins = 0

    @precondition(lambda self: any(len(path) > 1 for path in self.backend.resident()))
    @rule(which=pick)
    def look(self, which: int) -> None:
        """4: somebody looks and uses nothing."""
        before = self.seen()
        resident = sorted(path for path in self.backend.resident() if len(path) > 1)
        key = keys(resident[which % len(resident)])[-1]
        self.elsewhere(self.backend.chunks.__contains__, key)
        assert self.seen() == before

    @rule(which=pick)
    def remove(self, which: int) -> None:
        """By force, from outside; what is pinned is not removed while somebody reads it."""
        idle = sorted(key.path for key, it in dict.items(self.backend.chunks) if it.can_evict)
        if idle:
            path = idle[which % len(idle)]
            self.backend.remove(keys(path)[-1])
            self.model.drop(self.names(path)[-1])
            self.gone(path)

    @rule(step=steps)
    def time_passes(self, step: float | None) -> None:
        self.now += step or 0.0

    # --- what must hold ---

    def came(self, path: str) -> None:
        resident = self.backend.resident()
        if len(path) > 1 and path[:-1] not in resident:
            self.in_the_air.add(path)
        self.in_the_air -= {child for child in resident if child[:-1] == path}

    def gone(self, path: str) -> None:
        self.in_the_air.discard(path)
        self.in_the_air |= {child for child in self.backend.resident() if child[:-1] == path}

    def seen(self) -> tuple[object, ...]:
        index = self.backend.retention.index
        resident = sorted(self.backend.resident())
        views = {}
        for path in resident:
            view = index.describe(self.names(path)[-1])
            assert view is not None
            views[path] = View(**{name: getattr(view, name) for name in View._fields})
        return views, index.candidates(len(resident)), index.clock, index.half_life

    @invariant()
    def shows_what_the_reference_shows(self) -> None:
        """3, 6"""
        self.settle()
        views, order, clock, half_life = self.seen()
        assert isinstance(views, dict)
        for path, view in views.items():
            expected = self.model.describe(self.names(path)[-1])
            assert view == expected, (path, view, expected)
        assert len(views) == len(self.model)
        assert order == self.model.candidates(len(views))
        assert (clock, half_life) == (self.model.clock, self.model.half_life)

    @invariant()
    def follows_the_dictionary(self) -> None:
        """5, 7, 8"""
        check(self.backend)
        assert len(self.backend.chunks) <= self.backend.capacity

    @invariant()
    def no_orphan(self) -> None:
        """1"""
        resident = self.backend.resident()
        for path in resident - self.in_the_air:
            assert len(path) == 1 or path[:-1] in resident
