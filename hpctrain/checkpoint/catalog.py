"""Which checkpoints a folder holds. Reads manifests only; `verify` reads everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    POINTER,
    Manifest,
    load_manifest,
    parse_refused,
    parse_step,
)
from hpctrain.errors import CheckpointError


def serial(folder: Path) -> int:
    """Place of a checkpoint in the order of commits, from 1; 0 where its manifest cannot be read."""
    try:
        return load_manifest(folder).serial
    except CheckpointError:
        return 0


def out_of_reach(folder: Path) -> bool:
    """Whether nothing can be said about a checkpoint, because its manifest is there and the machine will not give it:
    no permission, a disk or a file server that fails."""
    try:
        load_manifest(folder)
    except CheckpointError as error:
        return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
    return False


def committed(root: Path) -> list[Path]:
    """Folders of committed steps in `RUN/checkpoints`, valid or not, in no order."""
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if parse_step(p.name) is not None and p.is_dir()]


def set_aside(root: Path) -> list[Path]:
    """Folders of committed steps that were refused, in no order. Nothing starts from them any more."""
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if parse_refused(p.name) is not None and p.is_dir()]


def pointer(root: Path) -> str | None:
    """What the pointer says, whether or not that makes sense; None where there is none."""
    try:
        return (root / POINTER).read_bytes().decode(errors="replace").strip()
    except OSError:
        return None


def root_of(path: Path) -> Path:
    """The folder of checkpoints that belongs to a run folder, or `path` itself if it is one."""
    return path / FOLDER if (path / FOLDER).is_dir() or path.name != FOLDER else path


def candidates(path: Path) -> list[Path]:
    """Checkpoints to try, the last commit first.

    Those without a readable manifest come before all others: one of them may be the last commit, so none is
    passed over in silence.

    Args:
        path: a run folder, a folder of checkpoints, or one checkpoint.
    """
    if _is_one(path):
        return [path] if path.is_dir() else []
    found = [(serial(p), p.name, p) for p in committed(root_of(path))]
    return [p for s, _, p in sorted(found, key=lambda f: (f[0] == 0, f[0], f[1]), reverse=True)]


def _is_one(path: Path) -> bool:
    named = parse_step(path.name) is not None or parse_refused(path.name) is not None
    return named or (path / MANIFEST).is_file()


@dataclass(frozen=True)
class Listing:
    """A line of `ls`.

    Attributes:
        path: the checkpoint's folder.
        step: from its name.
        latest: the pointer names it.
        manifest: None where it cannot be read.
        damage: why it cannot; empty where it can.
        refused: it was found damaged and set aside.
    """

    path: Path
    step: int
    latest: bool
    manifest: Manifest | None
    damage: str = ""
    refused: bool = False


def ls(path: Path) -> list[Listing]:
    """What there is, in the order of steps, by manifests alone; what was set aside, too.

    Args:
        path: a run folder, a folder of checkpoints, or one checkpoint.
    """
    lines = []
    aside = [] if _is_one(path) else set_aside(root_of(path))
    for folder in [*candidates(path), *aside]:
        latest = pointer(folder.parent) == folder.name
        manifest, damage = None, ""
        try:
            manifest = load_manifest(folder)
        except CheckpointError as error:
            damage = str(error)
        refused = parse_refused(folder.name)
        step = parse_step(folder.name) if refused is None else refused
        if step is None:
            step = manifest.step if manifest else 0
        lines.append(Listing(folder, step, latest, manifest, damage, refused is not None))
    return sorted(lines, key=lambda line: (line.step, line.path.name))
