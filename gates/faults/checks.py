"""The faults, one function each: what is done to a server, and what must hold afterwards."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.envelope import versions
from bench.errors import BenchError
from gates.faults.scene import ANSWER_TOKENS, Outcome, Sampler, Scene, Stage, growth

_RESET = "/reset_prefix_cache?reset_external=true"
_CLIENTS = 64
_FLAT = 0.05
_CONTEXT_BLOCKS = 10
_UPSTREAM_RESET = (
    "vLLM 0.24.0's own defect: its offloading scheduler raises KeyError when the prefix cache and "
    "the tier are reset with requests in flight (fixed upstream in #48102)"
)


@dataclass(frozen=True)
class Fault:
    """A named fault, and what it does, for a person."""

    name: str
    title: str
    run: Callable[[Scene, Outcome, float], None]


def killed(scene: Scene, outcome: Outcome, minutes: float) -> None:
    """SIGKILL while blocks are being stored, then a new server on the same machine."""
    contexts = scene.contexts[:8]
    with scene.stage("killed", tier_blocks=60, store_s=2.0) as stage:
        with ThreadPoolExecutor(4) as pool:
            ignored = Outcome("before the kill")
            for context in contexts[:4]:
                pool.submit(stage.check, context, ignored)
            stage.wait_in_flight("store")
            outcome.figures["stores_under_way_at_the_kill"] = stage.in_flight("store")
            group = stage.group()
            os.killpg(group, signal.SIGKILL)
        wrong = [problem for problem in ignored.problems if problem.startswith("wrong")]
        outcome.problems += wrong
        outcome.expect(not stage.client.alive(), "the server outlived SIGKILL")
    with scene.stage("restarted", tier_blocks=60) as stage:
        for _ in range(2):
            stage.check_all(contexts, outcome)
        restored = stage.client.counters().restored
        outcome.figures["restored_tokens_after_the_restart"] = restored
        outcome.expect(restored > 0, "nothing was restored after the restart")
        stage.settle(outcome)


def full(scene: Scene, outcome: Outcome, minutes: float) -> None:
    """A tier of two contexts, all of it pinned or held by slow loads, and eight more contexts."""
    contexts = scene.contexts[:10]
    tier_blocks = 2 * _CONTEXT_BLOCKS
    settings = {"max_pinned_fraction": 1.0}
    with scene.stage("full", tier_blocks=tier_blocks, load_s=1.0, evoke=settings) as stage:
        pinned = {"pinned": True, "priority": 10}
        for context in contexts[:2]:
            stage.check(context, outcome, pinned)
        stage.check_all(contexts[2:], outcome)  # pushes the pinned ones out of the pool
        before = stage.client.counters()
        with ThreadPoolExecutor(2) as pool:
            loads = [pool.submit(stage.check, c, outcome, pinned) for c in contexts[:2]]
            stage.wait_in_flight("load")
            outcome.figures["answered_beside"] = stage.check_all(
                contexts[2:], outcome, threads=4, tags=pinned
            )
            for load in loads:
                load.result()
        restored = stage.client.counters().restored - before.restored
        metrics = stage.client.metrics()
        outcome.figures["restored_tokens"] = restored
        outcome.figures["refused_blocks"] = metrics.get(
            "vllm:kv_offload_evoke_refused_blocks_total"
        )
        outcome.expect(
            restored >= tier_blocks * 32, "the pinned contexts were not restored from the tier"
        )
        stage.check_all(contexts * 2, outcome, threads=4)
        stage.settle(outcome)


def aborted(scene: Scene, outcome: Outcome, minutes: float) -> None:
    """Clients that hang up while their blocks are being loaded."""
    contexts = scene.contexts[:6]
    with scene.stage("aborted", tier_blocks=80, load_s=1.5) as stage:
        stage.check_all(contexts, outcome)
        stage.check_all(scene.contexts[6:14], outcome)  # pushes them out of the pool
        during = 0
        for context in contexts:
            during += _hang_up(stage, context, 0.4)
        outcome.figures["hung_up_while_loading"] = during
        outcome.expect(during > 0, "no request was aborted while loading: the gate proves nothing")
        again = threading.Thread(target=_hang_up, args=(stage, contexts[0], 0.4))
        again.start()
        stage.check_all(contexts, outcome, threads=3)  # the same blocks, wanted and let go
        again.join()
        stage.check_all(contexts, outcome)
        stage.settle(outcome)


def reset(scene: Scene, outcome: Outcome, minutes: float) -> None:
    """The prefix cache and the tier reset: idle, then with requests in flight."""
    contexts = scene.contexts[:8]
    with scene.stage("reset", tier_blocks=120, load_s=0.2) as stage:
        for _ in range(2):
            stage.check_all(contexts, outcome)
        before = stage.client.counters()
        outcome.expect(before.restored > 0, "nothing was restored before the reset")
        stage.client.request("POST", _RESET)
        stage.check_all(contexts, outcome)
        after = stage.client.counters()
        outcome.figures["restored_after_an_idle_reset"] = after.restored - before.restored
        outcome.expect(after.restored == before.restored, "blocks survived the reset")
        stage.check_all(contexts, outcome)
        outcome.expect(
            stage.client.counters().restored > after.restored,
            "nothing is restored any more after the reset",
        )
        stage.settle(outcome)
        _reset_under_load(stage, outcome)


def _reset_under_load(stage: Stage, outcome: Outcome) -> None:
    contexts = stage.scene.contexts
    under_load = Outcome("under load")
    stop = threading.Event()

    def ask() -> None:
        rng = random.Random(threading.get_ident())
        while not stop.is_set() and not under_load.problems:
            stage.check(rng.choice(contexts), under_load)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    resets = 0
    try:
        for _ in range(10):
            time.sleep(0.5)
            with suppress(BenchError):
                stage.client.request("POST", _RESET)
                resets += 1
            if under_load.problems:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    outcome.figures["resets_under_load"] = resets
    if stage.client.alive():
        outcome.problems += under_load.problems
        stage.settle(outcome)
    elif _is_upstream_crash(stage.server.log):
        outcome.upstream = _UPSTREAM_RESET
        wrong = [problem for problem in under_load.problems if problem.startswith("wrong")]
        outcome.problems += wrong
    else:
        outcome.problems.append(stage.server.failure("a reset under load ended it").message)


def clients(scene: Scene, outcome: Outcome, minutes: float) -> None:
    """64 clients at once, on a tier that holds a quarter of what they ask for."""
    distinct = len(scene.contexts) * _CONTEXT_BLOCKS
    end = time.monotonic()
    answered = 0
    lock = threading.Lock()
    with scene.stage("clients", tier_blocks=distinct // 4) as stage, Sampler(stage) as sampler:
        end = time.monotonic() + 60 * minutes

        def ask(seed: int) -> None:
            nonlocal answered
            rng = random.Random(seed)
            while time.monotonic() < end and len(outcome.problems) < 10:
                right = stage.check(rng.choice(scene.contexts), outcome)
                with lock:
                    answered += right

        with scene.reporter.counting("clients: seconds", int(60 * minutes)) as advance:
            threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(_CLIENTS)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                if time.monotonic() < end:
                    advance()
                time.sleep(1.0)
        counters = stage.client.counters()
        stage.settle(outcome)
    grown = growth(sampler.samples)
    outcome.figures |= {
        "clients": _CLIENTS,
        "minutes": minutes,
        "answered": answered,
        "restored_tokens": counters.restored,
        "memory_mib_at_the_end": sampler.samples[-1] >> 20,
        "memory_growth_after_warm_up": round(grown, 4),
    }
    outcome.expect(counters.restored > 0, "nothing was restored")
    outcome.expect(answered >= _CLIENTS, f"only {answered} answers came")
    outcome.expect(grown <= _FLAT, f"memory grew by {grown:.1%} after warm-up")


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("killed", "SIGKILL while storing, and a restart", killed),
        Fault("full", "a full tier, all of it pinned or held", full),
        Fault("aborted", "requests aborted while loading", aborted),
        Fault("reset", "the prefix cache reset, idle and under load", reset),
        Fault("clients", "64 clients on a tier that thrashes", clients),
    )
}


def _hang_up(stage: Stage, context: tuple[int, ...], after_s: float) -> bool:
    """Ask, and drop the connection before the answer; tell whether a load was under way then."""
    body = {
        "model": "model",
        "prompt": list(context),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    with suppress(httpx.TimeoutException):
        httpx.post(f"{stage.server.url}/v1/completions", json=body, timeout=after_s)
    return stage.in_flight("load") > 0


def _is_upstream_crash(log: Path) -> bool:
    text = log.read_text(errors="replace")
    at_fault = "offloading/scheduler.py" in text and "KeyError" in text
    return at_fault and versions().get("vllm", "").startswith("0.24.0")
