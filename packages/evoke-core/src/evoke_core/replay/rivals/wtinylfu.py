"""W-TinyLFU (Einziger, Friedman and Manes, TOS'17): an LRU window in front of a guarded main area.

What falls out of the window enters the main area only if it was used more often lately than the
block it would replace. The main area is a segmented LRU: a second use moves a block from probation
to the protected four fifths.

The paper counts uses in a sketch of small counters to save memory. Here they are counted exactly,
at most 15, in a dictionary that the halving keeps small: no collision costs this rival a hit.
After a halving the sample starts from 0, not from half as in the paper: better in most cells, and
what the published numbers that this file was checked against were made with.
"""

from collections import OrderedDict

_PROTECTED_SHARE = 0.8
_SAMPLE = 10  # uses counted per block of capacity before all counts are halved
_MOST = 15  # four bits


class RecentUses:
    """How often blocks were used lately, forgotten by halving.

    Args:
        capacity: of the cache, in blocks; every ten times as many uses the counts are halved.
    """

    def __init__(self, capacity: int) -> None:
        self._uses: dict[int, int] = {}
        self._sample = _SAMPLE * max(1, capacity)
        self._counted = 0

    def add(self, block: int) -> None:
        """Count one use."""
        uses = self._uses.get(block, 0)
        if uses < _MOST:
            self._uses[block] = uses + 1
        self._counted += 1
        if self._counted == self._sample:
            self._counted = 0
            self._uses = {block: uses // 2 for block, uses in self._uses.items() if uses > 1}

    def __getitem__(self, block: int) -> int:
        return self._uses.get(block, 0)


class WTinyLfu:
    """Window, probation and protected segments behind a count of recent uses.

    Args:
        capacity: blocks in all segments together.
        window: the window's share of it; at least one block.
    """

    def __init__(self, capacity: int, window: float = 0.01) -> None:
        self._window_size = min(capacity, max(1, round(window * capacity)))
        self._main_size = capacity - self._window_size
        self._protected_size = int(_PROTECTED_SHARE * self._main_size)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._recent = RecentUses(capacity)

    def __contains__(self, block: object) -> bool:
        return block in self._protected or block in self._probation or block in self._window

    def access(self, block: int) -> None:
        self._recent.add(block)
        if block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._protected_size:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[block] = None
            self._window.move_to_end(block)
            if len(self._window) > self._window_size:
                self._admit(self._window.popitem(last=False)[0])

    def settle(self) -> None:
        pass

    def _admit(self, candidate: int) -> None:
        """Put what left the window into probation, if there is room or it was used more."""
        if len(self._probation) + len(self._protected) < self._main_size:
            self._probation[candidate] = None
            return
        segment = self._probation or self._protected
        if segment:
            victim = next(iter(segment))
            if self._recent[candidate] > self._recent[victim]:
                del segment[victim]
                self._probation[candidate] = None
