"""Engine `none`: every data-parallel rank holds all state of its part of the model.

float32 and float64 train in that precision. bf16 and fp16 compute in it, with float32 master weights, and
accumulate and reduce gradients in float32; fp16 scales the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hpctrain.config.schema import OptimizerConfig, RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box, Placement
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.model.batch import Batch
from hpctrain.parallel.deferred import complete
from hpctrain.parallel.linears import defer_weights
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE, master
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.engine import Engine, StepResult
from hpctrain.sharding.none.buckets import GradientBuckets
from hpctrain.sharding.norm import GradientNorm, clip_factor
from hpctrain.sharding.routers import Routers
from hpctrain.sharding.scaler import LossScale
from hpctrain.sharding.state import KINDS, MOMENTS, WEIGHT, Piece, StateReader, balance, region


class PlainEngine(Engine):
    """See `Engine`. The chunks come with initial values in master precision, and are cast here."""

    def __init__(
        self, chunks: Sequence[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig
    ) -> None:
        self.chunks, self.records, self.mesh = chunks, records, mesh
        precision, options = config.train.precision, config.optimizer
        splits = config.parallel.schedule in ZERO_BUBBLE
        self.deferred = [defer_weights(chunk, mesh.alone) for chunk in chunks] if splits else []
        named = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        self.masters = {name: p.detach().clone() for name, p in named.items()}
        for chunk in chunks:
            chunk.to(COMPUTE[precision])
        self.working = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        if COMPUTE[precision] == master(precision):
            self.masters = {name: p.detach() for name, p in self.working.items()}
        self.scale = LossScale(config.train.loss_scale, dynamic=precision == "fp16")
        uneven = config.model.vocab % mesh.tp.size > 0
        apart = {spec.name for spec in parameter_specs(config.model) if uneven and "vocab" in spec.cuts}
        self.buckets = GradientBuckets(
            {p: mesh.reduction(records[n]) for n, p in self.working.items() if p.requires_grad},
            master(precision),
            int(config.sharding.bucket_mib * 2**20),
            config.train.overlap,
            [p for name, p in self.working.items() if name in apart],
        )
        gradients = self.buckets.gradients()
        self.gradients = {name: gradients[p] for name, p in self.working.items() if p in gradients}
        self.norm = GradientNorm({n: records[n] for n in self.gradients}, mesh, experts=config.model.moe is not None)
        self.clip = options.clip
        trained = {name: self.masters[name] for name in self.gradients}
        self.optimizer = _adamw(trained, {s.name: s.decay for s in parameter_specs(config.model)}, options)
        self.routers = Routers(chunks, mesh, config)
        self.updates, self.valid_tokens = 0, 0

    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        self.valid_tokens = valid_tokens
        self.buckets.begin(micro_batches)
        self.routers.begin_step()

    def forward(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Ticket:
        self.chunks[chunk].train()
        output, routers = self.chunks[chunk](batch, hidden, tied)
        return Ticket(chunk, output, routers, hidden)

    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None:
        self._through(ticket, grad)
        if self.deferred:
            complete(self.deferred[ticket.chunk].take())

    def backward_input(self, ticket: Ticket, grad: Tensor | None = None) -> Callable[[], None]:
        self._through(ticket, grad)
        left = self.deferred[ticket.chunk].take()
        return lambda: complete(left)

    def step(self, lr: float, loss_finite: bool = True) -> StepResult:
        self.buckets.finish()
        norm = self.norm.of(list(self.gradients.values())) / self.scale.value
        if loss_finite and math.isfinite(norm):
            factor = clip_factor(norm, self.clip) / self.scale.value
            if factor != 1.0:
                self.buckets.scale(factor)
            self._update(lr)
            self.routers.step()
            self.scale.update(overflowed=False)
            return StepResult(norm, skipped=False)
        return StepResult(norm, skipped=True, backed_off=loss_finite and self.scale.update(overflowed=True))

    def evaluate(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        self.chunks[chunk].eval()
        with torch.no_grad():
            output, _ = self.chunks[chunk](batch, hidden, tied)
        return cast(Tensor, output)

    def parameter(self, name: str) -> nn.Parameter:
        return self.working[name]

    def with_gradient(self, name: str, grad: Tensor, more: Tensor) -> Tensor:
        self.gradients[name].add_(more)  # where all of a step is summed in master precision
        return grad

    def values(self, name: str) -> Tensor:
        return self.working[name].detach()

    def pieces(self) -> Iterator[Piece]:
        for axis in (self.mesh.loss, self.mesh.edp):
            held = [record for record in self.records.values() if self.mesh.reduction(record) is axis]
            owned = [record for record in held if record.owner == self.mesh.rank]
            writers = balance([self.masters[record.name].numel() for record in owned], axis.size)
            for record, writer in zip(owned, writers):
                if writer == axis.index:
                    for kind, box in itertools.product(KINDS, record.boxes):
                        yield self._piece(record, kind, box)
        yield from self.routers.pieces()

    def scalars(self) -> dict[str, float]:
        return {"step": float(self.updates), **self.scale.scalars()}

    def load(self, reader: StateReader) -> None:
        scalars = reader.scalars()
        self.updates = int(scalars["step"])
        self.scale.load(scalars)
        for name, record in self.records.items():
            for kind in KINDS:
                for box in record.boxes:
                    values = reader.read(name, kind, box.start, box.shape)
                    region(self._state(name, kind), box).copy_(values)
            self.optimizer.state[self.masters[name]]["step"] = torch.tensor(float(self.updates))
        self.routers.load(reader)
        self._publish()

    def close(self) -> None:
        self.buckets.close()

    def _through(self, ticket: Ticket, grad: Tensor | None) -> None:
        """Autograd's part of a backward."""
        share = self.scale.value / max(self.valid_tokens, 1)
        ends = [(ticket.output, torch.full_like(ticket.output, share) if grad is None else grad)]
        if ticket.routers is not None:
            ends.append((ticket.routers, torch.full_like(ticket.routers, share)))
        trained = [end for end in ends if end[0].requires_grad]
        if trained:
            torch.autograd.backward([end for end, _ in trained], [of_end for _, of_end in trained])

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for name, gradient in self.gradients.items():
            self.masters[name].grad = gradient
        self.optimizer.step()
        self.updates += 1
        self._publish()

    def _publish(self) -> None:
        """Copy master weights to the weights that compute, where they are not the same tensors."""
        pairs = [(self.working[n], m) for n, m in self.masters.items() if self.working[n].data_ptr() != m.data_ptr()]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([w for w, _ in pairs], [m for _, m in pairs])

    def _piece(self, record: Placement, kind: str, box: Box) -> Piece:
        def fetch() -> Tensor:
            return region(self._state(record.name, kind), box).contiguous().cpu()

        dtype = self.masters[record.name].dtype
        return Piece(record.name, kind, record.global_shape, box.start, box.shape, dtype, fetch)

    def _state(self, name: str, kind: str) -> Tensor:
        if kind == WEIGHT:
            return self.masters[name]
        state = self.optimizer.state[self.masters[name]]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({moment: torch.zeros_like(self.masters[name]) for moment in MOMENTS})
        value: Tensor = state[kind]
        return value


def _adamw(masters: dict[str, Tensor], decays: dict[str, bool], options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over master weights, decay on matrices only."""
    groups = [
        {"params": [m for n, m in masters.items() if decays[n] == decay], "weight_decay": weight_decay}
        for decay, weight_decay in ((True, options.weight_decay), (False, 0.0))
    ]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps)
