"""W5, many tenants behind one system prompt: the head is everybody's, the rest is one tenant's.

Every prompt begins with the same system prompt; then comes the tenant's own context, then a
question. Few tenants ask often, most ask once: tenant k returns with weight 1/k.

Options: tenants, requests, system_tokens, tokens (of a tenant's context), facts.
"""

from bench.matrix.workloads.text import ANSWER_TOKENS, ask_for, filler, make_context
from bench.matrix.workloads.work import Ask, Request, Work


def make(ask: Ask) -> Work:
    """Return `requests` requests, each by a tenant drawn with weight 1/rank."""
    tenants, count = ask.number("tenants", 40), ask.number("requests", 80)
    system_tokens, tokens = ask.number("system_tokens", 128, 32), ask.number("tokens", 160, 64)
    facts = ask.number("facts", 2)
    rng = ask.random("tenants")
    system = filler(ask.random("system"), system_tokens, ask.encode)
    head = f"<|im_start|>system\nHouse rules. {system}<|im_end|>\n"
    whole = len(ask.encode(head)) + tokens
    names = [f"tenant-{n + 1}" for n in range(tenants)]
    drawn = rng.choices(names, [1 / (n + 1) for n in range(tenants)], k=count)
    made = {
        name: make_context(ask.random(name), name, whole, ask.encode, facts=facts, head=head)
        for name in dict.fromkeys(drawn)
    }
    seen: dict[str, int] = {}
    requests = []
    for name in drawn:
        seen[name] = seen.get(name, 0) + 1
        safe, code = rng.choice(list(made[name].codes.items()))
        prompt = (*made[name].tokens, *ask.encode(ask_for(safe)))
        answer_tokens = ask.number("answer_tokens", ANSWER_TOKENS)
        requests.append(Request(name, "all", seen[name], prompt, answer_tokens, (code,)))
    note = f"{len(made)} tenants ask, {sum(n > 1 for n in seen.values())} more than once"
    return Work(tuple(requests), ask.block_size, notes=(note,))
