"""The DeepSpeed engine behind our interface: ZeRO stages 1 to 3 with our mesh, tickets and loss divisor."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Placement
from hpctrain.layout.slots import UNIT
from hpctrain.model.batch import Batch
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.deepspeed import offload, ops, patches, state
from hpctrain.sharding.deepspeed.config import deepspeed_config
from hpctrain.sharding.deepspeed.experts import GROUP, forget_experts, shard_experts
from hpctrain.sharding.deepspeed.gather import make_fetchable
from hpctrain.sharding.deepspeed.groups import MeshUnit
from hpctrain.sharding.deepspeed.initial import make_hollow
from hpctrain.sharding.deepspeed.traffic import CountedBackend
from hpctrain.sharding.deepspeed.weights import WeightsOnDisk, in_place_of_deepspeeds
from hpctrain.sharding.engine import Engine, StepResult
from hpctrain.sharding.frozen import load_packed
from hpctrain.sharding.groups import ensure_world
from hpctrain.sharding.initial import InitialValues
from hpctrain.sharding.offload.home import Home, make_home
from hpctrain.sharding.routers import Routers
from hpctrain.sharding.scaler import LossScale
from hpctrain.sharding.state import WEIGHT, Piece, StateReader


class Chunks(nn.Module):
    """All chunks of a rank as the one module that DeepSpeed takes."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def forward(self, chunk: int, *inputs: Any) -> Any:
        return self.chunks[chunk](*inputs)


class _Receive(torch.autograd.Function):
    """A zero whose backward hands a given gradient on to the output of a forward.

    The gradient comes from a later stage's scaled loss, so it is not scaled again.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class DeepSpeedEngine(Engine):
    """See `Engine`.

    Args:
        chunks: the parallelized modules. Values that their parameters hold are dropped: this engine draws the
            initial values itself, each rank those that it keeps. So they may be on the meta device.
        records: placements of all their parameters, by name.
        mesh: the process groups of the run.
        config: of the run; `sharding.stage` is 1, 2 or 3.

    Raises:
        ConfigError: another DeepSpeed is installed, or it was imported for another kind of device, or the op
            that `sharding.torch_adam=false` needs is not built.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig
    ) -> None:
        self.chunks, self._mesh, self._records = chunks, mesh, records
        self._stage = config.sharding.stage
        self._scale = LossScale(config.train.loss_scale, dynamic=config.train.precision == "fp16")
        self._loss_finite = True
        if not config.sharding.torch_adam:
            ops.require_built("fused_adam", ops.extensions_folder(), "sharding.torch_adam")
        settings = deepspeed_config(config)
        deepspeed = load_deepspeed(mesh.device)
        root = Chunks(self.chunks)
        if self._stage == 3:
            make_fetchable(root, mesh.alone)
        make_hollow(root, COMPUTE[config.train.precision], mesh.device, sharded=self._stage == 3)
        self._named = {name: p for chunk in self.chunks for name, p in chunk.named_parameters()}
        for name, parameter in self._named.items():
            # DeepSpeed counts a parameter in the norm if it carries this flag or the rank is the first of tp,
            # who owns whatever it holds.
            parameter.tensor_model_parallel = records[name].owner == mesh.rank  # type: ignore[attr-defined]
        # Where edp is dp x cp experts are parameters as others are.
        trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        apart = {name for name in trained if mesh.reduction(records[name]).ranks != mesh.loss.ranks}
        if apart:
            assert config.model.moe is not None
            shard_experts(root, [self._named[n] for n in apart], config.model.moe.experts, mesh)
        self._unit = MeshUnit(mesh)
        kept = {name: records[name] for name in trained}
        home = make_home(config, mesh, kept) if config.sharding.offload.state else None
        weights = self._weights_on_disk(home, config) if home else None
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(patches.one_optimizer_class())
            stack.enter_context(patches.values_come_later())
            stack.enter_context(patches.local_rank(mesh.device))
            if home:
                stack.enter_context(offload.states_live_elsewhere(self._stage))
                stack.enter_context(in_place_of_deepspeeds(weights))
            warnings.simplefilter("ignore")
            self._engine, self._zero, *_ = deepspeed.initialize(
                model=root,
                config=settings,
                mpu=self._unit,
                model_parameters=_groups(trained, config, apart),
                dist_init_required=False,
            )
        self._store = self._make_store(home, weights)
        patches.skip_all_non_finite(self._zero, self._stage)
        patches.skip_where(self._zero, lambda: not self._loss_finite)
        patches.use_loss_scale(self._zero, self._scale)
        state.load(self._store, records, InitialValues(config), step=0, kinds=(WEIGHT,))
        load_packed(chunks, InitialValues(config), mesh.device)
        self.routers = Routers(chunks, mesh, config)
        self._valid_tokens = 1
        self._counted = CountedBackend(mesh)

    def _weights_on_disk(self, home: Home, config: RunConfig) -> WeightsOnDisk | None:
        """The place of partitions that `sharding.offload.params=nvme` puts on a disk."""
        if config.sharding.offload.params != "nvme":
            return None
        assert home.disk
        dtype, ranks = COMPUTE[config.train.precision], self._mesh.loss.size
        kept = [math.ceil(p.numel() / ranks) for p in self._named.values()]
        padded = [math.ceil(numel / UNIT) * UNIT for numel in kept]
        least, share = -(-config.model.hidden // ranks), config.sharding.offload.params_share
        file = home.file(math.ceil(share * sum(padded) + (share < 1) * max(padded)) * dtype.itemsize)
        copied = ranks > 1 or self._mesh.device.type != "cpu"
        return WeightsOnDisk(file, home.disk, dtype, least, share, home.sizes.ahead, home.pinned, copied)

    def _make_store(self, home: Home | None, weights: WeightsOnDisk | None) -> state.Store:
        zero, named = self._zero, self._named
        if home is None:
            return (state.ShardedParameters if self._stage == 3 else state.ShardedStates)(zero, named)
        if self._stage < 3:
            return offload.Partitions(zero, named, home)
        return offload.Parameters(zero, named, home, weights, self._records, self._mesh)

    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        self._valid_tokens = max(valid_tokens, 1)
        patches.fresh_gradients(self._zero, self._stage)
        self._store.begin_step(micro_batches)
        self.routers.begin_step()

    def forward(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Ticket:
        if not self._engine.module.training:
            self._engine.module.train()
        output, routers = self._engine(chunk, batch, hidden, tied)
        remaining = patches.remaining_inputs(self._engine.module) if self._stage == 3 else {}
        return Ticket(chunk, output, routers, hidden, remaining)

    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None:
        patches.expect_backward(self._zero)
        patches.restore_remaining(ticket.extra)
        factor = self._mesh.loss.size / self._valid_tokens  # DeepSpeed averages over the data-parallel ranks
        received = None if grad is None else _Receive.apply(ticket.output, grad)  # type: ignore[no-untyped-call]
        scalar = ticket.output * factor if received is None else received
        if ticket.routers is not None:
            scalar = scalar + ticket.routers * factor
        self._engine.backward(scalar, scale_wrt_gas=False)

    def step(self, lr: float, loss_finite: bool = True) -> StepResult:
        self._loss_finite = loss_finite
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        skipped = bool(self._zero.overflow)
        if not skipped:
            self._store.stepped()
            self.routers.step()
        backed_off = loss_finite and self._scale.update(overflowed=skipped)
        return StepResult(math.nan if skipped else float(self._zero._global_grad_norm), skipped, backed_off)

    def evaluate(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        self._engine.module.eval()
        with torch.no_grad():
            output, _ = self._engine(chunk, batch, hidden, tied)
        return cast(Tensor, output)

    def parameter(self, name: str) -> nn.Parameter:
        return self._named[name]

    def values(self, name: str) -> Tensor:
        return self._store.compute(self._named[name])

    def pieces(self) -> list[Piece]:
        return [*state.pieces(self._store, self._records, self._mesh.rank), *self.routers.pieces()]

    def scalars(self) -> dict[str, float]:
        return {"step": float(self._store.step()), **self._scale.scalars()}

    def load(self, reader: StateReader) -> None:
        scalars = reader.scalars()
        state.load(self._store, self._records, reader, int(scalars["step"]))
        load_packed(self.chunks, reader, self._mesh.device)
        self._scale.load(scalars)
        self.routers.load(reader)

    def close(self) -> None:
        self._counted.close()
        self._engine.destroy()
        self._store.close()
        patches.forget(self._unit, self._engine.module)
        forget_experts()


def load_deepspeed(device: torch.device) -> Any:
    """The module, of the version we know, quiet, mended and connected to the process group of torch.

    A process group of one is made where there is none.
    """
    patches.choose_accelerator(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    patches.require_version(deepspeed.__version__)
    patches.require_accelerator(deepspeed.get_accelerator().device_name(), device)
    for handler in (deepspeed.utils.logger, *deepspeed.utils.logger.handlers):
        handler.setLevel(logging.ERROR)
    patches.no_shared_memory_op()
    patches.no_world_checks()
    patches.no_compiler_at_import()
    patches.no_repeated_warnings()
    patches.fp16_on_cpu(deepspeed.get_accelerator())
    patches.devices_counted_once(deepspeed.get_accelerator())
    ensure_world(device)
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return deepspeed


def _groups(named: Mapping[str, nn.Parameter], config: RunConfig, apart: Set[str]) -> list[dict[str, Any]]:
    """The parameters with and without weight decay, and experts whose state is sharded over other ranks."""
    decays = {spec.name for spec in parameter_specs(config.model) if spec.decay}
    groups: list[dict[str, Any]] = []
    for decay, of_expert in ((True, False), (False, False), (True, True)):
        chosen = [p for n, p in named.items() if (n in decays) == decay and (n in apart) == of_expert]
        group = {"params": chosen, "weight_decay": config.optimizer.weight_decay if decay else 0.0}
        groups.append(group | {"moe": True, "name": GROUP} if of_expert else group)
    return [group for group in groups if group["params"]]
