"""Sends a workload's requests: one after the other, or each when it is due.

In a closed loop the server's counters tell exactly what each request found. In an open loop several
requests are on their way at once; then a request knows only how many of its prompt tokens were not
computed (the server's `cached_tokens`), and the counters hold for all of them together.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from bench.errors import BenchError
from bench.matrix.results import Row
from bench.matrix.workloads.scoring import score
from bench.matrix.workloads.work import Request
from bench.serving.client import Client, greedy

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

_SETTLE_S = 10.0


def send_closed(
    client: Client, requests: Sequence[Request], decode: Decode, advance: Callable[[], None]
) -> list[Row]:
    """Send one request after the other."""
    rows = []
    for request in requests:
        done = client.complete(request.prompt, request.answer_tokens, request.params)
        cache = done.cache
        cached = cache.in_gpu + cache.restored
        rows.append(
            _row(
                request,
                decode(done.token_ids),
                (done.ttft_s, done.latency_s),
                (cached, cache.in_gpu, cache.restored),
            )
        )
        advance()
    return rows


def send_open(
    client: Client, requests: Sequence[Request], decode: Decode, advance: Callable[[], None]
) -> list[Row]:
    """Send each request when it is due, whatever is on its way; rows in order of arrival.

    A failure ends the run: what is not yet due is not sent.
    """
    stop = Event()
    started = time.perf_counter()
    expected = client.counters().asked + sum(len(request.prompt) for request in requests)

    def serve(request: Request) -> Row:
        wait = (request.arrival_s or 0.0) - (time.perf_counter() - started)
        if stop.wait(max(0.0, wait)):
            raise BenchError("not sent: another request failed")
        return _stream(client, request, decode)

    rows = []
    with ThreadPoolExecutor(max_workers=len(requests)) as pool:
        futures = [pool.submit(serve, request) for request in requests]
        try:
            for future in futures:
                rows.append(future.result())
                advance()
        except BaseException:
            stop.set()
            raise
    limit = time.monotonic() + _SETTLE_S
    while client.counters().asked < expected:  # the last request is counted a step later
        if time.monotonic() > limit:
            raise BenchError("the server did not count every request: is it being restarted?")
        time.sleep(0.05)
    return rows


def _stream(client: Client, request: Request, decode: Decode) -> Row:
    body = greedy(
        request.prompt,
        request.answer_tokens,
        request.params,
        stream=True,
        stream_options={"include_usage": True},
    )
    started = time.perf_counter()
    ttft_s = 0.0
    tokens: list[int] = []
    cached: int | None = None
    for item in client.stream(body):
        new = item["choices"][0].get("token_ids") if item["choices"] else None
        if new:
            if not tokens:
                ttft_s = time.perf_counter() - started
            tokens += new
        if usage := item.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    latency_s = time.perf_counter() - started
    if len(tokens) != request.answer_tokens or cached is None:
        raise BenchError(f"{len(tokens)} of {request.answer_tokens} answer tokens came")
    return _row(request, decode(tokens), (ttft_s, latency_s), (cached, None, None))


def _row(
    request: Request,
    answer: str,
    times: tuple[float, float],
    found: tuple[int, int | None, int | None],
) -> Row:
    cached, in_gpu, restored = found
    return Row(
        context=request.context,
        kind=request.kind,
        loop=request.loop,
        asked=len(request.prompt),
        cached=cached,
        in_gpu=in_gpu,
        restored=restored,
        ttft_s=round(times[0], 4),
        latency_s=round(times[1], 4),
        answer=answer,
        score=score(answer, request.expected, as_json=request.as_json),
    )
