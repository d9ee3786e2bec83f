"""An HDF5 file to which measurements are added: every iteration of every rank.

/<start>-<n>                    a measurement; attributes: library, start, end
/<start>-<n>/spec, environment, where, extra    JSON
/<start>-<n>/rows/<number>      a row; attributes: what was varied, and how many results were wrong
    times                       float64 [ranks of the group, iterations], seconds
    ranks                       int64 [ranks of the group], global

An attribute holds 64 KiB at the most, so what grows with ranks is in datasets. A file is changed as a whole: a copy of
it, with the new measurement, takes its place, so a reader, or a kill, meets the one or the other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comms.groups import Where
from hpctrain.comms.result import Result, Row
from hpctrain.errors import DataError
from hpctrain.files import in_turn, publish

WAIT_S = 3600.0
"""For others who add."""

FORMAT = "hpctrain-bench-store-2"
PLAIN = ("operation", "backend", "groups", "size", "count", "dtype", "algorithm", "reduction", "root", "placement")
COUNTED = ("checked", "wrong", "elements", "average")
TEXTS = ("spec", "environment", "where", "extra")
NAMED = ("library", "start", "end")


def check(path: Path) -> None:
    """Refuse a file to which nothing can be added; one that is not there will be made.

    Raises:
        DataError: it is another kind of file.
    """
    import h5py

    if not path.exists():
        return
    if not h5py.is_hdf5(path):
        raise DataError(f"{path} is no HDF5 file: name another one, or remove it.")
    with h5py.File(path, "r") as file:
        _refuse_foreign(file, path)


def append(path: Path, result: Result) -> str:
    """Add a measurement to a file, which is made if it is not there; its name in it. Others who add wait.

    Raises:
        DataError: the file is another kind of file; it stays as it was.
        OSError: it cannot be written; likewise.
    """
    import h5py

    with in_turn(path, WAIT_S):
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            check(path)
            if path.exists():
                shutil.copyfile(path, part)
            with h5py.File(part, "a", libver=("earliest", "v110")) as file:
                name = _add(file, result, path)
            publish(part, path)
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(f"{path} cannot be added to ({error}): it is damaged; name another one.") from None
        finally:
            part.unlink(missing_ok=True)
    return name


def _refuse_foreign(file: Any, path: Path) -> None:
    if file.attrs.get("format", FORMAT if not len(file) else "") != FORMAT:
        raise DataError(f"{path} is no store of hpctrain bench: name another file.")


def _add(file: Any, result: Result, path: Path) -> str:
    file.attrs["format"] = FORMAT
    stamp = result.start.replace(":", "").split("+")[0]
    name = f"{stamp}-{sum(name.startswith(f'{stamp}-') for name in file)}"
    group, plain = file.create_group(name), result.plain()
    for key in TEXTS:
        group.create_dataset(key, data=np.bytes_(json.dumps(plain[key]).encode()))
    for key in NAMED:
        group.attrs[key] = plain[key]
    for index, row in enumerate(result.rows):
        made = group.create_group(f"rows/{index:06d}")
        for key in (*PLAIN, *COUNTED):
            made.attrs[key] = getattr(row, key)
        times = made.create_dataset("times", data=np.array(row.times, dtype="f8"))
        times.attrs["unit"] = "s"
        made.create_dataset("ranks", data=np.array(row.ranks, dtype="i8"))
    return name


def names(path: Path) -> list[str]:
    """Measurements in a file, in the order of time."""
    with _opened(path) as file:
        return sorted(file)


def read(path: Path, name: str = "", rows: bool = True) -> Result:
    """A measurement of a file, the last one unless named.

    Args:
        rows: with them; else all but what was found.

    Raises:
        DataError: there is none, or the file is none of ours.
    """
    with _opened(path) as file:
        name = name or max(file)
        if name not in file:
            raise DataError(f"{path} has no measurement {name!r}: it has {', '.join(sorted(file)[:8])}.")
        group = file[name]
        loaded = {key: json.loads(bytes(group[key][()])) for key in TEXTS}
        kept = group.get("rows", {}) if rows else {}
        found = tuple(_row(kept[index]) for index in sorted(kept))
        plain: dict[str, Any] = {key: str(group.attrs[key]) for key in NAMED}
    where = tuple(Where(**at) for at in loaded.pop("where"))
    return Result(rows=found, where=where, **loaded, **plain)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT or not len(file):
                raise DataError(f"{path} is no store of hpctrain bench: name a file that --store wrote.")
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5 ({error}): name a file that --store wrote.") from None


def _row(made: Any) -> Row:
    def value(key: str) -> Any:
        found = made.attrs[key]
        return found.item() if isinstance(found, np.generic) else str(found)

    kept = {key: value(key) for key in (*PLAIN, *COUNTED)}
    ranks = tuple(int(rank) for rank in made["ranks"][:])
    return Row(ranks=ranks, times=tuple(map(tuple, made["times"][:].tolist())), **kept)
