"""A client that asks for greedy answers with logprobs, and reads the server's counters.

`ask` may be called from several threads at once; whoever wants to know what the caches did for
one request must send requests one at a time and read `counters` between them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric

from bench.errors import BenchError
from bench.serving.client import CacheCounters, Connection, greedy

_SETTLE_S = 5.0
_POLL_S = 0.02
_STORED_BYTES = "vllm:kv_offload_store_bytes_total"
_RESTORED_BYTES = "vllm:kv_offload_load_bytes_total"


class Unanswered(Exception):
    """A request got no answer; `alive` says whether the server still is."""

    def __init__(self, message: str, *, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


@dataclass(frozen=True)
class Reply:
    """An answer: its tokens, their logprobs, and its text."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True)
class Counters:
    """Since the server started: prompt tokens asked, in the pool, restored; bytes moved."""

    asked: int = 0
    in_gpu: int = 0
    restored: int = 0
    stored_bytes: int = 0
    restored_bytes: int = 0


class GateClient(Connection):
    """Asks a server, and reads what it counted."""

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Answer a prompt of token ids with exactly `max_tokens` greedy tokens.

        Raises Unanswered, with one line that says why.
        """
        body = greedy(prompt, max_tokens, kv_transfer_params, logprobs=1)
        try:
            response = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise self._unanswered(f"{type(error).__name__}: {error}") from None
        if response.is_error:
            raise self._unanswered(f"status {response.status_code}: {_one_line(response.text)}")
        try:
            choice = response.json()["choices"][0]
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            reply = Reply(tuple(choice["token_ids"]), tuple(logprobs), choice["text"])
        except (ValueError, LookupError, TypeError):
            raise self._unanswered(f"no answer in {_one_line(response.text)}") from None
        if not len(reply.token_ids) == len(reply.logprobs) == max_tokens:
            raise self._unanswered(f"{len(reply.token_ids)} of {max_tokens} answer tokens came")
        return reply

    def counters(self) -> Counters:
        """Return the server's counters."""
        families = list(self.families())
        cache, values = CacheCounters.read(families), _totals(families)
        return Counters(
            cache.asked,
            cache.in_gpu,
            cache.restored,
            int(values.get(_STORED_BYTES, 0)),
            int(values.get(_RESTORED_BYTES, 0)),
        )

    def settled(self, before: Counters, prompt_tokens: int) -> Counters:
        """Return the counters once they hold the request just answered; normally at once.

        Raises Unanswered where the server is down.
        """
        limit = time.monotonic() + _SETTLE_S
        while True:
            try:
                now = self.counters()
            except BenchError as error:
                raise self._unanswered(error.message) from None
            if now.asked - before.asked == prompt_tokens:
                return now
            if time.monotonic() > limit:
                raise BenchError(
                    f"the server counted {now.asked - before.asked} prompt tokens for a prompt of "
                    f"{prompt_tokens}: is somebody else using it?"
                )
            time.sleep(_POLL_S)

    def metrics(self) -> dict[str, float]:
        """Return every counter and gauge by its name, summed over labels."""
        return _totals(self.families())

    def alive(self) -> bool:
        """Tell whether the server answers its health check."""
        try:
            return self._http.get("/health", timeout=10.0).is_success
        except httpx.HTTPError:
            return False

    def _unanswered(self, what: str) -> Unanswered:
        alive = self.alive()
        return Unanswered(what if alive else f"the server is down ({what})", alive=alive)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _totals(families: Iterable[Metric]) -> dict[str, float]:
    values: dict[str, float] = {}
    for family in families:
        if family.type in ("counter", "gauge", "unknown"):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
