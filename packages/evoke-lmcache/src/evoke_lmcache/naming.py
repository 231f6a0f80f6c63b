"""Names for LMCache's keys: short bytes that the retention index can file.

A name stands for a chunk. With layerwise caching LMCache files one key per chunk and layer: they
all have the chunk's name, because only together are they worth anything.
"""

import hashlib
from collections.abc import Hashable
from typing import Any


class Names:
    """Names chunks by content hash, namespace (model, ranks, data type) and identity tags.

    Namespaces are few and numbered as they appear. Identity tags come from clients: they enter as
    a digest, so that nothing grows with what strangers send.
    """

    def __init__(self) -> None:
        self._namespaces: dict[Hashable, bytes] = {}

    def name(self, key: Any) -> bytes:
        """Return the name of the chunk that ``key`` belongs to."""
        try:
            value = key.chunk_hash
            space = (key.model_name, key.world_size, key.worker_id, key.dtype)
            tags = key.tags
            if isinstance(value, bytes):
                digest = value
            else:
                digest = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        except AttributeError:
            return b"?" + repr(key).encode()
        number = self._namespaces.get(space)
        if number is None:
            number = self._namespaces[space] = len(self._namespaces).to_bytes(2, "big")
        if tags:
            digest += hashlib.blake2b(repr(tags).encode(), digest_size=16).digest()
        return number + digest
