"""NVIDIA's hand-tuned layouts (NeMo's recommended_model_configs) against the best that the planner finds.

For each row of pre-training that names enough, the layouts are those NeMo's own program could choose from: tp, pp, cp,
ep, virtual stages of equal layers and micro-batch, without recomputation where the row has none, ZeRO 1 with
reduce-scatter. Time and memory are those of its program, not of ours (`rows.NEMO_2025`).

    python -m benchmarks.planner.nemo
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.planner.rows import (
    DEFERRED,
    NEMO_2025,
    NEMO_LLAMA_8B,
    NEMO_MIXTRAL,
    NEMO_NEMOTRON,
    NEMO_QWEN,
    TABLES,
    read,
    with_fp8,
)
from hpctrain.config.schema import DataConfig, ModelConfig, MoeConfig, ParallelConfig, RunConfig, TrainConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.stages import even
from hpctrain.plan.candidates import candidates
from hpctrain.plan.constants import Constants, constants
from hpctrain.plan.gemm import Array
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import GAP, GRAPH_GAP, Machine
from hpctrain.plan.room import room, weights_besides
from hpctrain.plan.screen import screen
from hpctrain.plan.work import NAMES, Points, Work

CLOSE = 1.05
NOTHING = "nothing without recomputation fits by our memory model"


def _gqa(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: object) -> ModelConfig:
    """A decoder with grouped queries, its sequence length put in later."""
    values = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "ffn": ffn, "vocab": vocab, **more}
    return ModelConfig.model_validate({"max_seq": 2**20, **values})


QWEN = {"head_dim": 128, "qk_norm": True}
PLAIN = {"activation": "gelu", "norm": "layernorm"}
MODELS = {
    ("gpt3", "175b"): _gqa(96, 12288, 96, 96, 49152, 51200, position="learned", bias=True, tied=True, **PLAIN),
    ("llama3", "8b"): _gqa(32, 4096, 32, 8, 14336, 128256),
    ("llama3", "70b"): _gqa(80, 8192, 64, 8, 28672, 128256),
    ("llama31", "405b"): _gqa(126, 16384, 128, 8, 53248, 128256),
    ("nemotron3", "8b"): _gqa(32, 4096, 32, 32, 16384, 256000, **PLAIN),
    ("nemotron3", "22b"): _gqa(40, 6144, 48, 48, 24576, 256000, **PLAIN),
    ("nemotron4", "15b"): _gqa(32, 6144, 48, 8, 24576, 256000, **PLAIN),
    ("nemotron4", "340b"): _gqa(96, 18432, 96, 8, 73728, 256000, **PLAIN),
    ("mixtral", "8x7b"): _gqa(32, 4096, 32, 8, 14336, 32000, moe=MoeConfig(experts=8, top_k=2)),
    ("mixtral", "8x22b"): _gqa(56, 6144, 48, 8, 16384, 32000, moe=MoeConfig(experts=8, top_k=2)),
    ("qwen3", "30b_a3b"): _gqa(48, 2048, 32, 4, 6144, 151936, **QWEN, moe=MoeConfig(experts=128, top_k=8, ffn=768)),
    ("qwen3", "235b_a22b"): _gqa(94, 4096, 64, 4, 12288, 151936, **QWEN, moe=MoeConfig(experts=128, top_k=8, ffn=1536)),
}  # fmt: skip
"""From the configurations published with the models. Nemotron's squared ReLU is said as GELU: no gate."""

UNKNOWN = {
    "nemotronh": "Mamba layers",
    "deepseek": "latent attention",
    "llama4": "chunked attention",
    "vlm_llama4": "a vision tower",
    "neva_llama3": "a vision tower",
    "flux": "a diffusion model",
}
RECIPES = {
    ("llama3", "8b"): NEMO_LLAMA_8B,
    ("nemotron3", "8b"): NEMO_NEMOTRON,
    ("nemotron3", "22b"): NEMO_NEMOTRON,
    ("nemotron4", "15b"): NEMO_NEMOTRON,
    ("nemotron4", "340b"): NEMO_NEMOTRON,
    ("mixtral", "8x7b"): NEMO_MIXTRAL,
    ("mixtral", "8x22b"): NEMO_MIXTRAL,
    ("qwen3", "30b_a3b"): NEMO_QWEN,
    ("qwen3", "235b_a22b"): NEMO_QWEN,
}
CLUSTERS = {"h100": "dgx-h100", "b200": "dgx-b200", "gb200": "gb200-nvl72"}


@dataclass(frozen=True)
class Judged:
    """A row: its time over that of the best that fits, and both in words; or why it is left out."""

    name: str
    ratio: float | None
    why: str = ""
    theirs: str = ""
    ours: str = ""


def _number(row: dict[str, str], column: str) -> int:
    return int(float(row[column] or 1))


@dataclass(frozen=True)
class Case:
    """A row that names enough: what is trained on what by which program, and the layout that is recommended."""

    name: str
    machine: Machine
    config: RunConfig
    work: Work
    theirs: Points

    @property
    def devices(self) -> int:
        return self.theirs.layout(0).world

    def seconds(self, points: Points) -> Array:
        """Of a step."""
        return screen(self.machine, self.work, points).time

    def judged(self, ours: Points) -> Judged:
        """With the best layout that was found."""
        ratio = float(self.seconds(self.theirs)[0] / self.seconds(ours)[0])
        return Judged(self.name, ratio, "", text(self.theirs), text(ours))


def case(row: dict[str, str], fitted: Constants | None = None) -> Case | Judged:
    """A row as it is priced, or why it is left out."""
    name = f"{row['row_id']} {row['model']} {row['size']} {row['system']} {row['dtype']} {_number(row, 'num_gpus')}"
    if row["task"] != "pre_train":
        return Judged(name, None, f"task {row['task']}")
    if row["model"] in UNKNOWN:
        return Judged(name, None, f"{UNKNOWN[row['model']]}, which recipes cannot say")
    if row["use_mcore_fsdp"] == "1":
        return Judged(name, None, "Megatron's FSDP, which shards otherwise than ZeRO")
    seq = _number(row, "seq_len")
    which = row["model"], row["size"]
    model = MODELS[which].model_copy(update={"max_seq": seq})
    graphs = row["cuda_graphs"] in ("1", "1.0")
    devices, batch = (_number(row, column) for column in ("num_gpus", "gbs"))
    machine = Machine(hardware(CLUSTERS[row["system"]]), fitted or constants(), gap=GRAPH_GAP if graphs else GAP).of(
        devices
    )
    config = RunConfig(
        model=model,
        data=DataConfig(seq=seq, document_mask=False),
        train=TrainConfig(global_batch=batch, micro_batch=1, precision="bf16"),
        parallel=ParallelConfig(),
    )
    runtime = replace(RECIPES.get(which, NEMO_2025), defers=DEFERRED.get(which, 0), graphs=graphs)
    runtime = with_fp8(runtime) if row["dtype"] == "fp8" else runtime
    work = Work(model, seq, batch, "fp8" if row["dtype"] == "fp8" else "bf16", runtime)
    theirs = _points(row, model, devices)
    if theirs is None:
        return Judged(name, None, "its layout does not divide devices or layers by our rules")
    return Case(name, machine, config, work, theirs)


def best(one: Case) -> Points | None:
    """The fastest layout that NeMo could choose and that fits by our memory model; None where none fits."""
    machine, config, work, model = one.machine, one.config, one.work, one.work.model
    every = candidates(config, machine, one.devices)
    allowed = (every.stage == 1) | ((every.dp * every.cp == 1) & (every.stage == 0))
    allowed &= np.array([even(model.layers, int(n)) is not None for n in every.pp * every.chunks])
    allowed &= (every.recompute == 0) & np.isin(every.schedule, [NAMES.index("1f1b"), NAMES.index("interleaved")])
    every = every.take(np.flatnonzero(allowed))
    have = work.runtime.usable(machine.hardware.gpu.memory.value)
    every = every.take(np.flatnonzero(room(config, every, work.runtime, weights_besides(machine, work))[0] <= have))
    return every.take(np.array([int(np.argmin(one.seconds(every)))])) if len(every) else None


def judge(row: dict[str, str], fitted: Constants | None = None) -> Judged:
    """One row; by other constants, if they are given."""
    one = case(row, fitted)
    if isinstance(one, Judged):
        return one
    ours = best(one)
    return one.judged(ours) if ours is not None else Judged(one.name, None, NOTHING)


def _points(row: dict[str, str], model: ModelConfig, devices: int) -> Points | None:
    tp, pp, cp, ep = (_number(row, f"{axis}_size") for axis in ("tp", "pp", "cp", "ep"))
    chunks = _number(row, "vp_size") if pp > 1 else 1
    if devices % (tp * pp * cp) or even(model.layers, pp * chunks) is None:
        return None
    dp = devices // (tp * pp * cp)
    if not dp or (dp * cp * tp) % ep or _number(row, "gbs") % (dp * _number(row, "mbs")):
        return None
    return _one(devices, tp=tp, pp=pp, cp=cp, ep=ep, chunks=chunks, micro_batch=_number(row, "mbs"))


def _one(devices: int, tp: int, pp: int, cp: int, ep: int, chunks: int, micro_batch: int) -> Points:
    dp = devices // (tp * pp * cp)
    layout = Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, sp=tp > 1, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b"
    )
    return Points.one(layout, micro_batch, "none", stage=1 if dp * cp > 1 else 0)


def text(points: Points) -> str:
    """The first of some layouts, as the page of errors has it."""
    names = ("tp", "pp", "cp", "ep", "chunks", "micro_batch")
    return " ".join(f"{name}={int(getattr(points, name)[0])}" for name in names)


def read_back(words: str, devices: int) -> Points:
    """The layout that `text` wrote."""
    return _one(devices, **{name: int(value) for name, value in (word.split("=") for word in words.split())})


def judged(folder: Path = TABLES) -> list[Judged]:
    """All rows."""
    return [judge(row) for row in read("nvidia_nemo_recommended_layouts", folder)]


def main() -> None:
    every = judged()
    counted = [one for one in every if one.ratio is not None]
    for one in every:
        print(f"{one.name:52} " + (f"{one.ratio:.3f}  theirs {one.theirs} | best {one.ours}" if one.ratio else one.why))
    close = sum(one.ratio is not None and one.ratio <= CLOSE for one in counted)
    print(f"{close} of {len(counted)} rows within {CLOSE - 1:.0%} of the predicted best")


if __name__ == "__main__":
    main()
