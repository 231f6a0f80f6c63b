"""EVOKE in the LMCache server (``lmcache server``, LMCache 0.5.5 or newer).

    lmcache server --eviction-policy noop --server-module \\
      '{"module_path": "evoke_lmcache.server_module", "config": {"evoke": {...}}}'

The server's own eviction is turned off (``noop``). This module follows the server's events, ranks
its chunks, and deletes the lowest-ranked ones through the storage manager's public calls, early
enough that writes find room: below ``headroom`` of free memory, or below twice what the last
writes took, whichever is more. Objects that somebody reads are never deleted.

Guarantees: no exception leaves; the eviction thread does not die. Where ranking fails, the oldest
chunk goes first, and the log says so once. Events that the server dropped are made up for, see
:mod:`evoke_lmcache.server_index`; if memory is short and nothing is known that could go, the server
is asked to clear what nobody uses.

Configuration: ``evoke`` (settings as everywhere), ``headroom`` (fraction of L1 to keep free, 0.01
to 0.5, default 0.1), ``interval_ms`` (at least this often it looks, 1 to 1,000, default 20).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.mp_observability.event import EventType
from lmcache.v1.mp_observability.otel_init import register_gauge

from evoke_core import ConfigError, EvokeConfig, TagProblem
from evoke_lmcache.server_index import ServerIndex
from evoke_lmcache.settings import load_config

logger = init_logger(__name__)

SOURCE = "--server-module config"
KNOWN = ("evoke", "headroom", "interval_ms")
BATCH = 32
"""Chunks deleted between two looks at the memory in use."""

RETRY_LOCKED_S = 0.2
SESSION_S = 1.0
"""So long a lookup waits for its session, which carries its tags."""

MAX_BURST = 0.5
"""Headroom never grows beyond this fraction, however much a burst has written."""


class EvokeServerModule:
    """Follows the server and evicts. See the module's docstring.

    Args:
        context: the server's shared context.
        config: the operator's settings.
        headroom: fraction of L1 to keep free.
        interval_s: seconds between looks while nothing happens.
    """

    def __init__(
        self, context: Any, config: EvokeConfig, *, headroom: float = 0.1, interval_s: float = 0.02
    ) -> None:
        self._context = context
        self._storage = context.storage_manager
        self._bus = context.event_bus
        self._headroom = headroom
        self._interval = interval_s
        self._lock = threading.Lock()
        self._index = ServerIndex(config, tokens_per_chunk=context.chunk_size, warn=_warn)
        self._errors = 0
        self._failed_writes = 0
        self._starts_over = 0
        self._burst = 0.0
        self._written = 0
        self._lost = False
        self._lookups: deque[tuple[Any, float, int]] = deque()
        self._over: set[str] = set()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._unlock_at = 0.0
        self._subscribe()
        self._register_metrics()
        self._thread = threading.Thread(target=self._run, name="evoke-eviction", daemon=True)
        self._thread.start()

    # --- LMCache's interface ---

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        return {"evoke": self.figures() | {"thread_alive": self._thread.is_alive()}}

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5)

    def figures(self) -> dict[str, Any]:
        """Counters and gauges, by name."""
        with self._lock:
            counters = self._index.counters
            used, total = self._storage.get_l1_usage()
            return {
                "policy": self._index.config.policy,
                "chunks": len(self._index),
                "requests": counters.requests,
                "chunks_looked_up": counters.looked_up,
                "chunks_found": counters.found,
                "chunks_stored": counters.stored,
                "chunks_evicted": counters.evicted,
                "chunks_removed": counters.removed,
                "chunks_recovered": counters.recovered,
                "chunks_stale": counters.stale,
                "writes_failed": self._failed_writes,
                "events_dropped": self._bus.dropped_events_count(),
                "starts_over": self._starts_over,
                "errors": self._errors,
                "tags_ignored": sum(self._index.tags_ignored.values()),
                "free_fraction": 1 - used / total if total else 1.0,
                "headroom_fraction": self._room(total) / total if total else 0.0,
            }

    # --- events, on the bus's thread ---

    def _subscribe(self) -> None:
        for event_type, handler in (
            (EventType.MP_LOOKUP, self._on_lookup),
            (EventType.MP_REQUEST_END, self._on_end),
            (EventType.L1_WRITE_FINISHED, self._on_written),
            (EventType.L1_WRITE_FINISHED_AND_READ_RESERVED, self._on_written),
            (EventType.L1_KEYS_ACCESSED, self._on_accessed),
            (EventType.L1_KEYS_EVICTED, self._on_gone),
            (EventType.L1_ALLOCATION_FAILED, self._on_failed),
        ):
            self._bus.subscribe(event_type, self._safe(handler))
        self._bus.subscribe_drops(self._on_drops)

    def _safe(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(event: Any) -> None:
            try:
                with self._lock:
                    handler(event)
            except Exception:
                self._note_error("an event was not understood")

        return handle

    def _on_lookup(self, event: Any) -> None:
        self._lookups.append((event, time.monotonic(), self._index.counters.stored))
        self._follow_lookups()

    def _follow_lookups(self) -> None:
        """Read the lookups whose sessions are ready: the event comes a moment before."""
        while self._lookups:
            event, now, stored = self._lookups[0]
            session = self._context.session_manager.get(event.session_id)
            key = getattr(session, "lookup_ipc_key", None)
            over = event.session_id in self._over
            if key is None and not over and time.monotonic() - now < SESSION_S:
                return
            self._lookups.popleft()
            self._over.discard(event.session_id)
            said = event.metadata
            self._index.lookup(
                event.session_id,
                (said["model_name"], getattr(key, "cache_salt", "")),
                said["chunk_hashes"],
                getattr(key, "request_configs", None),
                now,
                counted=stored == self._index.counters.stored,
            )

    def _on_end(self, event: Any) -> None:
        if any(lookup.session_id == event.session_id for lookup, _, _ in self._lookups):
            self._over.add(event.session_id)  # it ended before its lookup could be read
        self._follow_lookups()
        self._index.ended(event.session_id)

    def _on_written(self, event: Any) -> None:
        self._follow_lookups()
        self._index.written(event.metadata["keys"])
        self._written += sum(meta.size_bytes for meta in event.metadata.get("meta", ()))
        self._wake.set()

    def _on_accessed(self, event: Any) -> None:
        self._index.accessed(event.metadata["keys"])

    def _on_gone(self, event: Any) -> None:
        self._index.gone(event.metadata["keys"])

    def _on_failed(self, event: Any) -> None:
        if event.metadata.get("during") == "l1_store":
            self._failed_writes += len(event.metadata["keys"])
        self._wake.set()

    def _on_drops(self) -> None:
        self._lost = True

    # --- evicting, on a thread of its own ---

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            try:
                self._make_room()
            except Exception:
                self._note_error("eviction failed")
                self._stop.wait(self._interval)

    def _room(self, total: int) -> float:
        return min(MAX_BURST * total, max(self._headroom * total, 2 * self._burst))

    def _make_room(self) -> None:
        with self._lock:
            self._follow_lookups()
            self._burst = max(0.98 * self._burst, self._written)
            self._written = 0
            if time.monotonic() >= self._unlock_at:
                self._index.unlock()
                self._unlock_at = time.monotonic() + RETRY_LOCKED_S
        while not self._stop.is_set():
            used, total = self._storage.get_l1_usage()
            if total <= 0 or total - used >= self._room(total):
                return
            if not self._evict():
                self._start_over(used, total)
                return

    def _evict(self) -> bool:
        """Delete the lowest-ranked chunks; False if there are none."""
        with self._lock:
            try:
                chunks = self._index.candidates(BATCH)
            except Exception:
                self._note_error("ranking failed: oldest first")
                chunks = self._index.oldest(BATCH)
            for name, _ in chunks:
                self._index.leaving(name)
        gone = 0
        for name, objects in chunks:
            deleted, locked = self._storage.delete_l1_keys(objects)
            gone += deleted
            with self._lock:
                if locked:
                    self._index.lock(name)
                elif deleted:
                    self._index.gone(objects)  # the event will say so again
                else:
                    self._index.stale(name)
        return bool(chunks)

    def _start_over(self, used: int, total: int) -> None:
        """Memory is short and nothing is known that could go: was it stored unseen?"""
        with self._lock:
            lost, self._lost = self._lost, False
            if not lost or total - used >= self._headroom * total / 2:
                self._lost = lost
                return
            self._starts_over += 1
        logger.warning(
            "EVOKE: the server dropped events and is nearly full: clearing what is unused"
        )
        self._storage.clear(force=False)
        with self._lock:
            self._index.start_over()

    # --- reporting ---

    def _note_error(self, what: str) -> None:
        self._errors += 1
        if self._errors == 1:
            logger.exception("EVOKE: %s; counted, not reported again", what)

    def _register_metrics(self) -> None:
        for name, value in self.figures().items():
            if not isinstance(value, str):
                register_gauge(
                    "evoke_lmcache",
                    f"evoke_lmcache.{name}",
                    f"EVOKE in the LMCache server: {name.replace('_', ' ')}",
                    lambda name=name: self.figures()[name],
                )


def build_server_modules(build: Any) -> EvokeServerModule:
    """Build the module; LMCache calls this because of ``--server-module``.

    Raises:
        ConfigError: a setting that cannot be honoured, in one line.
    """
    settings = read_settings(build.config)
    context = build.server_context
    if not context.event_bus.enabled:
        raise ConfigError(
            "--disable-observability is not allowed with EVOKE: it follows the server's events"
        )
    controllers = context.storage_manager.report_status()["l1_eviction_controllers"]
    for tag, status in controllers.items():
        if status["eviction_policy"] != "noop":
            raise ConfigError(
                f"--eviction-policy = {status['eviction_policy']!r} (L1 {tag!r}) is not allowed "
                "with EVOKE; allowed: noop, because two policies must not evict from one memory"
            )
    module = EvokeServerModule(
        context,
        settings["evoke"],
        headroom=settings["headroom"],
        interval_s=settings["interval_ms"] / 1000,
    )
    logger.info(
        "EVOKE decides what the server evicts; policy %s, headroom %g",
        settings["evoke"].policy,
        settings["headroom"],
    )
    return module


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the module's configuration.

    Raises:
        ConfigError: an unknown key or a wrong value, in one line.
    """
    for key in config:
        if key not in KNOWN:
            raise ConfigError(f"unknown key {key!r} (from {SOURCE}); known: {', '.join(KNOWN)}")
    numbers = {}
    for name, default, low, high in (("headroom", 0.1, 0.01, 0.5), ("interval_ms", 20, 1, 1_000)):
        value = config.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise ConfigError(
                f"{name} = {value!r} (from {SOURCE}) is not allowed; allowed: a number from "
                f"{low:g} to {high:g}"
            )
        numbers[name] = value
    evoke = load_config(config, source=f"{SOURCE}['evoke']", say=logger.info)
    return numbers | {"evoke": evoke}


def _warn(problem: TagProblem) -> None:
    logger.warning(
        "request_configs['lmcache.evoke.%s']: %s; ignored, counted, not reported again",
        problem.tag,
        problem.reason,
    )
