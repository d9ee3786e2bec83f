"""Buffers of one rank, filled with the pattern and checked against it, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comms.memory import Buffer, Memory
from hpctrain.comms.pattern import Block, Contents, Values

PIECE = 1 << 22
"""Elements that are worked on at once, so that a check needs little memory."""

SALT = 1_000_003

POISON = 113
"""In a buffer to which nothing has come yet; no value of a pattern, in which the largest is 96."""


@dataclass(frozen=True)
class Buffers:
    """What one operation reads and writes; in place one is part of the other.

    Attributes:
        dtype: of both, a key of `sizes.DTYPES`.
    """

    send: Buffer
    receive: Buffer
    dtype: str
    in_place: bool = False


def allocate(
    operation: str, contents: Contents, index: int, root: int, in_place: bool, dtype: str, memory: Memory
) -> Buffers:
    """Buffers of a rank, in the arrangement that nccl-tests calls in place or out of place.

    In place the smaller buffer is the rank's own part of the larger, or both are the same.
    """
    sends, receives = contents.sends, contents.receives
    if not in_place or (operation in ("gather", "scatter") and index != root):
        return Buffers(memory.zeros(sends, dtype), memory.zeros(receives, dtype), dtype, in_place)
    whole = memory.zeros(max(sends, receives), dtype)
    send = receive = whole
    if operation in ("all_gather", "gather"):
        send = whole[index * sends : (index + 1) * sends]
    elif operation in ("reduce_scatter", "scatter"):
        receive = whole[index * receives : (index + 1) * receives]
    return Buffers(send, receive, dtype, True)


def fill(buffers: Buffers, contents: Contents, values: Values, memory: Memory) -> None:
    """Put the pattern in, and poison where something is to come."""
    if not buffers.in_place or len(buffers.receive) > len(buffers.send):
        buffers.receive[:] = memory.table([POISON], buffers.dtype)

    def put(part: Buffer, wanted: Buffer) -> None:
        part[:] = wanted

    _each(buffers.send, contents.send, values, buffers.dtype, memory, put)


def wrong(receive: Buffer, blocks: Sequence[Block], values: Values, dtype: str, memory: Memory) -> int:
    """Elements of a receive buffer that are not what they have to be."""
    found = 0

    def compare(part: Buffer, wanted: Buffer) -> None:
        nonlocal found
        if values.tolerance:
            is_, must = memory.doubles(part, dtype), memory.doubles(wanted, dtype)
            found += int((~(abs(is_ - must) <= abs(must) * values.tolerance)).sum())
        else:
            found += int((part != wanted).sum())

    _each(receive, blocks, values, dtype, memory, compare)
    return found


def _each(
    buffer: Buffer,
    blocks: Sequence[Block],
    values: Values,
    dtype: str,
    memory: Memory,
    act: Callable[[Buffer, Buffer], object],
) -> None:
    """Call `act(part, wanted)` for all parts of a buffer that holds these blocks one after the other."""
    own, reduced = memory.table(values.own, dtype), memory.table(values.reduced, dtype)
    at = 0
    for block in blocks:
        table, shift = (reduced, 0) if block.source is None else (own, block.source)
        salt = SALT * (shift // values.period)  # ranks that are a period apart have other values all the same
        for begin in range(0, block.count, PIECE):
            size = min(PIECE, block.count - begin)
            places = _hash(memory.places(block.start + begin, size) + salt, values.period)
            act(buffer[at + begin : at + begin + size], table[(places + shift) % values.period])
        at += block.count


def _hash(places: Buffer, period: int) -> Buffer:
    """A number below `period` for each place, with no period of its own that a part could have."""
    return ((places * 2654435761 >> 13) ^ places) % period
