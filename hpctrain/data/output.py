"""What is written where the user said: refused before the work, whole or not at all, failures in words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import DataError
from hpctrain.files import whole

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_names_a_file(path: Path) -> None:
    """Refuse `.`, `..` and `/`, beside which nothing can lie.

    Raises:
        DataError: it is one of them.
    """
    if path.name in ("", ".."):
        raise DataError(f"{path} is a directory; name a file in it, for example {path / 'corpus'}.")


def check_output(output: Path, replace_existing: bool) -> None:
    """Refuse to write over what must stay.

    Raises:
        DataError: it is there already, or is no regular file.
    """
    if output.is_dir():
        raise DataError(f"Output {output} is a directory; name a file in it, for example {output / 'corpus.h5'}.")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise DataError(f"Output {output} is not a regular file, and is left alone; name a file of its own.")
    if output.exists() and not replace_existing:
        raise DataError(f"Output {output} is there already; name another file, or replace it with --force.")


def in_words(output: Path, error: OSError) -> DataError:
    """The sentence about an output that cannot be written."""
    if error.errno in NO_ROOM:
        return DataError(f"Output {output} does not fit ({error.strerror}); make room, or name a file elsewhere.")
    if isinstance(error, BlockingIOError):
        return DataError(
            f"Output {output} is being built by another process; wait for it, or end it and run this again."
        )
    return DataError(
        f"Output {output} cannot be written: {error.strerror or error}; check the directory and its rights."
    )


@contextmanager
def written(output: Path, replace_existing: bool) -> Iterator[Path]:
    """A file that takes the place of `output` when the block ends well, and is gone otherwise (`files.whole`).

    Raises:
        DataError: the output is there, cannot be written or does not fit.
    """
    check_output(output, replace_existing)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole(output) as part:
            yield part
    except OSError as error:
        raise in_words(output, error) from error
