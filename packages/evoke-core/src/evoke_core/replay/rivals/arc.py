"""ARC (Megiddo and Modha, FAST'03): recency and frequency lists that trade room by ghost hits.

``t1`` holds blocks seen once, ``t2`` blocks seen again; ``b1`` and ``b2`` remember what each of
them lost, together at most as much as the cache holds. A hit in ``b1`` asks for a longer ``t1``
(``target`` grows), one in ``b2`` for a shorter one. ``target`` moves by fractions and is compared
rounded down to whole blocks.
"""

from collections import OrderedDict


class Arc:
    """Adaptive replacement cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._t1: OrderedDict[int, None] = OrderedDict()
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._t1 or block in self._t2

    def access(self, block: int) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        capacity = self._capacity
        if capacity == 0:
            return
        if block in t2:
            t2.move_to_end(block)
            return
        if block in t1:
            del t1[block]
        elif block in b1:
            self._target = min(capacity, self._target + max(1.0, len(b2) / len(b1)))
            self._replace(in_b2=False)
            del b1[block]
        elif block in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            self._replace(in_b2=True)
            del b2[block]
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.popitem(last=False)
                    self._replace(in_b2=False)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.popitem(last=False)
                self._replace(in_b2=False)
            t1[block] = None
            return
        t2[block] = None

    def settle(self) -> None:
        pass

    def _replace(self, *, in_b2: bool) -> None:
        """Move the list's oldest block to its ghosts, from the list that is above its share."""
        t1, t2 = self._t1, self._t2
        if len(t1) + len(t2) < self._capacity:
            return
        target = int(self._target)
        longer = len(t1) > target or (in_b2 and len(t1) == target)
        if t1 and (longer or not t2):
            self._b1[t1.popitem(last=False)[0]] = None
        else:
            self._b2[t2.popitem(last=False)[0]] = None
