"""What the policies of one process count, as Prometheus counters beside LMCache's own.

They are in ``prometheus_client``'s default registry, where LMCache keeps its metrics too: whatever
shows those shows these.

Guarantees: every count is exact once the policy has returned; labels are bounded (LMCache's backend
classes, known tags and fixed reasons); counters exist once per process, however many policies do.
"""

from attrs import astuple, fields
from prometheus_client import Counter

from evoke_core import TagProblem
from evoke_lmcache.retention import Counters, Retention

PREFIX = "evoke_lmcache_"

_COUNTED = {
    "stored": ("chunks_stored", "chunks stored"),
    "evicted": ("chunks_evicted", "chunks evicted for room"),
    "removed": ("chunks_removed", "chunks removed otherwise"),
    "hits": ("chunks_found", "chunks that a request's lookup found"),
    "requests": ("requests", "requests told apart"),
    "refiled": ("chunks_refiled", "chunks filed behind the wrong one until a lookup said so"),
}


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, f"EVOKE in LMCache: {meaning}", ["backend", *labels])


_COUNTERS = tuple(_counter(*_COUNTED[each.name]) for each in fields(Counters))
_TAGS_IGNORED = _counter("tags_ignored", "tags that were not used", "tag", "reason")
_FAILED = _counter("policies_failed", "policies left to first in, first out")


class Metrics:
    """Hands on what one backend's retention has counted since the last time.

    Args:
        backend: LMCache's name for the backend.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._counters = tuple(counter.labels(backend) for counter in _COUNTERS)
        self._failed = _FAILED.labels(backend)
        self._shown = (0,) * len(_COUNTERS)
        self._ignored: dict[TagProblem, int] = {}

    def show(self, retention: Retention) -> None:
        """Bring the counters up to date. The caller holds the retention's lock."""
        now = astuple(retention.counters)
        if now == self._shown:
            return
        for counter, value, shown in zip(self._counters, now, self._shown, strict=True):
            if value > shown:
                counter.inc(value - shown)
        self._shown = now
        for problem, count in retention.tags_ignored.items():  # of a request that was counted too
            if (new := count - self._ignored.get(problem, 0)) > 0:
                _TAGS_IGNORED.labels(self._backend, problem.tag, problem.reason).inc(new)
                self._ignored[problem] = count

    def fail(self) -> None:
        """Count that the backend goes on first in, first out."""
        self._failed.inc()
