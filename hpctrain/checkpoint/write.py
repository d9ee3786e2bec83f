"""What one rank does in a save: take a snapshot, write it. No word to other ranks."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import files, tensorfile
from hpctrain.checkpoint.boxes import text
from hpctrain.checkpoint.manifest import Entry, FileRecord, checksum, checksum_text, dump_index, rank_files
from hpctrain.errors import CheckpointError
from hpctrain.sharding.state import Piece, StateSource

CHUNK = 8 << 20
"""Bytes written, added to the checksum and queued for write-back together: few enough that the second finds
them in the cache, enough that starting write-back is rare (with 1 MiB a save takes twice the time)."""


@dataclass(frozen=True)
class Snapshot:
    """What a rank is about to write. The values are still the source's: it must not change before `write` ends.

    Attributes:
        pieces: in the order they are written.
        entries: the index, entry by piece.
        scalars: numbers beside the tensors.
        header: of the file of values.
        index: text of the index.
    """

    pieces: tuple[Piece, ...]
    entries: tuple[Entry, ...]
    scalars: dict[str, float]
    header: bytes
    index: bytes

    @property
    def bytes(self) -> int:
        """What `write` will write."""
        values = sum(tensorfile.nbytes(e.dtype, e.shape) for e in self.entries)
        return len(self.header) + values + len(self.index)


def snapshot(source: StateSource) -> Snapshot:
    """The state to write, with all that can be known of it before any value is fetched.

    Raises:
        CheckpointError: two pieces are the same box, or a dtype is not one of a master state.
    """
    boxes = [p for p in source.pieces() if 0 not in p.shape]
    entries = [_entry(p) for p in boxes]
    if len({e.key for e in entries}) < len(entries):
        double = next(e.key for i, e in enumerate(entries) if e.key in {o.key for o in entries[:i]})
        raise CheckpointError(f"Piece {double} would be written twice by one rank.")
    # The widest dtype first, so that every tensor is aligned in the file.
    order = sorted(range(len(entries)), key=lambda i: -tensorfile.nbytes(entries[i].dtype, ()))
    entries = [entries[i] for i in order]
    header = tensorfile.header([(e.key, e.dtype, e.shape) for e in entries])
    pieces = tuple(boxes[i] for i in order)
    return Snapshot(pieces, tuple(entries), dict(source.scalars()), header, dump_index(entries))


def _entry(piece: Piece) -> Entry:
    dtype = str(piece.dtype).removeprefix("torch.")
    if dtype not in tensorfile.CODES:
        raise CheckpointError(
            f"{piece.kind} of {piece.name} has dtype {dtype}; a checkpoint holds master state: "
            f"{' or '.join(tensorfile.CODES)}."
        )
    key = f"{piece.name}:{piece.kind}{text(piece.start, piece.shape)}"
    return Entry(piece.name, piece.kind, piece.global_shape, piece.start, piece.shape, dtype, key)


def write(staging: Path, rank: int, shot: Snapshot) -> tuple[FileRecord, ...]:
    """Write a rank's files and wait until they are on the disk. One piece is in memory at a time.

    Args:
        staging: folder made by `commit.prepare`.
        rank: in whose name the files are written.
        shot: what to write.

    Returns:
        Size and checksum of each file.

    Raises:
        CheckpointError: the disk is full, or `staging` is not there.
        OSError: any other failure of the filesystem.
    """
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging} was made by the first rank and is not seen here; the run folder must be on a filesystem "
            f"that all nodes share."
        )
    values, index = rank_files(rank)
    try:
        records = (_write_values(staging / values, shot), _write_index(staging / index, shot.index))
        files.fsync_folder(staging)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(staging).free
        raise CheckpointError(
            f"{error.strerror}: this rank needs {shot.bytes} bytes in {staging.parent}, where {free} are free; "
            f"make room, raise the quota, or lower checkpoint.keep."
        ) from error
    return records


def _write_values(path: Path, shot: Snapshot) -> FileRecord:
    size, queued, crc = 0, 0, 0
    with files.durable(path) as fd:
        for data in _stream(shot):
            for begin in range(0, len(data), CHUNK):
                chunk = data[begin : begin + CHUNK]
                files.write(fd, chunk)
                crc = checksum(chunk, crc)
                size += len(chunk)
                if size - queued >= CHUNK:
                    queued += files.start_write_back(fd, queued, size - queued)
            del data, chunk  # before the next piece is fetched
    return FileRecord(path.name, size, checksum_text(crc))


def _stream(shot: Snapshot) -> Iterator[memoryview]:
    """The header, then the bytes of one piece after the other."""
    yield memoryview(shot.header)
    for piece in shot.pieces:
        yield _bytes(piece)


def _bytes(piece: Piece) -> memoryview:
    values = piece.fetch()
    assert tuple(values.shape) == piece.shape and values.dtype == piece.dtype, (
        f"{piece.kind} of {piece.name}: fetched {tuple(values.shape)} {values.dtype}, "
        f"announced {piece.shape} {piece.dtype}"
    )
    flat: Any = values.detach().contiguous().numpy().reshape(-1)
    return memoryview(flat).cast("B")


def _write_index(path: Path, data: bytes) -> FileRecord:
    files.write_file(path, data)
    return FileRecord(path.name, len(data), checksum_text(checksum(data)))
