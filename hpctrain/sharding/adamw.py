"""AdamW over master weights by name, and its state by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpctrain.config.schema import OptimizerConfig
from hpctrain.sharding.paged import paged_zeros_like
from hpctrain.sharding.state import MOMENTS, WEIGHT


class _State(NamedTuple):
    """What is kept of one master weight."""

    moments: dict[str, Tensor]
    step: Tensor


class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101, by torch's own function; decay on matrices only.

    Not by torch's class: to make one imports torch's compiler, a second on every rank.

    Args:
        masters: weights by name, all that a checkpoint has state of.
        trained: names of those that are updated.
        decays: by name, whether weight decay applies.
        options: of the run.

    Attributes:
        updates: how many were made.
    """

    def __init__(
        self, masters: Mapping[str, Tensor], trained: set[str], decays: Mapping[str, bool], options: OptimizerConfig
    ) -> None:
        self._masters, self._options, self.updates = masters, options, 0
        self._groups = [
            ([n for n in masters if n in trained and decays[n] == decay], weight)
            for decay, weight in ((True, options.weight_decay), (False, 0.0))
        ]
        self._states: dict[str, _State] = {}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One step, with gradients of all that is trained."""
        o = self._options
        for names, decay in self._groups:
            states = [self._state(name) for name in names]
            first, second = ([state.moments[kind] for state in states] for kind in MOMENTS)
            adamw(
                [self._masters[name] for name in names], [gradients[name] for name in names],
                first, second, [], [state.step for state in states],
                amsgrad=False, beta1=o.beta1, beta2=o.beta2, lr=lr, weight_decay=decay, eps=o.eps, maximize=False,
            )  # fmt: skip
        self.updates += 1

    def state(self, name: str, kind: str) -> Tensor:
        """Master weight or moment, itself; moments are zero before the first update."""
        return self._masters[name] if kind == WEIGHT else self._state(name).moments[kind]

    def start_at(self, updates: int) -> None:
        """Go on as if so many updates had been made."""
        self.updates = updates
        for name in self._masters:
            self._state(name).step.fill_(float(updates))

    def _state(self, name: str) -> _State:
        if name not in self._states:
            zeros = paged_zeros_like if self._options.paged else torch.zeros_like
            moments = {kind: zeros(self._masters[name]) for kind in MOMENTS}
            self._states[name] = _State(moments, torch.tensor(0.0))
        return self._states[name]
