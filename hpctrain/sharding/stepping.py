"""What engines of our own have in common: a forward, a backward through autograd, and the rules of a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.model.batch import Batch
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.adamw import AdamW
from hpctrain.sharding.engine import Engine, StepResult
from hpctrain.sharding.norm import GradientNorm, clip_factor
from hpctrain.sharding.routers import Routers
from hpctrain.sharding.scaler import LossScale


class SteppingEngine(Engine):
    """See `Engine`. Gradients are summed by the subclass; here they are judged, clipped and used, or passed over.

    Attributes:
        norm, optimizer: set by the subclass.
        scale: of the loss; 1 but in fp16.
        valid_tokens: of the step.
    """

    norm: GradientNorm
    optimizer: AdamW

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, config: RunConfig) -> None:
        self.chunks, self.mesh, self.clip = chunks, mesh, config.optimizer.clip
        self.scale = LossScale(config.train.loss_scale, dynamic=config.train.precision == "fp16")
        self.valid_tokens = 0

    def make_routers(self, config: RunConfig) -> None:
        """Once the chunks are what they will be."""
        self.routers = Routers(self.chunks, self.mesh, config)

    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        self.valid_tokens = valid_tokens
        self.routers.begin_step()

    def forward(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Ticket:
        self.chunks[chunk].train()
        output, routers = self.chunks[chunk](batch, hidden, tied)
        return Ticket(chunk, output, routers, hidden)

    def through(self, ticket: Ticket, grad: Tensor | None) -> None:
        """Autograd's part of a backward."""
        share = self.scale.value / max(self.valid_tokens, 1)
        ends = [(ticket.output, torch.full_like(ticket.output, share) if grad is None else grad)]
        if ticket.routers is not None:
            ends.append((ticket.routers, torch.full_like(ticket.routers, share)))
        trained = [end for end in ends if end[0].requires_grad]
        if trained:
            torch.autograd.backward([end for end, _ in trained], [of_end for _, of_end in trained])

    def step(self, lr: float, loss_finite: bool = True) -> StepResult:
        gradients = self.reduced()
        norm = self.norm.of(list(gradients.values())) / self.scale.value
        if loss_finite and math.isfinite(norm):
            factor = clip_factor(norm, self.clip) / self.scale.value
            if factor != 1.0:
                self.scale_gradients(factor)
            self.update(gradients, lr)
            self.routers.step()
            self.scale.update(overflowed=False)
            return StepResult(norm, skipped=False)
        return StepResult(norm, skipped=True, backed_off=loss_finite and self.scale.update(overflowed=True))

    @abstractmethod
    def reduced(self) -> Mapping[str, Tensor]:
        """The step's gradients, times the loss scale, by name, in master precision, complete. Collective."""

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply those of `reduced`."""

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Use gradients that are fit for it."""
        self.optimizer.update(gradients, lr)
        self.publish()

    def publish(self) -> None:
        """Master weights have changed."""

    def evaluate(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        self.chunks[chunk].eval()
        with torch.no_grad():
            output, _ = self.chunks[chunk](batch, hidden, tied)
        return cast(Tensor, output)

    def scalars(self) -> dict[str, float]:
        return {"step": float(self.optimizer.updates), **self.scale.scalars()}
