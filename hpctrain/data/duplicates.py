"""Documents whose text was there before: found exactly, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hpctrain.data.lay import keep_file
from hpctrain.data.partfile import Facts, Part

TOGETHER = 1 << 24
"""Documents that are compared at a time, about 1 GiB; of more, those whose hashes begin alike, in several rounds."""


def leave_out(
    folder: Path, parts: Sequence[tuple[str, Part]], facts: Callable[[int], Facts], together: int = TOGETHER
) -> int:
    """Mark all documents but the first of each text. Writes `KEY.keep` of every part.

    Args:
        folder: of the parts.
        parts: keys and parts in the order of the corpus.
        facts: of the n-th of them.
        together: see `TOGETHER`.

    Returns:
        how many were marked.
    """
    documents = sum(part.documents for _, part in parts)
    rounds = -(-documents // together) if documents else 0
    for key, part in parts:
        np.ones(part.documents, np.uint8).tofile(keep_file(folder, key))
    found = 0
    for turn in range(rounds):
        hashes, where, owner = [], [], []
        for number in range(len(parts)):
            known = facts(number).hashes
            mine = np.flatnonzero(known[:, 0] % np.uint64(rounds) == turn) if rounds > 1 else np.arange(len(known))
            hashes.append(known[mine])
            where.append(mine)
            owner.append(np.full(len(mine), number, np.int32))
        whole = np.concatenate(hashes)
        order = np.lexsort((whole[:, 1], whole[:, 0]))  # stable: of equal ones the first comes first
        again = order[1:][(whole[order[1:]] == whole[order[:-1]]).all(1)]
        found += len(again)
        at, owners = np.concatenate(where)[again], np.concatenate(owner)[again]
        for number in np.unique(owners):
            path = keep_file(folder, parts[number][0])
            keep = np.fromfile(path, np.uint8)
            keep[at[owners == number]] = 0
            keep.tofile(path)
    return found
