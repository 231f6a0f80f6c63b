"""Records one arm of the LMCache gate: every probe asked in order, in one process.

The arms are the other gate's: `lru` is LMCache's own LRU, `evoke` its `cache_policy: EVOKE`.
"""

import os
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait take nobody's time

from tokenizers import Tokenizer

from bench.envelope import machine, versions
from bench.progress import Reporter
from gates.arms import Arm
from gates.lmcache.runtime import Model, Runtime, serving
from gates.recorder import Bench
from gates.recording import Answer, Recording
from gates.workload import Probe, reusable_tokens, workload_digest

POLICIES = {"evoke": "EVOKE", "lru": "LRU"}


def record(arm: Arm, bench: Bench, log: Path, reporter: Reporter) -> Recording:
    """Run `arm` and return its recording; one process, so nothing goes to `log`."""
    profile, sizes = bench.profile, bench.sizes
    pool = profile.pools.pool_blocks if arm.evicts else sizes.baseline_blocks
    tier = sizes.tier_blocks if arm.tier else 0
    settings = {"evoke": {"policy": arm.policy}} if arm.policy else {}
    started = time.monotonic()
    with reporter.waiting(f"{arm.name} ({arm.title}): loading the model"):
        model = Model(bench.model)
        tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    boot_s = time.monotonic() - started
    with serving(
        model,
        profile.pools.block_size,
        pool,
        policy=POLICIES[arm.tier] if arm.tier else None,
        tier_blocks=tier,
        settings=settings,
        damage=arm.damage,
    ) as runtime:
        started = time.monotonic()
        answers = _ask_all(runtime, bench, arm, tokenizer, reporter)
        wall_s = time.monotonic() - started
        connector = runtime.connector
    return Recording(
        profile=profile.name,
        arm=arm.name,
        title=arm.title,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rules=profile.rules,
        workload={
            "digest": workload_digest(bench.probes),
            "unique_blocks": sizes.unique_blocks,
            **asdict(profile.workload),
        },
        server={
            "model": profile.model.source,
            "dtype": "float32",
            "block_size": profile.pools.block_size,
            "gpu_blocks": pool,
            "tier_blocks": tier,
            "cache_policy": POLICIES[arm.tier] if arm.tier else None,
            "extra_config": settings,
            "damage": arm.damage,
            "device": "cpu",
            "cores": len(os.sched_getaffinity(0)),
        },
        versions=versions(),
        machine=machine(),
        boot_s=round(boot_s, 1),
        wall_s=round(wall_s, 1),
        stored_bytes=connector.stored_bytes if connector else 0,
        restored_bytes=connector.restored_bytes if connector else 0,
        answers=answers,
    )


def _ask_all(
    runtime: Runtime, bench: Bench, arm: Arm, tokenizer: Any, reporter: Reporter
) -> tuple[Answer, ...]:
    reusable = reusable_tokens(bench.probes, bench.profile.pools.block_size)
    answers = []
    with reporter.counting(f"{arm.name}: probes", len(bench.probes)) as advance:
        for probe, reuse in zip(bench.probes, reusable, strict=True):
            answers.append(_ask(runtime, probe, reuse, tokenizer))
            advance()
    return tuple(answers)


def _ask(runtime: Runtime, probe: Probe, reusable: int, tokenizer: Any) -> Answer:
    answer = Answer(
        session=probe.session,
        turn=probe.turn,
        kind=probe.kind,
        prompt=probe.digest,
        asked=len(probe.prompt),
        reusable=reusable,
        passkey=probe.passkey,
    )
    reply = runtime.answer(probe.prompt, probe.answer_tokens)
    return replace(
        answer,
        in_gpu=reply.in_pool,
        restored=reply.restored,
        token_ids=reply.token_ids,
        logprobs=tuple(round(value, 6) for value in reply.logprobs),
        text=tokenizer.decode(list(reply.token_ids)),
    )
