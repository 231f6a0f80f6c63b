"""Of a hybrid model's blocks in the tier: how many lie there for nothing.

To restore a prompt the engine needs its blocks of every full-attention group, and of a sliding
window or a recurrent state the last ones. A block of such a window whose content the full-attention
groups do not have (any more) in the tier cannot be part of any hit: it fills a slot for nothing.

Only where all groups have blocks of the same size can contents be compared; elsewhere nothing is
reported.
"""

from collections.abc import Collection, Iterable, Mapping

from evoke_core import Decision


class WindowUse:
    """Follows which window blocks can be part of a hit. Costs a look-up per block that moves.

    Args:
        windows: groups without full attention.
        full: the others, at least one.
    """

    def __init__(self, windows: Collection[int], full: Collection[int]) -> None:
        self._windows = frozenset(windows)
        self._needed = len(full)
        self._full_blocks: dict[bytes, int] = {}
        self._window_blocks: dict[bytes, int] = {}
        self.unneeded = 0

    @classmethod
    def of(cls, windows: Collection[int], group_tokens: Mapping[int, int]) -> "WindowUse | None":
        """One for a model with these groups; None where there is nothing to tell."""
        full = [group for group in group_tokens if group not in windows]
        if not windows or not full or len(set(group_tokens.values())) > 1:
            return None
        return cls(windows, full)

    def decided(self, decisions: Iterable[Decision]) -> None:
        """Blocks were stored or evicted."""
        for decision in decisions:
            if decision.kind == "evicted" and decision.reason == "reset":
                self._full_blocks.clear()
                self._window_blocks.clear()
                self.unneeded = 0
            elif decision.kind == "stored":
                self._moved(decision, 1)
            elif decision.kind == "evicted":
                self._moved(decision, -1)

    def _moved(self, decision: Decision, by: int) -> None:
        for key in decision.keys:  # one decision may be about blocks of several groups
            content, group = key[:-4], int.from_bytes(key[-4:], "big")
            window = group in self._windows
            counts = self._window_blocks if window else self._full_blocks
            before = counts.get(content, 0)
            counts[content] = before + by
            if not counts[content]:
                del counts[content]
            if window:
                if self._full_blocks.get(content, 0) < self._needed:
                    self.unneeded += by
            elif max(before, before + by) == self._needed:  # all there from now on, or until now
                self.unneeded -= by * self._window_blocks.get(content, 0)
