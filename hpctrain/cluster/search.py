"""A small world's order of ranks made better by exchanging two ranks at a time, until no exchange helps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.cluster.linkbytes import LINKS, WEIGHTS, Floats, Ints, Sends
from hpctrain.cluster.slots import Slots

SMALL = 48
"""Ranks up to which it is tried."""

_STARTS = 12


def improve(slots: Slots, at: Ints, sends: Sequence[Sends], keep_tp: bool) -> Ints:
    """A better order than `at`, or that.

    Args:
        keep_tp: what tp sends has to stay inside NVLink domains.
    """
    used = np.unique(at)
    cost, volume = _matrices(slots, used, sends, len(at), keep_tp)
    random = np.random.default_rng(0)
    start = np.searchsorted(used, at)
    best: Ints = start
    lowest = _total(cost, volume, start)
    for attempt in range(_STARTS):
        found = _descend(cost, volume, start if attempt == 0 else _shaken(random, start, attempt))
        total = _total(cost, volume, found)
        if total < lowest * (1 - 1e-12):
            best, lowest = found, total
    out: Ints = used[best]
    return out


def _matrices(slots: Slots, used: Ints, sends: Sequence[Sends], world: int, keep_tp: bool) -> tuple[Floats, Floats]:
    """Cost of a byte from slot to slot, and bytes from rank to rank: for tp, and for all else."""
    a, b = np.meshgrid(used, used, indexing="ij")
    link = slots.links(a.ravel(), b.ravel()).reshape(a.shape)
    cost = np.array([WEIGHTS[name] for name in LINKS])[link]
    volume = np.zeros((2, world, world))
    for one in sends:
        np.add.at(volume[int(one.axis != "tp")], (one.source, one.target), one.bytes)
    dear = cost + (1e6 * (link != LINKS.index("nvlink")) if keep_tp else 0.0)
    both = volume + volume.transpose(0, 2, 1)
    return np.stack([dear + dear.T, cost + cost.T]), both / 2


def _total(cost: Floats, volume: Floats, at: Ints) -> float:
    return float((cost[:, at[:, None], at[None, :]] * volume).sum())


def _descend(cost: Floats, volume: Floats, start: Ints) -> Ints:
    """Exchanges that help, taken the best first."""
    at: Ints = np.array(start, dtype=np.int64)
    world = len(at)
    pairs = np.stack(np.triu_indices(world, 1), axis=1)
    while True:
        placed = cost[:, at[:, None], at[None, :]]
        # rows of bytes against rows of costs: what a rank costs at the place of another
        there = np.einsum("krx,ksx->rs", volume, placed)
        own = np.diag(there)
        i, j = pairs[:, 0], pairs[:, 1]
        between = (volume * placed).sum(axis=0)[i, j]
        at_self = (volume[:, i, j] * placed[:, i, i]).sum(axis=0)
        gain = own[i] + own[j] - there[i, j] - there[j, i] - 2 * between + 2 * at_self
        if world < 2 or gain.max() <= 1e-9 * max(1.0, own.sum()):
            return at
        a, b = pairs[int(gain.argmax())]
        at[a], at[b] = at[b], at[a]


def _shaken(random: np.random.Generator, at: Ints, attempt: int) -> Ints:
    """Every second time quite another order, else some places exchanged."""
    if attempt % 2:
        return np.asarray(random.permutation(at), dtype=np.int64)
    out: Ints = np.array(at, dtype=np.int64)
    some = random.choice(len(at), max(2, len(at) // 2), replace=False)
    out[some] = out[random.permutation(some)]
    return out
