"""A whole gate: every arm recorded, one after the other, then the verdict.

Each arm has a server of its own, so each starts with empty caches and a policy that has learned
nothing. Each recording is saved as soon as it is made.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.progress import Reporter
from gates.arms import ARMS, NEGATIVES, Arm, server_config
from gates.compare import BROKEN, FAIL, PASS, load_verdict, make_verdict, render
from gates.profiles import Profile
from gates.recorder import Bench, record
from gates.recording import SUFFIX, Recording

VERDICT = "verdict.json"
NEEDED = ("baseline", "evoke", "control")
_SHOWN_FAILURES = 10

Record = Callable[[Arm, Bench, Path, Reporter], Recording]
"""Records one arm, with what its engine says in a log at this path."""


def arms_of(profile: Profile) -> list[Arm]:
    """Return the arms in the order they run: the comparison's, then the negative controls."""
    names = [*NEEDED, *(name for name in profile.arms if name not in NEEDED)]
    return [ARMS[name] for name in names] + list(NEGATIVES.values())


def run_gate(
    bench: Bench, results: Path, reporter: Reporter, record: Record = record
) -> dict[str, Any]:
    """Record every arm into `results`, write the verdict there and return it."""
    results.mkdir(parents=True, exist_ok=True)
    for stale in (*results.glob(f"*{SUFFIX}"), results / VERDICT):
        stale.unlink(missing_ok=True)
    arms = arms_of(bench.profile)
    for number, arm in enumerate(arms, 1):
        reporter.say(f"arm {number} of {len(arms)}: {arm.name}")
        recording = record(arm, bench, results / "logs" / f"{arm.name}.log", reporter)
        recording.save(results / f"{arm.name}{SUFFIX}")
    verdict = derive(results)
    (results / VERDICT).write_text(render(verdict))
    return verdict


def derive(folder: Path) -> dict[str, Any]:
    """Return the verdict of the recordings in `folder`; no server and no engine is needed.

    Raises BenchError where a recording that the verdict needs is missing or unusable.
    """
    recordings = {
        path.name.removesuffix(SUFFIX): Recording.load(path)
        for path in sorted(folder.glob(f"*{SUFFIX}"))
    }
    for name in (*NEEDED, *NEGATIVES):
        if name not in recordings:
            raise BenchError(f"{folder} holds no recording of {name}")
    return make_verdict(
        *(recordings.pop(name) for name in NEEDED),
        negatives={name: recordings.pop(name) for name in NEGATIVES},
        others=recordings,
    )


def rederive(folder: Path) -> dict[str, Any]:
    """Return the verdict in `folder` if its recordings still give exactly that one."""
    published = load_verdict(folder / VERDICT)
    if derive(folder) != published:
        raise BenchError(f"the recordings in {folder} do not give the verdict that lies with them")
    return published


def summary(verdict: Mapping[str, Any]) -> list[str]:
    """Return the verdict in lines for a person."""
    counts = verdict["counts"]
    lines = []
    for failure in verdict["failures"][:_SHOWN_FAILURES]:
        where = f"session {failure['session']}, turn {failure['turn']} ({failure['probe']})"
        at = f" at position {failure['position']}" if "position" in failure else ""
        lines.append(f"  {where}: {failure['kind']}{at} {failure.get('detail', '')}".rstrip())
    if (more := len(verdict["failures"]) - _SHOWN_FAILURES) > 0:
        lines.append(f"  and {more} more, in the verdict's file")
    lines += [
        f"evoke: {counts['divergences']} of {counts['probes']} probes diverge from the baseline; "
        f"{counts['passkeys_found']} of {counts['passkeys_baseline']} passkeys; largest logprob "
        f"difference {counts['largest_logprob_difference']}",
        f"through restored blocks: {counts['restored_probes']} probes, "
        f"{counts['restored_tokens']:,} tokens, {counts['restored_bytes']:,} bytes (stored "
        f"{counts['stored_bytes']:,})",
        f"control (recomputed): {verdict['control']['divergences']} diverge",
    ]
    lines += [
        f"{name}: {other['divergences']} diverge; {other['restored_tokens']:,} tokens restored, "
        f"{other['stored_bytes']:,} bytes stored"
        for name, other in verdict["others"].items()
    ]
    lines += [
        f"negative control {name}: gate says {negative['verdict']} ({negative['why']})"
        for name, negative in verdict["negative_controls"].items()
    ]
    lines += [f"reason: {reason}" for reason in verdict["reasons"]]
    meaning = {
        PASS: "PASS",
        FAIL: "FAIL",
        BROKEN: "BROKEN: a damaged worker was not noticed, so the gate proves nothing",
    }
    lines.append(f"gate {verdict['profile']}: {meaning[verdict['verdict']]}")
    return lines


def plan_lines(bench: Bench, *, servers: bool = True) -> list[str]:
    """Return what a run would do: sizes, and each arm with its server's command line."""
    profile = bench.profile
    lines = [f"profile {profile.name}: {profile.title}", *bench.sizes.lines()]
    for arm in arms_of(profile):
        if not servers:
            lines.append(f"{arm.name}: {arm.title}, in this process")
            continue
        config = server_config(arm, profile, bench.sizes, Path(profile.model.source))
        lines.append(f"{arm.name}: vllm {' '.join(config.command(0)[3:])}")
    return lines
