# SPDX-License-Identifier: Apache-2.0
"""Hits of growing conversations under pressure, our policies beside the stock tier.

`python -m tests.vllm.conversations` in an engine's environment prints the table of evoke-vllm's
README on hybrid models. Everything is decided by the seed; no clock is read.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.vllm.engine import MiniEngine
from tests.vllm.shapes import BLOCK

ARMS: Mapping[str, dict[str, Any]] = {
    "stock LRU": {"spec_name": "HostOffloadingSpec", "spec_module_path": "evoke_vllm.host"},
    "adaptive": {"evoke": {"policy": "adaptive"}},
    "lru": {"evoke": {"policy": "lru"}},
}
SESSIONS, LONGEST, SYSTEM = 16, 40, 6  # conversations; blocks of one, of the system prompt


def conversations(seed: int, requests: int, *, scans: float) -> list[str]:
    """Prompts: the next turn of one of 16 conversations, or, as often as `scans`, one of no use.

    Half of the scans begin with the system prompt too. A conversation that is too long starts anew.
    """
    rng = random.Random(seed)
    system = _text(rng, SYSTEM)
    live: dict[int, str] = {}
    prompts = []
    for _ in range(requests):
        if rng.random() < scans:
            prompts.append(system[: rng.choice([0, SYSTEM])] + _text(rng, rng.randint(5, 20)))
            continue
        session = rng.randrange(SESSIONS)
        if len(live.get(session, "")) > LONGEST or session not in live:
            live[session] = system
        live[session] += _text(rng, rng.randint(1, 4))
        prompts.append(live[session])
    return prompts


def share_restored(prompts: Sequence[str], blocks: int, extra: dict[str, Any]) -> float:
    """Prompt tokens restored by a tier of so many blocks, of all; a model with a window."""
    mini = MiniEngine(blocks, window=True, extra=extra, gpu_blocks=160, step_tokens=256)
    restored = sum(mini.run(prompt, chunk=16) for prompt in prompts)
    mini.finish_transfers()
    return restored / (BLOCK * sum(map(len, prompts)))


def _text(rng: random.Random, blocks: int) -> str:
    return "".join(chr(rng.randrange(300, 3000)) for _ in range(blocks))


def main() -> None:
    """Print the table."""
    print("| tier | scans |", " | ".join(ARMS), "|")
    print("| ---: | ---: |", " | ".join("---:" for _ in ARMS), "|")
    for scans in (0.0, 0.5):
        for blocks in (60, 150, 300):
            cells = []
            for extra in ARMS.values():
                shares = [
                    100 * share_restored(conversations(seed, 300, scans=scans), blocks, extra)
                    for seed in range(2)
                ]
                cells.append(", ".join(f"{share:.1f}" for share in shares) + "%")
            print(f"| {blocks} blocks | {scans:.0%} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
