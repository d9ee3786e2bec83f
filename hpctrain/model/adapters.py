"""Adapters on frozen linears: LoRA (Hu et al., arXiv 2106.09685), DoRA (Liu et al., arXiv 2402.09353) and QLoRA
(Dettmers et al., arXiv 2305.14314). They know nothing of parallelism.

With a frozen weight W, factors A and B, and s = alpha / rank, an adapted linear is

    lora    x W' + s (x A') B' + bias
    dora    (x W' + s (x A') B') * m / |W + s B A| + bias

where ' transposes and |.| is the norm of each row, which backward takes for a constant (section 4.3 of the paper).
Dropout is on the x that A sees alone. QLoRA is lora over a W in 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.config.schema import AdapterConfig, ModelConfig
from hpctrain.model.grouped import ALIGNED, GroupedLinear
from hpctrain.model.mlp import FanOut
from hpctrain.model.moe import Experts
from hpctrain.model.packed import Packed, Weight, product, values_of
from hpctrain.model.random import Dropout


class InputDropout(nn.Module):
    """Dropout before adapters. The layer tells which samples it sees, for linears are not told.

    Attributes:
        samples: as for `Dropout`.
    """

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout
        self.samples: Sequence[int] = ()

    @property
    def drops(self) -> bool:
        """Whether it does anything now."""
        return self.training and self.dropout.p > 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(x, self.samples)
        return out


class Factors(NamedTuple):
    """What is trained beside a weight: A [..., rank, in], B [..., out, rank], DoRA's magnitudes [out], and s."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float


class AdaptedLinear(nn.Module):
    """A frozen linear, with an adapter or without one.

    Args:
        linear: the module replaced.
        adapter: what adapters are like, and whether weights are in 4 bits.
        adapts: whether this one has one.
        dropout: before it; linears of one input share it.
    """

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    magnitude: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, adapter: AdapterConfig, adapts: bool, dropout: InputDropout) -> None:
        super().__init__()
        out, width = linear.weight.shape
        self.weight: Weight = freeze(linear.weight, adapter)
        self.scale, self.dropout = adapter.scale, dropout

        def trained(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape))

        self.register_parameter("lora_a", trained(adapter.rank, width) if adapts else None)
        self.register_parameter("lora_b", trained(out, adapter.rank) if adapts else None)
        self.register_parameter("magnitude", trained(out) if adapts and adapter.kind == "dora" else None)
        self.register_parameter("bias", None if linear.bias is None else frozen(linear.bias))

    @property
    def factors(self) -> Factors | None:
        """What is trained of it."""
        if self.lora_a is None or self.lora_b is None:
            return None
        return Factors(self.lora_a, self.lora_b, self.magnitude, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        out, factors = product(x, self.weight, F.linear), self.factors
        if factors is not None:
            out = out + F.linear(F.linear(self.dropout(x), factors.a) * factors.scale, factors.b)
            if factors.magnitude is not None:
                norms = row_squares(self.weight, factors).sqrt()
                out = out * (factors.magnitude / norms.to(out.dtype))
        return out if self.bias is None else out + self.bias


@torch.no_grad()
def row_squares(weight: Weight, factors: Factors) -> Tensor:
    """Sums of squares of the rows of W + s B A, [out], in float32 or wider, without making that matrix.

    Of a part of the columns, what these add.
    """
    values = values_of(weight, factors.a.dtype)
    wide = torch.promote_types(values.dtype, torch.float32)
    a, b = factors.a.to(wide), factors.b.to(wide) * factors.scale
    own: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=wide).square()
    across = (values @ factors.a.T).to(wide)
    return own + ((2 * across + b @ (a @ a.T)) * b).sum(1)


class AdaptedExperts(Experts):
    """`Experts` that are frozen, with adapters or without.

    Args:
        experts: the module replaced.
        adapter: as for `AdaptedLinear`.
        adapts: whether they have adapters.
    """

    def __init__(self, experts: Experts, adapter: AdapterConfig, adapts: bool) -> None:
        nn.Module.__init__(self)
        self.activation, self.inputs, self.activated = experts.activation, experts.inputs, experts.activated
        self.adapter, self.adapts = adapter, adapts
        for name in (*experts.inputs, "down"):
            weight = getattr(experts, name)
            number, out, width = weight.shape
            setattr(self, name, freeze(weight, adapter))
            if adapts:
                self.register_parameter(f"{name}_lora_a", nn.Parameter(torch.empty(number, adapter.rank, width)))
                self.register_parameter(f"{name}_lora_b", nn.Parameter(torch.empty(number, out, adapter.rank)))

    def _kernel(self, x: Tensor) -> bool:
        return super()._kernel(x) and not (self.adapts and self.adapter.rank % ALIGNED)

    def _through(self, x: Tensor, name: str, linear: GroupedLinear) -> Tensor:
        out: Tensor = product(x, getattr(self, name), linear)
        if not self.adapts:
            return out
        inner = linear(x, getattr(self, f"{name}_lora_a")) * self.adapter.scale
        return out + linear(inner, getattr(self, f"{name}_lora_b"))


def frozen(parameter: Tensor) -> nn.Parameter:
    """The same values, not to be trained."""
    return nn.Parameter(parameter.detach(), requires_grad=False)


def freeze(weight: Tensor, adapter: AdapterConfig) -> Weight:
    """A linear's weight as adapters of a kind have it beside them; in 4 bits it has no values yet."""
    return Packed(weight.shape, adapter.block) if adapter.kind == "qlora" else frozen(weight)


def adapt(root: nn.Module, model: ModelConfig, seed: int) -> None:
    """Freeze a plain model and give its linears the adapters that it is to have.

    Args:
        root: of it.
        model: its shape.
        seed: of the run, for dropout.
    """
    adapter = model.adapter
    if adapter is None:
        return
    for name, parameter in list(root.named_parameters()):
        path, _, leaf = name.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, frozen(parameter))
    for path, parent in list(root.named_modules()):
        site: InputDropout | None = None
        for name, child in list(parent.named_children()):
            place = path if isinstance(parent, FanOut) else f"{path}.{name}"
            if type(child) is nn.Linear:
                if site is None or not isinstance(parent, FanOut):
                    site = InputDropout(Dropout(adapter.dropout, seed, f"{place}.adapter"))
                parent.register_module(name, AdaptedLinear(child, adapter, adapter.adapts(name), site))
            elif type(child) is Experts:
                parent.register_module(name, AdaptedExperts(child, adapter, adapter.adapts("experts")))
