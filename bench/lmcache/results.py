"""What a replay through LMCache leaves: one JSON file, and the table rendered from it.

A file says when, on which class of machine, with which versions, trace and settings; never a host
or a path. Needs no LMCache.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.envelope import machine, now, versions

SCHEMA = 1


def document(
    trace: Path, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what is written: ``results``, one per policy and pool, and how they came to be."""
    return {
        "schema": SCHEMA,
        "date": now()[:10],
        "machine": machine(),
        "versions": versions(),
        "trace": {"name": trace.name, "sha256": sha256(trace.read_bytes()).hexdigest()},
        "settings": dict(settings),
        "results": [dict(result) for result in results],
    }


def write(path: Path, written: Mapping[str, Any]) -> None:
    """Write a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


def table(results: Sequence[Mapping[str, Any]], distinct: int) -> str:
    """The results as a table in Markdown: hit tokens, and their share of what was asked for.

    ``distinct``: the trace's different chunks, of which a pool holds a share.
    """
    budgets = sorted({result["chunks"] for result in results})
    head = " | ".join(f"{chunks:,} chunks ({chunks / distinct:.0%})" for chunks in budgets)
    lines = [f"| policy | {head} |", "| --- |" + " ---: |" * len(budgets)]
    for policy in dict.fromkeys(result["policy"] for result in results):
        cells = [
            f"{result['hit_tokens']:,} ({result['hit_tokens'] / result['tokens']:.1%})"
            for chunks in budgets
            for result in results
            if result["policy"] == policy and result["chunks"] == chunks
        ]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
