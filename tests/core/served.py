# SPDX-License-Identifier: Apache-2.0
"""A server in miniature for tests of recordings: drives a ledger as an engine does, and records.

Requests may overlap. Each step of one tells the recorder the same as the ledger.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from evoke_core import BlockLedger, BlockState, EvokeConfig, RequestTags
from evoke_core.recording import Recorder

TOKENS_PER_BLOCK = 4
UNTAGGED = RequestTags()


def keys_of(prompt: str) -> list[bytes]:
    """Return a key for every letter, which stands for all that precedes it too."""
    return [prompt[: at + 1].encode() for at in range(len(prompt))]


@define(eq=False)
class Server:
    """A tier and its recorder, if it has one.

    Attributes:
        found: per request, in the order in which they were served, the blocks that the tier had.
        missed: blocks that the tier was asked for and did not have.
    """

    ledger: BlockLedger
    recorder: Recorder | None = None
    time: float = 1000.0
    found: list[int] = field(factory=list)
    missed: int = 0
    _chains: dict[str, list[bytes]] = field(factory=dict)
    _next: dict[str, int] = field(factory=dict)

    @classmethod
    def recording(cls, path: Path, capacity: int, policy: str = "lru", **header: Any) -> "Server":
        """Return a server that records to ``path``, its clock standing where it is told to."""
        server = cls.silent(capacity, policy)
        server.recorder = Recorder(
            path,
            header={
                "tokens_per_block": TOKENS_PER_BLOCK,
                "capacity": capacity,
                "policy": policy,
                **header,
            },
            clock=lambda: server.time,
        )
        return server

    @classmethod
    def silent(cls, capacity: int, policy: str = "lru") -> "Server":
        return cls(BlockLedger(capacity, config=EvokeConfig(policy=policy)))

    def open(self, request: str, tags: RequestTags = UNTAGGED) -> None:
        self.ledger.open(request, tags, self.time)
        if self.recorder is not None:
            self.recorder.opened(request, self.time, tags)

    def look(self, request: str, prompt: str, device: int = 0) -> int:
        """Look a prompt up behind what the device has; return the blocks found."""
        keys = keys_of(prompt)
        found = 0
        while (
            device + found < len(keys)
            and self.ledger.lookup(request, keys[device + found]) is BlockState.READY
        ):
            found += 1
        self.ledger.touch(request, keys)
        if self.recorder is not None:
            self.recorder.prompt(request, keys, tier_start=device, found=found)
        self.found.append(found)
        self.missed += len(keys) - device - found
        self._chains[request] = keys
        self._next[request] = device + found if found else 0
        return found

    def offer(self, request: str, blocks: int | None = None, generated: str = "") -> None:
        """Offer the next blocks, all that are left by default, and what was generated since."""
        chain = self._chains[request]
        text = chain[-1].decode() if chain else ""
        chain += keys_of(text + generated)[len(chain) :]
        begin = self._next[request]
        end = len(chain) if blocks is None else min(begin + blocks, len(chain))
        self._next[request] = end
        if begin == end:
            return
        keys = chain[begin:end]
        grant = self.ledger.reserve(request, keys, start=begin)
        self.ledger.commit(request, grant.keys, ticket=grant.ticket)
        if self.recorder is not None:
            self.recorder.offered(request, keys, start=begin)
            self.recorder.decisions(self.ledger.drain_decisions(), request)

    def close(self, request: str) -> None:
        self.ledger.close(request)
        if self.recorder is not None:
            self.recorder.closed(request)

    def serve(
        self,
        request: str,
        prompt: str,
        *,
        device: int = 0,
        chunk: int | None = None,
        generated: str = "",
        tags: RequestTags = UNTAGGED,
    ) -> int:
        """Serve one request from its arrival to its end; return the blocks found."""
        self.time += 1.0
        self.open(request, tags)
        found = self.look(request, prompt, device)
        while self._next[request] < len(prompt):
            self.offer(request, chunk)
        if generated:
            self.offer(request, generated=generated)
        self.close(request)
        return found

    def reset(self) -> None:
        self.ledger.reset()
        if self.recorder is not None:
            self.recorder.decisions(self.ledger.drain_decisions())

    def stop(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


def lines(path: Path) -> Sequence[str]:
    """Return the lines of a file."""
    return path.read_text().splitlines()
