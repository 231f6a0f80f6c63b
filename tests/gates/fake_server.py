"""A stand-in for a server: greedy answers with logprobs, counters, errors and a crash.

An answer's tokens follow from the prompt's length. Blocks are of 32 tokens; a prompt seen before
is restored from the "tier" as far as its full blocks go. A prompt in `refused` gets status 500,
one in `deadly` ends the server's life: from then on every request fails.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.listening import Quiet, listening

BLOCK_BYTES = 1000


class FakeEngine:
    """What the handler serves."""

    def __init__(self, *, tier: bool) -> None:
        self.tier = tier
        self.bodies: list[dict[str, Any]] = []
        self.seen: set[tuple[int, ...]] = set()
        self.refused: set[int] = set()
        self.deadly: set[int] = set()
        self.dead = False
        self.gauges: dict[str, float] = {}
        self.counts = dict.fromkeys(("kv_offload_store_bytes", "kv_offload_load_bytes"), 0)
        self.by_source: Counter[str] = Counter()

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.bodies.append(body)
        prompt = tuple(body["prompt"])
        if len(prompt) in self.deadly:
            self.dead = True
        if self.dead or len(prompt) in self.refused:
            return 500, {"error": {"message": "out of\nrange"}}
        blocks = [prompt[: 32 * n] for n in range(1, len(prompt) // 32 + 1)]
        found = sum(block in self.seen for block in blocks if len(block) < len(prompt))
        new = sum(block not in self.seen for block in blocks)
        self.seen |= set(blocks)
        self.by_source["local_compute"] += len(prompt) - 32 * found
        self.by_source["external_kv_transfer" if self.tier else "local_cache_hit"] += 32 * found
        if self.tier:
            self.counts["kv_offload_load_bytes"] += BLOCK_BYTES * found
            self.counts["kv_offload_store_bytes"] += BLOCK_BYTES * new
        tokens = [len(prompt) + at for at in range(body["max_tokens"])]
        choice = {
            "text": f"answer to {len(prompt)}",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
        }
        return 200, {"choices": [choice]}

    def metrics(self) -> str:
        lines = []
        for name, value in self.counts.items():
            lines += [f"# TYPE vllm:{name} counter", f'vllm:{name}_total{{engine="0"}} {value}.0']
        lines.append("# TYPE vllm:prompt_tokens_by_source counter")
        for source, value in self.by_source.items():
            lines.append(f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {value}.0')
        for name, gauge in self.gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name} {gauge}"]
        return "\n".join(lines) + "\n"


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Serve `engine` on a free port; yields its address."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.answer(engine.metrics(), 500 if engine.dead else 200)

        def do_POST(self) -> None:
            status, content = engine.complete(self.body())
            self.answer(json.dumps(content), status)

    with listening(Handler) as address:
        yield address
