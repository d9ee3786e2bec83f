"""Activation checkpointing (Chen et al., arXiv 1604.06174): activations that backward computes again.

Nothing random has to be saved or replayed: dropout masks are a pure function of seed, sample and place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.model.transformer import Layer, Transformer

Tensors = TypeVar("Tensors", Tensor, "tuple[Tensor, Tensor | None]")


def apply_recomputation(model: Transformer, what: str) -> None:
    """Swap the layers (`full`) or their attention (`selective`) for ones that keep only their inputs, or none."""
    for index, layer in model.numbered_layers():
        if what == "full":
            model.layers[str(index)] = RecomputedLayer(layer)
        elif what == "selective":
            layer.attention.core = Recomputed(layer.attention.core)


def recompute(function: Callable[..., Tensors], *inputs: Any) -> Tensors:
    """Call a function without keeping what its backward needs; its backward calls it again first.

    It returns a tensor or a tuple of them, in which there may be None.
    """

    def called(*inputs: Any) -> Any:
        out = function(*inputs)
        if isinstance(out, Tensor):
            return _Ahead.apply(out)[0]  # type: ignore[no-untyped-call]
        return _Ahead.apply(*out)  # type: ignore[no-untyped-call]

    return cast(Tensors, checkpoint(called, *inputs, use_reentrant=False, preserve_rng_state=False))


class _Ahead(torch.autograd.Function):
    """Identity at the end of what is recomputed, which makes that happen before any backward in it begins, and whole.

    PyTorch begins when the first tensor is asked for, in the midst of a module's backward, and ends by an exception
    in the midst of that module's second forward. ZeRO-3 counts on modules that are left as often as entered: its
    list of open ones grows for ever. Run to the end from there, it would free parameters whose backward has begun.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(torch.empty(0))
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        return grads


class RecomputedLayer(Layer):
    """`Layer` of which backward needs the input alone.

    Args:
        layer: the module replaced.
    """

    def __init__(self, layer: Layer) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        return recompute(super().forward, *inputs)


class Recomputed(nn.Module):
    """A module without parameters of which backward needs the inputs alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Tensor:
        out: Tensor = recompute(self.module, *inputs)
        return out
