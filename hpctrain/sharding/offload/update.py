"""AdamW over states by chunks (Loshchilov and Hutter, arXiv 1711.05101), in PyTorch's one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpctrain.layout.slots import Chunk
from hpctrain.sharding.offload.states import States


class Updater:
    """Updates a rank's states.

    Args:
        states: of the rank.
        publish: takes a chunk and its new master weights, [size] float32, which are good until it returns.
    """

    def __init__(self, states: States, publish: Callable[[Chunk, Tensor], None]) -> None:
        self._states, self._publish = states, publish

    def step(
        self, group: int, settings: Mapping[str, Any], gradient: Callable[[Chunk, Tensor], Tensor], done: int
    ) -> None:
        """Update the chunks of a group.

        Args:
            group: of the optimizer.
            settings: its `lr`, `betas`, `eps` and `weight_decay`.
            gradient: of a chunk, given its values, [size] float32 on their device.
            done: updates made before.

        Raises:
            OSError: the disk failed.
        """
        for chunk, values in self._states.walk(group):
            weight, first, second = values[:3]
            step = torch.tensor(float(done), device=weight.device)
            adamw(
                [weight], [gradient(chunk, values)], [first], [second], [], [step],
                fused=True, amsgrad=False, beta1=settings["betas"][0], beta2=settings["betas"][1], lr=settings["lr"],
                weight_decay=settings["weight_decay"], eps=settings["eps"], maximize=False,
            )  # fmt: skip
            self._publish(chunk, weight)
