"""Errors a user can act on.

Every one is a single sentence that says what is wrong, with which value, what is allowed and how to mend
it. The command line prints that sentence and exits with `exit_code`; it never shows a traceback for them.
"""

from __future__ import annotations

import errno
import os
from typing import Any

MENDS = {
    errno.ENOSPC: "free some space there, or write elsewhere",
    errno.EDQUOT: "free some of your quota there, or write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use another file system",
    errno.EACCES: "give yourself access, or use another path",
    errno.EPERM: "give yourself access, or use another path",
    errno.EROFS: "use a path on a file system that can be written",
    errno.EIO: "the disk or its server fails; use another, or ask who runs it",
    errno.ESTALE: "the file server has lost the file; try again",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "use a shorter name or folder",
    errno.EISDIR: "that is a folder; name a file in it",
    errno.ENOTDIR: "a part of that path is a file; use another path",
    errno.EEXIST: "a file is in the way; move it, or use another path",
    errno.ENFILE: "the machine has too many open files; close some",
}
"""Failures of the machine rather than of the program, and how to mend them."""


def os_sentence(error: OSError) -> str | None:
    """What a failure of the machine is called and how to mend it; None for one that is not of that kind."""
    if error.errno not in MENDS:
        return None
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return f"{where}{os.strerror(error.errno)}; {MENDS[error.errno]}."


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class HpctrainError(Exception):
    """Base of all errors that are the user's to mend."""

    exit_code = 1


class ConfigError(HpctrainError):
    """A setting, or a combination of settings, that cannot run.

    Args:
        path: dotted path of the setting, for example `parallel.tp`.
        value: what was found there.
        allowed: what would have been accepted, in words.
        fix: what to do, in words; left out where `allowed` says it all.
    """

    exit_code = 2

    def __init__(self, path: str, value: Any, allowed: str, fix: str = "") -> None:
        self.path, self.value, self.allowed, self.fix = path, value, allowed, fix
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        super().__init__(f"{path}={shown}: {allowed}" + (f"; {fix}" if fix else "") + ".")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.value, self.allowed, self.fix)


class DataError(HpctrainError):
    """A corpus that is missing, damaged, foreign, or does not fit the model."""


class CheckpointError(HpctrainError):
    """A checkpoint that cannot be written, or none that can be read."""


class LaunchError(HpctrainError):
    """Ranks that cannot be started or cannot find each other."""


class LabError(HpctrainError):
    """A practice cluster that cannot be brought up, reached or taken down."""


class TrainError(HpctrainError):
    """Training that had to stop, for example after too many non-finite steps."""
