# SPDX-License-Identifier: Apache-2.0
"""chain_keys: what a key says, and the encoding that other programs may rely on."""

import struct

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_core import chain_keys

tokens = st.lists(st.integers(0, 2**64 - 1), max_size=40)
sizes = st.integers(1, 7)


def spelled_out(token_ids: list[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """The documented encoding, written a second time."""

    def digest(data: bytes) -> bytes:
        context = "evoke-core 2026 KV block chain v1"
        return blake3.blake3(data, derive_key_context=context).digest()

    parent, keys = digest(salt), []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = token_ids[end - block_size : end]
        parent = digest(parent + b"".join(struct.pack("<Q", token) for token in block))
        keys.append(parent)
    return keys


@given(tokens, sizes, st.binary(max_size=8))
def test_the_encoding_is_the_documented_one(ids: list[int], size: int, salt: bytes) -> None:
    assert chain_keys(ids, size, salt=salt) == spelled_out(ids, size, salt)


def test_known_answers() -> None:
    """Changing these orphans every stored block of every user."""
    first, second = chain_keys([1, 2, 3, 4, 5], 2)
    assert first.hex() == FIRST
    assert second.hex() == SECOND
    (salted,) = chain_keys([1, 2], 2, salt=b"tenant")
    assert salted.hex() == SALTED


FIRST = "e4737b3597160c18186bb52de2a05bee34b8a980fd6713c4706dc3310ca3c0f3"
SECOND = "46db0ad3ce892c7ccdb2d0133f19aba5229d7e972b880a241f46ec5456305e48"
SALTED = "218bc99d9e9783af884593fbd605655f371349468d2f75b8a7d94ed497309a50"


@given(tokens, sizes)
def test_one_key_of_32_bytes_per_full_block(ids: list[int], size: int) -> None:
    keys = chain_keys(ids, size)
    assert len(keys) == len(ids) // size
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


@given(tokens, tokens, sizes)
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int], size: int) -> None:
    for end, (x, y) in enumerate(zip(chain_keys(a, size), chain_keys(b, size), strict=False), 1):
        assert (x == y) == (a[: end * size] == b[: end * size])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=24), sizes, st.data())
def test_a_continued_chain_equals_the_whole(ids: list[int], size: int, data: st.DataObject) -> None:
    blocks = len(ids) // size
    if not blocks:
        return
    cut = data.draw(st.integers(1, blocks)) * size
    head = chain_keys(ids[:cut], size)
    assert head + chain_keys(ids[cut:], size, parent=head[-1]) == chain_keys(ids, size)


def test_a_block_repeated_within_a_prompt_has_its_own_key() -> None:
    assert len(set(chain_keys([7] * 32, 4))) == 8


def test_salts_and_parents_separate_namespaces() -> None:
    plain = chain_keys([1, 2], 1)
    salted = chain_keys([1, 2], 1, salt=b"a")
    other = chain_keys([1, 2], 1, salt=b"b")
    continued = chain_keys([1, 2], 1, parent=plain[-1])
    assert len({*plain, *salted, *other, *continued}) == 8


def test_block_size_is_part_of_the_content() -> None:
    assert chain_keys([1, 2], 2)[0] not in chain_keys([1, 2], 1)


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 3, 4),
        iter([1, 2, 3, 4]),
        range(1, 5),
        np.array([1, 2, 3, 4]),
        np.array([1, 2, 3, 4], dtype=np.int32),
        np.array([1, 2, 3, 4], dtype=np.uint8),
        np.array([1, 0, 2, 0, 3, 0, 4, 0])[::2],
        np.array([1, 2, 3, 4], dtype=">i8"),
        [np.int64(1), np.int64(2), 3, 4],
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', '')}",
)
def test_the_container_does_not_matter(ids: object) -> None:
    assert chain_keys(ids, 2) == chain_keys([1, 2, 3, 4], 2)  # type: ignore[arg-type]


def test_ids_at_the_edge_of_64_bits() -> None:
    keys = chain_keys([2**64 - 1, 2**63, 2**63 - 1, 0], 1)
    assert keys == spelled_out([2**64 - 1, 2**63, 2**63 - 1, 0], 1)
    assert chain_keys([2**63 + 1, 1], 1) == spelled_out([2**63 + 1, 1], 1)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "16", None])
def test_refuses_a_block_size_that_is_none(size: object) -> None:
    with pytest.raises(ValueError, match="block_size"):
        chain_keys([1, 2, 3], size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids", [[-1], [1, -2], [1.0, 2.0], ["a"], [2**64], [-1, 2**63], [[1], [2]], [None], [True]]
)
def test_refuses_what_is_no_token_id(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain_keys(ids, 1)  # type: ignore[arg-type]


def test_refuses_salt_in_mid_chain() -> None:
    with pytest.raises(ValueError, match="salt"):
        chain_keys([1], 1, parent=b"p" * 32, salt=b"s")


def test_nothing_in_nothing_out() -> None:
    assert chain_keys([], 4) == chain_keys([1, 2, 3], 4) == chain_keys(np.array([]), 4) == []
