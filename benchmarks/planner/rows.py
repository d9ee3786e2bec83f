"""Published results as layouts that the planner can price.

What a table leaves out is a policy here, declared once for all its rows and never chosen by row. What a program of the
time did is a `Runtime`, from its paper or its sources.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.activations import Keeps
from hpctrain.layout.layout import Layout
from hpctrain.plan.constants import Constants
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.plan.played import price
from hpctrain.plan.step import Price
from hpctrain.plan.work import ByModule, Points, Runtime, Work

TABLES = Path(__file__).parents[1] / "published"

WIDE: dict[str, float] = {"logit": 4, "of_loss": 6}
"""Of programs whose loss is of whole logits in float32: bytes that are kept of one (exponentials, or their logarithm),
and of its gradient, in float32 and as computed (Megatron-LM, tensor_parallel/cross_entropy.py; Transformers,
loss/loss_utils.py; PyTorch's cross_entropy)."""

MEGATRON_2021 = Runtime(
    attention="unfused",
    dp_overlap=False,
    send_overlap="never",
    scatter_sends=True,
    reduce_bytes=2,
    loss_bytes=48,
    keeps=Keeps(scores=True, masks=1),
    buffers=False,
)
"""Megatron-LM of arXiv 2104.04473: sends wait (section 4.1, scatter/gather), float16 gradients all-reduced after the
last backward, vocabulary-parallel cross-entropy in float32 without fusion."""

MEGATRON_2022 = Runtime(
    attention="unfused",
    tp_overlap="backward",
    dp_overlap=False,
    send_overlap="never",
    scatter_sends=True,
    reduce_bytes=2,
    loss_bytes=48,
    keeps=Keeps(scores=True, masks=1),
    buffers=False,
)
"""Megatron-LM of arXiv 2205.05198: all-reduces of backward run beside the gradients of weights (section 6.2), gradients
are reduced without overlap (section 6.3)."""

MEGATRON_CORE = Runtime(
    attention="flash3",
    tp_overlap="all",
    gather_overlap=True,
    send_overlap="interleaved",
    scattered=True,
    reduce_bytes=2,
    accumulate_bytes=4,
    expert_streams=4,
    fused=True,
    ring_bytes=2,
    fp8_gathers=True,
    fp8_norms=True,
    even_stages=True,
    keeps=Keeps(repeated=False, gate=3, gradient=2),
    buffers=False,
)
"""Megatron-Core 0.8 and NeMo 24 on H100 and later: gradients' reduction, weights' gathering and tp's communication
overlap (README of Megatron-LM); attention of cuDNN; gradients summed and reduced in bf16, user buffers in fp8 (NeMo's
performance recipes); products of experts over four streams (TransformerEngine, common/util/multi_stream.cpp). Sends
wait where stages are not interleaved (NeMo, lightning/pytorch/callbacks/megatron_comm_overlap.py), and layers are cut
evenly. Attention keeps keys and values as they are, SwiGLU its two inputs and its output (core/fusions)."""

NEMO_2025 = replace(
    MEGATRON_CORE,
    loss_bytes=10,
    fp8_parameters=True,
    bucket=2.0**27,
    whole_chunks=True,
    user_buffers=True,
    keeps=replace(MEGATRON_CORE.keeps, logit=2, of_loss=0, routed="norm", flowing=3),
)
"""NeMo's recommended configurations, scripts/performance/helpers.py: cross-entropy of TransformerEngine, which keeps
logits in bf16 and writes their gradient in their place, so that a logit is read thrice and written twice; in fp8 also
weights are kept and gathered in fp8 (recipes/precision/mixed_precision.py). Gradients are in bf16, of all models.
Buckets have 2^27 elements (lightning/pytorch/callbacks/megatron_comm_overlap.py), and whole chunks where they are
interleaved (lightning/megatron_parallel.py), as the first is gathered beside the update. Megatron-Core 0.13 weights
what experts compute before the last product, and its router reads the norm's output (core/transformer/moe). While an
activation is differentiated, its gradient is there and those of its inputs: of SwiGLU two (core/fusions); one, and one
on the way, of a squared ReLU."""

DEFERRED = {
    ("gpt3", "175b"): 50,
    ("llama31", "405b"): 50,
    ("llama3", "70b"): 22,
    ("nemotron3", "22b"): 22,
    ("nemotron4", "340b"): 22,
}
"""Micro-batches for which recipes let gradients of the head's weight wait (`wgrad_deferral_limit`)."""

NEMO_NEMOTRON = replace(NEMO_2025, activation_passes=(4, 10))
"""Its squared ReLU is not fused (collections/llm/fn/activation.py): relu, and pow; backward three passes and two reads
more for pow's gradient (PyTorch, torch/csrc/autograd/FunctionsManual.cpp, pow_backward), and relu's."""

NEMO_LLAMA_8B = replace(NEMO_2025, tp_overlap="backward", user_buffers=False)
"""Its recipe turns user buffers off (recipes/llama3_8b.py)."""

NEMO_MIXTRAL = replace(NEMO_2025, tp_overlap="backward", user_buffers=False, expert_streams=1)
"""Its recipes of Mixtral turn user buffers off (recipes/mixtral_8x7b.py) and do not group the products of experts."""

NEMO_QWEN = replace(NEMO_2025, whole_chunks=False)
"""Those of Qwen3 turn overlap on after chunks are decided on (scripts/performance/llm/pretrain_qwen3_30b_a3b.py)."""


def with_fp8(runtime: Runtime) -> Runtime:
    """The same with products in fp8, whose inputs are kept in fp8 (TransformerEngine, pytorch/module); gradients are
    summed in bf16 then (scripts/performance/helpers.py)."""
    keeps = replace(runtime.keeps, operands=1, gradient=2)
    return replace(runtime, reduce_bytes=2, accumulate_bytes=4, keeps=keeps)


FSDP_2023 = Runtime(attention="flash1", scattered=True, reduce_bytes=4, buffers=False)
"""llm-foundry of 2023: PyTorch FSDP; Composer's mixed precision DEFAULT reduces in float32, PURE in
bf16; Triton FlashAttention."""

ZERO3_2021 = Runtime(
    attention="unfused",
    reduce_bytes=2,
    loss_bytes=48,
    one_port=True,
    by_module=ByModule(),
    lists=True,
    buffers=False,
)
"""DeepSpeed 0.3.13 of early 2021, as its sources have it, with its defaults. Each weight of 100,000 elements or more is
gathered by itself, by a list of tensors, and its gradient reduced so; the device is waited for before
(runtime/zero/partition_parameters.py). A module's weights are gathered ahead while the one before computes, if not too
many are there, and let go after it if they are not used again soon (runtime/zero/stage3.py; limits in
runtime/zero/constants.py). PyTorch copies the tensors of a list one after the other (lib/c10d/ProcessGroupNCCL.cpp).
That its collectives reach one port's rate and not eight ports' is an assumption: nothing printed says so."""


@dataclass(frozen=True)
class Row:
    """A published result and how we price it.

    Attributes:
        seconds: of a step, as published.
        x: what its curve is drawn over.
    """

    table: str
    name: str
    series: str
    x: float
    seconds: float
    cluster: str
    work: Work
    layout: Layout
    points: Points
    runtime: Runtime
    note: str = ""

    def price(self, constants: Constants) -> Price:
        """Ours."""
        return price(
            Machine(hardware(self.cluster), constants).of(self.layout.world), self.work, self.layout, self.points
        )


def read(name: str, folder: Path = TABLES) -> list[dict[str, str]]:
    """A table's rows; none where the file is not there."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def gpt(row: dict[str, str], dropout: float = 0.1) -> ModelConfig:
    """The GPT of a row of Megatron's tables."""
    sizes = {
        "layers": "layers",
        "hidden": "hidden",
        "heads": "heads",
        "ffn": "ffn",
        "vocab": "vocab",
        "max_seq": "seq_len",
    }
    given = {name: int(row[column]) for name, column in sizes.items()}
    return ModelConfig(
        **given, norm="layernorm", position="learned", activation="gelu_tanh", bias=True, tied=True, dropout=dropout
    )


def layout_of(row: dict[str, str], layers: int, chunks: int, sp: bool) -> Layout:
    """Layers spread evenly where that goes, as Megatron-LM does."""
    pp, number = int(row["pp"]), int(row["pp"]) * chunks
    even = (layers // number,) * number if layers % number == 0 and pp > 1 else None
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Layout(
        pp=pp, dp=int(row["dp"] or 1), tp=int(row["tp"]), sp=sp, schedule=schedule, chunks=chunks, stage_layers=even
    )


def korthikanti(folder: Path = TABLES) -> Iterator[Row]:
    """Table 5 of arXiv 2205.05198, fully specified, and the run of section 6.3 over 8 replicas."""
    for row in read("megatron_mlsys23_table5_iteration_time", folder):
        if not row["step_time_s"]:
            continue
        model, selective = gpt(row), row["recompute"] == "selective"
        layout = layout_of(row, model.layers, int(row["vpp"]), sp=selective)
        work = Work(model, int(row["seq_len"]), int(row["global_batch"]), "fp16", MEGATRON_2022)
        points = Points.one(layout, int(row["micro_batch"]), row["recompute"])
        held = layout.dp > 1
        yield Row(
            "Korthikanti section 6.3" if held else "Korthikanti T5",
            f"{row['model']} {row['recompute']}" + (f" dp={layout.dp}" if held else ""),
            row["recompute"],
            float(row["params_b"]),
            float(row["step_time_s"]),
            "dgx-a100",
            work,
            layout,
            points,
            MEGATRON_2022,
        )


def fewest_chunks(layers: int, pp: int) -> int:
    """The smallest interleaving that divides a rank's layers."""
    each = layers // pp
    return next((v for v in (2, 3, 5) if each % v == 0), 1) if pp > 1 else 1


SC21_MICRO_BATCH = 2
"""Micro-batch for all rows of SC21 table 1, which does not say it: the best one for the 91 billion model of the paper's
own study of micro-batches (section 5.4.3). With the smallest interleaving, as the text says the schedule is
interleaved and does not say how far."""


def sc21_table1(
    folder: Path = TABLES, micro: int = SC21_MICRO_BATCH, chunks: Callable[[int, int], int] = fewest_chunks
) -> Iterator[Row]:
    """Weak scaling of arXiv 2104.04473."""
    for row in read("megatron_sc21_table1_weak_scaling", folder):
        model = gpt(row)
        layout = layout_of(row, model.layers, chunks(model.layers, int(row["pp"])), sp=False)
        work = Work(model, int(row["seq_len"]), int(row["global_batch"]), "fp16", MEGATRON_2021)
        b = micro if work.global_batch % (layout.dp * micro) == 0 else 1
        points = Points.one(layout, b, "full")
        yield Row(
            "SC21 T1", row["model"], "PTD-P", float(row["n_gpus"]), float(row["step_time_s"]), "dgx-a100", work, layout,
            points, MEGATRON_2021,
        )  # fmt: skip


def sc21_table2(kind: str, folder: Path = TABLES) -> Iterator[Row]:
    """PTD-P (micro-batch as printed, interleaving not said: none) or ZeRO-3 of table 2."""
    for row in read("megatron_sc21_table2_ptdp_vs_zero3", folder):
        zero = row["zero_fsdp"] == "ZeRO-3"
        if zero != (kind == "ZeRO-3"):
            continue
        model, runtime = gpt(row), ZERO3_2021 if zero else MEGATRON_2021
        layout = layout_of(row, model.layers, 1, sp=False)
        work = Work(model, int(row["seq_len"]), int(row["global_batch"]), "fp16", runtime)
        points = Points.one(layout, int(row["micro_batch"]), "full", stage=3 if zero else 0)
        yield Row(
            f"SC21 T2 {kind}", f"{row['model']} {row['n_gpus']}", row["model"], float(row["n_gpus"]),
            float(row["step_time_s"]), "dgx-a100", work, layout, points, runtime,
        )  # fmt: skip


MPT_CLUSTERS = {"h100_80gb": "dgx-h100", "a100_80gb": "dgx-a100", "a100_40gb": "a100-40g"}


def mpt(folder: Path = TABLES) -> Iterator[Row]:
    """FSDP of llm-foundry: micro-batch, sharding and recomputation are printed."""
    shapes = {row["row_id"].removesuffix(".yaml"): row for row in read("mpt_arch", folder)}
    for row in read("mosaic_llm_foundry_mpt", folder):
        shape, seq = shapes[row["model"].lower()], int(row["seq_len"])
        hidden = int(shape["hidden"])
        model = ModelConfig(
            layers=int(shape["layers"]), hidden=hidden, heads=int(shape["heads"]), vocab=int(shape["vocab"]),
            ffn=int(shape["expansion_ratio"]) * hidden, max_seq=seq, norm="layernorm", position="learned",
            activation="gelu", tied=True,
        )  # fmt: skip
        runtime = replace(FSDP_2023, reduce_bytes=2) if row["mp_mode"] == "PURE" else FSDP_2023
        fp8 = "fp8" in row["precision"]
        layout, batch = Layout(dp=int(row["n_gpus"])), int(row["global_batch"])
        work = Work(model, seq, batch, "fp8" if fp8 else "bf16", runtime)
        recompute = "full" if row["act_ckpt"] == "True" else "none"
        reshard = row["sharding"] == "FULL_SHARD"
        points = Points.one(layout, int(row["micro_batch"]), recompute, stage=3, reshard=reshard)
        cluster = MPT_CLUSTERS[row["gpu"]]
        yield Row(
            "MPT FSDP fp8" if fp8 else "MPT FSDP", f"{row['row_id']} {row['model']} {row['gpu']} s={seq} n={layout.dp}",
            row["gpu"], float(row["params"]), batch * seq / float(row["tokens_per_s"]), cluster, work, layout, points,
            runtime,
        )  # fmt: skip


def megatron_core(folder: Path = TABLES) -> Iterator[Row]:
    """H100 weak scaling: micro-batch 1, the smallest interleaving, no recomputation where the table says nothing."""
    for row in read("megatron_core_h100_weak_scaling", folder):
        model = gpt(row, dropout=0.0)
        layout = layout_of(row, model.layers, fewest_chunks(model.layers, int(row["pp"])), sp=int(row["tp"]) > 1)
        work = Work(model, int(row["seq_len"]), int(row["global_batch"]), "bf16", MEGATRON_CORE)
        points = Points.one(layout, 1, "none", stage=1)
        yield Row(
            "Megatron-Core H100", row["model"], "weak", float(row["n_gpus"]), float(row["step_time_s"]), "dgx-h100",
            work, layout, points, MEGATRON_CORE,
        )  # fmt: skip


def everything(folder: Path = TABLES) -> list[Row]:
    """Every row of every table there is."""
    out = [*korthikanti(folder), *sc21_table1(folder)]
    out += [*sc21_table2("PTD-P", folder), *sc21_table2("ZeRO-3", folder), *mpt(folder), *megatron_core(folder)]
    return out
