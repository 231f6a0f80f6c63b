"""Runs: consecutive blocks of one chain that share one history, kept as a single record.

Requests touch prefixes, so whole stretches of a chain are touched by the same requests at the same
times. Storing the stretch instead of its blocks makes a touch cost one update per run, an eviction
one slice, and memory a fraction of a record per block (the idea of a radix tree's edges).

Guarantees: a run is never empty while the index holds it; its blocks differ in nothing but key,
position and holds; only its last block may have children (a block that gains a child in mid-run
splits the run first). A run knows its parent by the parent block's *key*: splitting or dropping the
parent's run needs no visit to the children.
"""

from attrs import define, field

from evoke_core.order import LeafEntry, RankClass
from evoke_core.terms import NO_TERMS, Terms

MAX_REUSE = 53
"""Distinct requests counted per block: in double precision 1 - 2**-n is 1 beyond it."""


@define(eq=False)
class Run:
    """Blocks ``keys`` at positions ``start``, ``start + 1``, ... of a chain, head first.

    Attributes:
        parent_key: key of the block before the first one; None at the head of a chain.
        children: resident runs that start right after the last block.
        last: tick of the most recent request that touched the blocks.
        reuse: distinct requests that touched them, at most ``MAX_REUSE``.
        gap: requests between the last two touches, where the policy keeps it.
        floor, priority: the highest living claims; ``floor_tick`` and
            ``priority_tick`` name the claiming request, ``role`` the source role behind ``floor``.
        held: how many of the blocks are held.
        serial: creation number, the last tie-break.
        terms: what clients declared beyond role and priority, all together.
        holding: whether the time until which the blocks keep their value is still to come.
        due_in: the number of what is left of the promise behind it, see ``promises.py``.
        owed: whether the promise of that time is neither kept nor broken yet.
        expired: whether they are the first to go.
        pinned: whether they must not go at all.
        reused: whether a request touched them again since they became resident.
        entry, rank_class: the run's place among the leaves; None while it has no place.
        alarm: its place among the runs that wait for a time.
    """

    keys: list[bytes]
    group: int
    start: int
    parent_key: bytes | None
    last: int
    reuse: int
    floor: float
    floor_tick: int
    role: str | None
    priority: float
    priority_tick: int
    serial: int
    gap: int = 0
    windowed: bool = False
    attention: float = 0.0
    coherence: float = 0.0
    terms: Terms = NO_TERMS
    holding: bool = False
    due_in: int = 0
    owed: bool = False
    expired: bool = False
    pinned: bool = False
    reused: bool = False
    children: int = 0
    held: int = 0
    entry: LeafEntry | None = field(default=None, repr=False)
    rank_class: RankClass | None = field(default=None, repr=False)
    alarm: "tuple[float, int, Run] | None" = field(default=None, repr=False)

    @property
    def tie_position(self) -> int:
        """Position of the last block; blocks of window groups stand beside, not behind, another."""
        return 0 if self.windowed else self.start + len(self.keys) - 1

    def head(self, length: int, serial: int) -> "Run":
        """Return a new run with this one's history for its first ``length`` blocks.

        The caller shortens this run and settles ``children`` and ``held``.
        """
        return Run(
            keys=self.keys[:length],
            group=self.group,
            start=self.start,
            parent_key=self.parent_key,
            last=self.last,
            reuse=self.reuse,
            floor=self.floor,
            floor_tick=self.floor_tick,
            role=self.role,
            priority=self.priority,
            priority_tick=self.priority_tick,
            serial=serial,
            gap=self.gap,
            windowed=self.windowed,
            attention=self.attention,
            coherence=self.coherence,
            terms=self.terms,
            holding=self.holding,
            due_in=self.due_in,
            owed=self.owed,
            expired=self.expired,
            pinned=self.pinned,
            reused=self.reused,
        )

    def continues(self, other: "Run") -> bool:
        """Say whether ``other``'s blocks, placed right behind, would share this run's history."""
        return (
            self.last == other.last
            and self.reuse == other.reuse
            and self.gap == other.gap
            and self.floor == other.floor
            and self.priority == other.priority
            and self.floor_tick == other.floor_tick
            and self.priority_tick == other.priority_tick
            and self.role == other.role
            and self.attention == other.attention
            and self.coherence == other.coherence
            and (self.terms is other.terms or self.terms == other.terms)
            and self.holding == other.holding
            and self.due_in == other.due_in
            and self.owed == other.owed
            and self.expired == other.expired
            and self.pinned == other.pinned
            and self.reused == other.reused
        )


def shared_length(keys: list[bytes], chain: list[bytes], at: int) -> int:
    """Return how many of ``keys``, from the first on, equal ``chain[at:]``."""
    n = min(len(keys), len(chain) - at)
    if n <= 0:
        return 0
    if chain[at : at + n] == (keys if n == len(keys) else keys[:n]):
        return n
    for i in range(n):
        if keys[i] != chain[at + i]:
            return i
    return n
