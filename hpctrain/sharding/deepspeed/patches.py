"""Everything that is mended in DeepSpeed, and nothing else.

Each function here says what is wrong and where. Those that replace or rely on private code first look for a
line of that code, so that another DeepSpeed is refused in a sentence instead of training wrongly.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.sharding.scaler import LossScale

VERSION = "0.19.8"
"""The one version these patches were written for."""


def require_version(found: str) -> None:
    """Refuse any other DeepSpeed.

    Raises:
        ConfigError: the version found is not `VERSION`.
    """
    if found != VERSION:
        raise ConfigError(
            "sharding.engine",
            "deepspeed",
            f"the engine is written for DeepSpeed {VERSION} and found {found}",
            f"pip install deepspeed=={VERSION}",
        )


def require_source(function: Callable[..., Any], line: str) -> None:
    """Refuse a DeepSpeed in which `function` no longer holds `line`.

    Raises:
        ConfigError: it does not.
    """
    function = inspect.getclosurevars(function).nonlocals.get("func", function)  # under DeepSpeed's NVTX wrapper
    try:
        found = line in inspect.getsource(function)
    except OSError:
        found = False
    if not found:
        raise ConfigError(
            "sharding.engine",
            "deepspeed",
            f"the installed DeepSpeed's {function.__module__}.{function.__qualname__} is not that of {VERSION}",
            f"pip install --force-reinstall deepspeed=={VERSION}",
        )


def no_shared_memory_op() -> None:
    """`comm/torch.py build_shm_op` compiles an op at the first use of the CPU and prints that it did.

    It also probes every other op for it. The op is for inference on one node; leave it out.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the package's attribute of this name is torch
    if backend.build_shm_op is not _no_op:
        require_source(backend.build_shm_op, 'create_op_builder("ShareMemCommBuilder")')
        backend.build_shm_op = _no_op


def no_compiler_at_import() -> None:
    """`runtime/zero/muon/original_muon.py` asks for compiled functions when it is imported, as every engine does.

    That imports torch's compiler, two seconds on every rank, for an optimizer that is not used here.
    """
    from deepspeed.runtime import compiler

    original = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original


def no_repeated_warnings() -> None:
    """`comm/torch.py` calls names of torch.distributed that torch has deprecated, at every collective."""
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", f".*{name}. is deprecated", FutureWarning)


def no_world_checks() -> None:
    """`runtime/zero/partitioned_param_coordinator.py reset_step` compares traces with global rank 0.

    The comparison is a broadcast over the whole world, and pipeline stages neither run the same modules nor
    come by at the same time: they wait for ever. The trace is checked against itself anyway.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    if coordinator.assert_ints_same_as_other_ranks is not _no_op:
        require_source(coordinator.assert_ints_same_as_other_ranks, "assert_lst_len_same_as_other_ranks(ints)")
        coordinator.assert_ints_same_as_other_ranks = _no_op


def fp16_on_cpu(accelerator: Any) -> None:
    """`accelerator/cpu_accelerator.py is_fp16_supported` asks for instructions that few CPUs have.

    PyTorch computes in fp16 on any CPU, slowly; without this fp16 could not be tested anywhere but on a GPU.
    """
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def devices_counted_once(accelerator: Any) -> None:
    """`accelerator/cpu_accelerator.py device_count` starts the program numactl, and ZeRO 3 asks at every reduction."""
    if accelerator.device_name() == "cpu":
        count = accelerator.device_count()
        accelerator.device_count = lambda: count


@contextmanager
def one_optimizer_class() -> Iterator[None]:
    """`runtime/engine.py _do_optimizer_sanity_check` gives bf16 stage 1 an optimizer class of its own.

    That class (`BF16_Optimizer`) prints, keeps the whole gradient on every rank in float32 beside its copy in
    bf16, and checks only the norm for non-finite values. The class of all other cases does bf16 with float32
    accumulation as well. While this holds, every engine that is made gets it.
    """
    from deepspeed.runtime import engine

    original = engine.DeepSpeedEngine._do_optimizer_sanity_check
    require_source(original, "return ZERO_OPTIMIZATION")
    engine.DeepSpeedEngine._do_optimizer_sanity_check = lambda self, optimizer: engine.ZERO_OPTIMIZATION
    try:
        yield
    finally:
        engine.DeepSpeedEngine._do_optimizer_sanity_check = original


@contextmanager
def values_come_later() -> Iterator[None]:
    """While engines are made, DeepSpeed copies and sends parameters that have no values yet (see `initial.py`).

    - `runtime/engine.py _broadcast_model` and `runtime/zero/partition_parameters.py _zero_init_param` send the
      whole model from the first data-parallel rank to the others.
    - `runtime/zero/stage_1_and_2.py flatten_dense_tensors_aligned` holds all parameters twice.
    """
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import partition_parameters, stage_1_and_2

    owners = engine.DeepSpeedEngine, partition_parameters.Init, stage_1_and_2.DeepSpeedZeroOptimizer
    names = "_broadcast_model", "_zero_init_param", "flatten_dense_tensors_aligned"
    originals = [getattr(owner, name) for owner, name in zip(owners, names)]
    require_source(originals[0], "dist.broadcast(p.data.view(torch.uint8),")
    require_source(originals[1], "self._convert_to_deepspeed_param(param)")
    require_source(originals[1], "param.partition()")
    require_source(originals[2], "return self.flatten(align_dense_tensors(tensor_list, alignment))")

    def partition(self: Any, param: Any) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()

    def flat(
        self: Any,
        tensor_list: list[Any],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        like = tensor_list[0].cpu_data if use_cpu_data else tensor_list[0]
        numel = sum(t.numel() for t in tensor_list) + sum(param_padding or ())
        return torch.zeros(-(-numel // alignment) * alignment, dtype=like.dtype, device=like.device)

    for owner, name, stand_in in zip(owners, names, (_no_op, partition, flat)):
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original in zip(owners, names, originals):
            setattr(owner, name, original)


def skip_all_non_finite(zero: Any, stage: int) -> None:
    """`step` of both ZeRO optimizers looks at every gradient for non-finite values in fp16 only.

    Elsewhere it goes by the norm, which leaves out what it must not count twice: a replica whose gradient is
    NaN would be stepped on its own. Look at every gradient in every precision. The check takes the maximum
    over both groups, so all ranks agree. It goes over each gradient half a dozen times; a sum, in which anything that
    is not finite shows, goes over it once, and only where that is not finite is there something to look for.
    """
    if stage < 3:
        require_source(type(zero).step, "if self.check_grad_overflow:")
        require_source(type(zero).has_overflow_partitioned_grads_serial, "for j, grad in enumerate(self.averaged_gradi")
        zero.check_grad_overflow = True
        thorough = zero.has_overflow_partitioned_grads_serial

        def found(self: Any) -> torch.Tensor:
            gradients = [g for i in range(len(self.bit16_groups)) for g in self.averaged_gradients[i] if g is not None]
            return torch.zeros(1, dtype=torch.bool) if _finite(gradients) else thorough()  # moved by who asks

        zero.has_overflow_partitioned_grads_serial = MethodType(found, zero)
        return
    require_source(type(zero)._overflow_check_and_loss_scale_update, "if self.dtype == torch.float16:")
    require_source(type(zero).step, "self._overflow_check_and_loss_scale_update(update_scale=False)")

    def check(self: Any, update_scale: bool = True) -> bool:
        self.overflow = False
        self.check_overflow()
        return bool(self._loss_scale_update_and_overflow_cleanup()) if update_scale else self.overflow

    zero._overflow_check_and_loss_scale_update = MethodType(check, zero)


def _finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether the sum of all is finite: then every one of their values is."""
    sums = [g.sum(dtype=torch.float32) for g in gradients]
    return not sums or bool(torch.stack(sums).sum().isfinite())


def skip_where(zero: Any, refused: Callable[[], bool]) -> None:
    """`step` of both ZeRO optimizers skips for what it finds in the gradients alone.

    Let it also skip when `refused`, which must answer alike on all ranks, as if it had found something.
    """
    require_source(type(zero)._check_overflow, "self.overflow = self.has_overflow(partition_gradients)")
    original = zero.has_overflow
    zero.has_overflow = lambda partition_gradients=True: original(partition_gradients) or refused()


class FixedLossScaler:
    """What DeepSpeed asks of a loss scaler, over a scale that changes between steps only."""

    def __init__(self, scale: LossScale) -> None:
        self._scale, self.dynamic = scale, scale.dynamic

    @property
    def cur_scale(self) -> float:
        return self._scale.value

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale.value

    def update_scale(self, overflow: bool) -> None:
        """The engine updates the scale after the step."""


def use_loss_scale(zero: Any, scale: LossScale) -> None:
    """`step` of both ZeRO optimizers changes the scale before it divides the gradients by it.

    In every step after which the scale grows, gradients (and, in stage 3, the norm) come out at half their size.
    DeepSpeed's own scaler (`runtime/fp16/loss_scaler.py DynamicLossScaler`) also ends the run at the smallest
    scale, knows no largest, and counts one step more than its window the first time and after each overflow.
    """
    require_source(type(zero)._update_scale, "self.loss_scaler.update_scale(has_overflow)")
    require_source(type(zero)._get_loss_scale, "return self.loss_scaler.cur_scale")
    require_source(type(zero).scale_if_loss, "return self.loss_scaler.scale_loss(value)")
    assert zero.loss_scaler.dynamic == scale.dynamic, (zero.loss_scaler, scale)
    zero.loss_scaler = FixedLossScaler(scale)


def fresh_gradients(zero: Any, stage: int) -> None:
    """`runtime/zero/stage3.py partition_grads` copies in the first backward of a step and adds in the others.

    A parameter that the first backward does not touch (another chunk's) would be added to the gradient of the
    step before. Start every step from zeros.
    """
    if stage == 3:
        zero.grad_partitions_flat_buffer.zero_()


def expect_backward(zero: Any) -> None:
    """`ZeROOptimizer` takes a backward to be over when the next forward begins.

    Two backwards in a row, as every pipeline schedule has them, would count as one: stage 3 would overwrite
    the first's gradients with the second's. Tell it that another one begins.
    """
    zero.clear_backward_seen_flag()


Remaining = Mapping[nn.Module, int]


def remaining_inputs(module: nn.Module) -> Remaining:
    """`runtime/zero/parameter_offload.py _post_backward_module_hook` counts a module's inputs at its forward.

    The count is kept on the module, so the next forward overwrites it, and a backward that finds the wrong
    count never lets the module's parameters go. Take the count after a forward and put it back before that
    forward's backward (`restore_remaining`).
    """
    return {m: m.ds_grads_remaining for m in module.modules() if hasattr(m, "ds_grads_remaining")}  # type: ignore[misc]


def restore_remaining(remaining: Remaining) -> None:
    """See `remaining_inputs`."""
    for module, count in remaining.items():
        module.ds_grads_remaining = count  # type: ignore[assignment]


def forget(unit: object, root: nn.Module) -> None:
    """`utils/groups.py mpu` and `parameter_offload.py FWD_MODULE_STACK` are globals that outlive an engine.

    The next engine of the process would read the last one's groups, or register parameters with its module.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    if groups.mpu is unit:
        groups.mpu = None
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not root]


def choose_accelerator(device: torch.device) -> None:
    """`accelerator/real_accelerator.py` picks the accelerator at import and prints its choice, unless it is told."""
    os.environ["DS_ACCELERATOR"] = device.type


def require_accelerator(found: str, device: torch.device) -> None:
    """Refuse a DeepSpeed that something else imported for another kind of device; it cannot change its mind.

    Raises:
        ConfigError: it computes on `found`.
    """
    if found != device.type:
        raise ConfigError(
            "cluster.device",
            device.type,
            f"DeepSpeed was imported in this process to compute on {found}",
            f"set DS_ACCELERATOR={device.type} in the environment",
        )


@contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """`runtime/engine.py _set_distributed_vars` computes on the device numbered LOCAL_RANK, not the current one.

    It also insists that Open MPI's variable is the same. While this holds both stand for the rank's device.
    """
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    saved = {name: os.environ.pop(name, None) for name in names}
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _no_op(*_: Any) -> None:
    return None
