"""What the runtime of a pipeline asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from hpctrain.model.batch import Batch


@dataclass
class Ticket:
    """A forward pass whose backward is still to come.

    Attributes:
        chunk: which chunk ran.
        output: what it returned: hidden states, or the sum of the losses on the last stage.
        hidden: what the stage before gave, whose gradient it wants; None on the first stage.
        extra: the engine's own.
    """

    chunk: int
    output: Tensor
    hidden: Tensor | None = None
    extra: Any = None


class Computes(Protocol):
    """The part of `hpctrain.sharding.engine.Engine` that the runtime uses; see there."""

    def forward(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Ticket: ...

    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None: ...

    def backward_input(self, ticket: Ticket, grad: Tensor | None = None) -> Callable[[], None]: ...

    def evaluate(
        self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None
    ) -> Tensor: ...

    def parameter(self, name: str) -> nn.Parameter: ...

    def with_gradient(self, name: str, grad: Tensor, more: Tensor) -> Tensor: ...

    def values(self, name: str) -> Tensor: ...
