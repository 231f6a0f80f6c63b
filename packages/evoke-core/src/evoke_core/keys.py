"""Content hashes for KV blocks, for runtimes that bring none of their own.

A key names a block by what it holds *and* by everything before it, because attention makes a
block's KV values depend on the whole prefix. Two requests that share a prefix share its keys;
two blocks with equal tokens after different prefixes never do.

Encoding (stable, part of the public contract): every token id is an unsigned 64-bit little-endian
integer; ``key[i] = BLAKE3(parent || tokens of block i)``, where ``parent`` is ``key[i - 1]`` and,
for the first block, ``BLAKE3(salt)``. Both hashes use BLAKE3's key-derivation mode with the context
``CONTEXT``, so that keys never collide with another use of BLAKE3 over the same bytes.
"""

from array import array
from collections.abc import Iterable
from operator import index
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

CONTEXT = "evoke-core 2026 KV block chain v1"


def chain_keys(
    token_ids: Iterable[int] | npt.NDArray[Any],
    block_size: int,
    *,
    parent: bytes | None = None,
    salt: bytes = b"",
) -> list[bytes]:
    """Return the 32-byte keys of all full blocks of a token sequence, head first.

    A trailing part shorter than ``block_size`` gets no key. ``parent`` continues an earlier
    sequence: ``chain_keys(a + b) == chain_keys(a) + chain_keys(b, parent=chain_keys(a)[-1])``
    whenever ``len(a)`` is a positive multiple of ``block_size``. ``salt`` separates namespaces
    (tenants, adapters, model revisions); it enters the first block only and reaches every later one
    through the chain.

    Raises:
        ValueError: ``block_size`` is not a positive integer, a token id is negative or not an
            integer, or ``parent`` and ``salt`` are both given.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    if parent is not None and salt:
        raise ValueError("salt belongs to the head of a chain: give parent or salt, not both")
    tokens = _as_uint64(token_ids)
    stride = 8 * block_size
    data = tokens[: len(tokens) // block_size * block_size].tobytes()
    previous = _digest(salt) if parent is None else parent
    keys = []
    for begin in range(0, len(data), stride):
        previous = _digest(previous + data[begin : begin + stride])
        keys.append(previous)
    return keys


def _digest(data: bytes) -> bytes:
    return blake3.blake3(data, derive_key_context=CONTEXT).digest()


def _as_uint64(token_ids: Iterable[int] | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
            raise ValueError("token ids must be a flat array of integers")
        if token_ids.dtype.kind == "i" and len(token_ids) and token_ids.min() < 0:
            raise ValueError("token ids must not be negative")
        return token_ids.astype("<u8")
    ids = list(token_ids)
    if bool in set(map(type, ids)):
        raise ValueError("token ids must be integers, got a truth value")
    try:
        return np.asarray(array("Q", map(index, ids))).astype("<u8")
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**64 - 1: {error}") from None
