"""The age at which recency has halved: fixed, or measured as the pool's turnover.

A pool that holds a thousand requests' worth of blocks must not forget after sixty-four. ``"auto"``
takes the number of requests in which as many blocks came in as the pool holds.
"""

from attrs import define

from evoke_core.config import AUTO

INITIAL = 64.0
SHORTEST = 16
LONGEST = 65_536


@define
class HalfLife:
    """The half-life in force, in requests."""

    value: float
    measured: bool
    _inserted: int = 0
    _since: int = 0

    @classmethod
    def of(cls, setting: float | str) -> "HalfLife":
        if isinstance(setting, str):
            assert setting == AUTO
            return cls(INITIAL, True)
        return cls(setting, False)

    def note_inserted(self, blocks: int) -> None:
        self._inserted += blocks

    def note_eviction(self, resident: int, clock: int) -> None:
        """Called before an eviction: closes a turnover once it is complete."""
        if self._inserted >= resident:
            if self.measured:
                self.value = float(min(LONGEST, max(SHORTEST, clock - self._since)))
            self.restart(clock)

    def restart(self, clock: int) -> None:
        self._inserted = 0
        self._since = clock
