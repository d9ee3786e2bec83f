"""What a checkpoint says about itself: names on disk, the index of each writer, the manifest of the whole.

RUN/checkpoints/latest                                   name of the last committed step, for people
RUN/checkpoints/step-00000100/manifest.json              makes the folder a checkpoint
RUN/checkpoints/step-00000100/rank-00000.safetensors     values written by one rank
RUN/checkpoints/step-00000100/rank-00000.json            which boxes of which tensors they are
RUN/checkpoints/step-00000200.partial/                   being written, or being deleted
RUN/checkpoints/step-00000150.refused/                   committed once, found damaged later, set aside
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError
from hpctrain.layout.placement import Index

FORMAT = "hpctrain-checkpoint"
VERSION = 1

FOLDER = "checkpoints"
POINTER = "latest"
MANIFEST = "manifest.json"
PARTIAL = ".partial"
REFUSED = ".refused"

_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_REFUSED = re.compile(_STEP.pattern + re.escape(REFUSED) + r"(?:-(\d+))?")


def step_name(step: int, repeat: int = 0) -> str:
    """Name of a step's folder; `repeat` counts earlier checkpoints of the same step that are still there."""
    return f"step-{step:08d}" + (f"-{repeat}" if repeat else "")


def parse_step(name: str) -> int | None:
    """The step that a committed folder's name stands for; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def refused_name(name: str, repeat: int = 0) -> str:
    """Name of a committed folder once it is set aside; `repeat` counts those of the same name before it."""
    return name + REFUSED + (f"-{repeat}" if repeat else "")


def parse_refused(name: str) -> int | None:
    """The step of a folder that was set aside; None for other names."""
    match = _REFUSED.fullmatch(name)
    return int(match[1]) if match else None


def rank_files(rank: int) -> tuple[str, str]:
    """Names of the values and of the index that a rank writes."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32 of `data`, continued from `before`.

    It is to find damage, not forgery, and must keep up with the disks: zlib's runs at 6 GB/s on a core where
    SHA-256 in hardware runs at 2 GB/s, which would be half of the time of a save.
    """
    return zlib.crc32(data, before)


def checksum_text(value: int) -> str:
    """How a checksum is noted."""
    return f"crc32:{value:08x}"


@dataclass(frozen=True)
class Entry:
    """One piece in a writer's file: a box of a logical tensor.

    Attributes:
        name, kind: of the tensor.
        global_shape: shape of the whole tensor.
        start, shape: the box.
        dtype: `float32` or `float64`.
        key: of its values in the file of values.
    """

    name: str
    kind: str
    global_shape: Index
    start: Index
    shape: Index
    dtype: str
    key: str


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint, as it was written."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps made.
        serial: counts the commits in this folder, so that "newest" does not rest on clocks or on step
            numbers, which go back when a damaged checkpoint is stepped over.
        created: UTC, ISO 8601.
        scalars: numbers of the engine.
        extra: what the driver wants to know again.
        files: all files but the manifest.
    """

    step: int
    serial: int
    created: str
    scalars: dict[str, float]
    extra: dict[str, Any]
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(f.bytes for f in self.files)


def dump_index(entries: Iterable[Entry]) -> bytes:
    """Text of a writer's index."""
    pieces = ",\n".join(json.dumps(asdict(e), separators=(",", ":")) for e in entries)
    return f'{{"format":"{FORMAT}","version":{VERSION},"pieces":[\n{pieces}\n]}}\n'.encode()


def load_index(path: Path) -> tuple[Entry, ...]:
    """The index of a writer.

    Raises:
        CheckpointError: it is missing or not an index.
    """
    try:
        return tuple(_entry(**piece) for piece in json.loads(path.read_bytes())["pieces"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as the index of a checkpoint: {error}.") from error


def _entry(*, global_shape: list[int], start: list[int], shape: list[int], **names: str) -> Entry:
    return Entry(global_shape=tuple(global_shape), start=tuple(start), shape=tuple(shape), **names)


def dump_manifest(manifest: Manifest) -> bytes:
    """Text of a manifest, with a checksum of its own content."""
    body = json.loads(json.dumps(asdict(manifest)))  # now it is what a reader will get: text keys, lists
    text = {"format": FORMAT, "version": VERSION, "checksum": _checksum_of(body), "body": body}
    return json.dumps(text, indent=1).encode()


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a step's folder.

    Raises:
        CheckpointError: it is missing, damaged or of another version. The text starts with the file's name.
    """
    try:
        text = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged (not JSON)") from error
    if not isinstance(text, dict) or text.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not of an hpctrain checkpoint")
    if text.get("version") != VERSION:
        raise CheckpointError(f"{MANIFEST} has format version {text.get('version')!r}, this program reads {VERSION}")
    if "checksum" not in text:
        raise CheckpointError(f"{MANIFEST} has no checksum")
    body = text.get("body", {})
    if text["checksum"] != _checksum_of(body):
        raise CheckpointError(f"{MANIFEST} is damaged (checksum differs)")
    return _manifest(body)


def _manifest(body: Mapping[str, Any]) -> Manifest:
    try:
        named = {f.name: body[f.name] for f in fields(Manifest)}
        records = tuple(FileRecord(f["name"], int(f["bytes"]), f.get("checksum", "")) for f in named.pop("files"))
        manifest = Manifest(**named, files=records)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{MANIFEST} lacks {error}") from error
    for name, kind in (("step", int), ("serial", int), ("created", str), ("scalars", dict), ("extra", dict)):
        if not isinstance(value := getattr(manifest, name), kind) or isinstance(value, bool):
            raise CheckpointError(f"{MANIFEST} has {name}={value!r:.60}, which must be {kind.__name__}")
    if not all(isinstance(r.name, str) and isinstance(r.checksum, str) and "/" not in r.name for r in records):
        raise CheckpointError(f"{MANIFEST} has files without a plain name or checksum")
    if not all(isinstance(v, (int, float)) for v in manifest.scalars.values()):
        raise CheckpointError(f"{MANIFEST} has scalars that are no numbers")
    return manifest


def _checksum_of(body: Any) -> str:
    return checksum_text(checksum(json.dumps(body, sort_keys=True).encode()))
