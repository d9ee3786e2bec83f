"""Which rank is where on the parallel axes. Plain arithmetic: no processes, no torch.

The world is `pp x dp x cp x tp` ranks, tp innermost so that it stays inside the NVLink domain, pp outermost
so that it crosses nodes. The `dp*cp*tp` ranks of one stage have a second factorisation for experts,
`edp x ep x etp`, etp innermost. Which physical GPU a rank sits on is not decided here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes and the ranks they imply; and how the layers are spread over pp.

    Attributes:
        sp: no axis: what tp does not split is split over the sequence, on the ranks of tp.
        schedule, chunks, stage_layers, cp_method: see `ParallelConfig`; what the first three mean, `layout/stages.py`.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    stage_layers: tuple[int, ...] | None = None
    cp_method: str = "ring"

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "etp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"parallel.{axis}", getattr(self, axis), "an axis has at least one rank")
        if self.etp not in (1, self.tp):
            raise ConfigError(
                "parallel.etp",
                self.etp,
                f"an expert is split as the dense layers are (tp={self.tp}) or not at all (1)",
                f"use {' or '.join(map(str, sorted({1, self.tp})))}",
            )
        stage = self.dp * self.cp * self.tp
        if stage % (self.ep * self.etp):
            sizes = divisors(stage // self.etp)
            raise ConfigError(
                "parallel.ep",
                self.ep,
                f"ep x etp must divide the {stage} ranks of a stage (dp x cp x tp)",
                f"use {' or '.join(map(str, sizes[-3:]))}, or more ranks",
            )

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> Layout:
        """The layout of `world` ranks under a configuration; dp is what is left.

        Raises:
            ConfigError: the ranks are not a multiple of pp x cp x tp.
        """
        model = parallel.pp * parallel.cp * parallel.tp
        if world % model:
            axis = next((a for a in ("tp", "cp", "pp") if world % getattr(parallel, a)), "tp")
            raise ConfigError(
                f"parallel.{axis}",
                getattr(parallel, axis),
                f"pp x cp x tp = {parallel.pp} x {parallel.cp} x {parallel.tp} = {model} must divide the {world} ranks",
                "change the axis, or cluster.nodes and cluster.gpus_per_node",
            )
        return cls(
            parallel.pp,
            world // model,
            parallel.cp,
            parallel.tp,
            parallel.ep,
            parallel.etp,
            sp=parallel.sp,
            schedule=parallel.schedule,
            chunks=parallel.chunks,
            stage_layers=parallel.stage_layers,
            cp_method=parallel.cp_method,
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks over which an expert's parameters are replicated."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def sizes(self, axes: tuple[str, ...] = AXES) -> tuple[int, ...]:
        """Sizes of the named axes, in the order given."""
        return tuple(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
        """Position of a rank on every axis of one factorisation."""
        assert 0 <= rank < self.world, rank
        out = {}
        for axis in reversed(axes):
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return {axis: out[axis] for axis in axes}

    def rank(self, axes: tuple[str, ...] = AXES, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis left out is at 0."""
        rank = 0
        for axis in axes:
            at = coordinates.get(axis, 0)
            assert 0 <= at < getattr(self, axis), (axis, at)
            rank = rank * getattr(self, axis) + at
        return rank

    def groups(self, *axes: str) -> tuple[Ranks, ...]:
        """All groups of ranks that differ only in the named axes, each ascending, in a fixed order.

        `groups("tp")` is the tensor-parallel groups; `groups("dp", "cp")` the groups a loss is summed over.
        Expert axes (edp, ep, etp) name groups of the second factorisation; the two are not mixed.
        """
        table = EXPERT_AXES if any(a in ("edp", "ep", "etp") for a in axes) else AXES
        assert all(a in table for a in axes), axes
        fixed = [a for a in table if a not in axes]
        moving = [a for a in table if a in axes]

        def positions(names: list[str]) -> itertools.product[tuple[int, ...]]:
            return itertools.product(*(range(getattr(self, a)) for a in names))

        return tuple(
            tuple(self.rank(table, **dict(zip(fixed, f)), **dict(zip(moving, m))) for m in positions(moving))
            for f in positions(fixed)
        )

    def group_of(self, rank: int, *axes: str) -> Ranks:
        """The ranks that share every coordinate with `rank` but the named axes."""
        table = EXPERT_AXES if any(a in ("edp", "ep", "etp") for a in axes) else AXES
        home = self.coordinates(rank, table)
        moving = [a for a in table if a in axes]
        spans = itertools.product(*(range(getattr(self, a)) for a in moving))
        return tuple(self.rank(table, **{**home, **dict(zip(moving, m))}) for m in spans)

    def describe(self) -> str:
        """Short text: how many ranks, and the axes that are more than one wide."""
        wide = [f"{a}={getattr(self, a)}" for a in (*AXES, "ep", "etp") if getattr(self, a) > 1]
        wide += ["sp"] if self.sp else []
        wide += [f"cp_method={self.cp_method}"] if self.cp > 1 else []
        if self.pp > 1:
            wide += [f"schedule={self.schedule}"] + ([f"chunks={self.chunks}"] if self.chunks > 1 else [])
        return f"{self.world} ranks, {' '.join(wide)}" if wide else "1 rank"


def split(total: int, parts: int, index: int) -> tuple[int, int]:
    """Start and size of part `index` when `total` items are cut as evenly as can be, larger parts first."""
    size, rest = divmod(total, parts)
    return index * size + min(index, rest), size + (index < rest)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
