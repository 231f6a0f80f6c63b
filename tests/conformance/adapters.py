# SPDX-License-Identifier: Apache-2.0
"""One face for everything the conformance suite runs on.

A `Tier` is what an engine sees of a CPU tier: requests open and close, keys are looked up and
touched, blocks are stored, loaded and finished. `IndexTier`, `LedgerTier` and `VllmTier` put that
face on the three public layers and declare what each can do; the first two also take the
references of `reference.py`, which have the same methods. Nothing here decides anything: a
translation that repaired an implementation's mistake would hide it.

Keys are `path + group` (see `key_of`), so that a test can read a key and know its parent.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple, Protocol
from unittest import mock

from attrs import evolve

from evoke_core import RequestTags
from tests.conformance.reference import View

BLOCK_STATES = ("ABSENT", "PENDING", "READY")


def key_of(path: str, group: int = 0) -> bytes:
    """The key of the last block of `path`; one character is one block of content."""
    return path.encode() + group.to_bytes(4, "big")


def keys_of(path: str, group: int = 0) -> list[bytes]:
    """The chain of `path`, head first."""
    return [key_of(path[: end + 1], group) for end in range(len(path))]


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


def parent_of(key: bytes) -> bytes | None:
    """The parent by content; None for a chain's head."""
    return key[:-5] + key[-4:] if len(key) > 5 else None


class Offer(NamedTuple):
    """A contiguous piece of one group's chain, offered for storing."""

    group: int
    start: int
    keys: list[bytes]


class Why(NamedTuple):
    """What is told of one evicted block."""

    key: bytes
    group: int
    reason: str
    last: int
    role: str | None
    reused: bool


def whys(batches: Iterable[Any]) -> list[Why]:
    """What is told of every block of evictions that went together."""
    return [
        Why(key, batch.group, batch.reason, batch.last, batch.role, batch.reused)
        for batch in batches
        for key in batch.keys
    ]


@dataclass
class Stored:
    """What an offer led to: the accepted keys, their slots and tickets, and who had to go."""

    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    tickets: dict[bytes, Any] = field(default_factory=dict)
    why: list[Why] = field(default_factory=list)


class Tier(Protocol):
    """What the suite drives. `index` is only looked at, never changed through this protocol."""

    admits: bool  # may refuse a block
    holds: bool  # protects blocks that are being read
    owns_slots: bool  # hands out slots and matches completions to reservations
    tickets: bool  # a completion can name its reservation
    positions: bool  # is told where in its chain a key stands
    opens_strangers: bool  # takes a request that was never opened for a new one
    own_clock: bool  # stamps every request; otherwise there may be no time
    explains: bool  # says why it evicted
    trusts_windows: bool  # stores windows of requests that were open at a reset

    index: Any

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None: ...
    def close(self, request_id: str) -> None: ...
    def lookup(self, request_id: str, key: bytes) -> str: ...
    def touch(self, request_id: str, keys: Sequence[bytes], group: int, start: int) -> None: ...
    def store(self, request_id: str, offers: Sequence[Offer]) -> Stored: ...
    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None: ...
    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None: ...
    def release(self, request_id: str, keys: Iterable[bytes]) -> None: ...
    def reset(self) -> None: ...
    def events(self) -> list[tuple[str, list[bytes]]]: ...
    def counts(self) -> dict[str, int]: ...


class IndexTier:
    """An engine that owns its slots and asks an index only whom to evict.

    It stores what fits, from the head, and has no rule about parents: whatever hangs in the air
    afterwards is this engine's doing, and it says so in `orphaned`.
    """

    holds = positions = trusts_windows = True
    admits = owns_slots = tickets = opens_strangers = own_clock = False

    def __init__(self, index: Any, capacity: int, *, plans_first: bool = False) -> None:
        self.index = index
        self.capacity = capacity
        self.explains = not plans_first
        self._plans_first = plans_first  # asks for candidates and drops them itself
        self._free = list(range(capacity))
        self._slots: dict[bytes, int] = {}
        self._pending: set[bytes] = set()

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None:
        self.index.open(request_id, RequestTags.parse(raw_tags)[0], now)

    def close(self, request_id: str) -> None:
        self.index.close(request_id)

    def lookup(self, request_id: str, key: bytes) -> str:
        if key not in self.index:
            return "ABSENT"
        return "PENDING" if key in self._pending else "READY"

    def touch(self, request_id: str, keys: Sequence[bytes], group: int, start: int) -> None:
        self.index.touch(request_id, keys, group=group, start=start)

    def store(self, request_id: str, offers: Sequence[Offer]) -> Stored:
        stored = Stored()
        for group, start, keys in offers:
            self.index.touch(request_id, keys, group=group, start=start)
            missing = sum(key not in self.index for key in keys) - len(self._free)
            victims, why = self._evict(missing, request_id)
            self._free += [self._slots.pop(victim) for victim in victims]
            stored.evicted += victims
            stored.why += why
            fits = [key for key in keys if key not in self.index][: len(self._free)]
            if not fits:
                continue
            upto = keys[: keys.index(fits[-1]) + 1]
            assert self.index.insert(request_id, upto, group=group, start=start) == fits
            for key in fits:
                self.index.hold(key)
                self._pending.add(key)
                self._slots[key] = self._free.pop()
                stored.keys.append(key)
                stored.slots.append(self._slots[key])
        return stored

    def _evict(self, n: int, request_id: str) -> tuple[list[bytes], list[Why]]:
        if not self._plans_first:
            why = whys(self.index.evict(n, protect=request_id))
            return [told.key for told in why], why
        victims = self.index.candidates(n, protect=request_id)
        for victim in victims:
            assert self.index.drop(victim, "capacity")
        return victims, []

    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None:
        for key in keys:
            self._pending.remove(key)
            self.index.unhold(key)
            if not ok:
                self.drop(key)

    def drop(self, key: bytes) -> None:
        """The engine takes a block away for its own reasons."""
        assert self.index.drop(key, "engine")
        self._free.append(self._slots.pop(key))

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        if any(self.lookup(request_id, key) != "READY" for key in keys):
            return None
        for key in keys:
            self.index.hold(key)
        return [self._slots[key] for key in keys]

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.index.unhold(key)

    def reset(self) -> None:
        self.index.clear()
        self._slots.clear()
        self._pending.clear()
        self._free = list(range(self.capacity))

    def events(self) -> list[tuple[str, list[bytes]]]:
        return []

    def counts(self) -> dict[str, int]:
        return {"resident": len(self.index), "free": len(self._free)}


class LedgerTier:
    """A `BlockLedger` (or its reference), called directly.

    `at_once`: an offer of several pieces is taken as vLLM's is, in one call: all of it is named
    before any is stored, so that no piece makes room for another.
    """

    admits = holds = owns_slots = tickets = positions = explains = trusts_windows = True
    opens_strangers = own_clock = False

    def __init__(self, ledger: Any, *, at_once: bool = False) -> None:
        self.ledger = ledger
        self.index = ledger.index
        self._at_once = at_once
        self._unread: list[Any] = []  # decisions that `events` has still to tell

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None:
        self.ledger.open(request_id, RequestTags.parse(raw_tags)[0], now)

    def close(self, request_id: str) -> None:
        self.ledger.close(request_id)

    def lookup(self, request_id: str, key: bytes) -> str:
        state = self.ledger.lookup(request_id, key)
        return getattr(state, "name", state)

    def touch(self, request_id: str, keys: Sequence[bytes], group: int, start: int) -> None:
        self.ledger.touch(request_id, keys, group=group, start=start)

    def store(self, request_id: str, offers: Sequence[Offer]) -> Stored:
        stored = Stored()
        if self._at_once:
            for group, start, keys in offers:
                self.ledger.touch(request_id, keys, group=group, start=start)
            offers = [
                Offer(group, same[0].start, [key for offer in same for key in offer.keys])
                for group, part in groupby(offers, lambda offer: offer.group)
                if (same := list(part))
            ]
        for group, start, keys in offers:
            got = self.ledger.reserve(request_id, keys, group=group, start=start)
            stored.keys += got.keys
            stored.slots += got.slots
            stored.evicted += got.evicted
            stored.tickets |= dict.fromkeys(got.keys, got.ticket)
        stored.why = self._reasons()
        return stored

    def _reasons(self) -> list[Why]:
        """Why blocks were evicted since the last call."""
        if hasattr(self.ledger, "evictions"):  # the reference keeps what its index told
            batches, self.ledger.evictions = self.ledger.evictions, []
            return whys(batches)
        decisions = self.ledger.drain_decisions()
        self._unread += decisions
        return [
            Why(key, d.group, d.reason, self.index.clock - d.age, d.role, d.reused)
            for d in decisions
            if d.kind == "evicted" and d.reason != "reset"
            for key in d.keys
        ]

    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None:
        end = self.ledger.commit if ok else self.ledger.abort
        for key in keys:
            end(request_id, [key], ticket=tickets[key] if tickets else None)

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        return self.ledger.acquire(request_id, keys)

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        self.ledger.release(request_id, keys)

    def reset(self) -> None:
        self.ledger.reset()

    def events(self) -> list[tuple[str, list[bytes]]]:
        decisions = self._unread + self.ledger.drain_decisions()
        self._unread = []
        return [(d.kind, list(d.keys)) for d in decisions]

    def counts(self) -> dict[str, int]:
        stats = self.ledger.stats
        names = ("capacity", "resident", "pending", "held", "free", "ghosts", "open_requests")
        return {name: getattr(stats, name) for name in names}


class VllmTier:
    """`EvokeOffloadingManager`, called the way vLLM's offloading scheduler calls it up to 0.30.

    Completions arrive as sets, positions are never told, several groups share one offer, and the
    time is the machine's.
    """

    admits = holds = owns_slots = opens_strangers = own_clock = True
    tickets = positions = explains = trusts_windows = False

    def __init__(self, manager: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        from evoke_vllm import compat

        self._states = {answer: state.name for state, answer in compat.LOOKUP.items()}
        self.manager = manager
        self._new_context = ReqContext
        self.ledger = manager.ledger
        self.index = self.ledger.index
        self._contexts: dict[str, Any] = {}

    def _context(self, request_id: str) -> Any:
        return self._contexts.get(request_id) or self._new_context(request_id)

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None:
        context = self._new_context(request_id, {"evoke": raw_tags})
        self._contexts[request_id] = context
        with mock.patch("time.monotonic", return_value=now):
            self.manager.on_new_request(context)

    def close(self, request_id: str) -> None:
        self.manager.on_request_finished(self._context(request_id))

    def lookup(self, request_id: str, key: bytes) -> str:
        found = self.manager.lookup(key, self._context(request_id))
        return self._states[found]

    def touch(self, request_id: str, keys: Sequence[bytes], group: int, start: int) -> None:
        self.manager.touch(keys, self._context(request_id))

    def store(self, request_id: str, offers: Sequence[Offer]) -> Stored:
        keys = [key for offer in offers for key in offer.keys]
        if not keys:  # the scheduler does not offer nothing
            return Stored()
        got = self.manager.prepare_store(keys, self._context(request_id))
        assert got is not None, "None makes the scheduler offer the same blocks at every step"
        slots = [int(slot) for slot in got.store_spec.block_ids]
        return Stored(list(got.keys_to_store), slots, list(got.evicted_keys))

    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None:
        self.manager.complete_store(set(keys), self._context(request_id), success=ok)

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        spec = self.manager.prepare_load(list(keys), self._context(request_id))
        return [int(slot) for slot in spec.block_ids]

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        self.manager.complete_load(set(keys), self._context(request_id))

    def reset(self) -> None:
        self.manager.reset_cache()

    def events(self) -> list[tuple[str, list[bytes]]]:
        return [
            ("evicted" if event.removed else "stored", list(event.keys))
            for event in self.manager.take_events()
            if not getattr(event, "metadata_only", False)  # 0.33: of a failed store, for its books
        ]

    def counts(self) -> dict[str, int]:
        return LedgerTier.counts(self)  # type: ignore[arg-type]


class SpanlessTier(IndexTier):
    """An engine whose requests have no spans, and that counts a block's readers itself.

    Nobody tells it how many tokens make a block; of several readers it reports the first to come
    and the last to go.
    """

    own_clock = True

    def __init__(self, index: Any, capacity: int, *, plans_first: bool = False) -> None:
        super().__init__(index, capacity, plans_first=plans_first)
        self._readers: Counter[bytes] = Counter()

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None:
        tags = evolve(RequestTags.parse(raw_tags)[0], spans=())
        self.index.open(request_id, tags, now)

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        slots = super().acquire(request_id, [key for key in keys if not self._readers[key]])
        self._readers.update(keys)
        return None if slots is None else [self._slots[key] for key in keys]

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        self._readers.subtract(keys)
        super().release(request_id, [key for key in keys if not self._readers[key]])

    def reset(self) -> None:
        super().reset()
        self._readers.clear()


class PolicyTier:
    """`EvokeCachePolicy`, called the way vLLM's stock manager calls a cache policy.

    The manager owns the slots and stores all of an offer or nothing. Here it offers again what
    fits, so that full pools are reached; whom to evict is the policy's answer alone.
    """

    holds = trusts_windows = True
    admits = owns_slots = tickets = opens_strangers = positions = explains = False
    own_clock = True

    def __init__(self, policy: Any, capacity: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.policies import base

        self.policy = policy
        self.index = policy.index
        self.capacity = capacity
        self._new_context = ReqContext
        self._new_block = getattr(base, "ChunkStatus", None) or base.BlockStatus
        announced = hasattr(base.CachePolicy, "on_store_miss")
        self._announce = policy.on_store_miss if announced else policy.touch
        self._names_inserter = "req_context" in signature(base.CachePolicy.insert).parameters
        self._contexts: dict[str, Any] = {}
        self._free = list(range(capacity))
        self._slots: dict[bytes, int] = {}

    def _context(self, request_id: str, named: Sequence[bytes] = ()) -> Any:
        """A request's context; since 0.31 it says where all that the request has named stands."""
        context = self._contexts.get(request_id) or self._new_context(request_id)
        if named and hasattr(context, "set_offload_key_position"):
            for end, key in enumerate(keys_of(named[-1][:-4].decode(), group_of(named[-1])), 1):
                context.set_offload_key_position(key, end)
        return context

    def open(self, request_id: str, raw_tags: object, now: float | None) -> None:
        self._contexts[request_id] = self._new_context(request_id, {"evoke": raw_tags})
        with mock.patch("time.monotonic", return_value=now):
            self.policy.touch([], self._contexts[request_id])

    def close(self, request_id: str) -> None:
        self.policy.on_request_finished((), set(), set(), self._context(request_id))

    def lookup(self, request_id: str, key: bytes) -> str:
        block = self.policy.get(key)
        return "ABSENT" if block is None else "READY" if block.is_ready else "PENDING"

    def touch(self, request_id: str, keys: Sequence[bytes], group: int, start: int) -> None:
        self.policy.touch(keys, self._context(request_id, keys))

    def store(self, request_id: str, offers: Sequence[Offer]) -> Stored:
        stored = Stored()
        for _, _, keys in offers:
            self._announce(keys, self._context(request_id, keys))
            missing = [key for key in keys if self.policy.get(key) is None]
            short = len(missing) - len(self._free)
            if short > 0:
                protected = set(keys)
                victims = self.policy.evict(short, protected)
                while victims is None:
                    short -= 1
                    victims = self.policy.evict(short, protected)
                for victim, _ in victims:
                    self._free.append(self._slots.pop(victim))
                    stored.evicted.append(victim)
            for key in missing[: len(self._free)]:
                self._slots[key] = self._free.pop()
                self._insert(key, request_id)
                stored.keys.append(key)
                stored.slots.append(self._slots[key])
        self.policy.touch([], self._context(request_id))  # whatever comes next files what is new
        return stored

    def _insert(self, key: bytes, request_id: str) -> None:
        context = [self._context(request_id)] if self._names_inserter else []
        self.policy.insert(key, self._new_block(self._slots[key]), *context)

    def finish(
        self, request_id: str, keys: Iterable[bytes], tickets: dict[bytes, Any] | None, ok: bool
    ) -> None:
        for key in keys:
            if ok:
                self.policy.get(key).ref_cnt = 0
                self.policy.mark_evictable(key)
            else:
                self.drop(key)

    def drop(self, key: bytes) -> None:
        self.policy.remove(key)
        self._free.append(self._slots.pop(key))

    def acquire(self, request_id: str, keys: Sequence[bytes]) -> list[int] | None:
        for key in keys:
            block = self.policy.get(key)
            if block.ref_cnt == 0:
                self.policy.mark_non_evictable(key)
            block.ref_cnt += 1
        return [self._slots[key] for key in keys]

    def release(self, request_id: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            block = self.policy.get(key)
            if block is None or block.ref_cnt < 1:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.policy.mark_evictable(key)

    def reset(self) -> None:
        self.policy.clear()
        self._slots.clear()
        self._free = list(range(self.capacity))

    def events(self) -> list[tuple[str, list[bytes]]]:
        return []

    def counts(self) -> dict[str, int]:
        return {"resident": len(self.index), "free": len(self._free)}


def snapshot(tier: Tier, keys: Iterable[bytes]) -> dict[bytes, View]:
    """Everything that can be seen of the resident blocks among `keys`."""
    seen = {}
    for key in keys:
        view = tier.index.describe(key)
        if view is not None:
            seen[key] = View(**{name: getattr(view, name) for name in View._fields})
    return seen
