"""A state for tests: tensors whose values are known, cut into random boxes and dealt to ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.layout.boxes import Region
from hpctrain.sharding.state import Piece, StateReader
from hpctrain.telemetry.meter import Meter

Cuts = tuple[tuple[str, str, torch.dtype, tuple[int, ...]], ...]

TENSORS: Cuts = (
    ("embed", "weight", torch.float32, (7, 5)),
    ("embed", "exp_avg", torch.float32, (7, 5)),
    ("norm", "weight", torch.float64, (11,)),
    ("scale", "weight", torch.float32, ()),
    ("ffn", "weight", torch.float64, (3, 4, 5)),
)


def whole(name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """All values of a tensor; no two tensors or seeds share them."""
    generator = torch.Generator().manual_seed(sum(map(ord, name + kind)) * 1000 + seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def tiling(shape: tuple[int, ...], rng: random.Random, cuts: int = 4) -> list[Region]:
    """Disjoint boxes of uneven sizes that cover the shape."""
    boxes: list[Region] = [(tuple(0 for _ in shape), shape)]
    for _ in range(rng.randrange(cuts + 1)):
        start, size = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, n in enumerate(size) if n > 1]
        if not dims:
            boxes.append((start, size))
            continue
        d = rng.choice(dims)
        at = rng.randrange(1, size[d])
        low = (*size[:d], at, *size[d + 1 :])
        high = (*size[:d], size[d] - at, *size[d + 1 :])
        boxes += [(start, low), ((*start[:d], start[d] + at, *start[d + 1 :]), high)]
    rng.shuffle(boxes)
    return boxes


def cut(t: Tensor, region: Region) -> Tensor:
    """A region's values."""
    return t[tuple(slice(a, a + n) for a, n in zip(*region))]


@dataclass
class FakeState:
    """The part of a state that one rank holds. The same `tiles` on every rank, another share of the boxes."""

    rank: int = 0
    world: int = 1
    seed: int = 0
    tiles: int = 0
    tensors: Cuts = TENSORS
    lost: int = -1
    loaded: dict[str, float] = field(default_factory=dict)

    def boxes(self) -> Iterator[tuple[str, str, torch.dtype, tuple[int, ...], Region]]:
        rng, dealt = random.Random(self.tiles), 0
        for name, kind, dtype, shape in self.tensors:
            for region in tiling(shape, rng):
                if dealt % self.world == self.rank and dealt != self.lost:
                    yield name, kind, dtype, shape, region
                dealt += 1

    def pieces(self) -> Iterable[Piece]:
        for name, kind, dtype, shape, region in self.boxes():

            def fetch(t: tuple = (name, kind, dtype, shape), region: Region = region) -> Tensor:
                return cut(whole(*t, self.seed), region).contiguous()

            yield Piece(name, kind, shape, *region, dtype, fetch)

    def scalars(self) -> dict[str, float]:
        return {"step": float(self.seed), "loss_scale": 0.1 + self.seed}

    def load(self, reader: StateReader) -> None:
        """Read this rank's boxes and compare every bit."""
        for name, kind, dtype, shape, (start, size) in self.boxes():
            got = reader.read(name, kind, start, size)
            want = cut(whole(name, kind, dtype, shape, self.seed), (start, size))
            assert got.dtype == dtype and got.is_contiguous() and torch.equal(got, want), (name, kind, start, size)
        self.loaded = reader.scalars()
        assert self.loaded == self.scalars()


def alone() -> object:
    """An axis of one rank."""
    from hpctrain.parallel.comm import Axis

    return Axis("world", (0,), 0, None, Meter())


def world_axis() -> object:
    """All ranks of the process group, if there is one."""
    import torch.distributed as dist

    from hpctrain.parallel.comm import Axis

    if not dist.is_initialized():
        return alone()
    return Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD, Meter())
