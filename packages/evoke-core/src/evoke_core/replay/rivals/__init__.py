"""Published policies to compare with, each a real implementation in one file.

They cache single blocks and know nothing of chains; :class:`~evoke_core.replay.tiers.BlockTier`
hands them a request tail before head. A hit is counted only within a request's resident prefix, so
a policy that evicts from the middle of a chain loses what lies behind, as it would in an engine.
``belady`` is the exception: it sees the future and whole chains, and is the ceiling.

Checked against two other simulators on Mooncake's conversation trace at 1, 3, 10 and 30% and on the
shapes W1 and W1S at 14, 27 and 55%: LRU, ARC, W-TinyLFU and MIN agree in every cell to the four
digits published, S3-FIFO within .0008 (its file says why).
"""

from collections.abc import Callable, Mapping

from evoke_core.replay.rivals.arc import Arc
from evoke_core.replay.rivals.lru import PlainLru
from evoke_core.replay.rivals.s3fifo import S3Fifo
from evoke_core.replay.rivals.wtinylfu import WTinyLfu
from evoke_core.replay.tiers import BlockCache

RIVALS: Mapping[str, Callable[[int], BlockCache]] = {
    "lru": PlainLru,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "wtinylfu": lambda capacity: WTinyLfu(capacity, window=0.01),
    "wtinylfu20": lambda capacity: WTinyLfu(capacity, window=0.20),
}
"""Rivals by name: each takes a capacity in blocks."""
