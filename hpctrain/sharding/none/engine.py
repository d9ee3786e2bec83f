"""Engine `none`: every data-parallel rank holds all state of its part of the model.

float32 and float64 train in that precision. bf16 and fp16 compute in it, with float32 master weights, and
accumulate and reduce gradients in float32; fp16 scales the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box, Placement
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.parallel.deferred import complete
from hpctrain.parallel.linears import defer_weights
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE, master
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.adamw import AdamW
from hpctrain.sharding.frozen import load_packed, load_parameters
from hpctrain.sharding.none.buckets import GradientBuckets
from hpctrain.sharding.norm import GradientNorm
from hpctrain.sharding.state import KINDS, Piece, StateReader, balance, region
from hpctrain.sharding.stepping import SteppingEngine


class PlainEngine(SteppingEngine):
    """See `Engine`. The chunks come with initial values in master precision, and are cast here."""

    def __init__(
        self, chunks: Sequence[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig
    ) -> None:
        super().__init__(chunks, mesh, config)
        precision = config.train.precision
        splits = config.parallel.schedule in ZERO_BUBBLE
        self.deferred = [defer_weights(chunk, mesh.alone) for chunk in chunks] if splits else []
        named = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        self.masters = {name: p.detach().clone() for name, p in named.items() if p.requires_grad}
        self.records = {name: records[name] for name in self.masters}
        for chunk in chunks:
            chunk.to(COMPUTE[precision])
        self.working = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        if COMPUTE[precision] == master(precision):
            self.masters = {name: self.working[name].detach() for name in self.masters}
        self.frozen = {name: p for name, p in self.working.items() if not p.requires_grad}
        self.frozen_records = {name: records[name] for name in self.frozen}
        specs = parameter_specs(config.model)
        uneven = config.model.vocab % mesh.tp.size > 0
        apart = {spec.name for spec in specs if uneven and "vocab" in spec.cuts}
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
        self.optimizer = AdamW(self.masters, set(self.gradients), {s.name: s.decay for s in specs}, config.optimizer)
        self.make_routers(config)

    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        super().begin_step(valid_tokens, micro_batches)
        self.buckets.begin(micro_batches)

    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None:
        self.through(ticket, grad)
        if self.deferred:
            complete(self.deferred[ticket.chunk].take())

    def backward_input(self, ticket: Ticket, grad: Tensor | None = None) -> Callable[[], None]:
        self.through(ticket, grad)
        left = self.deferred[ticket.chunk].take()
        return lambda: complete(left)

    def reduced(self) -> dict[str, Tensor]:
        self.buckets.finish()
        return self.gradients

    def scale_gradients(self, factor: float) -> None:
        self.buckets.scale(factor)

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

    def load(self, reader: StateReader) -> None:
        scalars = reader.scalars()
        self.optimizer.start_at(int(scalars["step"]))
        self.scale.load(scalars)
        for name, record in self.records.items():
            for kind in KINDS:
                for box in record.boxes:
                    values = reader.read(name, kind, box.start, box.shape)
                    region(self.optimizer.state(name, kind), box).copy_(values)
        load_parameters(self.frozen, self.frozen_records, reader)
        load_packed(self.chunks, reader, self.mesh.device)
        self.routers.load(reader)
        self.publish()

    def close(self) -> None:
        self.buckets.close()

    def publish(self) -> None:
        """Copy master weights to the weights that compute, where they are not the same tensors."""
        pairs = [(self.working[n], m) for n, m in self.masters.items() if self.working[n].data_ptr() != m.data_ptr()]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([w for w, _ in pairs], [m for _, m in pairs])

    def _piece(self, record: Placement, kind: str, box: Box) -> Piece:
        def fetch() -> Tensor:
            return region(self.optimizer.state(record.name, kind), box).contiguous().cpu()

        dtype = self.masters[record.name].dtype
        return Piece(record.name, kind, record.global_shape, box.start, box.shape, dtype, fetch)
