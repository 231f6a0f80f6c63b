"""The block ledger: slots, transfers and admission on top of the retention index.

The ledger decides which block gets which slot of a bounded pool, keeps blocks that are being
written or read from going, and matches completions to the transfer that they belong to.

Guarantees, beyond the index's:
- A slot belongs to at most one key; used and free slots add up to the capacity.
- A block is ``READY`` only after the very transfer that reserved its slot was committed.
  Completions that come late, twice, after an abort or a reset, or from another request, are
  counted and ignored.
- A request never evicts its own chain. What does not fit is refused from the tail: the head stays.
- A block whose parent is not resident is refused (full-attention groups): no orphans.
- Nothing raises on unknown keys or requests.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import chain, groupby, repeat, starmap
from typing import Literal

from attrs import evolve, frozen

from evoke_core.bulk import delete
from evoke_core.config import EvokeConfig
from evoke_core.histories import Reuse
from evoke_core.index import Evicted, RetentionIndex
from evoke_core.policies import Policy
from evoke_core.tags import UNTAGGED, RequestTags, TagProblem

MAX_DECISIONS = 65_536
"""Batches of decisions kept for a reader; older ones are dropped when nobody drains them."""


class BlockState(Enum):
    """Where a block stands in the tier."""

    ABSENT = "absent"
    PENDING = "pending"
    READY = "ready"


@frozen
class Reservation:
    """What ``reserve`` granted: write ``keys[i]`` to ``slots[i]``; ``evicted`` made room.

    ``ticket`` names this reservation; hand it back with the completion where the engine can carry
    it, and no other reservation of the same request and key can be mistaken for it.
    """

    keys: list[bytes]
    slots: list[int]
    evicted: list[bytes]
    ticket: int


@frozen
class Decision:
    """Blocks that were stored, refused, evicted or aborted together, and why.

    Attributes:
        age: requests since the blocks' last touch (0 unless evicted).
        role: source role behind the blocks' floor.
        reused: evicted after a request had touched them again.
    """

    kind: Literal["stored", "refused", "evicted", "aborted"]
    keys: list[bytes]
    reason: str
    age: int
    role: str | None
    group: int
    reused: bool = False


@frozen(kw_only=True)
class LedgerStats:
    """State, and from ``stored`` on counters since construction; in blocks unless said."""

    capacity: int
    resident: int
    pending: int
    held: int
    free: int
    pinned: int
    expired: int
    orphans: int
    resident_tokens: int
    ghosts: int
    tracked: int
    open_requests: int
    half_life: float
    stored: int
    refused: int
    evicted: int
    aborted: int
    late: int
    below_threshold: int
    tags_ignored: dict[TagProblem, int]


@frozen(eq=False)
class _Transfer:
    """A reservation that is being written."""

    request_id: str
    ticket: int
    slots: dict[bytes, int]
    group: int
    role: str | None
    roles: dict[bytes, str | None]  # of blocks that need not have the request's role


class BlockLedger:
    """Slots, transfers and admission for one tier. See the module's docstring for the guarantees.

    Args:
        capacity: slots of the tier.
        policy: the ranking; by default the one that ``config.policy`` names.
        config: the operator's settings.
        tokens_per_block: used to report sizes in tokens.
        store_threshold: a block is stored from the request on that is the threshold's-th to name
            it; below 2 everything is. Counted per request, so a prompt of any length warms in
            ``store_threshold`` requests.
        max_tracker_size: blocks whose naming is counted for the threshold.
        window_groups: groups whose blocks have no parent.

    Raises:
        ValueError: a capacity or size below its minimum.
    """

    def __init__(
        self,
        capacity: int,
        *,
        policy: Policy | None = None,
        config: EvokeConfig | None = None,
        tokens_per_block: int = 1,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        window_groups: Iterable[int] = (),
    ) -> None:
        for name, value, least in (
            ("capacity", capacity, 0),
            ("tokens_per_block", tokens_per_block, 1),
            ("store_threshold", store_threshold, 0),
            ("max_tracker_size", max_tracker_size, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r} is not allowed; allowed: integers >= {least}")
        self.capacity = capacity
        self.index = RetentionIndex(
            config, policy=policy, window_groups=window_groups, capacity=capacity
        )
        self._window_groups = frozenset(window_groups)
        self._tokens_per_block = tokens_per_block
        self._ready: dict[bytes, int] = {}
        self._pending: dict[bytes, _Transfer] = {}
        self._loads: dict[str, dict[bytes, int]] = {}
        self._freed: list[int] = []
        self._fresh = 0  # slots from here on were never used
        self._ticket = 0
        self._threshold = store_threshold
        self._named: OrderedDict[bytes, int] = OrderedDict()
        self._max_named = max_tracker_size
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._counts = dict.fromkeys(
            ("stored", "refused", "evicted", "aborted", "late", "below_threshold"), 0
        )
        self._tags_ignored: dict[TagProblem, int] = {}

    # --- requests ---

    def open(self, request_id: str, tags: RequestTags = UNTAGGED, now: float | None = None) -> None:
        """Begin a request; ``now`` is the time in seconds, stamped once by the adapter."""
        self.index.open(request_id, tags, now)
        if now is None:
            self.note_tag_problems(TagProblem(tag, "no clock") for tag in tags.in_seconds)

    def close(self, request_id: str) -> None:
        """End a request. Transfers still under way complete, and loads are released, as before."""
        self.index.close(request_id)

    def note_tag_problems(self, problems: Iterable[TagProblem]) -> None:
        """Count tags that could not be used, for ``stats``."""
        for problem in problems:
            self._tags_ignored[problem] = self._tags_ignored.get(problem, 0) + 1

    # --- reading ---

    def lookup(self, request_id: str, key: bytes) -> BlockState:
        """Say whether a block can be read. Changes nothing, however often it is asked."""
        if key in self._ready:
            return BlockState.READY
        return BlockState.PENDING if key in self._pending else BlockState.ABSENT

    def touch(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> None:
        """Note that a request uses ``keys``, head first from position ``start`` of its chain."""
        named = self.index.touch(request_id, keys, group=group, start=start)
        if named and self._threshold > 1:
            self._note_named(named)

    def acquire(self, request_id: str, keys: Collection[bytes]) -> list[int] | None:
        """Return the slots of ``keys`` and hold the blocks until ``release``.

        ``None``, and nothing is held, if any of them is not ``READY``.
        """
        try:
            slots = [self._ready[key] for key in keys]
        except KeyError:
            return None
        loads = self._loads.setdefault(request_id, {})
        for key in keys:
            loads[key] = loads.get(key, 0) + 1
        self.index.hold(*keys)
        return slots

    def release(self, request_id: str, keys: Collection[bytes]) -> None:
        """End a read: drop what this request holds of ``keys``, nobody else's hold."""
        loads = self._loads.get(request_id)
        if loads is None:
            self._counts["late"] += len(keys)
            return
        released = []
        for key in keys:
            count = loads.pop(key, 0)
            if count == 0:
                self._counts["late"] += 1
                continue
            if count > 1:
                loads[key] = count - 1
            released.append(key)
        self.index.unhold(*released)
        if not loads:
            del self._loads[request_id]

    # --- writing ---

    def reserve(
        self, request_id: str, keys: Sequence[bytes], *, group: int = 0, start: int = 0
    ) -> Reservation:
        """Grant slots for the blocks of ``keys`` that are missing and may be stored.

        ``keys`` is a stretch of the request's chain, head first, ``start`` the position of the
        first (any blocks of a window group). The granted keys keep the order of the input; they are
        ``PENDING`` until ``commit`` or ``abort``.
        """
        self._ticket += 1
        self.touch(request_id, keys, group=group, start=start)
        wanted = self._admissible(request_id, keys, group, start)
        if not wanted:
            return Reservation([], [], [], self._ticket)
        room = self.capacity - len(self.index)
        admission = self.index.admit(request_id, wanted, room, group=group, start=start)
        evicted = self._note_evicted(admission.evicted)
        self._refuse(admission.refused, "no room", group)
        granted = admission.added
        if not granted:
            return Reservation([], [], evicted, self._ticket)
        slots = self._take_slots(len(granted))
        tags = self.index.tags(request_id) or UNTAGGED
        transfer = _Transfer(
            request_id,
            self._ticket,
            dict(zip(granted, slots, strict=True)),
            group,
            tags.source_type,
            self._roles(tags, keys, group, start),
        )
        self._pending.update(dict.fromkeys(granted, transfer))
        return Reservation(granted, slots, evicted, self._ticket)

    def commit(
        self, request_id: str, keys: Collection[bytes], *, ticket: int | None = None
    ) -> list[bytes]:
        """A write succeeded: return the blocks that are ``READY`` because of it.

        Without a ``ticket`` a completion is matched by request and key.
        """
        done = self._finish(request_id, keys, ticket)
        self._ready.update(done.slots)
        self.index.unhold(*done.slots)
        return self._report("stored", done)

    def abort(
        self, request_id: str, keys: Collection[bytes], *, ticket: int | None = None
    ) -> list[bytes]:
        """A write failed: drop its blocks, free their slots, return the keys removed."""
        done = self._finish(request_id, keys, ticket)
        for key in reversed(done.slots):
            self.index.drop(key, "aborted")
            self._freed.append(done.slots[key])
        return self._report("aborted", done)

    def reset(self) -> None:
        """Drop all blocks, transfers and holds; keep open requests, their tags, and the tracker.

        Completions of earlier transfers are late from now on.
        """
        dropped = [*self._ready, *self._pending]
        if dropped:
            self._decide("evicted", dropped, "reset", 0, None, 0)
        self.index.clear()
        self._ready.clear()
        self._pending.clear()
        self._loads.clear()
        self._freed.clear()
        self._fresh = 0

    # --- reporting ---

    def drain_reuses(self) -> list[Reuse]:
        """Return the uses of stored blocks since the last call, at most the latest few."""
        return self.index.drain_reuses()

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions since the last call, in order."""
        decisions = list(self._decisions)
        self._decisions.clear()
        return decisions

    @property
    def stats(self) -> LedgerStats:
        """A snapshot of state and counters."""
        resident = len(self.index)
        return LedgerStats(
            capacity=self.capacity,
            resident=resident,
            pending=len(self._pending),
            held=self.index.held - len(self._pending),
            free=self.capacity - resident,
            pinned=self.index.pinned,
            expired=self.index.expired,
            orphans=self.index.orphans,
            resident_tokens=resident * self._tokens_per_block,
            ghosts=self.index.ghosts,
            tracked=len(self._named),
            open_requests=self.index.open_requests,
            half_life=self.index.half_life,
            tags_ignored=dict(self._tags_ignored),
            **self._counts,
        )

    # --- internals ---

    def _admissible(
        self, request_id: str, keys: Sequence[bytes], group: int, start: int
    ) -> Sequence[bytes]:
        """Return those of ``keys`` that may be resident, and record the refusal of the others."""
        tags = self.index.tags(request_id)
        if tags is None:
            return self._without(keys, keys, "request not open", group)
        if tags.no_store:
            return self._without(keys, keys, "no_store", group)
        first = next((at for at, key in enumerate(keys) if key not in self.index), 0)
        if not self.index.reachable(request_id, group, start + first):
            return self._without(keys, keys, "parent not resident", group)
        if self._threshold > 1:
            cold = [
                key
                for key in keys
                if self._named.get(key, 0) < self._threshold and key not in self.index
            ]
            if cold and group not in self._window_groups:
                cold = list(keys[keys.index(cold[0]) :])
            self._counts["below_threshold"] += len(cold)
            return self._without(keys, cold, "below threshold", group)
        return keys

    def _without(
        self, keys: Sequence[bytes], refused: Sequence[bytes], reason: str, group: int
    ) -> Sequence[bytes]:
        if not refused:
            return keys
        self._refuse(self._missing(refused), reason, group)
        if len(refused) == len(keys):
            return []
        gone = set(refused)
        return [key for key in keys if key not in gone]

    def _note_evicted(self, batches: list[Evicted]) -> list[bytes]:
        evicted: list[bytes] = []
        for batch in batches:
            self._freed += map(self._ready.pop, batch.keys)
            age = self.index.clock - batch.last
            self._decide(
                "evicted", batch.keys, batch.reason, age, batch.role, batch.group, batch.reused
            )
            evicted += batch.keys
        return evicted

    def _take_slots(self, n: int) -> list[int]:
        reused = min(n, len(self._freed))
        slots = self._freed[len(self._freed) - reused :]
        del self._freed[len(self._freed) - reused :]
        slots += range(self._fresh, self._fresh + n - reused)
        self._fresh += n - reused
        return slots

    def _finish(self, request_id: str, keys: Collection[bytes], ticket: int | None) -> _Transfer:
        """Take what a completion belongs to out of the pending transfers; return that part.

        Completions come as sets: the result is in the order of the reservations, so that nothing
        that follows depends on hashing.
        """
        pending = self._pending
        found = set(map(pending.get, keys))
        whole = found.pop() if len(found) == 1 else None
        if (
            whole is not None
            and whole.request_id == request_id
            and ticket in (None, whole.ticket)
            and whole.slots.keys() == set(keys)
        ):
            delete(pending, whole.slots)
            return whole
        matched: dict[bytes, _Transfer] = {}
        for key in keys:
            transfer = pending.get(key)
            if (
                transfer is None
                or transfer.request_id != request_id
                or (ticket is not None and ticket != transfer.ticket)
            ):
                self._counts["late"] += 1
                continue
            del pending[key]
            matched[key] = transfer
        if not matched:
            return _Transfer(request_id, 0, {}, 0, None, {})
        transfers = sorted(set(matched.values()), key=lambda transfer: transfer.ticket)
        slots = {
            key: slot
            for transfer in transfers
            for key, slot in transfer.slots.items()
            if matched.get(key) is transfer
        }
        roles = {key: role for each in transfers for key, role in each.roles.items()}
        return evolve(transfers[-1], slots=slots, roles=roles)

    def _report(self, kind: Literal["stored", "aborted"], done: _Transfer) -> list[bytes]:
        keys = list(done.slots)
        if done.roles:
            for role, part in groupby(keys, lambda key: done.roles.get(key, done.role)):
                self._decide(kind, list(part), "", 0, role, done.group)
        elif keys:
            self._decide(kind, keys, "", 0, done.role, done.group)
        return keys

    def _roles(
        self, tags: RequestTags, keys: Sequence[bytes], group: int, start: int
    ) -> dict[bytes, str | None]:
        """Return the source role of each block where a request gave parts of itself their own."""
        if not tags.spans or group in self._window_groups:
            return {}
        parts = tags.roles(start, start + len(keys))
        return dict(zip(keys, chain.from_iterable(starmap(repeat, parts)), strict=True))

    def _missing(self, keys: Iterable[bytes]) -> list[bytes]:
        ready, pending = self._ready, self._pending
        return [key for key in keys if key not in ready and key not in pending]

    def _refuse(self, keys: list[bytes], reason: str, group: int) -> None:
        if keys:
            self._decide("refused", keys, reason, 0, None, group)

    def _decide(
        self,
        kind: Literal["stored", "refused", "evicted", "aborted"],
        keys: list[bytes],
        reason: str,
        age: int,
        role: str | None,
        group: int,
        reused: bool = False,
    ) -> None:
        self._counts[kind] += len(keys)
        self._decisions.append(Decision(kind, keys, reason, age, role, group, reused))

    def _note_named(self, keys: list[bytes]) -> None:
        """Count a request's naming of ``keys``; where memory is short, forget tails first."""
        named = self._named
        for key in reversed(keys):
            named[key] = named.get(key, 0) + 1
            named.move_to_end(key)
        while len(named) > self._max_named:
            named.popitem(last=False)
