"""Where contexts and questions come from: made by the project, or a file that the user points to.

The file (`--data FILE`) is JSON lines, one context a line: {"context": text, "questions": [text,
...], "answers": [[text, ...] or text, ...]}, as MemoryAgentBench can be exported. An answer scores
if it holds one of the texts. Contexts are cut at the option `tokens`, head first. The file stays
where it is; a result names it by its last part and a digest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from bench.errors import UsageProblem
from bench.matrix.workloads.text import ask_for, chat, make_context
from bench.matrix.workloads.work import Ask

DATA = "data"


@dataclass(frozen=True)
class Item:
    """A context and what can be asked about it: questions, each with what an answer must hold."""

    name: str
    tokens: tuple[int, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]

    def question(self, rng: Random) -> tuple[str, tuple[str, ...]]:
        """Return one question's text and what its answer must hold."""
        return rng.choice(self.questions)


@dataclass(frozen=True)
class Found:
    """Contexts, and what a reader must know of where they come from."""

    items: tuple[Item, ...]
    notes: tuple[str, ...]


def contexts(ask: Ask, names: Sequence[str]) -> Found:
    """Return a context for each name; the options `tokens` and `facts` are read."""
    tokens, facts = ask.number("tokens", 256, 64), ask.number("facts", 2)
    path = ask.files.get(DATA)
    if path is not None:
        return _from_file(ask, path, names, tokens)
    items = []
    for name in names:
        made = make_context(ask.random(name), name, tokens, ask.encode, facts=facts)
        asked = tuple((ask_for(safe), (code,)) for safe, code in made.codes.items())
        items.append(Item(name, made.tokens, asked))
    return Found(tuple(items), (f"contexts made by the project, facts in each: {facts}",))


def _from_file(ask: Ask, path: Path, names: Sequence[str], tokens: int) -> Found:
    rows = read_rows(path)
    if len(rows) < len(names):
        raise UsageProblem(f"{path}: {len(rows)} contexts, {len(names)} are needed")
    chosen = ask.random("data").sample(rows, len(names))
    items = []
    for name, row in zip(names, chosen, strict=True):
        ids = ask.encode(f"<|im_start|>system\n{row['context']}")[:tokens]
        asked = tuple(
            (chat(question), (answer,))
            for question, answer in zip(row["questions"], row["answers"], strict=True)
        )
        items.append(Item(name, tuple(ids), asked))
    digest = sha256(path.read_bytes()).hexdigest()[:12]
    return Found(tuple(items), (f"contexts from {path.name} (sha256 {digest}), cut at {tokens}",))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a data set; UsageProblem names the first line that is none of it.

    An answer that is a list keeps its first text.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"cannot read data set {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            answers = [a if isinstance(a, str) else a[0] for a in row["answers"]]
            questions = [str(question) for question in row["questions"]]
            if not questions or len(questions) != len(answers):
                raise ValueError("as many answers as questions are needed, and at least one")
            rows.append(
                {"context": str(row["context"]), "questions": questions, "answers": answers}
            )
        except (ValueError, LookupError, TypeError) as error:
            raise UsageProblem(f"{path}:{number}: not a context with questions ({error})") from None
    return rows
