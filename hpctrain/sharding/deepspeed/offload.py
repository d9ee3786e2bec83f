"""Offloading under ZeRO: DeepSpeed moves weights and gradients between ranks, and its state lives where we keep it.

DeepSpeed's own ways of offloading are not used. What they get wrong without a word, in 0.19.8:

- gradients that are swapped out come back wrong where a partition is no multiple of 128 elements: O_DIRECT refuses
  memory that is not aligned, and `wait` counts the read as done. So it does on a disk that is full or fails;
- stages 1 and 2 with a disk keep everything in memory of the host; so does every group of state under 1 MiB or
  `aio.block_size`, and of weights the first billion elements (`max_in_cpu`);
- stages 1 and 2 sum gradients over micro-batches in the precision of the weights, whatever `grad_accum_dtype` says;
- the part that `ratio` leaves on the device is updated with the first learning rate there was, for ever;
- with a disk the whole gradient stays in memory, and with the host it is there twice;
- buffers are as large as the largest group of state, a billion elements unless told otherwise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.layout.placement import Placement
from hpctrain.layout.slots import Chunk, Span
from hpctrain.parallel.comm import all_reduce_
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.deepspeed.patches import require_source
from hpctrain.sharding.deepspeed.state import Fragment, Store
from hpctrain.sharding.deepspeed.weights import WeightsOnDisk
from hpctrain.sharding.offload.home import Home
from hpctrain.sharding.offload.update import Updater
from hpctrain.sharding.state import WEIGHT

Found = tuple[str, int, int, int]
"""A fragment: name, group, start in the parameter, elements."""


@contextmanager
def states_live_elsewhere(stage: int) -> Iterator[None]:
    """While engines are made, `runtime/zero/stage3.py` makes no master weights, moments or buffers of gradients.

    Stages 1 and 2 make master weights; `Partitions` lets them go.
    """
    if stage < 3:
        yield
        return
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero

    def setup(self: Any) -> None:
        self.fp32_partitioned_groups_flat = []
        for group in self.optimizer.param_groups:
            group["params"] = []
        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=self.device)
        self.grad_partitions_flat_buffer = torch.empty(0, device=self.device)
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}

    original = Zero._setup_for_real_optimizer
    for line in (
        "self._create_fp32_partitions()",
        "self.initialize_optimizer_states()",
        "bucket.buffer = torch.empty(",
    ):
        require_source(original, line)
    Zero._setup_for_real_optimizer = setup
    try:
        yield
    finally:
        Zero._setup_for_real_optimizer = original


class OffloadedStore(Store):
    """Master weights and moments where `sharding.offload` wants them, and the part of a step that updates them.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        parameters: by name.
        home: makes the memory and the files.
        fragments: what this rank keeps, groups in order.
    """

    def __init__(
        self, zero: Any, parameters: Mapping[str, nn.Parameter], home: Home, fragments: Sequence[Found]
    ) -> None:
        super().__init__(zero, parameters)
        self._home, self._done = home, 0
        self._starts = {name: start for name, _, start, _ in fragments}
        self.row = home.row([(name, group, numel) for name, group, _, numel in fragments])
        self.states = home.states(self.row)
        self._updater = Updater(self.states, self._publish)

    @abstractmethod
    def _put(self, span: Span, values: Tensor) -> None:
        """Take new master weights of a span, [numel], into the weights that the model computes with."""

    def _publish(self, chunk: Chunk, weight: Tensor) -> None:
        for span in self.row.of_chunk(chunk):
            self._put(span, weight[span.in_chunk : span.in_chunk + span.numel])

    def fragments(self) -> Iterator[Fragment]:
        """Stretches of a chunk's size at most: nobody who reads or writes them holds more than one."""
        for slot in self.row.slots.values():
            for start in range(0, slot.numel, self._home.sizes.chunk):
                numel = min(self._home.sizes.chunk, slot.numel - start)
                yield Fragment(slot.name, self.parameters[slot.name], self._starts[slot.name] + start, numel)

    def read(self, fragment: Fragment, kind: str) -> Tensor:
        return self.states.read(fragment.name, kind, self._in_slot(fragment), fragment.numel)

    def write(self, fragment: Fragment, kind: str, values: Tensor) -> None:
        start = self._in_slot(fragment)
        self.states.write(fragment.name, kind, start, values)
        if kind == WEIGHT:
            for span in self.row.of_slot(self.row.slots[fragment.name], start, fragment.numel):
                at = span.in_slot - start
                self._put(span, values[at : at + span.numel])

    def _in_slot(self, fragment: Fragment) -> int:
        return fragment.start - self._starts[fragment.name]

    def start_at(self, step: int) -> None:
        """Moments are zero until they are written: `state.load` writes all of them, or it is the beginning."""
        self._done = step

    def step(self) -> int:
        return self._done

    def stepped(self) -> None:
        self._done += 1

    def _flats(self) -> list[Tensor]:
        raise AssertionError("DeepSpeed has no state here")

    def close(self) -> None:
        self.states.close()
        self._home.close()


class _StandIn:
    """What stages 1 and 2 take for the master weights of a group: they give it the gradient, have it updated, and copy
    its values into the weights of the computation, which are what it has for values."""

    dtype = torch.float32

    def __init__(self, weights: Tensor) -> None:
        self.data, self.grad = weights, None


class Partitions(OffloadedStore):
    """Stages 1 and 2. DeepSpeed's step runs as it does without offloading, gradients on the device, but for the
    update itself."""

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter], home: Home) -> None:
        import torch.distributed as dist

        names, fragments = {id(p): name for name, p in parameters.items()}, []
        self._at: dict[str, tuple[int, int]] = {}
        for group, members in enumerate(zero.bit16_groups):
            for parameter in members:
                if (mapping := parameter._hp_mapping) is not None:
                    name, there = names[id(parameter)], mapping.hp_fragment_address
                    fragments.append((name, group, mapping.lp_fragment_address.start, there.numel))
                    self._at[name] = group, there.start
                    mapping.hp_fragment = None
        super().__init__(zero, parameters, home, fragments)
        for line in ("self._optimizer_step(i)", "bit16_partitions[partition_id].data.copy_(fp32_partition.data)"):
            require_source(type(zero).step, line)
        for group, partitions in enumerate(zero.parallel_partitioned_bit16_groups):
            own = partitions[dist.get_rank(zero.real_dp_process_group[group])]
            zero.single_partition_of_fp32_groups[group].data = torch.empty(0)  # the optimizer has it too
            zero.single_partition_of_fp32_groups[group] = _StandIn(own)
        zero._optimizer_step = self._update
        near, host = home.near, torch.device("cpu")
        self._staging = {far: torch.zeros(self.row.largest, device=host if far else near) for far in (False, True)}

    def _update(self, group: int) -> None:
        def gradient(chunk: Chunk, _: Tensor) -> Tensor:
            whole, out = self._stand_in(group).grad, self._staging[chunk.far][: chunk.size].zero_()
            assert whole is not None
            for span in self.row.of_chunk(chunk):
                at = self._at[span.slot.name][1] + span.in_slot
                out[span.in_chunk : span.in_chunk + span.numel].copy_(whole[at : at + span.numel])
            return out

        self._updater.step(group, self.zero.optimizer.param_groups[group], gradient, self._done)

    def _stand_in(self, group: int) -> _StandIn:
        found = self.zero.single_partition_of_fp32_groups[group]
        assert isinstance(found, _StandIn)
        return found

    def _put(self, span: Span, values: Tensor) -> None:
        group, at = self._at[span.slot.name]
        self._stand_in(group).data[at + span.in_slot :][: span.numel].copy_(values)

    def publish(self) -> None:
        self.zero.update_lp_params()


class Parameters(OffloadedStore):
    """Stage 3. A gradient goes where its state is as soon as it is reduced.

    Args:
        weights: those on a disk, if there are any.
        records: placements by name.
        mesh: the ranks over which the norm is summed.
    """

    def __init__(
        self,
        zero: Any,
        parameters: Mapping[str, nn.Parameter],
        home: Home,
        weights: WeightsOnDisk | None,
        records: Mapping[str, Placement],
        mesh: Mesh,
    ) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._weights, self._mesh, self._squares = weights, mesh, 0.0
        fragments = []
        for group, members in enumerate(zero.fp16_groups):
            for parameter in members:
                size = parameter.partition_numel()
                start = size * zero._get_param_partition_rank(parameter)
                numel = max(0, min(size, parameter.ds_numel - start))
                fragments.append((self._names[id(parameter)], group, start, numel))
        super().__init__(zero, parameters, home, fragments)
        self._gradients = home.gradients(self.row, lambda name: records[name].owner == mesh.rank)
        self._factor = 1.0
        kind = type(zero)
        require_source(kind._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads, "self.partition_grads(")
        for line in (
            "norm_groups = self._get_norm_groups()",
            "self.unscale_and_clip_grads(sub_group_id, scaled_global_grad_norm)",
            "self._optimizer_step(sub_group_id)",
            "self._reassign_or_swap_out_partitioned_parameters(sub_group_id)",
        ):
            require_source(kind.step, line)
        zero.offload_optimizer = True  # it keeps no gradients of its own then
        zero.partition_grads = self._take_gradients
        zero.has_overflow = self._has_non_finite
        zero._get_norm_groups = lambda: [torch.tensor(math.sqrt(self._squares))]
        zero.unscale_and_clip_grads = MethodType(self._clip, zero)
        zero._optimizer_step = self._update
        zero._reassign_or_swap_out_partitioned_parameters = lambda group: None

    def begin_step(self, micro_batches: int) -> None:
        self._gradients.begin_step(micro_batches)
        if self._weights:
            self._weights.begin_step()

    def _take_gradients(self, parameters: Sequence[Any], partitions: Sequence[Tensor]) -> list[Tensor]:
        for parameter, partition in zip(parameters, partitions):
            slot = self.row.slots[self._names[id(parameter)]]
            if slot.numel:
                self._gradients.add(slot.name, partition.view(-1)[: slot.numel])
            if parameter.grad.is_cuda:
                parameter.grad.record_stream(torch.cuda.current_stream())
            parameter.grad = None
        return []

    def _has_non_finite(self, partition_gradients: bool = True) -> bool:
        if self._weights:
            self._weights.end_step()
        squares, finite = self._gradients.finish()
        totals = torch.tensor([squares, float(not finite)], dtype=torch.float64, device=self._mesh.device)
        self._squares, bad = all_reduce_(totals, self._mesh.world).tolist()
        return bool(bad > 0)

    def _clip(self, zero: Any, group: int, norm: Tensor) -> None:
        scale = float(zero.loss_scale)
        clip = max(1.0, (float(norm) / scale + 1e-6) / zero.clip_grad) if zero.clip_grad else 1.0
        self._factor = 1.0 / (scale * clip)

    def _update(self, group: int) -> None:
        settings = self.zero.optimizer.param_groups[self.zero.sub_group_to_group_id[group]]

        def gradient(chunk: Chunk, values: Tensor) -> Tensor:
            return self._gradients.of(chunk, values).mul_(self._factor)

        self._updater.step(group, settings, gradient, self._done)
        if self._weights:
            self._weights.synchronize_writes()

    def _put(self, span: Span, values: Tensor) -> None:
        parameter: Any = self.parameters[span.slot.name]
        if self._weights and self._weights.holds(parameter):
            self._weights.put(parameter, span.in_slot, values)
        else:
            parameter.ds_tensor.data[span.in_slot : span.in_slot + span.numel].copy_(values)

    def compute(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def publish(self) -> None:
        if self._weights:
            self._weights.synchronize_writes()
        self.zero._partition_all_parameters()
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def close(self) -> None:
        if self._weights:
            self._weights.close()
        super().close()
