"""W1, uniform revisits: every context returns once in every loop, in the same order.

Question answering over a fixed set of documents. Nothing is hotter than anything else: with less
room than the working set, least recently used is the worst order there is, because what returns
next has waited longest. `shuffle = true` draws a new order for every loop.

Options: contexts, tokens (of a context), loops, facts, shuffle, and the data set's file, if one is
given with `--data` (see data.py).
"""

from bench.matrix.workloads.data import contexts
from bench.matrix.workloads.text import ANSWER_TOKENS
from bench.matrix.workloads.work import Ask, Request, Work


def make(ask: Ask) -> Work:
    """Return the requests: `loops` × `contexts`."""
    count, loops = ask.number("contexts", 12), ask.number("loops", 8)
    shuffle = ask.flag("shuffle", False)
    found = contexts(ask, [f"uniform-{n + 1}" for n in range(count)])
    rng = ask.random("order")
    order = list(range(len(found.items)))
    rng.shuffle(order)
    requests = []
    for loop in range(1, loops + 1):
        if shuffle:
            rng.shuffle(order)
        for number in order:
            item = found.items[number]
            question, expected = item.question(rng)
            requests.append(
                Request(
                    context=item.name,
                    kind="all",
                    loop=loop,
                    prompt=(*item.tokens, *ask.encode(question)),
                    answer_tokens=ask.number("answer_tokens", ANSWER_TOKENS),
                    expected=expected,
                )
            )
    return Work(tuple(requests), ask.block_size, notes=found.notes)
