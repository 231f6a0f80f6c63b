"""A stand-in for an inference server, for tests: answers, counters, caches and a crash.

Every prompt is one block-free unit: it is in the GPU pool if it was the last one asked, in the
tier if it was asked before. A prompt that starts with 13 crashes the "engine" mid-stream.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.listening import Quiet, listening


class FakeEngine:
    """What the handler serves: counters in tokens, and the prompts it remembers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.last: list[int] = []
        self.tier: list[list[int]] = []
        self.by_source: Counter[str] = Counter()
        self.queried = 0
        self.by_role: dict[str, tuple[int, int]] = {}
        self.lock = threading.Lock()

    def ask(self, prompt: list[int]) -> int:
        """Count a request; return how many of its tokens need not be computed."""
        size = len(prompt)
        hit = prompt == self.last
        known = hit or prompt in self.tier
        source = "local_cache_hit" if hit else "external_kv_transfer" if known else "local_compute"
        self.by_source[source] += size
        self.queried += 0 if hit else size
        self.last = prompt
        self.tier.append(prompt)
        return size if known else 0

    def metrics(self) -> str:
        queries = "vllm:external_prefix_cache_queries"
        lines = [f"# TYPE {queries} counter", f"{queries}_total {self.queried}.0"]
        # As where every request had to wait a step, and so was looked up twice.
        looked_up = 2 * self.by_source.total()
        lines.append("# TYPE vllm:prefix_cache_queries counter")
        lines.append(f"vllm:prefix_cache_queries_total {looked_up}.0")
        lines.append("# TYPE vllm:prompt_tokens_by_source counter")
        for source, value in self.by_source.items():
            lines.append(f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {value}.0')
        for at, kind in enumerate(("lookup", "hit")):
            family = f"vllm:kv_offload_evoke_{kind}_blocks"
            lines.append(f"# TYPE {family} counter")
            for role, counts in self.by_role.items():
                lines.append(f'{family}_total{{engine="0",source_role="{role}"}} {counts[at]}.0')
        return "\n".join(lines) + "\n"


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Serve `engine` on a free port; yields its address."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.answer(engine.metrics() if self.path == "/metrics" else "")

        def do_POST(self) -> None:
            self._complete(self.body())

        def _complete(self, body: dict[str, Any]) -> None:
            engine.bodies.append(body)
            with engine.lock:
                cached = engine.ask(body["prompt"])
            items: list[dict[str, Any]] = [
                {"choices": [{"text": "", "token_ids": [100 + n]}]}
                for n in range(body["max_tokens"])
            ]
            if body["prompt"][0] == 13:
                items[1:] = [{"error": {"message": "engine died"}}]
            if body.get("stream_options", {}).get("include_usage"):
                details = {"prompt_tokens_details": {"cached_tokens": cached}}
                items.append({"choices": [], "usage": details})
            lines = [f"data: {json.dumps(item)}\n\n" for item in items]
            self.answer("".join(lines) + "data: [DONE]\n\n")

    with listening(Handler) as address:
        yield address
