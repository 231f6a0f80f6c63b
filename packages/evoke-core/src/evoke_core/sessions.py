"""Which runs belong to a session alone, and how many blocks that makes.

Guarantees: exact at any time; a session without resident blocks leaves nothing behind.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoke_core.runs import Run


class Sessions:
    """Resident runs by owner. Runs of nobody are not kept."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[Run, None]] = {}  # least recently used first
        self._blocks: dict[str, int] = {}

    def add(self, owner: str | None, run: "Run", blocks: int) -> None:
        """Blocks of ``run`` came in, or came to ``owner``; the run itself may be known."""
        if owner is not None:
            self._runs.setdefault(owner, {})[run] = None
            self._blocks[owner] = self._blocks.get(owner, 0) + blocks

    def remove(self, owner: str | None, run: "Run", blocks: int, *, whole: bool) -> None:
        """Blocks of ``run`` left, or lost their owner; ``whole`` if none of the run stays."""
        if owner is None:
            return
        self._blocks[owner] -= blocks
        if whole:
            del self._runs[owner][run]
        if not self._runs[owner]:
            del self._runs[owner], self._blocks[owner]

    def renew(self, run: "Run") -> None:
        """Note that a run, if it is somebody's own, was used."""
        if run.terms.owner is not None:
            runs = self._runs[run.terms.owner]
            del runs[run]
            runs[run] = None

    def runs(self, session: str) -> Iterable["Run"]:
        """Return a session's own runs, least recently used first."""
        return self._runs.get(session, {}).keys()

    def blocks(self, session: str) -> int:
        """Return how many blocks are a session's own."""
        return self._blocks.get(session, 0)

    def over(self, share: int) -> Iterator[tuple[str, int]]:
        """Yield the sessions with more than ``share`` blocks, and how many more."""
        for session, blocks in self._blocks.items():
            if blocks > share:
                yield session, blocks - share

    def clear(self) -> None:
        self._runs.clear()
        self._blocks.clear()
