"""W2, long-range understanding: facts at the start, the middle and the end, all asked for at once.

The answer must be a JSON object; its values are compared one by one. A small model scores low here,
with or without a tier: what is judged is that the tier changes nothing.

Options: contexts, tokens, loops, facts.
"""

from bench.matrix.workloads.text import ask_for_all, make_context
from bench.matrix.workloads.work import Ask, Request, Work

_ANSWER_TOKENS_EACH = 16


def make(ask: Ask) -> Work:
    """Return the requests: `loops` × `contexts`, each loop shuffled."""
    count, loops = ask.number("contexts", 8), ask.number("loops", 4)
    tokens, facts = ask.number("tokens", 320, 64), ask.number("facts", 3)
    names = [f"report-{n + 1}" for n in range(count)]
    made = [make_context(ask.random(n), n, tokens, ask.encode, facts=facts) for n in names]
    rng = ask.random("order")
    answer_tokens = ask.number("answer_tokens", _ANSWER_TOKENS_EACH * facts)
    requests = []
    for loop in range(1, loops + 1):
        for context in rng.sample(made, count):
            asked = rng.sample(list(context.codes), facts)
            requests.append(
                Request(
                    context=context.name,
                    kind="all",
                    loop=loop,
                    prompt=(*context.tokens, *ask.encode(ask_for_all(asked))),
                    answer_tokens=answer_tokens,
                    expected=tuple(context.codes[safe] for safe in asked),
                    as_json=True,
                )
            )
    return Work(tuple(requests), ask.block_size, notes=(f"{facts} facts, asked for as JSON",))
