"""AdamW over master weights by name, and its state by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hpctrain.config.schema import OptimizerConfig
from hpctrain.sharding.paged import paged_zeros_like
from hpctrain.sharding.state import MOMENTS, WEIGHT


class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101, by torch's own; decay on matrices only.

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
        self._masters, self.updates, self._paged = masters, 0, options.paged
        groups = [
            {"params": [masters[n] for n in masters if n in trained and decays[n] == decay], "weight_decay": weight}
            for decay, weight in ((True, options.weight_decay), (False, 0.0))
        ]
        betas = (options.beta1, options.beta2)
        self._torch = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps)

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One step, with gradients of all that is trained."""
        for group in self._torch.param_groups:
            group["lr"] = lr
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient
            if self._paged:
                self.state(name, MOMENTS[0])  # before torch makes its own
        self._torch.step()
        self._torch.zero_grad()
        self.updates += 1

    def state(self, name: str, kind: str) -> Tensor:
        """Master weight or moment, itself; moments are zero before the first update."""
        master = self._masters[name]
        if kind == WEIGHT:
            return master
        state = self._torch.state[master]
        if not state:
            zeros = paged_zeros_like if self._paged else torch.zeros_like
            state["step"] = torch.tensor(0.0)
            state.update({moment: zeros(master) for moment in MOMENTS})
        value: Tensor = state[kind]
        return value

    def start_at(self, updates: int) -> None:
        """Go on as if so many updates had been made."""
        self.updates = updates
        for name, master in self._masters.items():
            self.state(name, MOMENTS[0])
            self._torch.state[master]["step"] = torch.tensor(float(updates))
