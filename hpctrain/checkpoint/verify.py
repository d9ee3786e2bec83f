"""What makes a checkpoint valid: a sound manifest, and every file there with its size and checksum, and the
pieces cover every tensor exactly once. A checksum that is missing is not taken for one that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpctrain.checkpoint.boxes import incomplete
from hpctrain.checkpoint.manifest import (
    MANIFEST,
    Entry,
    FileRecord,
    Manifest,
    checksum,
    checksum_text,
    dump_manifest,
    load_index,
    load_manifest,
)
from hpctrain.errors import CheckpointError
from hpctrain.sharding.state import balance

CHUNK = 8 << 20
"""Bytes read at a time."""


class Damage(NamedTuple):
    """A file of a checkpoint and what is wrong with it."""

    file: str
    how: str

    def __str__(self) -> str:
        return f"{self.file} {self.how}"


@dataclass(frozen=True)
class Share:
    """The part of the files that rank `index` of `size` looks at."""

    index: int
    size: int


ALL = Share(0, 1)


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint can be trusted.

    Attributes:
        path: its folder.
        damage: all that was found; empty for a valid one.
        bytes: of the files.
        identity: the same wherever the same manifest is seen; 0 where it cannot be read.
    """

    path: Path
    damage: tuple[Damage, ...]
    bytes: int = 0
    identity: int = 0

    @property
    def valid(self) -> bool:
        """Nothing was found."""
        return not self.damage

    def __str__(self) -> str:
        return f"{self.path.name}: " + ("; ".join(str(d) for d in self.damage) or "valid")


def verify(path: Path, share: Share = ALL, progress: Callable[[int], None] | None = None) -> Verdict:
    """Judge a checkpoint.

    Args:
        path: its folder.
        share: which files to read; all by default. Every share looks at the manifest, the first at the pieces.
        progress: called with the number of bytes just read.
    """
    try:
        manifest = load_manifest(path)
    except CheckpointError as error:
        return Verdict(path, (Damage(MANIFEST, str(error).removeprefix(f"{MANIFEST} ")),))
    if not manifest.files:
        return Verdict(path, (Damage(MANIFEST, "lists no files"),), 0, identity_of(manifest))
    owners = balance([record.bytes for record in manifest.files], share.size)
    mine = [record for record, owner in zip(manifest.files, owners) if owner == share.index]
    found = [_look(path, record, progress or (lambda n: None)) for record in mine]
    damage = sorted(d for d in found if d is not None)
    if share.index == 0 and not damage:
        damage = _pieces(path, manifest.files)
    return Verdict(path, tuple(damage), manifest.bytes, identity_of(manifest))


def still_is(verdict: Verdict) -> bool:
    """Whether the folder holds what was judged: another checkpoint may have got its name since."""
    try:
        return verdict.identity == identity_of(load_manifest(verdict.path))
    except CheckpointError:
        return verdict.identity == 0 and verdict.path.is_dir()


def identity_of(manifest: Manifest) -> int:
    """A number that another checkpoint does not have, wherever this one is moved to."""
    return checksum(dump_manifest(manifest))


def _look(folder: Path, record: FileRecord, progress: Callable[[int], None]) -> Damage | None:
    """Compare one file with what the manifest says."""
    if not record.checksum:
        return Damage(record.name, "has no checksum in the manifest")
    try:
        size = (folder / record.name).stat().st_size
        if size != record.bytes:
            return Damage(record.name, f"has {size} bytes, {record.bytes} were written")
        crc = 0
        with open(folder / record.name, "rb", buffering=0) as file:
            buffer = bytearray(CHUNK)
            while n := file.readinto(buffer):
                crc = checksum(memoryview(buffer)[:n], crc)
                progress(n)
    except FileNotFoundError:
        return Damage(record.name, "is missing")
    except OSError as error:
        return Damage(record.name, f"cannot be read ({error.strerror})")
    if checksum_text(crc) != record.checksum:
        return Damage(record.name, f"is damaged (checksum {checksum_text(crc)}, {record.checksum} was written)")
    return None


def _pieces(folder: Path, records: tuple[FileRecord, ...]) -> list[Damage]:
    """Faults of the indices taken together. Whoever has a damaged one in his share reports that."""
    entries: list[Entry] = []
    for record in records:
        if record.name.endswith(".json"):
            try:
                entries += load_index(folder / record.name)
            except CheckpointError:
                intact = _look(folder, record, lambda n: None) is None
                return [Damage(record.name, "is not an index")] if intact else []
    return [Damage("index", f"is not of a whole state ({fault})") for fault in incomplete(entries)]
