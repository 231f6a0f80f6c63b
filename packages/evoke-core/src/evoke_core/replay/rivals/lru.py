"""LRU over an ordered dictionary: the baseline, as fast as a bare loop over the dictionary.

Eviction waits until the request is through, so a request never evicts what it is about to touch.
The ledger's own LRU (``ledger-lru``) finds the same in every request, block by block.
"""

from collections import OrderedDict


class PlainLru:
    """Least recently used block first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def access(self, block: int) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def settle(self) -> None:
        blocks = self._blocks
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
