"""HDF5 files as Cerebras' ModelZoo writes them: samples of a fixed length with a mask and shifted labels.

A file has either `data` [samples, 3, seq] of input_ids, mask and labels, or these as three datasets [samples, seq];
`labels[i]` is what follows `input_ids[i]`, the mask is 1 where that is learnt, and padding is masked at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.foreign import Array, Foreign
from hpctrain.errors import DataError

ROWS = 256
"""Samples that are read at a time."""
NAMES = ("input_ids", "attention_mask", "labels")


def read_cerebras(path: Path) -> Foreign:
    """What is in such a file, or in all .h5 files of a folder, in the order of their names. A sample is a document.

    Raises:
        DataError: a file cannot be read, or is none of that kind.
    """
    files = sorted(path.glob("*.h5")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no .h5 files; name a file, or a folder of some.")
    lengths: list[NDArray[np.int64]] = []
    learnt_all, tokens = True, 0
    for file in files:
        for ids, mask, labels in _samples(file):
            places = _lengths(mask)
            inside = np.arange(ids.shape[1]) < places[:, None]
            wrong = inside[:, 1:] & (ids[:, 1:] != labels[:, :-1])
            if wrong.any():
                raise DataError(
                    f"{file} has samples in which labels are not the ids that follow; fill-in-the-middle and other "
                    f"objectives are not read."
                )
            learnt_all &= bool((mask[inside] != 0).all())
            lengths.append(places[places > 0] + 1)
            tokens += int(lengths[-1].sum())
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()

    def blocks() -> Iterator[Array]:
        for file in files:
            for ids, mask, labels in _samples(file):
                yield _documents(ids, labels, _lengths(mask))

    def masks() -> Iterator[Array]:
        for file in files:
            for ids, mask, _ in _samples(file):
                ahead = np.concatenate([np.ones((len(mask), 1), mask.dtype), mask], 1)
                ahead[:, 0] = mask[:, 0] != 0
                yield _cut(ahead != 0, _lengths(mask))
                assert ids.shape == mask.shape

    facts = {"files": len(files)}
    return Foreign(path, "cerebras", offsets, blocks, None if learnt_all else masks, facts)


def _lengths(mask: Array) -> NDArray[np.int64]:
    """Places of each sample up to the last that is learnt."""
    learnt = mask != 0
    last = mask.shape[1] - learnt[:, ::-1].argmax(1)
    return np.where(learnt.any(1), last, 0).astype(np.int64)


def _documents(ids: Array, labels: Array, places: NDArray[np.int64]) -> Array:
    """All ids of each sample and the one after them."""
    return _cut(np.concatenate([ids[:, :1], labels], 1), places)


def _cut(rows: Array, places: NDArray[np.int64]) -> Array:
    keep = np.arange(rows.shape[1]) <= places[:, None]
    keep[places == 0] = False
    return np.asarray(rows[keep])


def _samples(path: Path) -> Iterator[tuple[Array, Array, Array]]:
    """Ids, mask and labels of some samples at a time."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            sets: list[Any]
            if isinstance(file.get("data"), h5py.Dataset) and file["data"].ndim == 3 and file["data"].shape[1] == 3:
                data, sets = file["data"], []
                _check(path, data)
            else:
                data, sets = None, [file.get(name) for name in NAMES]
                if not all(isinstance(one, h5py.Dataset) and one.ndim == 2 for one in sets):
                    raise DataError(
                        f"{path} has neither data [samples, 3, seq] nor {', '.join(NAMES)} [samples, seq]; it is no "
                        f"file of Cerebras' ModelZoo for language models."
                    )
                for one in sets:
                    _check(path, one)
                if len({one.shape for one in sets}) != 1:
                    raise DataError(f"{path} is damaged: {', '.join(NAMES)} have different shapes; get it again.")
            count = len(data) if data is not None else len(sets[0])
            for at in range(0, count, ROWS):
                if data is not None:
                    part = data[at : at + ROWS]
                    yield part[:, 0], part[:, 1], part[:, 2]
                else:
                    yield sets[0][at : at + ROWS], sets[1][at : at + ROWS], sets[2][at : at + ROWS]
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"{path} cannot be read as HDF5 ({error}); get it again.") from error


def _check(path: Path, data: Any) -> None:
    if not data.shape[-1]:
        raise DataError(f"Dataset {data.name} of {path} has samples without a place; get it again.")
    if data.dtype.kind not in "iu":
        raise DataError(f"Dataset {data.name} of {path} has type {data.dtype}; integers are read.")
