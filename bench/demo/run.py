"""Runs the demo: every arm on one machine, one after the other, each with a server of its own.

A server is booted for every arm and seed, so each run starts with empty caches and a policy that
has learned nothing. The arms of a seed follow each other directly: what else the machine does
disturbs them alike. Each finished run is saved at once: an interruption loses only what it was
doing.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.demo.results import Row, Run
from bench.demo.workload import BLOCK_SIZE, Call, Workload
from bench.envelope import machine, now, versions
from bench.progress import Reporter
from bench.serving.arms import Arm
from bench.serving.client import Client
from bench.serving.server import ServerConfig, running

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What to run: arms in order, one workload per seed (same pool sizes), and where."""

    arms: Sequence[Arm]
    workloads: Sequence[Workload]
    model: Path
    results: Path
    port: int | None = None


def run_plan(plan: Plan, reporter: Reporter) -> list[Run]:
    """Run every arm with every seed, save each as JSON, and return them."""
    return [
        _run_arm(arm, workload, plan, reporter) for workload in plan.workloads for arm in plan.arms
    ]


def kv_bytes_per_token(model: Path, bytes_per_value: int = 4) -> int:
    """Return the KV-cache bytes of one token, from the model folder's config.json."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    tokens: int = 2 * config["num_hidden_layers"] * kv_heads * head_size * bytes_per_value
    return tokens


def server_config(
    arm: Arm, workload: Workload, model: Path, recording: Path | None = None
) -> ServerConfig:
    """Return what `arm` is served with: the workload's small pool, or one that never evicts.

    `recording`: where a tier that can record does so.
    """
    block_bytes = kv_bytes_per_token(model) * BLOCK_SIZE
    gpu_blocks = workload.gpu_blocks
    if arm.spec is None:
        gpu_blocks += workload.all_blocks
    return ServerConfig(
        model=model,
        gpu_blocks=gpu_blocks,
        max_model_len=workload.max_model_len,
        block_size=BLOCK_SIZE,
        kv_space_gib=max(4, -(-gpu_blocks * block_bytes // _GIB)),
        kv_transfer=arm.kv_transfer(workload.tier_blocks * block_bytes, recording),
        options=("--shutdown-timeout", "5"),  # seconds in which the engine may end what it does
    )


def _run_arm(arm: Arm, workload: Workload, plan: Plan, reporter: Reporter) -> Run:
    config = server_config(arm, workload, plan.model)
    name = f"{workload.name}-{arm.name}-seed{workload.seed}"
    recording = (plan.results / f"{name}.recording.jsonl").absolute()
    for older in plan.results.glob(f"{recording.name}*"):  # it would be gone on with
        older.unlink()
    recorded = server_config(arm, workload, plan.model, recording)
    log = plan.results / "logs" / f"{name}.log"
    label = f"seed {workload.seed}, arm {arm.name} ({arm.title})"
    rows = []
    with ExitStack() as stack:
        with reporter.waiting(f"{label}: booting the server") as on_wait:
            server = stack.enter_context(running(recorded, log, port=plan.port, on_wait=on_wait))
        client = stack.enter_context(Client(server))
        with reporter.counting(f"{label}: requests", len(workload.calls)) as advance:
            started = time.perf_counter()
            for call in workload.calls:
                rows.append(_send(client, call))
                advance()
            wall_s = time.perf_counter() - started
        by_role = client.tier_by_role()
    run = Run(
        arm=arm.name,
        workload=workload.name,
        seed=workload.seed,
        date=now(),
        wall_s=wall_s,
        boot_s=server.boot_s,
        configuration=_configuration(config, workload),
        versions=versions(),
        machine=machine(),
        notes=workload.notes,
        rows=tuple(rows),
        by_role=by_role,
    )
    run.save(plan.results)
    return run


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
