"""Runs the demo: every arm on one machine, one after the other, one server per arm.

A server is booted once per arm and used for all seeds; between seeds both caches are reset, and
the reset is verified with a probe (see `Client.reset_caches`), so every seed starts empty. Each
finished seed is saved at once: an interrupted run loses only what it was doing.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.demo.contexts import make_context
from bench.demo.results import Row, Run, machine, versions
from bench.demo.workload import BLOCK_SIZE, Call, Encode, Workload
from bench.progress import Reporter
from bench.serving.arms import Arm
from bench.serving.client import Client
from bench.serving.server import ServerConfig, running

_PROBE_TOKENS = 160
_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What to run: arms in order, one workload per seed (same pool sizes), and where."""

    arms: Sequence[Arm]
    workloads: Sequence[Workload]
    model: Path
    results: Path
    port: int | None = None


def run_plan(plan: Plan, encode: Encode, reporter: Reporter) -> list[Run]:
    """Run every arm with every seed, save each as JSON, and return them."""
    runs: list[Run] = []
    for arm in plan.arms:
        runs += _run_arm(arm, plan, encode, reporter)
    return runs


def kv_bytes_per_token(model: Path, bytes_per_value: int = 4) -> int:
    """Return the KV-cache bytes of one token, from the model folder's config.json."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    tokens: int = 2 * config["num_hidden_layers"] * kv_heads * head_size * bytes_per_value
    return tokens


def server_config(arm: Arm, workloads: Sequence[Workload], model: Path) -> ServerConfig:
    """Return what `arm` is served with: the workload's small pool, or one that never evicts."""
    first = workloads[0]
    block_bytes = kv_bytes_per_token(model) * BLOCK_SIZE
    gpu_blocks = first.gpu_blocks
    if arm.spec is None:
        gpu_blocks += max(workload.all_blocks for workload in workloads)
    return ServerConfig(
        model=model,
        gpu_blocks=gpu_blocks,
        max_model_len=first.max_model_len,
        block_size=BLOCK_SIZE,
        kv_space_gib=max(4, -(-gpu_blocks * block_bytes // _GIB)),
        kv_transfer=arm.kv_transfer(first.tier_blocks * block_bytes),
    )


def _run_arm(arm: Arm, plan: Plan, encode: Encode, reporter: Reporter) -> list[Run]:
    config = server_config(arm, plan.workloads, plan.model)
    log = plan.results / "logs" / f"{plan.workloads[0].name}-{arm.name}.log"
    probe = make_context(random.Random(0), "probe", _PROBE_TOKENS, encode)
    label = f"arm {arm.name} ({arm.title})"
    runs = []
    with ExitStack() as stack:
        with reporter.waiting(f"{label}: booting the server") as on_wait:
            server = stack.enter_context(running(config, log, port=plan.port, on_wait=on_wait))
        client = stack.enter_context(Client(server))
        for workload in plan.workloads:
            client.reset_caches(probe)
            with reporter.counting(
                f"{label}: seed {workload.seed}, requests", len(workload.calls)
            ) as advance:
                started = time.perf_counter()
                rows = []
                for call in workload.calls:
                    rows.append(_send(client, call))
                    advance()
                wall_s = time.perf_counter() - started
            run = Run(
                arm=arm.name,
                workload=workload.name,
                seed=workload.seed,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                wall_s=wall_s,
                boot_s=server.boot_s,
                configuration=_configuration(config, workload),
                versions=versions(),
                machine=machine(),
                notes=workload.notes,
                rows=tuple(rows),
            )
            run.save(plan.results)
            runs.append(run)
    return runs


def _send(client: Client, call: Call) -> Row:
    answer = client.complete(call.prompt, call.answer_tokens, call.kv_transfer_params)
    return Row(
        context=call.context,
        kind=call.kind,
        loop=call.loop,
        asked=answer.cache.asked,
        in_gpu=answer.cache.in_gpu,
        queried=answer.cache.queried,
        restored=answer.cache.restored,
        ttft_s=answer.ttft_s,
        latency_s=answer.latency_s,
        token_ids=answer.token_ids,
    )


def _configuration(config: ServerConfig, workload: Workload) -> dict[str, Any]:
    """Return what a reader needs to repeat the run; no path, no port."""
    return {
        "model": config.model.name,
        "server": {key: value for key, value in asdict(config).items() if key != "model"},
        "tier_blocks": workload.tier_blocks if config.kv_transfer else 0,
        "workload": dict(workload.parameters),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("EVOKE_")},
    }
