"""What a cell is served with: sizes in blocks and bytes, and the server's command and environment.

A server of the bench runs with this repository's own specs and with no setting of EVOKE from the
environment: every arm has its defaults.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.demo.run import kv_bytes_per_token
from bench.errors import UsageProblem
from bench.matrix.arms import ARMS
from bench.matrix.cells import Budget, Cell
from bench.matrix.workloads.work import Work
from bench.serving.server import MeasuredConfig

_GIB = 2**30
_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Sizes:
    """Blocks of the engine's pool and of the tier, and the bytes of one."""

    block_bytes: int
    gpu_blocks: int
    tier_blocks: int

    @property
    def tier_bytes(self) -> int:
        """Return the tier's room in bytes."""
        return self.tier_blocks * self.block_bytes


def measure(cell: Cell, work: Work, model: Path | None) -> Sizes:
    """Return a cell's sizes; the matrix's own numbers are used where the model is not at hand.

    Raises UsageProblem where a request does not fit the engine's pool.
    """
    server = cell.server
    value_bytes = _VALUE_BYTES[server["kv_dtype"] or server["dtype"]]
    if server["layers"]:
        heads = server["layers"] * server["kv_heads"] * server["head_size"]
        token_bytes = 2 * heads * value_bytes
    elif model is not None:
        token_bytes = kv_bytes_per_token(model, value_bytes)
    else:
        raise UsageProblem(f"matrix {cell.matrix}: layers, kv_heads and head_size are needed")
    block = server["block_size"]
    need = -(-min(server["max_model_len"], work.longest) // block) + 1
    if work.longest > server["max_model_len"] or need > server["gpu_blocks"]:
        raise UsageProblem(
            f"cell {cell.name}: a request of {work.longest} tokens does not fit max_model_len "
            f"{server['max_model_len']} and {server['gpu_blocks']} blocks of {block}"
        )
    tier = Budget(cell.budget).blocks(work, token_bytes * block) if cell.budget else 0
    return Sizes(token_bytes * block, server["gpu_blocks"], tier)


def server_config(cell: Cell, sizes: Sizes, model: Path, profile: Path | None) -> MeasuredConfig:
    """Return what a cell is served with; `profile` is where its tier's overhead is written."""
    arm, server = ARMS[cell.arm], cell.server
    options = [*server["options"], "--enable-prompt-tokens-details", "--shutdown-timeout", "5"]
    if server["kv_dtype"]:
        options += ["--kv-cache-dtype", server["kv_dtype"]]
    return MeasuredConfig(
        model=model,
        gpu_blocks=sizes.gpu_blocks,
        max_model_len=server["max_model_len"],
        block_size=server["block_size"],
        max_batched_tokens=server["max_batched_tokens"],
        max_seqs=server["max_seqs"],
        dtype=server["dtype"],
        kv_space_gib=max(1, -(-sizes.gpu_blocks * sizes.block_bytes // _GIB)),
        kv_transfer=arm.kv_transfer(sizes.tier_bytes, server["block_size"], profile),
        options=tuple(options),
        environment=arm.environment(sizes.tier_bytes),
    )
