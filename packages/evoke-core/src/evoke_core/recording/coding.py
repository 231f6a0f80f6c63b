"""How a recording's lines name blocks and tags. Shared by the recorder and the reader.

Every segment (file) of a recording has a table of blocks of its own, filled as its lines come. A
line that names blocks the table lacks brings them along under ``h``, and all lines name blocks as
stretches of the table under ``b``::

    {"k": "prompt", ..., "b": [[0, 60], [412, 3]], "h": [412, "<3 ids of 8 bytes, base64>"]}

so a prompt that repeats the first 60 blocks of another costs one pair of numbers for them. Ids are
keyed hashes of the engine's keys, the key being random and never written: a recording does not
tell whether a known text was among the prompts. The writer forgets blocks that it has not met for
long, and writes them anew when they return: the reader knows them by their ids.

A line's ``h`` says where in the table its blocks belong, so that a line that is lost costs the
blocks it brought and no others.
"""

import base64
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, cast

from attrs import fields_dict

from evoke_core.spans import Span
from evoke_core.tags import RequestTags

VERSION = 1
MAGIC = "evoke_recording"
"""First key of a segment's first line; its value is the version."""

RESET = "reset"
"""Kind of the line that says that the tier was emptied, and the ledger's reason for that."""

ID_BYTES = 8
_GENERATION = 100_000  # blocks the writer remembers, twice: some 40 MB at most
_HASHED_AT_ONCE = 256  # blocks hashed before other threads get a turn
_MAX_GAP = 1 << 24  # blocks that lost lines may have brought; more is no recording
_UNKNOWN = -1


class BlockWriter:
    """Turns keys into stretches of a segment's table."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=ID_BYTES, key=os.urandom(16))
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._count = 0

    def restart(self) -> None:
        """Begin an empty table: a new segment."""
        self._young, self._old, self._count = {}, {}, 0

    def write(self, keys: Sequence[bytes]) -> dict[str, Any]:
        """Return the line's part that names ``keys``."""
        numbers = list(map(self._young.get, keys))
        base = self._count
        fresh = bytearray()
        if None in numbers:
            missing = [at for at, number in enumerate(numbers) if number is None]
            for done, at in enumerate(missing, 1):
                key = keys[at]
                number = self._young.get(key)  # a key twice
                if number is None:
                    number = self._old.get(key)
                    if number is None:
                        number = self._count
                        self._count += 1
                        fresh += self._id(key)
                    self._young[key] = number
                numbers[at] = number
                if done % _HASHED_AT_ONCE == 0:
                    time.sleep(0)
            if len(self._young) > _GENERATION:
                self._young, self._old = {}, self._young
        part: dict[str, Any] = {"b": _stretches(cast(list[int], numbers))}
        if fresh:
            part["h"] = [base, base64.b64encode(fresh).decode()]
        return part

    def _id(self, key: bytes) -> bytes:
        hash_ = self._hash.copy()  # cheaper than setting up the key each time
        hash_.update(key)
        return hash_.digest()


def _stretches(numbers: Sequence[int]) -> list[list[int]]:
    """Return consecutive numbers as pairs of the first one and how many."""
    if not numbers:
        return []
    cuts = [at for at, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    return [[numbers[begin], end - begin] for begin, end in pairwise([0, *cuts, len(numbers)])]


class BlockReader:
    """Turns a segment's stretches into numbers that hold for the whole recording.

    Args:
        known: (run, id) -> number; shared by the segments of a recording, and added to.
        run: which run of the server the segment is of. Another run's ids mean nothing here.
    """

    def __init__(self, known: dict[tuple[str, bytes], int], run: str) -> None:
        self._known = known
        self._run = run
        self._table = array("i")

    def read(self, line: Mapping[str, Any]) -> "array[int]":
        """Return the numbers of the blocks that a line names.

        Raises:
            LookupError, TypeError, ValueError: the line is not as written, or names blocks of a
                line that is lost.
        """
        table = self._table
        if "h" in line:
            base, text = line["h"]
            ids = base64.b64decode(text, validate=True)
            if len(ids) % ID_BYTES or not 0 <= base <= len(table) + _MAX_GAP:
                raise ValueError("h is not as written")
            known, run = self._known, self._run
            fresh = array(
                "i",
                [
                    known.setdefault((run, ids[at : at + ID_BYTES]), len(known))
                    for at in range(0, len(ids), ID_BYTES)
                ],
            )
            table.extend([_UNKNOWN] * (base - len(table)))
            table[base : base + len(fresh)] = fresh
        blocks = array("i")
        for first, count in line["b"]:
            if first < 0 or count < 1 or first + count > len(table):
                raise LookupError("it names blocks of a line that is lost")
            blocks += table[first : first + count]
        if _UNKNOWN in blocks:
            raise LookupError("it names blocks of a line that is lost")
        return blocks


def read_tags(raw: Mapping[str, Any]) -> RequestTags:
    """Return what :meth:`RequestTags.given` wrote; a tag that this version lacks is left out.

    Raises:
        AttributeError, TypeError, ValueError: a value that no recorder writes.
    """
    values = _known(RequestTags, raw)
    if "spans" in values:
        values["spans"] = tuple(Span(**_known(Span, span)) for span in values["spans"])
    return RequestTags(**values)


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    known = fields_dict(kind)
    return {name: value for name, value in raw.items() if name in known}
