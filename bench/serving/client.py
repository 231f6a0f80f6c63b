"""A client for one server: streamed completions, and what the caches did for each of them.

Requests must be sent one at a time: what a request found in the GPU pool and in the tier is read
as the difference of the server's counters before and after it. `Client.complete` checks that the
counters account for exactly this request's prompt, so a difference never mixes two requests.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.errors import BenchError
from bench.serving.server import SERVED_NAME, Server

_SETTLE_S = 5.0
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_IN_GPU = "local_cache_hit"
_RESTORED = "external_kv_transfer"
_QUERIED = "vllm:external_prefix_cache_queries_total"
_BY_ROLE = "vllm:kv_offload_evoke_{}_blocks_total"


@dataclass(frozen=True)
class CacheCounters:
    """Tokens: asked for, found in the GPU pool, looked up in the tier, restored from it.

    They count a prompt once. The engine's `prefix_cache_queries` and `_hits` would not: it looks a
    prompt up again in every step in which the request has to wait.
    """

    asked: int = 0
    in_gpu: int = 0
    queried: int = 0
    restored: int = 0

    @classmethod
    def read(cls, families: Iterable[Metric]) -> Self:
        """Read a server's metrics; what it does not report is 0."""
        by_source: Counter[str] = Counter()
        queried = 0
        for family in families:
            for sample in family.samples:
                if sample.name == _PROMPT_TOKENS:
                    by_source[sample.labels["source"]] += int(sample.value)
                elif sample.name == _QUERIED:
                    queried += int(sample.value)
        return cls(by_source.total(), by_source[_IN_GPU], queried, by_source[_RESTORED])

    def since(self, earlier: "CacheCounters") -> "CacheCounters":
        """Return what was counted after `earlier`."""
        return CacheCounters(
            self.asked - earlier.asked,
            self.in_gpu - earlier.in_gpu,
            self.queried - earlier.queried,
            self.restored - earlier.restored,
        )


@dataclass(frozen=True)
class Completion:
    """An answer: its token ids, seconds to the first token and to the last, cache counts."""

    token_ids: tuple[int, ...]
    ttft_s: float
    latency_s: float
    cache: CacheCounters


class Connection:
    """HTTP to `server`, `connections` at a time; a context manager that closes them."""

    def __init__(self, server: Server, *, timeout_s: float = 300.0, connections: int = 4) -> None:
        self._server = server
        limits = httpx.Limits(max_connections=connections)
        self._http = httpx.Client(base_url=server.url, timeout=timeout_s, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str) -> httpx.Response:
        """Send a request without a body; BenchError, naming the server's state, where it fails."""
        try:
            return self._http.request(method, path).raise_for_status()
        except httpx.HTTPError as error:
            raise self._server.failure(f"{method} {path} failed ({error})") from None

    def families(self) -> Iterable[Metric]:
        """Return the server's metrics."""
        return text_string_to_metric_families(self.request("GET", "/metrics").text)

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Complete `body`, which must ask for a stream, and yield the items as they come.

        The last may have no choices but a `usage`, where the body asked for it. Raises BenchError,
        naming the server's state, when the answer breaks off.
        """
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    text = response.read().decode(errors="replace")
                    raise self._server.failure(f"the server refused a request ({text})")
                for line in _lines(response.iter_bytes()):
                    data = line.removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    item = json.loads(data)
                    # A crashed engine's last word on a 200 stream has neither.
                    if not item.get("choices") and not item.get("usage"):
                        raise self._server.failure(f"the answer broke off ({data})")
                    yield item
        except httpx.HTTPError as error:
            raise self._server.failure(f"the answer broke off ({error})") from None


def greedy(
    prompt: Sequence[int],
    max_tokens: int,
    kv_transfer_params: Mapping[str, Any] | None,
    **more: Any,
) -> dict[str, Any]:
    """Return the body that asks for exactly `max_tokens` greedy tokens, as ids."""
    body = {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return body


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines that end with a line feed, and no other: JSON may hold other separators."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


class Client(Connection):
    """Sends requests to a server, one at a time."""

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a prompt of token ids with exactly `max_tokens` greedy tokens.

        Raises BenchError, naming the server's state, when the answer breaks off.
        """
        before = self.counters()
        body = greedy(prompt, max_tokens, kv_transfer_params, stream=True)
        started = time.perf_counter()
        ttft_s = 0.0
        token_ids: list[int] = []
        for item in self.stream(body):
            new = item["choices"][0].get("token_ids") if item["choices"] else None
            if not new:
                continue
            if not token_ids:
                ttft_s = time.perf_counter() - started
            token_ids += new
        latency_s = time.perf_counter() - started
        if len(token_ids) != max_tokens:
            raise self._server.failure(f"{len(token_ids)} of {max_tokens} answer tokens came")
        return Completion(tuple(token_ids), ttft_s, latency_s, self._settled(before, len(prompt)))

    def counters(self) -> CacheCounters:
        """Return the server's cache counters since it started."""
        return CacheCounters.read(self.families())

    def tier_by_role(self) -> dict[str, tuple[int, int]]:
        """Return, by source role, blocks that EVOKE's tier was asked for and that it restored.

        Empty if the server has another tier, or none.
        """
        counts: dict[str, tuple[int, int]] = {}
        for family in self.families():
            for sample in family.samples:
                role = sample.labels.get("source_role", "")
                asked, found = counts.get(role, (0, 0))
                if sample.name == _BY_ROLE.format("lookup"):
                    counts[role] = asked + int(sample.value), found
                elif sample.name == _BY_ROLE.format("hit"):
                    counts[role] = asked, found + int(sample.value)
        return {role: each for role, each in sorted(counts.items()) if each[0]}

    def _settled(self, before: CacheCounters, prompt_tokens: int) -> CacheCounters:
        """Wait until the counters hold the request just answered; normally they do at once."""
        limit = time.monotonic() + _SETTLE_S
        while True:
            delta = self.counters().since(before)
            if delta.asked == prompt_tokens:
                return delta
            if time.monotonic() > limit:
                raise BenchError(
                    f"the server counted {delta.asked} prompt tokens for a prompt of "
                    f"{prompt_tokens}: is somebody else using it?"
                )
            time.sleep(0.05)
