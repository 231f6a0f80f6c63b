"""Where a request's blocks stand: what vLLM says of it, told to the ledger.

Up to vLLM 0.30 the scheduler names a request's blocks with ``touch``, from the head of each chain.
Since 0.31 it does not call ``touch``; instead the request's context holds the token at which each
block ends. ``Positions`` reads those and names the chains in its place, once per new block.

A block that ends inside a chunk (the partial tail that vLLM stores for some recurrent models since
0.30) belongs to no chain: nothing is ever built on it. It is filed under a group of its own.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby, islice
from operator import itemgetter

from attrs import frozen
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from evoke_core import RetentionIndex
from evoke_vllm import compat

PARTIAL = 1 << 16
"""Added to a group's number for its partial tails."""

_group_bytes = itemgetter(slice(-4, None))


def window_groups(groups: Iterable[int], all_groups: Iterable[int]) -> list[int]:
    """Groups without chains: ``groups``, and the partial tails of ``all_groups``."""
    return [*groups, *(group | PARTIAL for group in all_groups)]


def by_group(keys: Collection[OffloadKey]) -> list[tuple[int, list[bytes]]]:
    """Part keys that may mix KV-cache groups into one list per run of equal groups."""
    parts = list(keys)
    if not parts:
        return []
    if len(set(map(_group_bytes, parts))) == 1:
        return [(get_offload_group_idx(parts[0]), parts)]
    return [(group, list(part)) for group, part in groupby(parts, get_offload_group_idx)]


@frozen(eq=False)
class _Followed:
    """Kept in a request's context: so many of its blocks have been named."""

    by: "Positions"
    blocks: int


class Positions:
    """Names the chains of requests whose contexts say where their blocks end.

    Args:
        index: knows which requests are open.
        touch: is told.
        windows: groups without full attention.
        group_tokens: tokens of an offloaded block, by group; empty where nobody knows, and then
            a group's first block says it.
    """

    def __init__(
        self,
        index: RetentionIndex,
        touch: Callable[..., object],
        windows: Iterable[int],
        group_tokens: Mapping[int, int],
    ) -> None:
        self._index = index
        self._tell = touch
        self._windows = frozenset(windows)
        self._group_tokens = dict(group_tokens)

    def follow(self, context: ReqContext) -> None:
        """Touch what the request has named since the last call, group by group, head first.

        Windows are left out: that a request has named a block of theirs does not mean that it
        needs it.
        """
        positions = compat.positions(context)
        state = context.get_state(_Followed)
        seen = 0 if state is None or state.by is not self else state.blocks
        if len(positions) == seen or not self._index.is_open(context.req_id):
            return
        context.set_state(_Followed(self, len(positions)))
        stretches: dict[int, tuple[int, list[bytes]]] = {}
        for key, end in islice(positions.items(), seen, None):
            group = get_offload_group_idx(OffloadKey(key))
            tokens = self._group_tokens.setdefault(group, end)
            if group in self._windows or end % tokens:
                continue
            at = end // tokens - 1
            start, stretch = stretches.setdefault(group, (at, []))
            if at != start + len(stretch):
                self._touch(context, group, start, stretch)
                start, stretch = stretches[group] = (at, [])
            stretch.append(key)
        for group, (start, stretch) in stretches.items():
            self._touch(context, group, start, stretch)

    def chain(self, context: ReqContext, group: int) -> list[bytes]:
        """The blocks of a request's chain in a group, head first."""
        tokens = self._group_tokens.get(group, 1)
        return [
            key
            for key, end in compat.positions(context).items()
            if end % tokens == 0 and get_offload_group_idx(OffloadKey(key)) == group
        ]

    def parts(
        self, keys: Iterable[OffloadKey], context: ReqContext
    ) -> list[tuple[int, list[bytes]]]:
        """As ``by_group``, with the partial tails in groups of their own."""
        positions = compat.positions(context)

        def group_of(key: bytes) -> int:
            group = get_offload_group_idx(OffloadKey(key))
            tokens = self._group_tokens.get(group)
            return group | PARTIAL if tokens and positions.get(key, 0) % tokens else group

        return [(group, list(part)) for group, part in groupby(keys, group_of)]

    def _touch(self, context: ReqContext, group: int, start: int, keys: list[bytes]) -> None:
        self._tell(context.req_id, keys, group=group, start=start)
