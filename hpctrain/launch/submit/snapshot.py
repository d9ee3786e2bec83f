"""The code of a job, copied when it is submitted, so that editing sources does not change what waits in the queue."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import hpctrain
from hpctrain.errors import LaunchError

GIT_TIMEOUT_S = 60


def checkout() -> Path | None:
    """The top of the repository that tracks this package; None where it was installed otherwise."""
    package = Path(hpctrain.__file__).resolve().parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    top = _git(package, "rev-parse", "--show-toplevel")
    return Path(top.strip()) if top else None


def take(top: Path, target: Path) -> list[str]:
    """Copy what the repository at `top` tracks, as it is in the working tree now.

    Returns:
        Python files of the package that are not tracked, and so are not in the copy.

    Raises:
        LaunchError: it cannot be read or written.
    """
    tracked = _git(top, "ls-files", "-z")
    loose = _git(top, "ls-files", "-z", "--others", "--exclude-standard", "--", "*hpctrain/*.py") or ""
    if tracked is None:
        raise LaunchError(f"git cannot list the files of {top}: see git -C {top} status.")
    try:
        for name in filter(None, tracked.split("\0")):
            source, copy = top / name, target / name
            if not source.exists() and not source.is_symlink():
                continue  # deleted, and not committed yet
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                continue  # a submodule
            shutil.copy2(source, copy, follow_symlinks=False)
    except OSError as error:
        raise LaunchError(f"the code cannot be copied to {target}: {error.strerror} ({error.filename}).") from None
    return [name for name in loose.split("\0") if name]


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
