"""Which modules of a chunk are computed again in backward: `train.recompute` in terms of modules.

Nothing random has to be saved or replayed: dropout masks are a pure function of seed, sample and place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.schema import Operation, TrainConfig
from hpctrain.layout.recompute import recomputed
from hpctrain.model.adapters import InputDropout
from hpctrain.model.mlp import Linear, Mlp, activate
from hpctrain.model.moe import MoE
from hpctrain.model.transformer import Layer, Transformer
from hpctrain.parallel.keeper import Keeper, Tensors, recompute
from hpctrain.parallel.stash import Stash


def apply_recomputation(model: Transformer, train: TrainConfig, stash: Stash | None = None) -> None:
    """Swap the layers that are computed again, or the named operations of them, for ones that keep only their inputs.

    Args:
        model: changed in place.
        train: says which layers, and what of them.
        stash: where what is kept waits, if that is not where it is.
    """
    assert train.activation_budget is None, "a budget is settled before (`layout/budget.py`)"
    layers, keeper = dict(model.numbered_layers()), Keeper(stash)
    again = recomputed(train, list(layers))
    for place, (index, layer) in enumerate(layers.items()):
        if again[index] == "full":
            model.layers[str(index)] = RecomputedLayer(layer, keeper, first=place == 0)
            continue
        operations = train.recompute_ops if again[index] == "selective" else ()
        _recompute_inside(layer, operations, keeper)
        if stash is not None or "layernorm" in operations:
            model.layers[str(index)] = KeptLayer(layer, keeper, place == 0, "layernorm" in operations)


def _recompute_inside(layer: Layer, operations: Collection[Operation], keeper: Keeper) -> None:
    """Swap modules of a layer for ones that are computed again, none inside another; of norms, `KeptLayer` sees to
    that."""
    activation = "activation" in operations

    def of_mlp(mlp: Mlp, whole: bool) -> Mlp:
        if activation and not whole:
            mlp.activated = _activation_again(keeper)
        return RecomputedMlp(mlp, keeper) if whole else mlp

    if "core_attn" in operations:
        layer.attention.core = Recomputed(layer.attention.core, keeper)
    if layer.mlp is not None:
        layer.mlp = of_mlp(layer.mlp, "mlp" in operations)
    if layer.moe is None:
        return
    if "moe" in operations:
        layer.moe = RecomputedMoE(layer.moe, keeper)
        return
    if activation:
        layer.moe.experts.activated = _activation_again(keeper)
    if layer.moe.shared is not None:
        layer.moe.shared = of_mlp(layer.moe.shared, "shared_experts" in operations)


def _activation_again(keeper: Keeper) -> Callable[[str, Sequence[Tensor], Linear], Tensor]:
    def activated(activation: str, inputs: Sequence[Tensor], down: Linear) -> Tensor:
        """As `hpctrain.model.mlp.activated`."""
        if not torch.is_grad_enabled():
            return down(activate(activation, inputs))
        return keeper.between(lambda *inputs: activate(activation, inputs), down, *inputs)

    return activated


class RecomputedLayer(Layer):
    """`Layer` of which backward needs the input alone.

    Args:
        layer: the module replaced.
        keeper: says what becomes of the input.
        first: of the layers of its chunk.
    """

    def __init__(self, layer: Layer, keeper: Keeper, first: bool = True) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._keeper, self._first = keeper, first

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        stash = self._keeper.stash
        if stash is None or not torch.is_grad_enabled():
            return recompute(super().forward, *inputs)
        with stash.layer(self._first, inputs):
            return recompute(super().forward, *inputs, keeper=self._keeper)


class KeptLayer(Layer):
    """`Layer` of which a keeper says what becomes of what backward needs. Arguments as for `RecomputedLayer`.

    Args:
        norms: what they return is computed again.
    """

    def __init__(self, layer: Layer, keeper: Keeper, first: bool, norms: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._keeper, self._first, self._norms = keeper, first, norms

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        stash = self._keeper.stash
        if stash is None or not torch.is_grad_enabled():
            return super().forward(*inputs)
        with stash.layer(self._first, inputs):
            return super().forward(*inputs)

    def attended(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        if not self._norms or not torch.is_grad_enabled():
            return super().attended(x, rope, mask)
        out: Tensor = self._keeper.between(self.attention_norm, lambda y: self.attention(y, rope, mask), x)
        return out

    def fed_forward(self, x: Tensor, samples: list[int], valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self._norms or not torch.is_grad_enabled():
            return super().fed_forward(x, samples, valid)
        return self._keeper.between(self.mlp_norm, lambda y: self.through_mlp(y, samples, valid), x)


class Recomputed(nn.Module):
    """A module without parameters of which backward needs the inputs alone.

    Args:
        module: the one replaced.
        keeper: says what becomes of the inputs.
    """

    def __init__(self, module: nn.Module, keeper: Keeper) -> None:
        super().__init__()
        assert next(module.parameters(), None) is None, "names of parameters say where they are"
        self.module, self._keeper = module, keeper

    def forward(self, *inputs: Any) -> Tensor:
        out: Tensor = recompute(self.module, *inputs, keeper=self._keeper)
        return out


class RecomputedMlp(Mlp):
    """`Mlp` of which backward needs the input alone. Arguments as for `Recomputed`."""

    def __init__(self, mlp: Mlp, keeper: Keeper) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)
        self._keeper, self._sites = keeper, _sites(mlp)

    def forward(self, x: Tensor) -> Tensor:
        return recompute(_of_same_samples(self._sites, super().forward), x, keeper=self._keeper)


class RecomputedMoE(MoE):
    """`MoE` of which backward needs the input alone. Arguments as for `Recomputed`."""

    def __init__(self, moe: MoE, keeper: Keeper) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(moe.__dict__)
        self._keeper, self._sites = keeper, _sites(moe)

    def forward(self, x: Tensor, samples: Sequence[int], valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        forward = _of_same_samples(self._sites, super().forward)
        return recompute(forward, x, samples, valid, keeper=self._keeper)


def _sites(module: nn.Module) -> list[InputDropout]:
    return [site for site in module.modules() if isinstance(site, InputDropout)]


def _of_same_samples(sites: Sequence[InputDropout], forward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The forward of a part of a layer, as it would be now. Until it is called again the layer may have told its
    dropouts of other samples."""
    seen = [site.samples for site in sites]

    def called(*inputs: Any) -> Tensors:
        for site, samples in zip(sites, seen):
            site.samples = samples
        return forward(*inputs)

    return called
