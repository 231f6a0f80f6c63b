"""`python -m examples.transformers_runtime`: the scene, the count, and what a restore costs."""

from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from bench import ROOT
from bench.progress import Reporter, make_console
from bench.serving.model import check_model_folder, prepare_model
from examples.transformers_runtime.restore_cost import LENGTHS, measure
from examples.transformers_runtime.runtime import SIGNALS, TRUNCATION, Runtime, Said
from examples.transformers_runtime.scene import SEEDS, Conversation, conversation

_PATH = click.Path(path_type=Path)
ARMS: dict[str, dict[str, Any]] = {
    "recovery": {"config": SIGNALS, "recover": True},
    "truncation": {"config": TRUNCATION, "recover": False},
    "unbounded": {"budget": None, "recover": False},
}


@click.command()
@click.option("--budget", type=click.IntRange(256), default=1024, show_default=True)
@click.option("--facts", type=click.IntRange(1, SEEDS), default=SEEDS, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of timings.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--model", type=_PATH, help="A Hugging Face model folder instead of SmolLM2.")
@click.option("--cache", type=_PATH, default=ROOT / ".cache", help="Where the model is kept.")
def main(
    budget: int, facts: int, repeats: int, threads: int, model: Path | None, cache: Path
) -> None:
    """A fact planted at turn 1, a dozen other turns, and the question, in a bounded cache."""
    console = make_console()
    reporter = Reporter(console)
    if model is None:
        cache.mkdir(parents=True, exist_ok=True)
        model = prepare_model(cache, reporter.say)
    language_model, tokenizer = load(check_model_folder(model), threads)
    found: dict[str, list[Said]] = {arm: [] for arm in ARMS}
    conversations = [conversation(seed) for seed in range(facts)]
    for seed, talk in enumerate(conversations):
        for arm, settings in ARMS.items():
            shown = console if seed == 0 and arm == "recovery" else None
            runtime = Runtime(language_model, tokenizer, **{"budget": budget, **settings})
            found[arm].append(play(runtime, talk, shown))
        show_answers(console, seed, talk, {arm: said[-1] for arm, said in found.items()})
    show_count(console, conversations, found, budget)
    show_costs(console, measure(language_model, LENGTHS, repeats))


def load(folder: Path, threads: int) -> tuple[Any, Any]:
    """The model in float32, with attention that hands out its weights, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def play(runtime: Runtime, talk: Conversation, console: Console | None) -> Said:
    """Take all turns; return the last."""
    for number, turn in enumerate(talk.turns, start=1):
        said = runtime.say(turn.user, turn.reply)
        if console is not None:
            show_turn(console, number, turn.user, said, given=turn.reply is not None)
    return said


def show_turn(console: Console, number: int, user: str, said: Said, *, given: bool) -> None:
    console.print(f"\n[bold]turn {number}[/bold]  {user}")
    for text in said.recalled:
        console.print(f"  came back: {text!r}", style="green", markup=False)
    for text in said.moved:
        console.print(f"  moved here: {text!r}", style="green", markup=False)
    reply = said.reply if not given or len(said.reply) < 80 else said.reply[:77] + "..."
    console.print(f"  {'given' if given else 'model'}: {reply}", style="dim", markup=False)
    left = f", {len(said.evicted)} blocks left" if said.evicted else ""
    took = f", recalled in {said.recall_s * 1000:.0f} ms" if said.recall_s else ""
    console.print(f"  {said.tokens} tokens in the cache{left}{took}", style="dim")


def show_answers(console: Console, seed: int, talk: Conversation, answers: dict[str, Said]) -> None:
    console.print(f"\n[bold]fact {seed + 1}: {talk.code}[/bold]  {talk.turns[-1].user}")
    for arm, said in answers.items():
        mark = "[green]recalled[/green]" if talk.code in said.reply else "[red]lost[/red]"
        console.print(f"  {arm:<11}{mark}  ", end="")
        console.print(repr(said.reply), style="dim", markup=False)


def show_count(
    console: Console,
    talks: list[Conversation],
    found: dict[str, list[Said]],
    budget: int,
) -> None:
    table = Table(title=f"Facts recalled, budget {budget} tokens")
    for column in (
        "arm",
        "recalled",
        "from the store",
        "from farther ahead",
        "most tokens in the cache",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, answers in found.items():
        right = sum(talk.code in said.reply for talk, said in zip(talks, answers, strict=True))
        back, here = (
            sum(
                any(talk.code in text for text in getattr(said, where))
                for talk, said in zip(talks, answers, strict=True)
            )
            for where in ("recalled", "moved")
        )
        most = str(max(said.most for said in answers))
        table.add_row(arm, f"{right} of {len(talks)}", str(back), str(here), most)
    console.print()
    console.print(table)


def show_costs(console: Console, costs: list[tuple[int, float, float]]) -> None:
    table = Table(title="Bringing a block back, against computing it again (512 tokens before it)")
    for column in ("tokens", "restore", "prefill", "ratio"):
        table.add_column(column, justify="right")
    for tokens, restore, prefill in costs:
        cells = (f"{restore * 1000:.1f} ms", f"{prefill * 1000:.0f} ms", f"{prefill / restore:.0f}")
        table.add_row(str(tokens), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
