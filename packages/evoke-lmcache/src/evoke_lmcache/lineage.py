"""Which chunk follows which: the parents that LMCache's keys do not carry.

A chunk's key is a hash over its whole prefix, so its parent is a fact of its content: what was
learned once stays true, and every backend of a process may share it.

Guarantees: memory is bounded, the links used or learned longest ago go first; a chain that is
asked for always ends, whatever was learned; nothing here raises on unknown chunks.
"""

from collections import OrderedDict

ROOT = b""
"""The parent of a chunk that begins a prompt."""

MAX_LINKS = 65_536
MAX_CHAIN = 65_536


class Lineage:
    """Parents by chunk name, sure ones and guessed ones.

    Args:
        limit: links remembered.
    """

    def __init__(self, limit: int = MAX_LINKS) -> None:
        self._limit = limit
        self._links: OrderedDict[bytes, tuple[bytes, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def parent(self, name: bytes) -> bytes | None:
        """Return the parent's name, ``ROOT`` at the head of a prompt, None where unknown."""
        link = self._links.get(name)
        return None if link is None else link[0]

    def learn(self, name: bytes, parent: bytes, *, sure: bool) -> None:
        """Note ``name``'s parent. A guess never replaces what is known, a sure link does."""
        known = self._links.get(name)
        if name == parent or (known is not None and (known[0] == parent or not sure)):
            if known is not None:
                self._links.move_to_end(name)
            return
        self._links[name] = (parent, sure)
        self._links.move_to_end(name)
        if len(self._links) > self._limit:
            self._links.popitem(last=False)

    def chain(self, name: bytes) -> tuple[list[bytes], bool]:
        """Return the chunks up to ``name``, head first, and whether the first begins a prompt."""
        chain = [name]
        seen = {name}
        while len(chain) < MAX_CHAIN:
            parent = self.parent(chain[-1])
            if parent is None or parent == ROOT or parent in seen:
                chain.reverse()
                return chain, parent == ROOT
            chain.append(parent)
            seen.add(parent)
        chain.reverse()
        return chain, False
