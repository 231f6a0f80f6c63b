# SPDX-License-Identifier: Apache-2.0
"""The same calls give the same evictions, whatever PYTHONHASHSEED: ranks must evict alike."""

import os
import random
import subprocess
import sys
from pathlib import Path

from evoke_core import EvokeConfig
from tests.lmcache.backend import Backend

ROOT = Path(__file__).parents[2]


def main(policy: str) -> None:
    draw = random.Random(4)
    backend = Backend(30, settings=EvokeConfig(policy=policy), clock=lambda: 0.0)
    tags = [None, {"lmcache.evoke.source_type": "system"}, {"lmcache.evoke.priority": "3"}]
    for _ in range(600):
        backend.serve("".join(draw.choices("abc", k=draw.randint(1, 9))), draw.choice(tags))
    print(backend.evicted)


def test_evictions_do_not_follow_the_hash_seed() -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    for policy in ("scored", "adaptive"):
        logs = [
            subprocess.run(
                [sys.executable, "-m", "tests.lmcache.test_hash_seed", policy],
                cwd=ROOT,
                env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
                capture_output=True,
                check=True,
                timeout=120,
            ).stdout
            for seed in ("0", "4242")
        ]
        assert logs[0].count(b",") > 100, "a run that evicts nothing shows nothing"
        assert logs[0] == logs[1]


if __name__ == "__main__":
    main(sys.argv[1])
