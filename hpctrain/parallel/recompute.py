"""Activation checkpointing (Chen et al., arXiv 1604.06174): activations that backward computes again.

Nothing random has to be saved or replayed: dropout masks are a pure function of seed, sample and place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.config.schema import TrainConfig
from hpctrain.layout.recompute import recomputed
from hpctrain.model.transformer import Layer, Transformer
from hpctrain.parallel.stash import Kept, Stash

Tensors = TypeVar("Tensors", Tensor, "tuple[Tensor, Tensor | None]")


def apply_recomputation(model: Transformer, train: TrainConfig, stash: Stash | None = None) -> None:
    """Swap the layers that are computed again, or their attention, for ones that keep only their inputs.

    Args:
        model: changed in place.
        train: says which layers, and what of them.
        stash: where what is kept waits, if that is not where it is.
    """
    layers = dict(model.numbered_layers())
    again = recomputed(train, list(layers))
    for place, (index, layer) in enumerate(layers.items()):
        if again[index] == "full":
            model.layers[str(index)] = RecomputedLayer(layer, stash, first=place == 0)
            continue
        if again[index] == "selective":
            layer.attention.core = Recomputed(layer.attention.core, stash)
        if stash is not None:
            model.layers[str(index)] = StashedLayer(layer, stash, first=place == 0)


def recompute(function: Callable[..., Tensors], *inputs: Any, stash: Stash | None = None) -> Tensors:
    """Call a function without keeping what its backward needs; its backward calls it again first.

    It returns a tensor or a tuple of them, in which there may be None.

    Args:
        stash: where its inputs wait for that, in a layer of its.
    """

    def called(*inputs: Any) -> Any:
        out = function(*(x.now() if isinstance(x, Kept) else x for x in inputs))
        if isinstance(out, Tensor):
            return _Ahead.apply(out)[0]  # type: ignore[no-untyped-call]
        return _Ahead.apply(*out)  # type: ignore[no-untyped-call]

    kept = [Kept(x) if stash and isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    out = cast(Tensors, checkpoint(called, *kept, use_reentrant=False, preserve_rng_state=False))
    for x in kept:
        if stash and isinstance(x, Kept):
            x.leave(stash)
    return out


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
        stash: where the input waits, if it is not to stay.
        first: of the layers of its chunk.
    """

    def __init__(self, layer: Layer, stash: Stash | None = None, first: bool = True) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._stash, self._first = stash, first

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        if self._stash is None or not torch.is_grad_enabled():
            return recompute(super().forward, *inputs)
        with self._stash.layer(self._first, inputs):
            return recompute(super().forward, *inputs, stash=self._stash)


class StashedLayer(Layer):
    """`Layer` of which what backward needs waits elsewhere. Arguments as for `RecomputedLayer`."""

    def __init__(self, layer: Layer, stash: Stash, first: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._stash, self._first = stash, first

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return super().forward(*inputs)
        with self._stash.layer(self._first, inputs):
            return super().forward(*inputs)


class Recomputed(nn.Module):
    """A module without parameters of which backward needs the inputs alone.

    Args:
        module: the one replaced.
        stash: where the inputs wait, if they are not to stay.
    """

    def __init__(self, module: nn.Module, stash: Stash | None = None) -> None:
        super().__init__()
        self.module, self._stash = module, stash

    def forward(self, *inputs: Any) -> Tensor:
        stash = self._stash if torch.is_grad_enabled() else None
        out: Tensor = recompute(self.module, *inputs, stash=stash)
        return out
