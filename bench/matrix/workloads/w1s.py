"""W1S, hot and cold: a few contexts return in every loop, between scans that never return.

An agent platform's long-lived contexts beside documents that pass through once. The cold contexts
of a loop are new, so every block of theirs that is kept is kept in vain. Every loop is shuffled
anew. Requests carry no tags: what is told is what a stock client tells.

Options: hot, cold (contexts a loop), tokens, loops, facts.
"""

from bench.matrix.workloads.data import Item, contexts
from bench.matrix.workloads.text import ANSWER_TOKENS
from bench.matrix.workloads.work import Ask, Request, Work


def make(ask: Ask) -> Work:
    """Return the requests: in each loop every hot context and `cold` new ones, shuffled."""
    hot, cold = ask.number("hot", 4), ask.number("cold", 5)
    loops = ask.number("loops", 9)
    names = [f"hot-{n + 1}" for n in range(hot)]
    names += [f"cold-{n + 1}" for n in range(cold * loops)]
    found = contexts(ask, names)
    rng = ask.random("order")
    requests = []
    for loop in range(1, loops + 1):
        first = hot + (loop - 1) * cold
        visits: list[tuple[str, Item]] = [("hot", item) for item in found.items[:hot]]
        visits += [("cold", item) for item in found.items[first : first + cold]]
        rng.shuffle(visits)
        for kind, item in visits:
            question, expected = item.question(rng)
            requests.append(
                Request(
                    context=item.name,
                    kind=kind,
                    loop=loop,
                    prompt=(*item.tokens, *ask.encode(question)),
                    answer_tokens=ask.number("answer_tokens", ANSWER_TOKENS),
                    expected=expected,
                )
            )
    hot_blocks = sum(len(item.tokens) // ask.block_size for item in found.items[:hot])
    return Work(tuple(requests), ask.block_size, hot_blocks, found.notes)
