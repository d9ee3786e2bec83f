"""What is priced: the work of a run, the software that does it, and many layouts at once as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from hpctrain.config.schema import ModelConfig, RunConfig
from hpctrain.layout.activations import OURS, Keeps
from hpctrain.layout.layout import Layout
from hpctrain.layout.schedule import SCHEDULES
from hpctrain.plan.gemm import Array
from hpctrain.plan.hardware import Dtype

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu", "nvme")
NAMES = tuple(SCHEDULES)


@dataclass(frozen=True)
class ByModule:
    """When ZeRO 3 gathers the weights of a module, and lets them go.

    Attributes:
        reuse: weights stay if no more elements than these are used before they are again.
        live: nothing is gathered ahead while more elements than these are there.
        prefetch: elements that are gathered ahead at least.
        bucket: elements of gradients that are reduced together at most, but for larger ones.
    """

    reuse: float = 1e9
    live: float = 1e9
    prefetch: float = 5e7
    bucket: float = 5e8


@dataclass(frozen=True)
class Runtime:
    """What a training program does that a layout does not say. Facts about programs, never fitted.

    Attributes:
        attention: kernel; `unfused` writes all scores.
        tp_overlap: `backward`: collectives of tp in backward run beside the gradients of weights. `all`: those of
            forward, too, are cut in as many parts as ranks and run beside the products that use or make them, as
            TransformerEngine's user buffers do.
        dp_overlap: gradients are reduced beside the last backward.
        gather_overlap: weights that ZeRO 1 updated in parts are gathered beside the next forward.
        send_overlap: ranks of a pipeline go on while they send: always, never, or under the interleaved schedule alone.
        scatter_sends: each rank of tp sends a part of what all have, and the part is gathered there.
        scattered: ZeRO 1 and 2 reduce-scatter gradients; otherwise all-reduce.
        one_port: ZeRO 3's collectives leave a host by one of its ports, as a ring of one channel does.
        by_module: ZeRO 3 gathers weights module by module, as the rules say; otherwise layer by layer.
        lists: collectives of ZeRO 3 take a tensor of each rank, which are copied one after the other.
        gathers: equal parts in which ZeRO 3 gathers a layer's weights and reduces their gradients.
        expert_streams: products of a rank's experts that run beside each other; 0: one kernel for all of them.
        fused: gate and up projections of an MLP are one product.
        activation_passes: times that an MLP without a gate passes over its inner numbers, forward and backward.
        fp8_gathers: with products in fp8, tp gathers their inputs in fp8 (user buffers).
        fp8_norms: with products in fp8, norms before linears write their results in fp8.
        fp8_parameters: with products in fp8, weights are kept and gathered in fp8 alone.
        ring_bytes: of an element of the gradients of keys and values that go around with a ring of cp.
        defers: micro-batches whose gradient of the head's weight waits until the pipeline drains.
        reduce_bytes: of an element of a gradient when it is reduced.
        accumulate_bytes: moved for an element of a weight's gradient that is added to what there is.
        loss_bytes: read and written for a logit by cross-entropy, forward and backward.
        bucket: elements of gradients that are reduced together, and of weights that are gathered together.
        whole_chunks: interleaved chunks are each reduced whole, and the first is gathered beside the update of others.
        graphs: layers are CUDA graphs: each chunk has as many sets of activations as it ever has micro-batches under
            way, and none of them is another's.
        user_buffers: ten buffers of the whole hidden states for tp's communication, six of them in fp8 with it.
        even_stages: virtual stages have equal layers, embedding and head counting as one each where they have to.
        slack: memory that no model counts, bytes: CUDA context, NCCL's buffers.
        fragments: share of a device's memory that its allocator keeps without use.
        keeps: what is kept for backward.
        buffers: memory has what our engines hold for a moment (`layout/phases.py`); of others only `slack` is known.
    """

    attention: Literal["unfused", "flash1", "flash2", "flash3"] = "flash2"
    tp_overlap: Literal["none", "backward", "all"] = "none"
    dp_overlap: bool = True
    gather_overlap: bool = False
    send_overlap: Literal["always", "interleaved", "never"] = "always"
    scatter_sends: bool = False
    scattered: bool = False
    one_port: bool = False
    by_module: ByModule | None = None
    lists: bool = False
    gathers: int = 1
    expert_streams: int = 0
    fused: bool = False
    activation_passes: tuple[int, int] = (2, 3)
    fp8_gathers: bool = False
    fp8_norms: bool = False
    fp8_parameters: bool = False
    ring_bytes: float = 4.0
    defers: int = 0
    reduce_bytes: int = 4
    accumulate_bytes: int = 8
    loss_bytes: int = 32
    bucket: float = 2.0**23
    whole_chunks: bool = False
    graphs: bool = False
    user_buffers: bool = False
    even_stages: bool = False
    slack: float = 3 * 2**30
    fragments: float = 0.08
    keeps: Keeps = OURS
    buffers: bool = True

    def sends_beside(self, schedule: str) -> bool:
        """Whether ranks of a pipeline go on while they send."""
        return self.send_overlap == "always" or self.send_overlap == schedule

    def usable(self, memory: float) -> float:
        """Bytes of a device that the memory model may count on."""
        return memory * (1 - self.fragments) - self.slack


OWN = Runtime()
"""This program."""

OF_DEEPSPEED = 4
"""Gathers of a layer: DeepSpeed fetches a module's weights together, and a layer has four of these: q, k and v; output;
up and gate; down (`sharding/deepspeed/gather.py`)."""


def _own(config: RunConfig) -> Runtime:
    """This program under the settings of a run."""
    overlap = config.train.overlap
    gathers = 1 if config.sharding.engine == "fsdp" else OF_DEEPSPEED
    return replace(OWN, tp_overlap="backward" if overlap else "none", dp_overlap=overlap, gathers=gathers)


@dataclass(frozen=True)
class Work:
    """A training step whatever the layout.

    Attributes:
        dtype: of matrix products; fp8 computes activations in bf16.
        skew: load of the fullest expert rank over the mean.
    """

    model: ModelConfig
    seq: int
    global_batch: int
    dtype: Dtype
    runtime: Runtime = OWN
    skew: float = 1.0
    cp_method: str = "ring"
    document_mask: bool = False

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return {"float32": 4.0, "float64": 8.0}.get(self.dtype, 2.0)

    @property
    def weight_width(self) -> float:
        """Bytes of a weight that is gathered."""
        return 1.0 if self.dtype == "fp8" and self.runtime.fp8_parameters else self.width

    @classmethod
    def of(cls, config: RunConfig, runtime: Runtime | None = None, dtype: Dtype | None = None) -> Work:
        """That of a configuration."""
        train = config.train
        return cls(
            config.model,
            config.data.seq,
            train.global_batch,
            dtype or train.precision,
            runtime or _own(config),
            cp_method=config.parallel.cp_method,
            document_mask=config.data.document_mask,
        )


@dataclass(frozen=True)
class Points:
    """Many layouts: arrays of one length, or numbers. `schedule`, `recompute`, `offload` are places in their tuples."""

    tp: Array
    sp: Array
    pp: Array
    dp: Array
    cp: Array
    ep: Array
    etp: Array
    micro_batch: Array
    chunks: Array
    schedule: Array
    recompute: Array
    stage: Array
    reshard: Array
    offload: Array

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: Array) -> Points:
        """Some of them."""
        return Points(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @classmethod
    def join(cls, many: Sequence[Points]) -> Points:
        """All of several."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in many]) for f in fields(cls)})

    @classmethod
    def one(
        cls,
        layout: Layout,
        micro_batch: int,
        recompute: str = "none",
        stage: int = 0,
        reshard: bool = True,
        offload: str = "none",
    ) -> Points:
        """Arrays of one."""
        of: dict[str, Any] = {a: getattr(layout, a) for a in ("tp", "sp", "pp", "dp", "cp", "ep", "etp", "chunks")}
        of |= {"micro_batch": micro_batch, "schedule": NAMES.index(layout.schedule), "stage": stage, "reshard": reshard}
        of |= {"recompute": RECOMPUTE.index(recompute), "offload": OFFLOAD.index(offload)}
        return cls(**{name: np.array([value], dtype=np.int64) for name, value in of.items()})

    def layout(self, index: int) -> Layout:
        """One of them, with its layers balanced."""
        at = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        axes: dict[str, Any] = {axis: at[axis] for axis in ("pp", "dp", "cp", "tp", "ep", "etp", "chunks")}
        return Layout(**axes, sp=bool(at["sp"]), schedule=NAMES[at["schedule"]])

    def micro_batches(self, work: Work) -> Array:
        """Of a step."""
        return work.global_batch // (self.dp * self.micro_batch)


@dataclass(frozen=True)
class Phase:
    """Seconds of a part of a step, by what they are spent on; communication is what computation does not hide."""

    matmul: Array = 0.0
    attention: Array = 0.0
    pointwise: Array = 0.0
    tp: Array = 0.0
    cp: Array = 0.0
    ep: Array = 0.0
    shard: Array = 0.0
    """Gathering and reducing of ZeRO 3."""

    @property
    def total(self) -> Array:
        return self.compute + self.tp + self.cp + self.ep + self.shard

    @property
    def compute(self) -> Array:
        return self.matmul + self.attention + self.pointwise

    def __add__(self, other: Phase) -> Phase:
        return Phase(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Array) -> Phase:
        return Phase(*(getattr(self, f.name) * times for f in fields(self)))

    def with_(self, **parts: Array) -> Phase:
        return replace(self, **parts)
