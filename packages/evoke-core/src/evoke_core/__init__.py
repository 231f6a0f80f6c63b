"""evoke-core: which KV-cache blocks to keep when memory is short. Framework-free.

Start with :class:`BlockLedger` where you own the slots, with :class:`RetentionIndex` where an
engine does; :func:`chain_keys` names blocks where the runtime has no content hashes.
"""

from evoke_core.config import ConfigError, EvokeConfig
from evoke_core.index import BlockView, Evicted, RetentionIndex
from evoke_core.keys import chain_keys
from evoke_core.ledger import BlockLedger, BlockState, Decision, LedgerStats, Reservation
from evoke_core.policies import POLICIES, LruPolicy, Policy, ScoredPolicy
from evoke_core.spans import Span
from evoke_core.tags import RequestTags, TagProblem

__all__ = [
    "POLICIES",
    "BlockLedger",
    "BlockState",
    "BlockView",
    "ConfigError",
    "Decision",
    "Evicted",
    "EvokeConfig",
    "LedgerStats",
    "LruPolicy",
    "Policy",
    "RequestTags",
    "Reservation",
    "RetentionIndex",
    "ScoredPolicy",
    "Span",
    "TagProblem",
    "chain_keys",
]
