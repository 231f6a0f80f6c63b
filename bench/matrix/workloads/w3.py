"""W3, recorded agent sessions: real calls of a coding agent, text and order as recorded.

The trace is pointed at (`--trace FILE`), by default the agent text beside this repository. Sessions
start together and are interleaved by the time since their first call. A seed chooses which sessions
take part. Calls longer than `max_tokens` are left out, never cut. Nothing is scored: the recorded
answers are a larger model's.

Options: sessions, calls, max_tokens.
"""

from bench.demo.trace import load_trace
from bench.errors import UsageProblem
from bench.matrix.workloads.work import Ask, Request, Work

TRACE = "trace"
_ALL = 10**9
_ANSWER_TOKENS = 8


def make(ask: Ask) -> Work:
    """Return the first `calls` calls of `sessions` sessions that the seed chose."""
    path = ask.files.get(TRACE)
    if path is None or not path.is_file():
        raise UsageProblem(f"workload w3 needs an agent trace: give one with --{TRACE} FILE")
    longest, calls = ask.number("max_tokens", 2048, 64), ask.number("calls", 24)
    wanted = ask.number("sessions", 8)
    answer_tokens = ask.number("answer_tokens", _ANSWER_TOKENS)
    work = load_trace(path, ask.encode, max_calls=_ALL, max_tokens=longest, order="together")
    names = sorted({call.context for call in work.calls})
    chosen = set(ask.random("sessions").sample(names, min(wanted, len(names))))
    kept = [call for call in work.calls if call.context in chosen][:calls]
    requests = [Request(call.context, "all", 1, tuple(call.prompt), answer_tokens) for call in kept]
    note = (
        f"{path.name}: {len(kept)} calls of at most {longest} tokens, of {len(chosen)} of "
        f"{len(names)} sessions that have such calls; sessions start together"
    )
    return Work(tuple(requests), ask.block_size, notes=(note,))
