"""How a parameter is cut over the ranks that share its state under engine `fsdp`. Plain arithmetic.

FSDP2 cuts along one dim into equal parts, the last of which may be shorter, or empty: then it travels padded.
"""

from __future__ import annotations

import math

from hpctrain.layout.placement import Index

ROWS = 16
"""Rows a rank from which padding, of a row a rank at most, is little beside them."""


def shard_dim(shape: Index, ranks: int) -> int:
    """The dim that a rank's tensor of this shape is cut along.

    The first: its parts lie together in memory. Where it has few rows and does not divide (experts of a layer), the
    first other dim that does, if there is one; others have to divide.
    """
    if shape[0] % ranks and shape[0] < ROWS * ranks:
        return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)
    return 0


def shard(shape: Index, ranks: int, index: int) -> tuple[Index, Index]:
    """Start and shape of the part that one of the ranks keeps; the shape has a 0 where it keeps nothing."""
    dim = shard_dim(shape, ranks)
    start = min(index * _size(shape, ranks), shape[dim])
    count = min(_size(shape, ranks), shape[dim] - start)
    return _with(dim, start, (0,) * len(shape)), _with(dim, count, shape)


def replicas_of(replicas: int, ranks: int) -> int:
    """Groups of ranks that each hold all state, of those that `sharding.replicas` asks for: as many as divide the
    ranks. Of experts, which fewer ranks share, there may be less."""
    return math.gcd(replicas, ranks)


def padded(shape: Index, ranks: int) -> int:
    """Elements of all parts as they travel."""
    dim = shard_dim(shape, ranks)
    return math.prod(_with(dim, _size(shape, ranks) * ranks, shape))


def _size(shape: Index, ranks: int) -> int:
    return -(-shape[shard_dim(shape, ranks)] // ranks)


def _with(dim: int, value: int, index: Index) -> Index:
    return (*index[:dim], value, *index[dim + 1 :])
