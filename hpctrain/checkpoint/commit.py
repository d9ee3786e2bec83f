"""What the first rank does in a save: make room, commit what all ranks have written, delete what is old.

A folder is a checkpoint from the moment it is renamed from `step-N.partial`. At that moment everything in
it is on the disk already. Deleting starts with the way back: a folder is renamed to `.partial` first, so that a
half deleted checkpoint is never mistaken for one. One that was found damaged is set aside before anything is
deleted: counted among those to keep, it would push out the last good one.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import files
from hpctrain.checkpoint.boxes import incomplete
from hpctrain.checkpoint.catalog import committed, out_of_reach, serial, set_aside
from hpctrain.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    POINTER,
    FileRecord,
    Manifest,
    dump_manifest,
    load_index,
    parse_refused,
    parse_step,
    refused_name,
    step_name,
)
from hpctrain.checkpoint.verify import Verdict, still_is
from hpctrain.errors import CheckpointError

MARGIN = 1 << 20
"""Bytes kept free for the manifest and the folders."""


def prepare(root: Path, step: int, need: int) -> Path:
    """Make the folder to write into, after removing what earlier attempts have left.

    Args:
        root: `RUN/checkpoints`; made if need be.
        step: about to be saved.
        need: bytes that all ranks together will write.

    Raises:
        CheckpointError: the filesystem has less room than that.
    """
    _make_folders(root)
    _clear(root)
    free = shutil.disk_usage(root).free
    if need + MARGIN > free:
        raise CheckpointError(
            f"{need} bytes are needed in {root} and {free} are free; make room, lower checkpoint.keep, or choose "
            f"another run folder."
        )
    staging = root / (step_name(step) + PARTIAL)
    files.make_folder(staging)
    return staging


def _clear(root: Path) -> None:
    for stale in sorted(root.glob(f"*{PARTIAL}")):
        files.remove_tree(stale) if stale.is_dir() else files.remove(stale)


def _make_folders(path: Path) -> None:
    if path.is_dir():
        return
    _make_folders(path.parent)
    files.make_folder(path)
    files.fsync_folder(path.parent)


def commit(
    staging: Path, step: int, scalars: Mapping[str, float], extra: Mapping[str, Any], records: Sequence[FileRecord]
) -> Path:
    """Turn the staged files into the newest checkpoint.

    Args:
        staging: from `prepare`, written and synced by all ranks.
        step: being saved.
        scalars: of the engine.
        extra: of the driver; must survive JSON.
        records: of all ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a file is not there, or the pieces do not cover every tensor exactly once.
    """
    root = staging.parent
    _check(staging, records)
    old = committed(root)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    number = 1 + max((serial(folder) for folder in old), default=0)
    manifest = Manifest(step, number, now, dict(scalars), dict(extra), tuple(records))
    files.write_file(staging / MANIFEST, dump_manifest(manifest))
    files.fsync_folder(staging)
    # A step may be saved again, by a run that stepped back; what is there stays until the new one is.
    folder = _free(root, lambda repeat: step_name(step, repeat))
    pointer = root / (POINTER + PARTIAL)
    files.write_file(pointer, f"{folder.name}\n".encode())
    files.rename(staging, folder)
    files.replace(pointer, root / POINTER)
    files.fsync_folder(root)
    return folder


def _check(staging: Path, records: Sequence[FileRecord]) -> None:
    for record in records:
        path = staging / record.name
        size = path.stat().st_size if path.exists() else None
        if size != record.bytes:
            seen = "no such file" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"{path} was written with {record.bytes} bytes and the first rank sees {seen}; the run folder must be "
                f"on a filesystem that all nodes share."
            )
    entries = [e for r in records if r.name.endswith(".json") for e in load_index(staging / r.name)]
    faults = incomplete(entries)
    if faults:
        raise CheckpointError(f"The pieces of all ranks are not a whole state: {'; '.join(faults[:3])}.")


def _free(root: Path, name: Callable[[int], str]) -> Path:
    """The first of the names 0, 1, 2, ... that nothing has."""
    repeat = 0
    while (root / name(repeat)).exists():
        repeat += 1
    return root / name(repeat)


def abandon(staging: Path) -> None:
    """Remove what a failed save has written."""
    _clear(staging.parent)


def prune(newest: Path, keep: int, refused: Sequence[Verdict] = ()) -> None:
    """Delete all but the `keep` last commits. Those of a step that was committed again go first.

    What could not be judged, because it cannot be read at the moment, is left alone, and takes no place either. What
    was refused takes the place of none of them. It is set aside under another name, and deleted when all
    `keep` places are taken by newer commits.

    Args:
        newest: just committed; never deleted.
        keep: at least 1.
        refused: checkpoints found not valid, in this folder or elsewhere.
    """
    assert keep >= 1
    root = newest.parent
    for verdict in refused:
        if verdict.path.parent.resolve() == root.resolve() and still_is(verdict):
            _set_aside(verdict.path)
    kept: dict[int | None, Path] = {parse_step(newest.name): newest}
    doomed = []
    within_reach = [folder for folder in committed(root) if not out_of_reach(folder)]
    for folder in sorted(within_reach, key=serial, reverse=True):
        step = parse_step(folder.name)
        if folder == newest or (step not in kept and len(kept) < keep):
            kept[step] = folder
        else:
            doomed.append(folder)
    if len(kept) == keep:
        doomed += [folder for folder in set_aside(root) if all(_older(folder, k) for k in kept.values())]
    _delete(doomed)


def _set_aside(folder: Path) -> None:
    files.rename(folder, _free(folder.parent, lambda repeat: refused_name(folder.name, repeat)))


def _older(refused: Path, commit: Path) -> bool:
    """By the order of commits; by steps where the refused one's manifest, which tells, is what is damaged."""
    place = serial(refused)
    if place:
        return place < serial(commit)
    return (parse_refused(refused.name) or 0) < (parse_step(commit.name) or 0)


def _delete(folders: Iterable[Path]) -> None:
    doomed = []
    for folder in folders:
        doomed.append(folder.with_name(folder.name + PARTIAL))
        files.rename(folder, doomed[-1])
    if doomed:
        files.fsync_folder(doomed[0].parent)
    for folder in doomed:
        files.remove_tree(folder)
