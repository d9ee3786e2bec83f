"""Splitting a backward: the gradients of inputs now, those of the linears' weights later (zero-bubble schedules).

Autograd runs as ever, and frees as ever what a node kept. Where it comes to a linear, that computes the gradient of its
input and leaves here what the gradient of its weight needs: its input and the gradient of its output. Parameters of
other modules (norms, embedding) are small work and get their gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor | None]


class Work(NamedTuple):
    """Parameters, and what computes their gradients: None where there is none, or it is not wanted."""

    parameters: Tensors
    compute: Callable[[], Tensors]


class Deferred:
    """Where the linears of a chunk leave the gradients of their weights.

    Attributes:
        anchor: an input that backward comes by for, even where nothing before a linear is trained. The weights
            themselves are no inputs then: autograd would take it that they had their gradient.
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self._left: list[Work] = []

    def leave(self, parameters: Tensors, compute: Callable[[], Tensors]) -> None:
        """Add to what is left."""
        self._left.append(Work(parameters, compute))

    def take(self) -> list[Work]:
        """What has been left since the last time, in order."""
        left, self._left = self._left, []
        return left


class Later:
    """Whether a linear computes the gradients of its parameters in its backward, or leaves them for later."""

    def __init__(self, parameters: Tensors, deferred: Deferred | None) -> None:
        self._parameters, self._deferred = parameters, deferred
        self.needs = [p is not None and p.requires_grad for p in parameters]

    @property
    def now(self) -> bool:
        """Whether a backward computes any of them itself."""
        return self._deferred is None and any(self.needs)

    @property
    def inputs(self) -> list[Tensor | None]:
        """What an autograd function is given in the place of the parameters; it returns as many gradients."""
        if self._deferred is None:
            return list(self._parameters)
        return [*(None if p is None else p.detach() for p in self._parameters), self._deferred.anchor]

    def gradients(self, compute: Callable[[], Tensors]) -> Tensors:
        """What the function's backward returns for `inputs`."""
        if self._deferred is None:
            return compute() if self.now else [None] * len(self._parameters)
        if any(self.needs):
            self._deferred.leave(self._parameters, compute)
        return [None] * (len(self._parameters) + 1)


def complete(left: list[Work]) -> None:
    """Compute what was left, in order, and let autograd accumulate it; each part is freed when it is done."""
    left.reverse()
    while left:
        work = left.pop()
        pairs = [(p, g) for p, g in zip(work.parameters, work.compute()) if p is not None and g is not None]
        if pairs:
            torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
