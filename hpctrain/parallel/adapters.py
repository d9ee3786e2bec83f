"""Adapters under tensor parallelism. Their factors are cut as the weight is that they lie beside of.

Of a column-parallel linear every rank has all of A and its rows of B; of a row-parallel one its columns of A and all of
B. What A makes of the input is one more output of the column-parallel linears of that input, and what B adds one more
summand of the row-parallel one, so nothing is sent for adapters in forward, and in backward only the gradients of the
factor that is not cut, and of DoRA's norms the sums over columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.placement import Placement
from hpctrain.model.adapters import AdaptedLinear, Factors, row_squares
from hpctrain.model.mlp import FanOut
from hpctrain.model.packed import Weight
from hpctrain.model.random import Dropout
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.autograd import shared
from hpctrain.parallel.comm import Axis, all_reduce
from hpctrain.parallel.context import ContextDropout
from hpctrain.parallel.deferred import Deferred
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.sequence import SequenceDropout
from hpctrain.parallel.tensor import Beside, ColumnFanOut, Region, RowLinear, column_linear, row_linear


class Sums(NamedTuple):
    """The ranks over which gradients of an adapted linear's parameters are summed inside autograd."""

    weight: Axis
    a: Axis
    b: Axis
    magnitude: Axis

    @classmethod
    def of(cls, name: str, mesh: Mesh, records: Mapping[str, Placement]) -> Sums:
        """By the placements of a linear's parameters; this rank only for those that it does not have."""
        held = (records.get(f"{name}.{end}") for end in ("weight", "lora_a", "lora_b", "magnitude"))
        return cls(*(mesh.alone if record is None else mesh.partial(record) for record in held))

    @classmethod
    def none(cls, alone: Axis) -> Sums:
        """Where one rank has all."""
        return cls(alone, alone, alone, alone)


class AdaptedFanOut(ColumnFanOut):
    """`ColumnFanOut` of adapted linears.

    Args:
        fan: the linears, cut.
        region: entered here.
        sums: of each linear.
        alone: this rank only.
    """

    def __init__(self, fan: FanOut, region: Region, sums: Mapping[str, Sums], alone: Axis) -> None:
        super().__init__(fan, region, tuple(each.weight for each in sums.values()))
        self.sums, self.inside = tuple(sums.values()), Region(alone)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        linears = [linear for linear in self.values() if isinstance(linear, AdaptedLinear)]
        weights = [linear.weight for linear in linears]
        biases = [None if linear.magnitude is not None else linear.bias for linear in linears]
        adapted = [(each.factors, sums) for each, sums in zip(linears, self.sums) if each.factors is not None]
        factors = [f.a for f, _ in adapted]
        axes = tuple(sums.a for _, sums in adapted)
        if adapted and linears[0].dropout.drops:
            outs = self._enter(x, self.replicas, weights, biases)
            inner = self._enter(linears[0].dropout(x), axes, factors, [None] * len(factors))
        else:
            both = self._enter(x, (*self.replicas, *axes), [*weights, *factors], [*biases, *[None] * len(factors)])
            outs, inner = both[: len(weights)], both[len(weights) :]
        of_adapted = iter(inner)
        return tuple(
            out if linear.factors is None else self._add(out, next(of_adapted), linear, linear.factors, sums)
            for out, linear, sums in zip(outs, linears, self.sums)
        )

    def _enter(
        self, x: Tensor, axes: tuple[Axis, ...], weights: Sequence[Weight], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        return column_linear(x, self.region, axes, weights, biases, self.deferred)

    def _add(self, out: Tensor, inner: Tensor, linear: AdaptedLinear, factors: Factors, sums: Sums) -> Tensor:
        """What the linear returns, from what its weight and what A make of the input."""
        inner = inner * factors.scale
        out = out + column_linear(inner, self.inside, (sums.b,), [factors.b], [None], self.deferred)[0]
        if factors.magnitude is None:
            return out
        return scaled(out, row_squares(linear.weight, factors), factors.magnitude, sums.magnitude, linear.bias)


class AdaptedRowLinear(AdaptedLinear):
    """`RowLinear` with an adapter, or without one and its weight in 4 bits.

    Args:
        linear: the module replaced, cut.
        region: left here.
        sums: of it.
        alone: this rank only.
    """

    def __init__(self, linear: AdaptedLinear, region: Region, sums: Sums, alone: Axis) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(linear.__dict__)
        self.region, self.sums, self.inside = region, sums, Region(alone)
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> Tensor:
        factors = self.factors
        if factors is None:
            return row_linear(x, self.weight, self.bias, self.region, self.deferred)
        given = self.dropout(x) if self.dropout.drops else x
        inner = column_linear(given, self.inside, (self.sums.a,), [factors.a], [None], self.deferred)[0]
        beside = Beside(inner * factors.scale, factors.b, self.sums.b)
        if factors.magnitude is None:
            return row_linear(x, self.weight, self.bias, self.region, self.deferred, beside)
        out = row_linear(x, self.weight, None, self.region, self.deferred, beside)
        squares = all_reduce(row_squares(self.weight, factors), self.region.axis)
        return scaled(out, squares, factors.magnitude, self.sums.magnitude, self.bias)


def scaled(out: Tensor, squares: Tensor, magnitude: Tensor, axis: Axis, bias: Tensor | None) -> Tensor:
    """DoRA's outputs: over the norms of the rows, times their magnitudes, and the bias.

    Args:
        out: [..., out] of the linear and its adapter, without bias.
        squares: [out] of whole rows, summed.
        magnitude: [out].
        axis: of those that use the same magnitudes for other tokens or for their own outputs.
        bias: [out].
    """
    (whole,) = shared(axis, magnitude)
    out = out * (whole / squares.sqrt().to(out.dtype))
    return out if bias is None else out + bias


class FeatureDropout(Dropout):
    """`Dropout` of some columns of the input of a row-parallel linear: it drops what that drops there.

    Args:
        dropout: of all columns.
        start: the first one held.
        width: of all.
    """

    def __init__(self, dropout: Dropout, start: int, width: int) -> None:
        super().__init__(dropout.p, dropout.seed, dropout.site)
        self.dropout, self.start, self.width = dropout, start, width

    def mask(self, samples: Sequence[int], shape: torch.Size, device: torch.device) -> Tensor:
        seq, columns = shape
        return self.dropout.mask(samples, torch.Size((seq, self.width)), device).narrow(2, self.start, columns)


def apply_adapter_dropout(model: Transformer, mesh: Mesh, config: RunConfig, records: Mapping[str, Placement]) -> None:
    """Let dropout before adapters know which part of the sequence, and of the columns, it sees."""
    adapter, method = config.model.adapter, config.parallel.cp_method
    if adapter is None or adapter.dropout == 0.0:
        return

    def part(plain: Dropout, inner: Axis) -> Dropout:
        if mesh.cp.size > 1:
            return ContextDropout(plain, method, mesh.cp, inner)
        return SequenceDropout(plain, inner) if inner.size > 1 else plain

    in_fans = set()
    outside = mesh.tp if config.parallel.sp else mesh.alone
    for module in model.modules():
        if isinstance(module, FanOut):
            linears = [linear for linear in module.values() if isinstance(linear, AdaptedLinear)]
            in_fans.update(linears)
            linears[0].dropout.dropout = part(linears[0].dropout.dropout, outside)
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear) and module not in in_fans and module.factors is not None:
            (box,) = records[f"{name}.lora_a"].boxes
            whole = part(module.dropout.dropout, mesh.alone)
            module.dropout.dropout = FeatureDropout(whole, box.start[1], records[f"{name}.lora_a"].global_shape[1])


def column_parallel(prefix: str, fan: FanOut, region: Region, mesh: Mesh, records: Mapping[str, Placement]) -> FanOut:
    """The linears of a fan, cut, as they lead into a region."""
    if any(isinstance(linear, AdaptedLinear) for linear in fan.values()):
        sums = {name: Sums.of(f"{prefix}.{name}", mesh, records) for name in fan}
        return AdaptedFanOut(fan, region, sums, mesh.alone)
    return ColumnFanOut(fan, region, tuple(mesh.partial(records[f"{prefix}.{name}.weight"]) for name in fan))


def row_parallel(
    prefix: str, linear: nn.Module, region: Region, mesh: Mesh, records: Mapping[str, Placement]
) -> nn.Module:
    """A linear, cut, as it leads out of a region."""
    if isinstance(linear, AdaptedLinear):
        return AdaptedRowLinear(linear, region, Sums.of(prefix, mesh, records), mesh.alone)
    assert isinstance(linear, nn.Linear), linear
    return RowLinear(linear, region)
