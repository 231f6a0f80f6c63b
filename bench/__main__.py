"""`python -m bench`: one line for every error, no traceback, and no server left behind.

A command's module is imported only when the command is called: they need different environments.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from bench.entry import run

_FORWARD = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group()
def cli() -> None:
    """Benchmarks and demonstrations of EVOKE."""


def _add(name: str, module: str, summary: str, attribute: str = "main") -> None:
    @cli.command(name, short_help=summary, add_help_option=False, context_settings=_FORWARD)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def forward(args: tuple[str, ...]) -> None:
        command: click.Command = getattr(import_module(module), attribute)
        command.main(list(args), prog_name=f"python -m bench {name}", standalone_mode=False)


_add("plan", "bench.matrix.cli", "What a matrix would run, and how long it takes.", "plan")
_add("run", "bench.matrix.cli", "Workloads × arms × budgets × seeds on real servers.", "run")
_add("report", "bench.matrix.cli", "Render a matrix's cells: Markdown and a page.", "report")
_add("compare", "bench.matrix.cli", "Which differences of two arms are significant.", "compare")
_add("demo", "bench.demo.cli", "A real server keeps its hot contexts, or does not.")
_add("eviction-cost", "bench.eviction_cost", "Time per request in the tier's manager.")
_add("memory-cost", "bench.memory_cost", "Bytes per block of the tier's manager.")
_add("replay", "bench.replay.cli", "What each policy keeps of recorded and generated traces.")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for what cannot be right, 130 when interrupted."""
    return run(cli, "bench", args)


if __name__ == "__main__":
    sys.exit(main())
