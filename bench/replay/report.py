"""bench/REPLAY.md, from results alone: a pure function of the documents."""

from collections.abc import Iterable, Sequence

from bench.replay.results import Document
from bench.replay.targets import (
    CEILING,
    OURS,
    RIVALS,
    Duel,
    duels,
    losses,
    lru_budget,
    points,
    verdicts,
)
from evoke_core.replay import TraceResult

_NAMES = {
    "lru": "LRU",
    "arc": "ARC",
    "s3fifo": "S3-FIFO",
    "wtinylfu": "W-TinyLFU 1%",
    "wtinylfu20": "W-TinyLFU 20%",
    "scored": "scored",
    "min": "MIN",
}
_COLUMNS = (*RIVALS, "scored", CEILING)

_INTRO = """\
# Replay: one policy on every workload

The results of `nox -s replay` (or `python -m bench replay`), rendered from the JSON files in
[published/replay](published/replay); nothing below is typed by hand. `--render` renders again
without replaying.

Every request of a trace goes through a single tier of a fixed size with nothing in front of it; all
its blocks are offered, one request after the other. Numbers are block hit ratios: the share of all
requested blocks that lay in a resident prefix. A budget is a share of the trace's different blocks.
`adaptive` runs with its defaults everywhere and without tags. MIN knows the future and is the
ceiling. LRU is the one that stock vLLM has had since 0.31: the tail of a request goes before its
head; what `adaptive` finds beyond it is what remains to be won there. *margin* is `adaptive`
against the best rival of the cell, in points (.01 of the hit ratio). *gap* is the share of the way
from LRU to MIN that `adaptive` goes, left out where there is none. Recorded traces and generated
shapes are kept apart: a mean over both would say nothing.

The constants of `adaptive` were frozen on the first half in time of the recorded traces called
*named* and on the shapes called *named* or *watched*, by a rule set down beforehand
([policy-notes.md](policy-notes.md)); second halves and *fresh* workloads were replayed after that.
Two reservations: where the rule kept a constant, its value comes from earlier work, the
prototype's included, which had looked at whole traces; and some second halves were seen while ideas
were tried out, before the rule chose among them. So second halves are held out from the last choice
only. On fresh workloads nothing was ever decided.
"""

_MEMORY = """\
How much memory would LRU need to find as many blocks? Read off between LRU's hit ratios at 22
budgets, on a logarithmic scale of sizes.
"""

_HINTS = """\
Hit ratios with tags, as points gained or lost against no tags at all. *Truthful*: session and role
as recorded (the conversations record neither, the shapes only sessions). *With promises*: each
request of a session says, besides, in how many seconds its blocks will be needed again
(`expect_reuse_in_s`, here known exactly), and the last one of a session that it is the last.
*Shuffled*: roles and priorities at random. *All at maximum*: every request claims role `system` and
priority 10. *One greedy tenant*: only one in eight does. *Promises at random*: each request makes
the promise that is true of another one; *everything promised at once*: all say one second.
`scored` obeys its tags by definition, so it loses what a liar takes.
"""

_PACE = """\
- `lru`, the whole call of `evoke_core.replay`, takes so many times as long as a bare loop over an
  ordered dictionary that is given the chains and counts block hits (the same ones), both in turns
  in one process: """


def render(documents: Sequence[Document], folder: str) -> str:
    """Return the report. Pictures are looked for in `folder`, relative to the report's."""
    recorded = [each for each in documents if each.kind == "recorded"]
    phases = [each for each in documents if each.kind == "phase"]
    shapes = [each for each in documents if each.kind == "shape"]
    watched = [each for each in documents if each.kind == "watched"]
    parts = [_INTRO, "## Targets\n", _verdicts(documents)]
    if any(each.curve for each in documents):
        parts.append(f"![Hit ratio over budget on two traces]({folder}/story.png)\n")
    parts.append("## Recorded traces\n")
    for document in recorded:
        parts += _recorded(document, folder)
    if any(each.sweep for each in recorded):
        parts += ["### Memory for equal hits\n", _MEMORY, _memory(recorded)]
    for title, group in (
        ("A change of phase", phases),
        ("Shapes the defaults were chosen on", [each for each in shapes if each.named]),
        ("Shapes watched while the policy was worked on", watched),
        ("Fresh shapes", [each for each in shapes if not each.named]),
    ):
        if group:
            parts += [f"## {title}\n", _described(group), _grid(group)]
    hinted = [each for each in documents if each.hints]
    if hinted:
        parts += ["## Hints\n", _HINTS, _hints(hinted)]
    parts += ["## How it was run\n", _machines(documents)]
    return "\n".join(parts)


def _verdicts(documents: Sequence[Document]) -> str:
    answers = {True: "yes", False: "**no**", None: "not known"}
    rows = [(each.target, each.found, answers[each.holds]) for each in verdicts(documents)]
    return _table(("target", "found", "holds"), rows, numbers=False)


def _recorded(document: Document, folder: str) -> list[str]:
    whole = document.whole
    named = "named" if document.named else "fresh"
    parts = [
        f"### {document.title}\n",
        f"{whole.requests:,} requests, {whole.references:,} blocks requested,"
        f" {whole.unique_blocks:,} different ones of {whole.tokens_per_block} tokens; if nothing"
        f" were evicted {whole.ceiling:.4f} would be found. {named.capitalize()}."
        f" Settings: {_settings(document)}.\n",
        f"![Hit ratio over budget]({folder}/{document.slug}.png)\n",
        _cells(duels(document.title, whole), whole),
    ]
    if document.second is not None:
        parts += [
            "Second half only:\n",
            _cells(duels(document.title, document.second), document.second),
        ]
    return parts


def _cells(found: Iterable[Duel], result: TraceResult) -> str:
    headings = ("budget", "blocks", *_headings())
    rows = [(duel.budget, f"{duel.capacity:,}", *_values(duel, result)) for duel in found]
    return _table(headings, rows)


def _grid(documents: Iterable[Document]) -> str:
    rows = [
        (duel.title, duel.budget, f"{duel.capacity:,}", *_values(duel, document.whole))
        for document in documents
        for duel in duels(document.title, document.whole)
    ]
    return _table(("workload", "budget", "blocks", *_headings()), rows)


def _headings() -> tuple[str, ...]:
    return (OURS, "best rival", "margin", *(_NAMES[name] for name in _COLUMNS), "gap")


def _values(duel: Duel, result: TraceResult) -> tuple[str, ...]:
    return (
        f"**{duel.ours:.4f}**",
        f"{duel.best:.4f} {_NAMES[duel.rival]}",
        points(duel.margin),
        *(f"{result.cell(name, duel.budget).block_hits:.4f}" for name in _COLUMNS),
        "" if duel.gap_closed is None else f"{duel.gap_closed:.3f}",
    )


def _described(documents: Iterable[Document]) -> str:
    lines = [
        f"- {each.title}: {each.whole.requests:,} requests, {each.whole.unique_blocks:,} different"
        f" blocks; {_settings(each)}."
        for each in documents
    ]
    return "\n".join(lines) + "\n"


def _memory(documents: Iterable[Document]) -> str:
    rows = []
    for document in documents:
        if document.sweep is None:
            continue
        for duel in duels(document.title, document.whole):
            needed = lru_budget(document.sweep, duel.ours)
            rows.append(
                (
                    document.title,
                    duel.budget,
                    f"{duel.capacity:,}",
                    f"{duel.ours:.4f}",
                    "outside the sweep" if needed is None else f"{needed:,.0f}",
                    "" if needed is None else f"{needed / duel.capacity:.2f}",
                )
            )
    return _table(("trace", "budget", "blocks", OURS, "LRU needs blocks", "times"), rows)


def _hints(documents: Sequence[Document]) -> str:
    claims = list(dict.fromkeys(claim for each in documents for claim in each.hints))
    rows = []
    for document in documents:
        for policy in (OURS, "scored"):
            lost = {claim: dict(losses(document, claim, policy)) for claim in document.hints}
            for budget in dict.fromkeys(cell.budget for cell in document.whole.cells):
                rows.append(
                    (
                        document.title,
                        policy,
                        budget,
                        f"{document.whole.cell(policy, budget).block_hits:.4f}",
                        *(
                            points(-lost[claim][budget]) if claim in lost else ""
                            for claim in claims
                        ),
                    )
                )
    return _table(("workload", "policy", "budget", "no tags", *claims), rows)


def _machines(documents: Sequence[Document]) -> str:
    lines = []
    for document in documents:
        machine = document.machine
        versions = ", ".join(f"{name} {version}" for name, version in document.versions.items())
        line = (
            f"- {document.date}, {machine['cpu']}, {machine['cores']} cores,"
            f" {machine['memory_gib']} GiB, {machine['system']}; {versions}"
        )
        if line not in lines:
            lines.append(line)
    seconds = sum(_seconds(each) for each in documents)
    lines.append(f"- all cells together: {seconds / 60:.0f} minutes of one core")
    if any(each.pace for each in documents):
        lines.append(_PACE + "; ".join(_pace(each) for each in documents if each.pace))
    return "\n".join(lines) + "\n"


def _pace(document: Document) -> str:
    times = ", ".join(f"{each.times:.2f} ({each.budget})" for each in document.pace)
    return f"{document.title} {times}"


def _seconds(document: Document) -> float:
    results = [document.whole, document.second, document.sweep, document.curve]
    results += document.hints.values()
    return sum(cell.counts.seconds for result in results if result for cell in result.cells)


def _settings(document: Document) -> str:
    parts = []
    for name, value in document.settings.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return "; ".join(parts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    last = "---:" if numbers else "---"
    lines = [headings, ["---", *[last] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
