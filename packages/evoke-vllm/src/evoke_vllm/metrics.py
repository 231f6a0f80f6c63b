"""What EVOKE's tier does, as Prometheus metrics through vLLM's own plumbing.

``definitions`` is what the spec announces, ``ManagerMetrics`` what the manager counts between two
steps of the scheduler. vLLM carries the counts to the process that serves ``/metrics``.

Guarantees: labels come from fixed vocabularies (source roles from the operator's
``source_floors``), never from a client's text; a step hands on a bounded number of histogram
observations however many blocks it moved; all values are plain Python numbers, which survive the
way between processes.

Counts are in blocks of the tier unless a name says otherwise. Times are in requests, as everywhere
in EVOKE: an age of 40 means that 40 requests have come since.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from evoke_core import BlockLedger, Decision, LedgerStats, RequestTags
from evoke_vllm.hybrid import WindowUse

PREFIX: Final = "vllm:kv_offload_evoke_"
REQUESTS: Final = PREFIX + "requests"
LOOKED_UP: Final = PREFIX + "lookup_blocks"
HIT: Final = PREFIX + "hit_blocks"
STORED: Final = PREFIX + "stored_blocks"
REFUSED: Final = PREFIX + "refused_blocks"
EVICTED: Final = PREFIX + "evicted_blocks"
EVICTED_REUSED: Final = PREFIX + "evicted_reused_blocks"
ABORTED: Final = PREFIX + "aborted_blocks"
REUSED: Final = PREFIX + "reused_blocks"
TAGS_IGNORED: Final = PREFIX + "tags_ignored"
RECORDING_DROPPED: Final = PREFIX + "recording_dropped_events"
EVICTION_AGE: Final = PREFIX + "eviction_age_requests"
REUSE_INTERVAL: Final = PREFIX + "reuse_interval_requests"
CAPACITY: Final = PREFIX + "capacity_blocks"
RESIDENT: Final = PREFIX + "resident_blocks"
PINNED_RATIO: Final = PREFIX + "pinned_ratio"
EXPIRED: Final = PREFIX + "expired_blocks"
ORPHANS: Final = PREFIX + "orphan_blocks"
UNNEEDED_RATIO: Final = PREFIX + "unneeded_window_ratio"
BELIEF: Final = PREFIX + "belief"

OTHER_ROLE: Final = "other"
NO_ROLE: Final = "none"
RESULTS: Final = ("on_device", "miss", "partial", "full")
REFUSALS: Final = ("no room", "parent not resident", "no_store", "below threshold")
EVICTIONS: Final = ("capacity", "expired", "session share", "reset")

BLOCKS_PER_OBSERVATION: Final = 8
"""A histogram observes one block in so many: quantiles stay, the cost of a large step does not."""

MAX_OBSERVATIONS: Final = 64
"""Observations that one step hands to each histogram; more are thinned out evenly."""

_BELIEFS_EVERY = 16
"""Requests between two readings of what the policy believes."""

_BUCKETS = tuple(float(2**exponent) for exponent in range(18))
_ROLE = ("source_role",)


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric of the manager, by the name without Prometheus's suffixes."""

    def counter(documentation: str, *labels: str) -> OffloadingMetricMetadata:
        return OffloadingCounterMetadata(documentation, labels)

    def gauge(documentation: str, *labels: str) -> OffloadingMetricMetadata:
        return OffloadingGaugeMetadata(documentation, labels)

    def histogram(documentation: str) -> OffloadingMetricMetadata:
        thinned = f" One observation for every {BLOCKS_PER_OBSERVATION} blocks."
        return OffloadingHistogramMetadata(documentation + thinned, buckets=_BUCKETS)

    return {
        REQUESTS: counter(
            "Requests, by what they found in the tier of the blocks that the GPU did not have.",
            "result",
        ),
        LOOKED_UP: counter("Prompt blocks not on the GPU, once per request.", *_ROLE),
        HIT: counter("Prompt blocks restored from the tier, once per request.", *_ROLE),
        STORED: counter("Blocks written to the tier.", *_ROLE),
        REFUSED: counter("Blocks offered to the tier and not stored.", "reason"),
        EVICTED: counter("Blocks that left the tier.", *_ROLE, "reason"),
        EVICTED_REUSED: counter(
            "Blocks that left the tier after another request had used them there.", *_ROLE
        ),
        ABORTED: counter("Blocks whose write to the tier failed."),
        REUSED: counter(
            "Uses of a block in the tier by a later request, on the GPU or restored.", *_ROLE
        ),
        TAGS_IGNORED: counter("Tags of requests that were not used as given.", "tag", "reason"),
        RECORDING_DROPPED: counter("Events that the recording had to leave out."),
        EVICTION_AGE: histogram("Requests between a block's last use and its eviction."),
        REUSE_INTERVAL: histogram("Requests between two uses of a block in the tier."),
        CAPACITY: gauge("Blocks that the tier can hold."),
        RESIDENT: gauge("Blocks in the tier."),
        PINNED_RATIO: gauge("Pinned blocks as a share of the tier, from 0 to 1."),
        EXPIRED: gauge("Blocks in the tier that are marked as the first to go."),
        ORPHANS: gauge("Blocks in the tier that nothing can reach. Always 0."),
        UNNEEDED_RATIO: gauge(
            "Window blocks that no hit can use any more, as a share of a hybrid model's tier."
        ),
        BELIEF: gauge("What the policy has learned, as a few summary figures.", "about"),
    }


class ManagerMetrics:
    """Counts what happens between two calls of ``flush``.

    Args:
        ledger: whose state the gauges show.
        roles: source roles that get a label of their own.
        windows: knows which window blocks serve nothing; None unless the model is a hybrid.
    """

    def __init__(
        self, ledger: BlockLedger, roles: Iterable[str], windows: WindowUse | None = None
    ) -> None:
        self._ledger = ledger
        self._windows = windows
        self._role_labels: dict[str | None, tuple[str, ...]] = {role: (role,) for role in roles}
        self._role_labels[None] = (NO_ROLE,)
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}
        self._ages = _Thinned()
        self._intervals = _Thinned()
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._ignored: dict[tuple[str, ...], int] = {}
        self._beliefs_at = 0
        self._dropped = 0
        self._begin()

    def _begin(self) -> None:
        """Name every series of a fixed vocabulary with 0: rates need a value before the first."""
        series: list[tuple[str, tuple[str, ...]]] = [(ABORTED, ()), (RECORDING_DROPPED, ())]
        series += [(REQUESTS, (result,)) for result in RESULTS]
        series += [(REFUSED, (reason,)) for reason in REFUSALS]
        for label in {*self._role_labels.values(), (OTHER_ROLE,)}:
            series += [(name, label) for name in (LOOKED_UP, HIT, STORED, EVICTED_REUSED, REUSED)]
            series += [(EVICTED, (*label, reason)) for reason in EVICTIONS]
        self._counts.update(dict.fromkeys(sorted(series), 0))

    # --- what happened ---

    def looked_up(self, tags: RequestTags, start: int, asked: int, found: int) -> None:
        """A request asked for ``asked`` blocks from position ``start`` on and got ``found``."""
        result = "on_device" if not asked else "miss" if not found else "partial"
        self._add(REQUESTS, ("full" if asked and found >= asked else result,), 1)
        for name, blocks in ((LOOKED_UP, asked), (HIT, found)):
            if blocks:
                for role, part in by_role(tags, start, start + blocks).items():
                    self._add(name, self._role(role), part)

    def decided(self, decisions: Collection[Decision]) -> None:
        """The ledger decided."""
        if self._windows is not None:
            self._windows.decided(decisions)
        for decision in decisions:
            blocks = len(decision.keys)
            kind = decision.kind
            if kind == "evicted":
                label = self._role(decision.role)
                self._add(EVICTED, (*label, decision.reason), blocks)
                if decision.reused:
                    self._add(EVICTED_REUSED, label, blocks)
                if decision.reason != "reset":
                    self._ages.add(decision.age, blocks)
            elif kind == "stored":
                self._add(STORED, self._role(decision.role), blocks)
            elif kind == "refused":
                self._add(REFUSED, (decision.reason,), blocks)
            else:
                self._add(ABORTED, (), blocks)

    def reused(self, reuses: Iterable[tuple[int, int, str | None]]) -> None:
        """Blocks of the tier were used again: (requests since the last use, blocks, role)."""
        for interval, blocks, role in reuses:
            self._add(REUSED, self._role(role), blocks)
            self._intervals.add(interval, blocks)

    def recording_dropped(self, total: int) -> None:
        """The recorder has left out ``total`` events since it began."""
        if total > self._dropped:
            self._add(RECORDING_DROPPED, (), total - self._dropped)
            self._dropped = total

    # --- handing on ---

    def flush(self, stats: OffloadingConnectorStats) -> LedgerStats:
        """Move what was counted into ``stats``, show the ledger's state there, and return it."""
        state = self._ledger.stats
        for problem, count in state.tags_ignored.items():
            label: tuple[str, ...] = (problem.tag, problem.reason)
            if (new := count - self._ignored.get(label, 0)) > 0:
                self._add(TAGS_IGNORED, label, new)
                self._ignored[label] = count
        for (name, label), value in self._counts.items():
            stats.increase_counter(name, value, label)
        self._counts.clear()
        for name, thinned in ((EVICTION_AGE, self._ages), (REUSE_INTERVAL, self._intervals)):
            for observation in thinned.take():
                stats.observe_histogram(name, observation)
        capacity = state.capacity
        self._show(stats, CAPACITY, capacity)
        self._show(stats, RESIDENT, state.resident)
        self._show(stats, PINNED_RATIO, state.pinned / capacity if capacity else 0.0)
        self._show(stats, EXPIRED, state.expired)
        self._show(stats, ORPHANS, state.orphans)
        if self._windows is not None:
            unneeded = self._windows.unneeded
            self._show(stats, UNNEEDED_RATIO, unneeded / capacity if capacity else 0.0)
        clock = self._ledger.index.clock
        if clock >= self._beliefs_at:
            self._beliefs_at = clock + _BELIEFS_EVERY
            for about, belief in self._ledger.index.beliefs().items():
                self._show(stats, BELIEF, float(belief), (about,))
        return state

    def _show(
        self,
        stats: OffloadingConnectorStats,
        name: str,
        value: float,
        label: tuple[str, ...] = (),
    ) -> None:
        """Hand on a gauge that has changed."""
        if self._gauges.get((name, label)) != value:
            self._gauges[name, label] = value
            stats.set_gauge(name, value, label)

    def _add(self, name: str, label: tuple[str, ...], n: int) -> None:
        self._counts[name, label] = self._counts.get((name, label), 0) + n

    def _role(self, role: str | None) -> tuple[str, ...]:
        return self._role_labels.get(role, (OTHER_ROLE,))


def by_role(tags: RequestTags, start: int, end: int) -> Mapping[str | None, int]:
    """Count the blocks at positions ``start`` to ``end - 1`` by the role a request gave them."""
    counts: dict[str | None, int] = {}
    for role, blocks in tags.roles(start, end):
        counts[role] = counts.get(role, 0) + blocks
    return counts


class _Thinned:
    """Values weighted by blocks, as one observation for every ``BLOCKS_PER_OBSERVATION`` blocks.

    The first block ever is observed, so that a small tier shows something, too.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # observations by value
        self._since = BLOCKS_PER_OBSERVATION - 1

    def add(self, value: int, blocks: int) -> None:
        taken, self._since = divmod(self._since + blocks, BLOCKS_PER_OBSERVATION)
        if taken:
            self._taken[value] = self._taken.get(value, 0) + taken

    def take(self) -> list[int]:
        """Return the observations since the last call, thinned out evenly if there are many."""
        if not self._taken:
            return []
        values = sorted(self._taken)
        ends = list(accumulate(self._taken[value] for value in values))
        shown = min(ends[-1], MAX_OBSERVATIONS)
        self._taken = {}
        return [values[bisect_right(ends, at * ends[-1] // shown)] for at in range(shown)]
