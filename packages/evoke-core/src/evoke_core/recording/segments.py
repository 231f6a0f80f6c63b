"""The files of a recording: one that is written, and those that are full.

``PATH`` is the one being written; full ones become ``PATH.000001``, ``PATH.000002``, ... and are
packed to ``PATH.000001.gz``, ... bit by bit between other work. The oldest go when all of them
together would exceed the limit.

Guarantees: no file that is not a recording's is written to, renamed or deleted; two processes never
write to one file (the second takes ``NAME.2.SUFFIX``, and so on); every line is handed to the
operating system whole and at once, nothing waits in a buffer of this process; an earlier recording
at the same path is kept, as full segments.
"""

import contextlib
import gzip
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from evoke_core.recording.coding import MAGIC

try:
    import fcntl
except ImportError:  # not there on every platform: without it nothing tells two writers apart
    fcntl = None  # type: ignore[assignment]

FIRST_BYTES = f'{{"{MAGIC}":'.encode()
"""How every segment begins."""

_SHARE = 8  # a segment is this part of the limit
_PIECE = 1 << 18  # bytes packed at a time
_MAX_WRITERS = 64


@frozen(order=True)
class Segment:
    """A full file of a recording."""

    number: int
    path: Path
    packed: bool


def full_segments(path: Path) -> list[Segment]:
    """Return the full files of the recording at ``path``, oldest first, each once."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})(\.gz)?")
    found: dict[int, Segment] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent))
    except OSError:
        return []
    for name in names:
        match = pattern.fullmatch(name)
        if match:  # unpacked before packed: packing that was broken off left both
            number = int(match[1])
            found.setdefault(number, Segment(number, path.with_name(name), bool(match[2])))
    return sorted(found.values())


def _is_at(file: int, path: Path) -> bool:
    """Say whether an open file is the one that lies at a path."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file))


class SegmentWriter:
    """Writes lines, begins new files, keeps all of them within ``max_bytes``.

    Every method may raise OSError; afterwards :meth:`begin` may be tried again.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.size = 0
        self.limit = max(1, max_bytes // _SHARE)
        self._wanted = path
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._full: list[tuple[int, Path]] = []  # bytes and path, oldest first
        self._next = 1
        self._packing: Iterator[None] | None = None
        self._unpacked: list[Path] = []
        self._part_bytes = 0

    @property
    def ready(self) -> bool:
        """Whether a file is open."""
        return self._file is not None

    def begin(self) -> None:
        """Open a new file, and make what lies at the path a full segment."""
        self.leave()
        self._wanted.parent.mkdir(parents=True, exist_ok=True)
        for turn in range(1, _MAX_WRITERS + 1):
            path = self._wanted
            if turn > 1:
                path = path.with_name(f"{path.stem}.{turn}{path.suffix}")
            if self._take(path):
                return
        raise OSError(f"{_MAX_WRITERS} processes record at this path")

    def write(self, data: bytes) -> None:
        """Append whole lines."""
        if self._file is None:
            raise OSError("no file is open")
        self._make_room(len(data))
        end = self.size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            with contextlib.suppress(OSError):  # no half line, if that can be helped
                os.ftruncate(self._file, end)
            raise
        self.size += len(data)

    def rotate(self) -> None:
        """Make the file a full segment and open a new one."""
        if self._file is not None:
            self._set_aside(self.path)  # while it is locked, so that nobody else does
        self.begin()

    def check(self) -> None:
        """Raise if somebody took the file away: what is written then would be seen by nobody."""
        if self._file is not None and not _is_at(self._file, self.path):
            raise FileNotFoundError(0, "it is gone from its place", str(self.path))

    def pack(self) -> bool:
        """Pack a little of the full segments; False when nothing is left to pack."""
        if self._packing is None:
            if not self._unpacked:
                return False
            self._packing = self._pack(self._unpacked.pop(0))
        try:
            next(self._packing)
        except StopIteration:
            self._packing = None
        except OSError:
            self._packing = None
            raise
        return True

    def leave(self) -> None:
        """Close the file, if one is open."""
        if self._packing is not None:
            self._packing.close()  # type: ignore[attr-defined]
            self._packing = None
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                os.close(file)

    # --- internals ---

    def _take(self, path: Path) -> bool:
        """Make ``path`` the file that is written; False if another process writes to it."""
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return False
            try:
                if not _is_at(file, path):  # somebody set it aside just now
                    continue
                state = os.fstat(file)
                regular = stat.S_ISREG(state.st_mode)
                # What a kill or a full disk left of a first line is ours too.
                ours = regular and FIRST_BYTES.startswith(os.read(file, len(FIRST_BYTES)))
                if regular and state.st_size == 0:
                    self._file, self.path, self.size = file, path, 0
                    self._find_full()
                    return True
                if not ours:
                    raise FileExistsError(0, "it is there already and no recording", str(path))
                self.path = path
                self._find_full()
                self._set_aside(path)
            finally:
                if self._file != file:
                    os.close(file)

    def _find_full(self) -> None:
        """Look for full segments, and for what packing that was broken off left."""
        for entry in os.scandir(self.path.parent):
            if re.fullmatch(re.escape(self.path.name) + r"\.\d{6,}\.gz\.part", entry.name):
                os.unlink(entry.path)
        segments = full_segments(self.path)
        self._full = [(each.path.stat().st_size, each.path) for each in segments]
        self._unpacked = [each.path for each in segments if not each.packed]
        self._next = segments[-1].number + 1 if segments else 1
        self._part_bytes = 0

    def _set_aside(self, path: Path) -> None:
        target = path.with_name(f"{path.name}.{self._next:06d}")
        os.rename(path, target)
        self._next += 1
        self._full.append((target.stat().st_size, target))
        self._unpacked.append(target)

    def _make_room(self, more: int) -> None:
        used = sum(size for size, _ in self._full) + self._part_bytes + self.size + more
        while self._full and used > self._max_bytes:
            size, path = self._full.pop(0)
            used -= size
            if path in self._unpacked:
                self._unpacked.remove(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if used > self._max_bytes:
            raise OSError("a line is larger than all that may be written")

    def _pack(self, path: Path) -> Iterator[None]:
        target = path.with_name(f"{path.name}.gz")
        part = path.with_name(f"{path.name}.gz.part")
        try:
            with path.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as packed:
                while piece := source.read(_PIECE):
                    packed.write(piece)
                    self._part_bytes += len(piece)  # more than it is: the limit holds
                    yield
            if all(path != each for _, each in self._full):
                return  # it was the oldest, and had to go meanwhile
            os.rename(part, target)
            os.unlink(path)
            self._full = [
                (target.stat().st_size, target) if each == path else (size, each)
                for size, each in self._full
            ]
        finally:
            self._part_bytes = 0
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
