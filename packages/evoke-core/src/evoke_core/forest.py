"""The resident blocks as a forest of runs, with holds and with every leaf in its place.

Guarantees: each resident key is in exactly one run; a run's ``children`` and ``held`` are exact
whatever is split, added or removed, parents that are missing included; a run has a place in the
order if and only if it is a leaf that is not pinned and whose last block is not held (or, after a
hold on a placed leaf, until a selection meets it). Owners, pins and deadlines are followed here,
because here is where runs split, grow and go.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, repeat
from types import MappingProxyType

from evoke_core.bulk import delete
from evoke_core.deadlines import Deadlines
from evoke_core.order import LeafOrder, OverShare, Step
from evoke_core.pins import Pins
from evoke_core.policies import Policy
from evoke_core.runs import Run
from evoke_core.sessions import Sessions
from evoke_core.terms import NO_TERMS, Terms

NOTHING: Mapping[str, int] = MappingProxyType({})


class Forest:
    """Runs by key, linked by their parents' keys."""

    def __init__(self, policy: Policy) -> None:
        self.runs: dict[bytes, Run] = {}
        self.holds: dict[bytes, int] = {}
        self.pins = Pins()
        self.sessions = Sessions()
        self.expired = 0
        self._deadlines = Deadlines()
        self._order = LeafOrder(policy)
        self._orphans: dict[bytes, int] = {}  # key of a missing parent -> runs that wait for it
        self._serial = 0

    def clear(self) -> None:
        self.runs.clear()
        self.holds.clear()
        self.pins.clear()
        self.sessions.clear()
        self.expired = 0
        self._deadlines.clear()
        self._orphans.clear()
        self._order.clear()

    def advance(self, clock: int, *, rescored: bool) -> None:
        """A request begins; ``rescored`` if the policy's scores have changed."""
        if rescored:
            self._order.rescore()
        self._order.advance(clock)

    # --- looking ---

    def at(self, key: bytes, position: int) -> Run | None:
        """Return the run that has ``key`` at ``position``; None for a key that is elsewhere."""
        run = self.runs.get(key)
        if run is not None:
            offset = position - run.start
            if 0 <= offset < len(run.keys) and run.keys[offset] == key:
                return run
        return None

    def parent(self, run: Run) -> Run | None:
        return None if run.parent_key is None else self.runs.get(run.parent_key)

    @property
    def has_orphans(self) -> bool:
        return bool(self._orphans)

    @property
    def orphans(self) -> int:
        """How many runs wait for a missing parent."""
        return sum(self._orphans.values())

    def awaited(self, key: bytes) -> bool:
        """Say whether orphans wait for this missing block."""
        return key in self._orphans

    # --- changing ---

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def add(self, run: Run, *, hold: bool) -> None:
        """File a new run behind its parent, as part of the parent's run where histories agree."""
        keys = run.keys
        if hold:
            self.holds.update(dict.fromkeys(keys, 1))
            run.held = len(keys)
        run.children = self._orphans.pop(keys[-1], 0) if self._orphans else 0
        if run.parent_key is not None:
            above = self.runs.get(run.parent_key)
            if above is None:
                self._orphans[run.parent_key] = self._orphans.get(run.parent_key, 0) + 1
            else:
                above = self.end_with(run.parent_key)
                self._order.discard(above)
                if above.children == 0 and above.continues(run):
                    above.keys += keys
                    above.held += run.held
                    above.children = run.children
                    run = above
                else:
                    above.children += 1
        self.runs.update(dict.fromkeys(keys, run))
        if run.terms is not NO_TERMS:
            self.sessions.add(run.terms.owner, run, len(keys))
            if run.alarm is None:
                self._deadlines.watch(run)
        if run.expired:
            self.expired += len(keys)
        self._settle(run)

    def split(self, run: Run, length: int) -> Run:
        """Part ``run`` so that its first ``length`` blocks are a run; return the run of the rest.

        The smaller part gets the new record, so that few keys are filed anew.
        """
        new = run.head(length, self.next_serial())
        rest = run.keys[length:]
        self._order.discard(run)
        if length <= len(rest):
            upper, lower = new, run
        else:
            upper, lower = run, new
            lower.children = run.children
            del upper.keys[length:]
        lower.keys, lower.start, lower.parent_key = rest, upper.start + length, upper.keys[-1]
        upper.children = 1
        self.runs.update(dict.fromkeys(new.keys, new))
        if new.terms is not NO_TERMS:
            self.sessions.add(new.terms.owner, new, 0)
            self._deadlines.watch(new)
        if run.held:
            upper.held = sum(key in self.holds for key in upper.keys)
            lower.held = sum(key in self.holds for key in lower.keys)
        self._settle(lower)
        return lower

    def end_with(self, key: bytes) -> Run:
        """Split so that the resident block ``key`` is the last of its run; return that run."""
        run = self.runs[key]
        if run.keys[-1] != key:
            self.split(run, run.keys.index(key) + 1)
        return self.runs[key]

    def remove(self, key: bytes) -> Run:
        """Take one block out, held or not; what hangs below it waits as orphans.

        Returns the run that it was in, for its history.
        """
        run = self.end_with(key)
        if run.children:
            self._orphans[key] = run.children
            run.children = 0
        if self.holds.pop(key, 0):
            run.held -= 1
        self.remove_tail(run, 1)
        return run

    def remove_tail(self, run: Run, count: int) -> list[bytes]:
        """Take the last ``count`` blocks out of a leaf; return them deepest first."""
        self._order.discard(run)
        keys = run.keys[-count:]
        del run.keys[-count:]
        delete(self.runs, keys)
        if run.terms is not NO_TERMS:
            self.sessions.remove(run.terms.owner, run, count, whole=not run.keys)
            if not run.keys:
                self._deadlines.unwatch(run)
        if run.expired:
            self.expired -= count
        if run.pinned:
            self.pins.discard(keys)
        if run.keys:
            self._settle(run)
        elif run.parent_key is not None:
            above = self.runs.get(run.parent_key)
            if above is not None:
                above.children -= 1
                self._settle(above)
            elif (waiting := self._orphans.get(run.parent_key, 0)) > 1:
                self._orphans[run.parent_key] = waiting - 1
            else:
                self._orphans.pop(run.parent_key, None)
        keys.reverse()
        return keys

    def rerank(self, run: Run, change: Callable[[], None]) -> None:
        """Apply ``change``, which may alter what the run is worth, whose it is, or until when."""
        placed = run.entry is not None
        self._order.discard(run)
        before, expired, pinned = run.terms, run.expired, run.pinned
        change()
        if run.terms is not NO_TERMS or before is not NO_TERMS:
            self._follow(run, before, expired)
        if pinned and not run.pinned:
            self._settle(run)
        elif placed and not run.pinned:
            self._order.add(run)

    def _follow(self, run: Run, before: Terms, expired: bool) -> None:
        """Keep owners and deadlines after a run's terms have changed."""
        now, blocks = run.terms, len(run.keys)
        if now.owner != before.owner:
            self.sessions.remove(before.owner, run, blocks, whole=True)
            self.sessions.add(now.owner, run, blocks)
        else:
            self.sessions.renew(run)
        self.expired += blocks * (run.expired - expired)
        self._deadlines.unwatch(run)
        self._deadlines.watch(run)

    def pin(self, run: Run, tick: int) -> None:
        """Note that the request with this tick pins ``run``; ``run.pinned`` is the caller's."""
        self.pins.add(run.keys, tick, run.group, 0 if run.windowed else run.start)

    def due(self, now: float) -> list[Run]:
        """Return the runs whose next deadline is reached; :meth:`rerank` them."""
        return self._deadlines.due(now)

    # --- holds ---

    def hold(self, *keys: bytes) -> None:
        for key in keys:
            run = self.runs.get(key)
            if run is None:
                continue
            count = self.holds.get(key, 0)
            self.holds[key] = count + 1
            if count == 0:
                run.held += 1

    def unhold(self, *keys: bytes) -> None:
        counts = list(map(self.holds.pop, keys, repeat(0)))
        if counts.count(1) < len(counts):  # held more than once, or not at all
            again = {key: n - 1 for key, n in zip(keys, counts, strict=True) if n > 1}
            self.holds.update(again)
            keys = tuple(key for key, n in zip(keys, counts, strict=True) if n == 1)
        for run, freed in Counter(map(self.runs.__getitem__, keys)).items():
            run.held -= freed
            if run.children == 0:
                self._settle(run)

    # --- victims ---

    def select(
        self,
        n: int,
        half_life: float,
        limit: Callable[[Run, int], int],
        drafts: Sequence[Run] = (),
        share: int | None = None,
        incoming: Mapping[str, int] = NOTHING,
    ) -> list[Step]:
        """Plan ``n`` evictions, see :meth:`LeafOrder.select`; then apply it or not, and
        :meth:`restore`. ``limit(run, room)`` lowers how many of a run's last blocks may go.

        ``drafts`` are runs of one chain, head first (or of a window group), that are not filed yet
        and compete for room: steps that name them are refusals. Sessions with more than ``share``
        blocks of their own, ``incoming`` ones included, give way first.
        """
        drafted_parent: dict[Run, Run | None] = dict.fromkeys(drafts)
        if not drafts or not drafts[0].windowed:
            for above, draft in pairwise(drafts):
                drafted_parent[draft] = above
                above.children = 1

        def available(run: Run) -> int:
            if run.pinned:
                return 0
            room = len(run.keys)
            if run in drafted_parent:
                return room
            if run.held:
                room = tail_length(run.keys, lambda key: key not in self.holds)
                if room == 0:
                    self._order.discard(run)  # it gets a place again when the hold ends
                    return 0
            return limit(run, room)

        def parent(run: Run) -> Run | None:
            return drafted_parent[run] if run in drafted_parent else self.parent(run)

        challengers = [draft for draft in drafts if draft.children == 0 and not draft.pinned]
        over = None if share is None else self._over_share(share, incoming)
        return self._order.select(n, half_life, available, parent, challengers, over)

    def _over_share(self, share: int, incoming: Mapping[str, int]) -> OverShare | None:
        """Find the sessions whose own blocks, incoming ones included, are more than ``share``."""
        excess: dict[str | None, int] = dict(self.sessions.over(share))
        for session, blocks in incoming.items():
            more = self.sessions.blocks(session) + blocks - share
            if more > 0:
                excess[session] = more
        if not excess:
            return None
        owned = (run for session in excess for run in self.sessions.runs(session or ""))
        return OverShare(owned, excess)

    def restore(self) -> None:
        self._order.restore()

    def _settle(self, run: Run) -> None:
        """Give ``run`` a place among the leaves if it should have one and has none."""
        if (
            run.entry is None
            and run.children == 0
            and not run.pinned
            and (run.held == 0 or run.keys[-1] not in self.holds)
        ):
            self._order.add(run)


def tail_length(keys: list[bytes], accept: Callable[[bytes], bool]) -> int:
    """Return how many of the last keys, without a gap, are accepted."""
    for n, key in enumerate(reversed(keys)):
        if not accept(key):
            return n
    return len(keys)
