"""Engine `fsdp`: weights, gradients and optimizer state sharded over the data-parallel ranks by PyTorch's FSDP2.

float32 and float64 train in that precision. bf16 and fp16 compute in it, with float32 master weights, of which each
rank has a part; gradients are reduced in float32 unless `sharding.reduce_dtype` says otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import EXPERT, Placement
from hpctrain.layout.shards import replicas_of, shard_dim
from hpctrain.model.batch import Batch
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE, master
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.adamw import AdamW
from hpctrain.sharding.fsdp.axes import ShardAxes, shard_axes
from hpctrain.sharding.fsdp.comm import Gather, Reductions, Scatter, count_sums, finish
from hpctrain.sharding.fsdp.state import Part, load, pieces
from hpctrain.sharding.fsdp.units import Unit, prefetch, units_of
from hpctrain.sharding.groups import ensure_world
from hpctrain.sharding.initial import InitialValues
from hpctrain.sharding.norm import GradientNorm
from hpctrain.sharding.state import KINDS, WEIGHT, Piece, StateReader, balance
from hpctrain.sharding.stepping import SteppingEngine

NEEDED = ("set_custom_all_gather", "set_force_sum_reduction_for_comms", "set_unshard_in_backward")
"""What FSDP2 has learnt last of what is used here."""


class Turn(NamedTuple):
    """How a backward treats what it makes.

    Attributes:
        reduce: gradients are summed over the ranks, those of the backwards before with them.
        last: of the step.
        let_go: gathered weights are not kept for the next micro-batch.
    """

    reduce: bool = True
    last: bool = True
    let_go: bool = True


class FsdpEngine(SteppingEngine):
    """See `Engine`.

    Args:
        chunks: the parallelized modules. Values that their parameters hold are dropped: each rank draws the initial
            values of what it keeps. So they may be on the meta device.
        records: placements of all their parameters, by name.
        mesh: the process groups of the run.
        config: of the run.

    Raises:
        ConfigError: the FSDP2 of the installed torch is too old.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig
    ) -> None:
        require_fsdp2()
        ensure_world(mesh.device)
        _no_warnings_of_views()
        super().__init__(chunks, mesh, config)
        sharding, timeout_s = config.sharding, config.cluster.timeout_s
        self._once, self._keep = sharding.reduce_every == "step", not sharding.reshard_after_forward
        self._axes: dict[bool, ShardAxes] = {  # by whether it is of experts
            of_expert: shard_axes(axis, replicas_of(sharding.replicas, axis.size), mesh.alone, mesh.device, timeout_s)
            for of_expert, axis in ((False, mesh.loss), (True, mesh.edp))
        }
        self._reductions: Reductions = []
        self._sums: dict[str, Tensor] = {}
        self._left, self._turns = [0] * len(chunks), [Turn()] * len(chunks)
        self._units = [unit for chunk in chunks for unit in self._shard(chunk, config)]
        home = torch.device("cpu") if sharding.offload.params == "cpu" else mesh.device
        for chunk in chunks:
            chunk.to_empty(device=home)
        self._sharded = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        self._parts = {name: self._part(records[name]) for name in self._sharded}
        masters = {name: _local(p) for name, p in self._sharded.items()}
        assert all(masters[name].shape == part.shape for name, part in self._parts.items())
        self._trained = [n for n, p in self._sharded.items() if p.requires_grad and self._parts[n].numel]
        decays = {spec.name: spec.decay for spec in parameter_specs(config.model)}
        self.optimizer = AdamW(masters, set(self._trained), decays, config.optimizer)
        axes = self._axes[False].shards, self._axes[True].shards
        counted = {name: records[name] for name in self._trained}
        self.norm = GradientNorm(counted, mesh, config.model.moe is not None, axes, home)
        load(self._parts, self.optimizer.state, InitialValues(config), (WEIGHT,))
        self._working, self._home = self._gather_once()
        self.make_routers(config)

    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        super().begin_step(valid_tokens, micro_batches)
        self._take()
        self._sums, self._left = {}, [micro_batches] * len(self.chunks)

    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None:
        self._take()
        self._left[ticket.chunk] -= 1
        last = self._left[ticket.chunk] == 0
        self._turn(ticket.chunk, Turn(last or not self._once, last, last or not self._keep))
        self.through(ticket, grad)

    def evaluate(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        output = super().evaluate(chunk, batch, hidden, tied)
        for unit in self._units:
            unit.handle.reshard()
        return output

    def reduced(self) -> Mapping[str, Tensor]:
        self._take()
        found = {name: self._sums.get(name) for name in self._trained}
        masters = {name: self.optimizer.state(name, WEIGHT) for name in self._trained}
        self._sums = {n: torch.zeros_like(masters[n]) if sums is None else sums for n, sums in found.items()}
        return self._sums

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_(list(self._sums.values()), factor)

    def parameter(self, name: str) -> nn.Parameter:
        return self._working[name]

    def values(self, name: str) -> Tensor:
        self._home[name].unshard()
        values = self._working[name].detach().clone()
        self._home[name].reshard()
        return values

    def pieces(self) -> Iterator[Piece]:
        for of_expert, axes in self._axes.items():
            held = [part for part in self._parts.values() if _of_expert(part.record) == of_expert]
            owned = [part for part in held if part.record.owner == self.mesh.rank]
            writers = balance([part.numel for part in owned], axes.replicas.size)
            for part, writer in zip(owned, writers):
                if writer == axes.replicas.index:
                    for kind in KINDS if part.numel else ():
                        yield from pieces(part, kind, self.optimizer.state)
        yield from self.routers.pieces()

    def load(self, reader: StateReader) -> None:
        scalars = reader.scalars()
        self.optimizer.start_at(int(scalars["step"]))
        self.scale.load(scalars)
        load(self._parts, self.optimizer.state, reader, KINDS)
        self.routers.load(reader)

    def _shard(self, chunk: nn.Module, config: RunConfig) -> list[Unit]:
        """Hand a chunk to FSDP2; returns all its units, the root last."""
        assert isinstance(chunk, Transformer), chunk
        _to_meta(chunk, master(config.train.precision))
        outer = units_of(chunk, apart=config.model.vocab % self.mesh.tp.size > 0)
        units = [unit.inside for unit in outer if unit.inside is not None] + outer
        units.append(Unit("root", (chunk,), turn=True))
        for unit in units:
            axes = self._axes[unit.experts]
            fully_shard(
                list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],  # type: ignore[arg-type]
                mesh=axes.mesh,
                reshard_after_forward=not (unit.turn or self._keep),
                shard_placement_fn=lambda p, ranks=axes.shards.size: Shard(shard_dim(tuple(p.shape), ranks)),  # type: ignore[misc]
                mp_policy=policy(config),
                offload_policy=self._offload(config),
            )
            self._settle(unit, axes, config)
        prefetch(outer, config.sharding.prefetch)
        return units

    def _settle(self, unit: Unit, axes: ShardAxes, config: RunConfig) -> None:
        """Settings of a unit: sums instead of means, and how they are sent.

        A reduction can go on after FSDP2 has it, where it does not look at the result before the engine does.
        """
        on_host = self.mesh.device.type == "cpu" and config.train.overlap
        unread = axes.replicas.size == 1 and config.sharding.reduce_dtype == "float32"
        unit.handle.set_gradient_divide_factor(1.0)
        unit.handle.set_force_sum_reduction_for_comms(True)
        if axes.shards.size > 1:
            unit.handle.set_custom_all_gather(Gather(axes.shards, unit.name, on_host))  # type: ignore[arg-type]
            later = self._reductions if on_host and unread else None
            unit.handle.set_custom_reduce_scatter(Scatter(axes.shards, unit.name, later))  # type: ignore[arg-type]
        if axes.replicas.size > 1:
            unit.handle.set_all_reduce_hook(count_sums(axes.replicas))
        if unit.lookup:
            unit.handle.set_unshard_in_backward(False)

    def _offload(self, config: RunConfig) -> OffloadPolicy:
        if config.sharding.offload.params != "cpu":
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")

    def _part(self, record: Placement) -> Part:
        shards = self._axes[_of_expert(record)].shards
        return Part.of(record, shards.size, shards.index)

    def _gather_once(self) -> tuple[dict[str, nn.Parameter], dict[str, FSDPModule]]:
        """The parameters that the model computes with, which FSDP2 makes when it first gathers them and keeps from
        then on; and what gathers each."""
        working, home = {}, {}
        for unit in self._units:
            unit.handle.unshard()
            for chunk in self.chunks:
                for name, p in chunk.named_parameters():
                    if not isinstance(p, DTensor):
                        working[name], home[name] = p, unit.handle
            unit.handle.reshard()
        return working, home

    def _turn(self, chunk: int, turn: Turn) -> None:
        """Tell FSDP2 of the backward that comes."""
        root = self.chunks[chunk]
        assert isinstance(root, FSDPModule)
        if self._turns[chunk] != turn:
            root.set_requires_gradient_sync(turn.reduce)
            root.set_requires_all_reduce(turn.reduce and turn.last)
            root.set_reshard_after_backward(turn.let_go)
            self._turns[chunk] = turn

    def _take(self) -> None:
        """Add what the last backward has reduced to the sums of the step."""
        finish(self._reductions)
        for name, p in self._sharded.items():
            if p.grad is not None:
                gradient, p.grad = _local(p.grad), None
                self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient


def require_fsdp2() -> None:
    """Refuse a torch whose FSDP2 lacks what is used here.

    Raises:
        ConfigError: it does.
    """
    lacking = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if lacking:
        reason = f"needs FSDP2 with {lacking[0]}, which that of torch {torch.__version__} has not"
        fix = "use torch 2.13, or sharding.engine=deepspeed sharding.stage=3"
        raise ConfigError("sharding.engine", "fsdp", reason, fix)


def _no_warnings_of_views() -> None:
    """FSDP2 warns of what would be lost if an output that is a view were changed in place. Those of layers whose
    activations are computed again are views (`parallel/recompute.py`), and nothing changes them."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def policy(config: RunConfig) -> MixedPrecisionPolicy:
    """Dtypes of weights that compute and of reductions, where those are not the master weights'."""
    compute = COMPUTE[config.train.precision]
    if compute == master(config.train.precision):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(compute, COMPUTE[config.sharding.reduce_dtype], cast_forward_inputs=False)


def _to_meta(root: nn.Module, dtype: torch.dtype) -> None:
    """Replace every parameter by one without values."""
    for module in root.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            blank = torch.empty(p.shape, dtype=dtype, device="meta")
            module.register_parameter(name, nn.Parameter(blank, requires_grad=p.requires_grad))


def _of_expert(record: Placement) -> bool:
    return record.reduced_over == EXPERT


@torch.no_grad()
def _local(t: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, itself."""
    assert isinstance(t, DTensor), type(t)
    return t.to_local()
