"""The memory model held against published memory. Nothing is fitted: what other programs keep is from their sources.

python -m benchmarks.planner.memory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.rows import MEGATRON_2022, TABLES, WIDE, gpt, layout_of, read
from hpctrain.config.load import load
from hpctrain.config.schema import DataConfig, ModelConfig, RunConfig, ShardingConfig, TrainConfig
from hpctrain.layout.activations import Keeps, activations
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import estimate, state
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.schedule_claims import claimed_peak
from hpctrain.layout.stages import Stage, stages_of
from hpctrain.layout.units import GIB

GATE = (8.0, 15.0)
"""Largest mean and largest single error of a table, percent."""


@dataclass(frozen=True)
class Held:
    """A published number of bytes, or share of bytes, and ours."""

    table: str
    name: str
    published: float
    ours: float
    unit: str

    @property
    def error(self) -> float:
        """Percent."""
        return 100 * (self.ours / self.published - 1)


@dataclass(frozen=True)
class Left:
    """A row that is left out, and why."""

    table: str
    name: str
    why: str


def _config(model: ModelConfig, seq: int, batch: int, micro: int, recompute: str, stage: int = 0) -> RunConfig:
    train = TrainConfig(global_batch=batch, micro_batch=micro, precision="bf16")
    return RunConfig(
        model=model,
        data=DataConfig(seq=seq, document_mask=False),
        train=train.model_copy(update={"recompute": recompute}),
        sharding=ShardingConfig(stage=stage),
    )


MODES = {
    "TP, no recompute": ("none", False),
    "TP+SP+selective": ("selective", True),
    "TP baseline": ("none", False),
    "+SP": ("none", True),
    "+selective": ("selective", False),
    "+SP+selective": ("selective", True),
    "full recompute": ("full", False),
}
"""Recomputation and sequence parallelism of the modes of figures 1 and 7."""


def megatron(folder: Path = TABLES) -> Iterator[Held | Left]:
    """Figures 1 and 7 of arXiv 2205.05198: what the first stage keeps of its layers, and its state.

    Activations are those from forward to backward, of layers alone, as the paper counts them (equations 1 to 6); what
    is computed again in backward is there besides. State is all of it, embedding, biases and norms included, which the
    figure leaves out.
    """
    table = "Korthikanti figures 1 and 7"
    sizes = {row["model"]: row for row in read("megatron_mlsys23_table5_iteration_time", folder) if row["dp"] == "1"}
    for row in read("megatron_mlsys23_fig1_fig7_memory", folder):
        size, mode = sizes[row["model"]], row["mode"]
        model, seq = gpt(size), int(size["seq_len"])
        recompute, sp = MODES.get(mode, ("none", False))
        config = _config(model, seq, int(size["global_batch"]), int(size["micro_batch"]), recompute)
        layout = layout_of(size, model.layers, int(size["vpp"]), sp)
        name = f"{row['model']} {row['quantity'].split(' ')[0]} {mode}"
        if "optimizer" in row["quantity"]:
            memory = estimate(config, layout, MEGATRON_2022.keeps)
            ours = (memory.weights + memory.gradients + memory.optimizer) / GIB
            yield Held(table, name, float(row["value"]), ours, "GiB")
            continue
        kept = _kept(config, layout, MEGATRON_2022.keeps)
        if row["quantity"].startswith("activation GiB"):
            yield Held(table, name, float(row["value"]), kept / GIB, "GiB")
        else:
            plain = _config(model, seq, int(size["global_batch"]), int(size["micro_batch"]), "none")
            base = _kept(plain, replace(layout, sp=False), MEGATRON_2022.keeps)
            yield Held(table, name, float(row["value"]), 100 * kept / base, "%")


def _kept(config: RunConfig, layout: Layout, keeps: Keeps) -> float:
    """Bytes of layers' activations on the first rank at the most."""
    nothing = activations(config, layout, Stage(1, 0, 0, range(0), False, False), keeps).kept
    mine = [replace(stage, first=False, last=False) for stage in stages_of(config.model, layout, 0)]
    of_chunk = [activations(config, layout, stage, keeps).kept - nothing for stage in mine]
    number = config.train.global_batch // (layout.dp * config.train.micro_batch)
    alive = claimed_peak(layout.schedule, layout.pp, layout.chunks, number, 0)
    return alive * sum(of_chunk) / len(of_chunk)


HF_LIGER = Keeps(repeated=False, gate=3, logit=0, of_loss=0, gradient=2, flowing=1)
"""Transformers with Liger-Kernel: SwiGLU's gradient is written over its inputs (ops/swiglu.py), the head's product and
the loss go in pieces of which nothing is kept (ops/fused_linear_cross_entropy.py). Gradients of DeepSpeed are bf16."""

HF = Keeps(repeated=False, gradient=2, flowing=1, **WIDE)
"""Transformers alone: silu's result is kept, and logits are there in float32."""

BUCKET, LIVE = 5e8, 1e9
"""Elements of a bucket, and of gathered weights that ZeRO 3 lets live: DeepSpeed's defaults of reduce_bucket_size and
stage3_max_live_parameters. With overlap there are two buckets (runtime/zero/stage_1_and_2.py), or a bucket and what
reduce-scatter makes of it (stage3.py)."""


def deepspeed_8b(folder: Path = TABLES) -> Iterator[Held | Left]:
    """Llama-3.1-8B on 8 GPUs: the most that the allocator had reserved. Its ZeRO 3 keeps optimizer state and gradients
    on the host. The whole model is on the device before it is sharded (runtime/engine.py moves it there), so there is
    never less."""
    table, model = "Llama-8B, DeepSpeed", load("llama-8b").model
    numel = sum(spec.numel for spec in parameter_specs(model))
    head = 2.0 * model.vocab * model.hidden  # its gradient does not go into a bucket
    for row in read("ml_engineering_llama8b_h200_b200", folder):
        seq = int(row["seq_len"])
        if row["zero_fsdp"].startswith("ZeRO-3"):
            config = _config(model, seq, 8, 1, "full", stage=3)
            memory = estimate(config, Layout(dp=8), HF_LIGER)
            one = 2.0 * model.hidden * model.ffn_width  # a gradient, on its way into a bucket
            step = memory.weights + memory.activations + 2 * LIVE + 2 * 2 * BUCKET + head + one
            peak = max(step, 2.0 * numel) / (1 - MEGATRON_2022.fragments)
            yield Held(table, row["row_id"].removeprefix("mleng_"), float(row["peak_mem_gib"]), peak / GIB, "GiB")
            continue
        shown = dict(
            zip((HF, HF_LIGER), row["peak_mem_gib"].replace("(no Liger)", "").replace("(Liger)", "").split("/"))
        )
        for keeps, value in shown.items():
            memory = estimate(_config(model, seq, 8, 1, "none", stage=2), Layout(dp=8), keeps)
            peak = (memory.training + 2 * 2 * BUCKET + head) / (1 - MEGATRON_2022.fragments)
            name = row["row_id"].removeprefix("mleng_") + ("" if keeps is HF else " Liger")
            yield Held(table, name, float(value), peak / GIB, "GiB")


STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
UNITS = {"B": 1e9, "T": 1e12}


def zero(folder: Path = TABLES) -> Iterator[Held | Left]:
    """Tables 1 and 2 of arXiv 1910.02054: model state, gradients in half precision; and that the largest models in
    theory fill the 32 GB of a V100."""
    for row in read("zero_paper_tables1_2", folder):
        table = "ZeRO tables 1 and 2"
        ranks, name = int(row["dp"]), f"{row['row_id']} {row['model']} {row['stage']} dp={row['dp']}"
        if "MEASURED" in row["stage"]:
            yield Left(table, name, "what was measured has activations, and the table names no shape")
            continue
        first = row["table"].startswith("T1")
        text = row["model"] if first else row["value"]
        numel = float(text[:-1]) * UNITS[text[-1]] / int(row["mp"] or 1)
        stage = STAGES[row["stage"].split(" ")[0].removeprefix("ZeRO-DP")]
        ours = sum(state(numel, numel / ranks, stage, 2, True, gradient=2)) / 1e9
        yield Held(table, name, float(row["value"]) if first else 32.0, ours, "GB")


def everything(folder: Path = TABLES) -> list[Held | Left]:
    """All rows of all tables."""
    return [*megatron(folder), *deepspeed_8b(folder), *zero(folder)]


def by_table(rows: Iterable[Held | Left]) -> dict[str, list[Held]]:
    """Rows that are held against, in the order of the tables."""
    out: dict[str, list[Held]] = {}
    for one in rows:
        if isinstance(one, Held):
            out.setdefault(one.table, []).append(one)
    return out


def main() -> None:
    for one in everything():
        if isinstance(one, Held):
            print(f"{one.table:30} {one.name:40} {one.published:10.4g} {one.ours:10.4g} {one.error:+6.1f}%")


if __name__ == "__main__":
    main()
