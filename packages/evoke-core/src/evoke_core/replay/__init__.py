"""Replaying recorded requests against a cache tier: what would which policy have kept?

    from evoke_core.replay import read_trace, replay

    trace = read_trace("conversation_trace.jsonl.gz")
    [result] = replay(trace, ["1%", "10%"], ["lru", "scored", "arc", "min"])
    print(result.cell("scored", "10%").block_hits)

The command ``evoke replay`` does the same with tables, plots and a progress bar. The simulation is
of a single tier, one request after the other, see :mod:`~evoke_core.replay.simulate`.
"""

from evoke_core.replay.generate import (
    concatenate,
    conversations,
    first,
    generate,
    hot_cold,
    loop,
    tenants,
)
from evoke_core.replay.grid import (
    Budget,
    Cell,
    RecordedTier,
    ReplayError,
    TraceResult,
    known_policies,
    make_tier,
    replay,
)
from evoke_core.replay.readers import ReaderOptions, read_trace
from evoke_core.replay.readers.agent_text import load_tokenizer
from evoke_core.replay.recorded import RecordedTrace
from evoke_core.replay.simulate import Counts, simulate
from evoke_core.replay.tiers import recorded_tags, untagged
from evoke_core.replay.trace import Trace, TraceBuilder, TraceError

__all__ = [
    "Budget",
    "Cell",
    "Counts",
    "ReaderOptions",
    "RecordedTier",
    "RecordedTrace",
    "ReplayError",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "TraceResult",
    "concatenate",
    "conversations",
    "first",
    "generate",
    "hot_cold",
    "known_policies",
    "load_tokenizer",
    "loop",
    "make_tier",
    "read_trace",
    "recorded_tags",
    "replay",
    "simulate",
    "tenants",
    "untagged",
]
