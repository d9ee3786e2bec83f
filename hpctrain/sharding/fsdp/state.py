"""Where the parts that FSDP2 gives a rank lie in the logical tensors, and how to read and write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from hpctrain.layout.boxes import meet, within
from hpctrain.layout.placement import Index, Placement
from hpctrain.layout.shards import shard
from hpctrain.sharding.state import Piece, StateReader

State = Callable[[str, str], Tensor]
"""A rank's part of a parameter's state, by name and kind: itself."""


@dataclass(frozen=True)
class Part:
    """What a rank keeps of one parameter.

    Attributes:
        record: of the parameter.
        start, shape: of the part in the rank's local tensor.
    """

    record: Placement
    start: Index
    shape: Index

    @classmethod
    def of(cls, record: Placement, ranks: int, index: int) -> Part:
        """Of one of the ranks that share the parameter's state."""
        return cls(record, *shard(record.local_shape, ranks, index))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sections(self) -> Iterator[tuple[Index, Index, tuple[slice, ...]]]:
        """Boxes of the logical tensor: start and shape there, and where they lie in the part."""
        for box in self.record.boxes:
            common = meet((self.start, self.shape), (box.local, box.shape))
            if common is not None:
                low, shape = common
                yield tuple(g + a - s for g, a, s in zip(box.start, low, box.local)), shape, within(common, self.start)


def pieces(part: Part, kind: str, state: State) -> Iterator[Piece]:
    """What is written of a part."""
    record = part.record
    for start, shape, inside in part.sections():

        def fetch(inside: tuple[slice, ...] = inside) -> Tensor:
            return state(record.name, kind)[inside].contiguous().cpu()

        dtype = state(record.name, kind).dtype
        yield Piece(record.name, kind, record.global_shape, start, shape, dtype, fetch)


def load(parts: Mapping[str, Part], state: State, reader: StateReader, kinds: tuple[str, ...]) -> None:
    """Take what is kept of every parameter."""
    for name, part in parts.items():
        for kind in kinds:
            for start, shape, inside in part.sections():
                state(name, kind)[inside].copy_(reader.read(name, kind, start, shape))
