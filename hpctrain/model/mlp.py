"""The MLP of a layer, and its parts that experts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.config.schema import ModelConfig


class FanOut(nn.ModuleDict):
    """Linears of one input, computed together. Returns their outputs in order."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.values())


Linear = Callable[[Tensor], Tensor]
Activated = Callable[[str, Sequence[Tensor], Linear], Tensor]


def activated(activation: str, inputs: Sequence[Tensor], down: Linear) -> Tensor:
    """The second half of an MLP: the activation of the outputs of its first linears, and its last linear."""
    return down(activate(activation, inputs))


class Mlp(nn.Module):
    """SwiGLU, or GELU without a gate.

    Args:
        model: its shape.
        width: of what lies between, if not the model's.

    Attributes:
        activated: `activated`, or what does the same.
    """

    def __init__(self, model: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        self.activation, width = model.activation, width or model.ffn_width
        self.activated: Activated = activated
        self.inputs = FanOut({n: nn.Linear(model.hidden, width, bias=model.bias) for n in input_names(model)})
        self.down: nn.Module = nn.Linear(width, model.hidden, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(self.activation, self.inputs(x), self.down)


def input_names(model: ModelConfig) -> tuple[str, ...]:
    """Names of the linears that an MLP begins with."""
    return ("gate", "up") if model.gated else ("up",)


def activate(activation: str, inputs: Sequence[Tensor]) -> Tensor:
    """What an MLP makes of the outputs of its first linears, in the order of `input_names`."""
    if activation == "swiglu":
        gate, up = inputs
        return F.silu(gate) * up
    (up,) = inputs
    return F.gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")
