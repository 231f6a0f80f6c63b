"""Records one arm: its server started, every probe asked in order, the server ended.

Probes are asked one at a time, so what the caches did for each can be read from the server's
counters. A probe that gets no answer is recorded with its error; when the server is down the
rest is recorded as unanswered, and the comparer judges it.
"""

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.envelope import machine, now, versions
from bench.errors import BenchError
from bench.progress import Reporter
from bench.serving.server import MeasuredConfig, running
from gates.arms import Arm, server_config
from gates.client import Counters, GateClient, Unanswered
from gates.profiles import Profile
from gates.recording import Answer, Recording
from gates.sizing import Sizes, measure
from gates.workload import Encode, Probe, make_probes, reusable_tokens, workload_digest


@dataclass(frozen=True)
class Bench:
    """A profile made ready: its probes, their sizes, and the model's folder."""

    profile: Profile
    probes: tuple[Probe, ...]
    sizes: Sizes
    model: Path

    @classmethod
    def prepare(cls, profile: Profile, encode: Encode, model: Path) -> "Bench":
        """Make the probes and check that they fit; UsageProblem where they do not."""
        try:
            probes = make_probes(profile.workload, encode)
        except ValueError as error:
            raise BenchError(f"profile {profile.name}: workload.{error}") from None
        return cls(profile, probes, measure(profile, probes), model)


def record(arm: Arm, bench: Bench, log: Path, reporter: Reporter) -> Recording:
    """Run `arm` and return its recording; BenchError where its server never was healthy."""
    profile, sizes = bench.profile, bench.sizes
    config = server_config(arm, profile, sizes, bench.model)
    with ExitStack() as stack:
        with reporter.waiting(f"{arm.name} ({arm.title}): booting the server") as on_wait:
            server = stack.enter_context(running(config, log, on_wait=on_wait))
        client = stack.enter_context(GateClient(server))
        started = time.monotonic()
        answers, counters = _ask_all(client, bench, arm, reporter)
        wall_s = time.monotonic() - started
    return Recording(
        profile=profile.name,
        arm=arm.name,
        title=arm.title,
        date=now(),
        rules=profile.rules,
        workload={
            "digest": workload_digest(bench.probes),
            "unique_blocks": sizes.unique_blocks,
            **asdict(profile.workload),
        },
        server=_configuration(config, profile, arm, sizes),
        versions=versions(),
        machine=machine(),
        boot_s=round(server.boot_s, 1),
        wall_s=round(wall_s, 1),
        stored_bytes=counters.stored_bytes,
        restored_bytes=counters.restored_bytes,
        answers=answers,
    )


def _ask_all(
    client: GateClient, bench: Bench, arm: Arm, reporter: Reporter
) -> tuple[tuple[Answer, ...], Counters]:
    """Ask every probe; return the answers, and the counters as they last were."""
    reusable = reusable_tokens(bench.probes, bench.profile.pools.block_size)
    answers = []
    counters = client.counters()
    down: str | None = None
    with reporter.counting(f"{arm.name}: probes", len(bench.probes)) as advance:
        for probe, reuse in zip(bench.probes, reusable, strict=True):
            answer = Answer(
                session=probe.session,
                turn=probe.turn,
                kind=probe.kind,
                prompt=probe.digest,
                asked=len(probe.prompt),
                reusable=reuse,
                passkey=probe.passkey,
            )
            if down is None:
                try:
                    answer, counters = _ask(client, probe, answer, counters)
                except Unanswered as error:
                    answer = replace(answer, error=str(error))
                    if error.alive:
                        counters = client.counters()
                    else:
                        down = str(error)
            else:
                answer = replace(answer, error=down)
            answers.append(answer)
            advance()
        if down is None:
            counters = client.counters()  # transfers are counted a step later than requests
    return tuple(answers), counters


def _ask(
    client: GateClient, probe: Probe, answer: Answer, before: Counters
) -> tuple[Answer, Counters]:
    reply = client.ask(probe.prompt, probe.answer_tokens)
    after = client.settled(before, len(probe.prompt))
    answer = replace(
        answer,
        in_gpu=after.in_gpu - before.in_gpu,
        restored=after.restored - before.restored,
        token_ids=reply.token_ids,
        logprobs=tuple(round(value, 6) for value in reply.logprobs),
        text=reply.text,
    )
    return answer, after


def _configuration(
    config: MeasuredConfig, profile: Profile, arm: Arm, sizes: Sizes
) -> dict[str, Any]:
    """Return what a reader needs to repeat the run; no path, no port."""
    shown = asdict(config)
    del shown["model"], shown["environment"]
    return {
        "model": profile.model.source,
        **shown,
        "options": list(config.options),
        "device": profile.pools.device,
        "tier_blocks": sizes.tier_blocks if arm.tier else 0,
        "cores": len(os.sched_getaffinity(0)),
    }
