"""Runs the faults and writes what they came to."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.envelope import machine, versions
from bench.errors import BenchError
from bench.progress import Reporter
from gates.faults.checks import FAULTS, Fault
from gates.faults.scene import Outcome, Scene

_CONTEXTS = 24
_SHOWN_PROBLEMS = 5


def run_faults(
    faults: Sequence[Fault], model: Path, folder: Path, minutes: float, reporter: Reporter
) -> dict[str, Any]:
    """Run the faults one after the other, write the report into `folder` and return it."""
    scene = Scene.prepare(model, _CONTEXTS, folder, reporter)
    outcomes = []
    for number, fault in enumerate(faults, 1):
        reporter.say(f"fault {number} of {len(faults)}: {fault.title}")
        outcomes.append(run_fault(fault, scene, minutes))
        for line in lines(outcomes[-1]):
            reporter.say(line)
    report = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": "fail" if any(outcome.problems for outcome in outcomes) else "pass",
        "versions": versions(),
        "machine": machine(),
        "faults": {
            outcome.name: {
                "title": FAULTS[outcome.name].title,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 1),
                **({"upstream": outcome.upstream} if outcome.upstream else {}),
                "problems": outcome.problems,
                "figures": outcome.figures,
            }
            for outcome in outcomes
        },
    }
    (folder / report_name()).write_text(json.dumps(report, indent=1) + "\n")
    return report


def report_name() -> str:
    """Return the report's file name: one for each vLLM, as faults differ between them."""
    version = versions().get("vllm", "unknown").partition("+")[0]
    return f"faults-vllm-{version}.json"


def run_fault(fault: Fault, scene: Scene, minutes: float) -> Outcome:
    """Run one fault; what it raises is its problem."""
    outcome = Outcome(fault.name)
    started = time.monotonic()
    try:
        fault.run(scene, outcome, minutes)
    except BenchError as error:
        outcome.problems.append(error.message)
    outcome.seconds = time.monotonic() - started
    return outcome


def lines(outcome: Outcome) -> list[str]:
    """Return an outcome in lines for a person."""
    figures = ", ".join(f"{name} {value}" for name, value in outcome.figures.items())
    made = [f"{outcome.name}: {outcome.status} in {outcome.seconds:.0f} s; {figures}"]
    made += [f"  {problem}" for problem in outcome.problems[:_SHOWN_PROBLEMS]]
    if (more := len(outcome.problems) - _SHOWN_PROBLEMS) > 0:
        made.append(f"  and {more} more")
    if outcome.upstream:
        made.append(f"  {outcome.upstream}")
    return made
