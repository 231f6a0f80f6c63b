"""Small cells, plans and workloads for the tests of the bench matrix."""

import zlib
from pathlib import Path

from bench.matrix.cells import Cell, Matrix, load_matrix
from bench.matrix.results import Plan, Planned, Result, Row
from bench.matrix.run import Bench

MATRIX = """
title = "Small"
why = "for tests"
model = "tiny-random"
targets = true

[server]
gpu_blocks = 17
max_model_len = 512
layers = 2
kv_heads = 2
head_size = 32

[[grid]]
workload = "w1s"
arms = ["A1", "A2"]
budgets = ["1.6x hot"]
seeds = [0, 1]
options = { hot = 2, cold = 2, loops = 3, tokens = 128, facts = 1 }
seconds = 10

[[grid]]
workload = "w1s"
arms = ["A4"]
budgets = ["1.6x hot"]
options = { hot = 2, cold = 2, loops = 3, tokens = 128, facts = 1 }

[[grid]]
part = "secondary"
workload = "w1"
arms = ["A0"]
options = { contexts = 2, loops = 2, tokens = 128, facts = 1 }
"""


def encode(text: str) -> list[int]:
    """One token a word, whatever the tokenizer of the day; never 13, on which the fake dies."""
    return [20 + zlib.crc32(word.encode()) % 10**6 for word in text.split()]


def decode(ids: object) -> str:
    """Answers of the fake server mean nothing."""
    return "12345"


def matrix(folder: Path, text: str = MATRIX) -> Matrix:
    """Return the small matrix, read from a file."""
    path = folder / "small.toml"
    path.write_text(text)
    return load_matrix(str(path))


def bench(folder: Path, text: str = MATRIX) -> Bench:
    """Return a matrix made ready, without a model."""
    return Bench(matrix(folder, text), folder / "model", encode, decode, {})


def row(kind: str, restored: int, ttft_s: float = 1.0, **more: object) -> Row:
    """Return a request of 100 tokens, 20 of them in the pool."""
    fields = {
        "context": kind,
        "kind": kind,
        "loop": 1,
        "asked": 100,
        "cached": 20 + restored,
        "in_gpu": 20,
        "restored": restored,
        "ttft_s": ttft_s,
        "latency_s": ttft_s + 1,
        "answer": "12345",
        "score": 1.0,
    }
    return Row(**{**fields, **more})  # type: ignore[arg-type]


def result(arm: str, rows: tuple[Row, ...], seed: int = 0, **more: object) -> Result:
    """Return a cell of W1S, or what `more` says."""
    budget = "" if arm == "A0" else "1.6x hot"
    fields = {
        "matrix": "small",
        "cell": f"w1s-{arm}-{budget}-seed{seed}".replace(" ", ""),
        "workload": "w1s",
        "label": "w1s",
        "arm": arm,
        "budget": budget,
        "seed": seed,
        "digest": "d",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "a cpu", "cores": 2, "memory_gib": 24.0, "system": "Linux x86_64"},
        "versions": {"python": "3.11", "vllm": "0.24.0"},
        "configuration": {"arm": arm},
        "sizes": {
            "tier_blocks": 38 if budget else 0,
            "gpu_blocks": 17,
            "hot_blocks": 24,
            "all_blocks": 424,
            "requests": len(rows),
        },
        "open_loop": False,
        "boot_s": 20.0,
        "wall_s": 60.0,
        "metrics": {"asked": 100, "in_gpu": 20, "queried": 80, "restored": 40},
        "scheduler": {
            "steps": 100,
            "calls": 1000,
            "manager_ns": 2_000_000,
            "step_ns": 1_000_000_000,
            "worst_step_ns": 90_000,
        },
        "notes": ("a note",),
        "rows": rows,
    }
    return Result(**{**fields, **more})  # type: ignore[arg-type]


def plan_of(cells: list[Result], *more: Planned, references: tuple[object, ...] = ()) -> Plan:
    """Return a plan that holds these cells, and more."""
    planned = [
        Planned(c.cell, c.label, c.arm, c.budget, c.seed, "primary", c.digest, None, 0.5, 0.6)
        for c in cells
    ]
    return Plan("small", "Small", "for tests", "m", True, references, (*planned, *more))  # type: ignore[arg-type]


def names(cells: tuple[Cell, ...] | list[Cell]) -> list[str]:
    """Return the cells' names."""
    return [cell.name for cell in cells]
