"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198): what lies between the tensor-parallel regions.

Norms, dropout and residuals of `[batch, seq, hidden]` are sharded over the sequence on the ranks of tp, so each
rank does and keeps its part of them. Their parameters see a part of the sequence on each rank; the layers here
make the gradients whole inside autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.layout.placement import Placement
from hpctrain.model.random import Dropout
from hpctrain.model.transformer import Embedding, Transformer
from hpctrain.parallel.autograd import own_part, shared
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.mesh import Mesh


def apply_sequence_parallelism(model: Transformer, mesh: Mesh, records: dict[str, Placement]) -> None:
    """Swap what lies between the tensor-parallel layers for modules that know they see a part of the sequence."""

    def norm(name: str, plain: nn.Module) -> nn.Module:
        return SequenceNorm(plain, mesh.partial(records[f"{name}.weight"]))

    def dropout(plain: Dropout) -> Dropout:
        return SequenceDropout(plain, mesh.tp)

    if model.positions is not None:
        model.positions = SequencePositions(model.positions, mesh.partial(records["positions.weight"]))
    model.dropout = dropout(model.dropout)
    for index, layer in model.numbered_layers():
        layer.attention_norm = norm(f"layers.{index}.attention_norm", layer.attention_norm)
        layer.attention_dropout = dropout(layer.attention_dropout)
        layer.mlp_norm = norm(f"layers.{index}.mlp_norm", layer.mlp_norm)
        layer.mlp_dropout = dropout(layer.mlp_dropout)
    if model.norm is not None:
        model.norm = norm("norm", model.norm)


class SequenceNorm(nn.Module):
    """RMSNorm or LayerNorm of a part of the sequence. in, out: sharded; gradients of its parameters: summed.

    Args:
        norm: the module replaced.
        axis: the ranks that hold the other parts.
    """

    def __init__(self, norm: nn.Module, axis: Axis) -> None:
        super().__init__()
        assert isinstance(norm, nn.RMSNorm | nn.LayerNorm), norm
        self.weight = norm.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", norm.bias if isinstance(norm, nn.LayerNorm) else None)
        self.shape, self.eps, self.axis = norm.normalized_shape, norm.eps, axis

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            (weight,) = shared(self.axis, self.weight)
            return F.rms_norm(x, self.shape, weight, self.eps)
        weight, bias = shared(self.axis, self.weight, self.bias)
        return F.layer_norm(x, self.shape, weight, bias, self.eps or 0.0)


class SequencePositions(Embedding):
    """Learned positions. in: [seq] places, replicated; out: [seq / tp, hidden], sharded.

    Args:
        positions: the module replaced.
        axis: the ranks that hold the other parts.
    """

    def __init__(self, positions: Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.axis = positions.weight, axis

    def forward(self, index: Tensor) -> Tensor:
        return own_part(F.embedding(index, self.weight), self.axis, dim=0)


class SequenceDropout(Dropout):
    """`Dropout` of a part of the sequence: it drops what that drops there.

    Args:
        dropout: the module replaced.
        axis: the ranks that hold the other parts.
    """

    def __init__(self, dropout: Dropout, axis: Axis) -> None:
        super().__init__(dropout.p, dropout.seed, dropout.site)
        self.axis = axis

    def mask(self, samples: Sequence[int], shape: torch.Size, device: torch.device) -> Tensor:
        seq, hidden = shape
        whole = super().mask(samples, torch.Size((seq * self.axis.size, hidden)), device)
        return whole.narrow(1, seq * self.axis.index, seq)
