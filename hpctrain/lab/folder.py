"""The folder of a lab: whose it is, who may change it, what is written into it, and its end.

`lab.json` says what the lab is. It is written first and removed last, so a folder without it is never ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.files import write_whole
from hpctrain.lab import config
from hpctrain.lab.client import PROGRAMS
from hpctrain.lab.spec import LabSpec

RECORD = "lab.json"
LOCK_TIMEOUT_S = 60.0


def load(folder: Path) -> LabSpec | None:
    """What the lab in a folder is; None if there is none.

    Raises:
        LabError: its record is damaged.
    """
    try:
        return LabSpec.from_json((folder / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise LabError(
            f"{folder / RECORD} is damaged; delete {folder}, and what runs of its lab ends by itself in seconds."
        ) from error


def claim(folder: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        LabError: it holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_owner(folder)
    if load(folder) is None and any(folder.iterdir()):
        raise LabError(f"{folder} is not empty and holds no lab; name another folder with --folder.")


def check_owner(folder: Path) -> None:
    """Raises LabError if the folder is somebody else's: of other users' machines nothing can be seen or ended."""
    if folder.stat().st_uid != os.geteuid():
        raise LabError(f"{folder} belongs to another user; name another with --folder, or use sudo.")


def write(spec: LabSpec) -> None:
    """Everything that daemons find when they start, in place of whatever was there."""
    _empty(spec.folder)
    write_whole(spec.folder / RECORD, spec.to_json())
    for name, mode in (("etc", 0o755), ("run", 0o755), ("log", 0o755), ("state", 0o700), ("db", 0o700)):
        (spec.folder / name).mkdir(mode)
    for name, text in config.files(spec).items():
        path = spec.etc / name
        path.touch(0o600 if name == "slurmdbd.conf" else 0o644)  # slurmdbd refuses a file that others can read
        path.write_text(text)
    if spec.rails:
        spec.programs.mkdir()
        (spec.etc / "client.sh").chmod(0o755)
        for name in PROGRAMS:
            (spec.programs / name).symlink_to(spec.etc / "client.sh")
    key = spec.etc / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))


def remove(folder: Path) -> None:
    """The folder of a lab that does not run any more."""
    _empty(folder)
    shutil.rmtree(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time changes a lab. The lock is the folder itself, so that none is left behind.

    Raises:
        LabError: it was removed while this waited, or somebody holds it for long.
    """
    gone = LabError(f"the lab in {folder} was taken down just now; try again.")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise gone from None
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _lock(handle):
            if time.monotonic() > deadline:
                raise LabError(f"the lab in {folder} is being brought up or down elsewhere; try later.")
            time.sleep(0.1)
        if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise gone
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _empty(folder: Path) -> None:
    """All but the record."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != RECORD:
            entry.unlink()
