"""A recorded or generated sequence of requests, stored as a tree of blocks.

Every block stands behind exactly one other (or at the head of a prompt), so a trace is a tree and a
request is one path in it: the number of its last block is all that has to be stored. Blocks are
numbered from 0, parents before children. A block's number stands for its
content *and* all that precedes it, whatever the trace's own ids promise.

Guarantees: requests are in order of time (equal times in order of insertion); a chain is always
rebuilt head first; a trace is read-only once built and can be shared between processes.
"""

from array import array
from collections.abc import Hashable, Iterable, Sequence

from attrs import define, field, frozen

HEAD = -1
"""Parent of a prompt's first block, and last block of a request without a full block."""


class TraceError(ValueError):
    """A trace that cannot be read or generated. The message is one line."""


@frozen(eq=False)
class Trace:
    """Requests in order of time. Build one with :class:`TraceBuilder`.

    Attributes:
        name: what reports call it.
        tokens_per_block: size of a block, in tokens.
        parents: per block, the block before it, or ``HEAD``.
        tails: per request, its last block, or ``HEAD`` for a request of no block.
        lengths: per request, its blocks.
        tokens: per request, its prompt in tokens: at most one block more than its blocks hold.
        times: per request, seconds.
        ids, sessions, roles: per request, as recorded; None where the trace does not say.
        skipped: bad lines that were left out on request.
    """

    name: str
    tokens_per_block: int
    parents: list[int]
    tails: "array[int]"
    lengths: "array[int]"
    tokens: "array[int]"
    times: "array[float]"
    ids: list[str | None]
    sessions: list[str | None]
    roles: list[str | None]
    skipped: int = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.tails)

    @property
    def unique_blocks(self) -> int:
        """Different blocks, the size of a cache that never evicts."""
        return len(self.parents)

    @property
    def references(self) -> int:
        """Blocks over all requests."""
        return sum(self.lengths)

    @property
    def ceiling(self) -> float:
        """Share of the blocks that a cache that never evicts finds."""
        return 1.0 - self.unique_blocks / max(1, self.references)

    @property
    def last_blocks(self) -> "array[int]":
        """Per request, the last block that it leaves behind: what it asks for, and no more."""
        return self.tails

    def path(self, request: int) -> list[int]:
        """Return the blocks that a request leaves behind, head first."""
        return self._up_to(self.last_blocks[request])

    def chain(self, request: int) -> list[int]:
        """Return the blocks of a request, head first."""
        return self._up_to(self.tails[request])

    def _up_to(self, block: int) -> list[int]:
        parents = self.parents
        chain = []
        while block >= 0:
            chain.append(block)
            block = parents[block]
        chain.reverse()
        return chain

    def keys(self) -> list[bytes]:
        """Return a key for every block, for a :class:`~evoke_core.ledger.BlockLedger`."""
        return [block.to_bytes(4, "little") for block in range(len(self.parents))]


@define
class TraceBuilder:
    """Collects requests in any order of time and puts them in order at the end.

    Args:
        name: of the trace.
        tokens_per_block: size of a block, in tokens.
    """

    name: str
    tokens_per_block: int
    skipped: int = 0
    _parents: list[int] = field(factory=list, init=False)
    _children: dict[tuple[int, Hashable], int] = field(factory=dict, init=False)
    _requests: list[tuple[float, int, int, int, str | None, str | None, str | None]] = field(
        factory=list, init=False
    )

    @property
    def parents(self) -> list[int]:
        """Per block so far, the block before it, or ``HEAD``."""
        return self._parents

    @property
    def blocks(self) -> int:
        """Blocks so far."""
        return len(self._parents)

    def extend(self, block: int, contents: Iterable[Hashable]) -> list[int]:
        """Return the numbers of the blocks with these contents behind ``block`` (or ``HEAD``).

        Equal contents behind the same block are the same block.
        """
        children, parents = self._children, self._parents
        numbers = []
        for content in contents:
            number = children.setdefault((block, content), len(parents))
            if number == len(parents):
                parents.append(block)
            numbers.append(number)
            block = number
        return numbers

    def add(
        self,
        time: float,
        chain: Sequence[int],
        *,
        tokens: int | None = None,
        request_id: str | None = None,
        session: str | None = None,
        role: str | None = None,
    ) -> None:
        """Add a request over the blocks ``chain``, which :meth:`extend` numbered, head first.

        ``tokens`` beyond what the blocks hold, and one block more, is cut off: what no block can
        serve is no property of a policy. By default the blocks are full.
        """
        most = len(chain) * self.tokens_per_block
        size = most if tokens is None else min(max(tokens, 0), most + self.tokens_per_block - 1)
        tail = chain[-1] if chain else HEAD
        self._requests.append((time, tail, len(chain), size, request_id, session, role))

    def build(self) -> Trace:
        """Return the trace.

        Raises:
            TraceError: no request has a block.
        """
        if not self._parents:
            raise TraceError(f"{self.name}: no request with a full block of text in it")
        rows = sorted(self._requests, key=lambda row: row[0])  # stable
        return Trace(
            name=self.name,
            tokens_per_block=self.tokens_per_block,
            parents=self._parents,
            tails=array("i", (row[1] for row in rows)),
            lengths=array("i", (row[2] for row in rows)),
            tokens=array("i", (row[3] for row in rows)),
            times=array("d", (row[0] for row in rows)),
            ids=[row[4] for row in rows],
            sessions=[row[5] for row in rows],
            roles=[row[6] for row in rows],
            skipped=self.skipped,
        )
