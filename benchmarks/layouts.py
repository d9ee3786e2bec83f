"""Tokens a second of every layout on two CPU ranks, beside other tools' way to do the same work.

A small Llama, one optimizer step of 16 samples in micro-batches of 4 for the whole job, float32, one thread a rank,
the same clipping and AdamW. The families run one after the other; in each all contenders are alive at once and
take a step each in turn (`benchmarks/rounds.py`). Reported are medians over rounds of the ratio within a round,
beside the peer of the same kind, and beside two processes of our own plain step that do half the work each and never
talk: what two ranks could reach at most, but for AdamW, which there goes over the whole model in both.

    python -m benchmarks.layouts [--rounds 21] [--only tensor pipeline data context] [--megatron PYTHON] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.ours import ours
from benchmarks.peers import deepspeed_engines, megatron_core, native
from benchmarks.rounds import Contender, Record, race, rates, ratios, warm_up
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.layout.parameters import parameter_specs

IMPORTS = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "deepspeed",
    "deepspeed.pipe",
    "hpctrain.train.loop",
    "hpctrain.sharding.none.engine",
    "hpctrain.sharding.deepspeed.engine",
    "hpctrain.sharding.fsdp.engine",
)

SHAPE = (
    "model.layers=4", "model.hidden=256", "model.heads=8", "model.kv_heads=4", "model.ffn=688", "model.vocab=4096",
    "model.max_seq=256", "data.seq=256", "train.global_batch=16", "train.micro_batch=4", "optimizer.lr=3e-4",
    "parallel.tp=1",
)  # fmt: skip

LIMIT = "two processes without communication"
PLAIN = "two plain PyTorch loops without communication"

LAYOUTS: dict[str, dict[str, list[str]]] = {
    "tensor": {
        "tp=2": ["parallel.tp=2"],
        "tp=2, sp": ["parallel.tp=2", "parallel.sp=true"],
    },
    "pipeline": {
        "pp=2, gpipe": ["parallel.pp=2", "parallel.schedule=gpipe"],
        "pp=2, 1f1b": ["parallel.pp=2", "parallel.schedule=1f1b"],
        "pp=2, 1f1b, even split": ["parallel.pp=2", "parallel.schedule=1f1b", "parallel.stage_layers=[2,2]"],
        "pp=2, interleaved": ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2"],
        "pp=2, zb-h1": ["parallel.pp=2", "parallel.schedule=zb-h1"],
        "pp=2, zb-v": ["parallel.pp=2", "parallel.schedule=zb-v", "parallel.chunks=2"],
    },
    "data": {
        "dp=2": [],
        "dp=2, ZeRO 1": ["sharding.stage=1"],
        "dp=2, ZeRO 2": ["sharding.stage=2"],
        "dp=2, ZeRO 3": ["sharding.stage=3"],
        "dp=2, ZeRO 3, weights kept": ["sharding.stage=3", "sharding.reshard_after_forward=false"],
        "dp=2, FSDP2": ["sharding.engine=fsdp"],
        "dp=2, FSDP2, weights kept": ["sharding.engine=fsdp", "sharding.reshard_after_forward=false"],
    },
    "experts": {
        "8 experts, ep=2": ["parallel.ep=2"],
    },
    "context": {
        "cp=2, ring": ["parallel.cp=2"],
        "cp=2, ulysses": ["parallel.cp=2", "parallel.cp_method=ulysses"],
    },
}
"""What of ours takes part, and its settings beside the shape."""

DENSE = "torch DDP, dense, of the same active FLOPs"
FAMILY_SHAPES = {
    "context": ("data.seq=2048", "model.max_seq=2048", "train.global_batch=2", "train.micro_batch=1"),
}
"""What a family changes of the shape: here as many tokens a step, in two long samples."""

WHOLE = {"context": "one process that does the whole sequence"}
"""A further contender, which does all of the work alone."""

PEERS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]] = {
    "DTensor": (native.tensor_parallel, (False,), ("tp=2",)),
    "DTensor, SequenceParallel": (native.tensor_parallel, (True,), ("tp=2, sp",)),
    "DeepSpeed AutoTP": (deepspeed_engines.tensor_parallel, (), ("tp=2",)),
    "torch ScheduleGPipe": (native.pipeline, ("ScheduleGPipe", 1), ("pp=2, gpipe",)),
    "torch Schedule1F1B": (native.pipeline, ("Schedule1F1B", 1), ("pp=2, 1f1b", "pp=2, 1f1b, even split")),
    "torch ScheduleInterleaved1F1B": (native.pipeline, ("ScheduleInterleaved1F1B", 2), ("pp=2, interleaved",)),
    "torch ScheduleInterleavedZeroBubble": (native.pipeline, ("ScheduleInterleavedZeroBubble", 1), ("pp=2, zb-h1",)),
    "the same with 2 stages a rank": (native.pipeline, ("ScheduleInterleavedZeroBubble", 2), ("pp=2, zb-h1",)),
    "torch ScheduleZBVZeroBubble": (native.pipeline, ("ScheduleZBVZeroBubble", 2), ("pp=2, zb-v",)),
    "DeepSpeed PipelineModule": (deepspeed_engines.pipeline, (), ("pp=2, 1f1b",)),
    "torch DDP": (native.ddp, (), ("dp=2",)),
    "DeepSpeed ZeRO 1": (deepspeed_engines.zero, (1,), ("dp=2, ZeRO 1",)),
    "DeepSpeed ZeRO 2": (deepspeed_engines.zero, (2,), ("dp=2, ZeRO 2",)),
    "DeepSpeed ZeRO 3, as lean": (deepspeed_engines.zero, (3, True), ("dp=2, ZeRO 3", "dp=2, FSDP2")),
    "DeepSpeed ZeRO 3": (
        deepspeed_engines.zero,
        (3,),
        ("dp=2, ZeRO 3", "dp=2, ZeRO 3, weights kept", "dp=2, FSDP2, weights kept"),
    ),
    "torch fully_shard": (native.fully_sharded, (True,), ("dp=2, FSDP2", "dp=2, ZeRO 3")),
    "torch fully_shard, weights kept": (
        native.fully_sharded,
        (False,),
        ("dp=2, FSDP2, weights kept", "dp=2, ZeRO 3, weights kept"),
    ),
    DENSE: (native.ddp, (), ("8 experts, ep=2",)),
    "megatron-core, experts": (megatron_core.work, ("ep",), ("8 experts, ep=2",)),
    "megatron-core, tensor": (megatron_core.work, ("tp",), ("tp=2",)),
    "megatron-core, 1F1B": (megatron_core.work, ("pp",), ("pp=2, 1f1b",)),
}
"""How a peer is built, what with, and which of ours it is held against."""


def contenders(family: str, overrides: Sequence[str], python: str | None) -> list[Contender]:
    """All of a family."""
    overrides = shape_of(family, overrides)
    mine = {name: config_of([*overrides, *settings], 2) for name, settings in LAYOUTS[family].items()}
    one = config_of(overrides, 1)
    half = config_of([*overrides, f"train.global_batch={one.train.global_batch // 2}"], 1)
    out = [
        Contender(LIMIT, ours, (half, 1), world=0, copies=2),
        Contender(PLAIN, native.alone, (half,), world=0, copies=2),
    ]
    if family in WHOLE:
        out.append(Contender(WHOLE[family], ours, (one, 1), world=0))
    out += [Contender(name, ours, (config, 2)) for name, config in mine.items()]
    for name, (build, args, beside) in PEERS.items():
        if set(beside) & mine.keys():
            extra = (python,) if build is megatron_core.work else ()
            out.append(Contender(name, build, (one, *args, *extra)))
    return out


def shape_of(family: str, overrides: Sequence[str]) -> list[str]:
    """Overrides of a family's shape. Two experts have as many columns as the MLP in whose place they are."""
    overrides = [*FAMILY_SHAPES.get(family, ()), *overrides]
    if family != "experts":
        return overrides
    ffn = config_of(overrides, 1).model.ffn_width // 2
    return [*overrides, "model.moe.experts=8", "model.moe.top_k=2", f"model.moe.ffn={ffn}"]


def config_of(overrides: Sequence[str], world: int) -> RunConfig:
    """The shape with overrides, checked for a number of ranks."""
    config = load("llama-tiny", [*SHAPE, *overrides])
    validate(config, world)
    return config


def same_work(records: dict[str, Record], config: RunConfig) -> None:
    """Assert that all trained a model of the same size, from a loss like that of a model that knows nothing.

    What two processes hold without communication is two models. Plain loops have no experts, but as much to compute.
    """
    dense = config.model.model_copy(update={"moe": None})
    for name, record in records.items():
        size = sum(spec.numel for spec in parameter_specs(dense if name in (PLAIN, DENSE) else config.model))
        if record.error is None:
            models = 2 if name in (LIMIT, PLAIN) else 1
            assert record.parameters == models * size, f"{name} trains {record.parameters} parameters, not {size}"
            ignorance = math.log(config.model.vocab)
            assert abs(record.loss / ignorance - 1) < 0.05, f"{name} begins with a loss of {record.loss}"


def measure(
    families: Sequence[str], overrides: Sequence[str], rounds: int, python: str | None = None
) -> dict[str, Any]:
    """Rates, ratios and failures of all contenders, and rows for a table. Forks, as `race` does.

    Args:
        families: some of `LAYOUTS`.
        overrides: of the shape.
        rounds: in each of which all contenders of a family have their turn.
        python: an interpreter with megatron-core.

    Raises:
        RuntimeError: one of ours failed.
    """
    load_before = os.getloadavg()[0]
    out: dict[str, Any] = {"overrides": list(overrides), "rounds": rounds, "families": {}, "cannot_run": {}, "rows": []}
    for family in families:
        config = config_of(shape_of(family, overrides), 1)
        tokens = config.train.global_batch * config.data.seq
        records = race(contenders(family, overrides, python), rounds)
        failed = {name: record.error for name, record in records.items() if record.error is not None}
        if lost := failed.keys() & {LIMIT, PLAIN, *LAYOUTS[family], WHOLE.get(family)}:
            raise RuntimeError("\n".join(f"{name}: {failed[name]}" for name in lost))
        same_work(records, config)
        out["families"][family] = {name: facts(records, name, tokens) for name in records if name not in failed}
        out["cannot_run"] |= failed
        out["rows"] += rows(records, family, tokens)
    return out | {"load": [load_before, os.getloadavg()[0]]}


def facts(records: dict[str, Record], name: str, tokens: int) -> dict[str, float]:
    """Of one contender, for the record."""
    record, to_limit = records[name], ratios(records, name, LIMIT)
    return {
        "tokens_per_second": rates({name: record}, tokens)[name],
        "tokens_per_cpu_second": tokens / statistics.median(record.cpu),
        "ratio_to_limit": statistics.median(to_limit),
        "ratio_to_limit_low": min(to_limit),
        "ratio_to_limit_high": max(to_limit),
        "cores_of_others": statistics.median(record.others),
        "loss": record.loss,
        "bytes_grown": record.grown,
    }


def rows(records: dict[str, Record], family: str, tokens: int) -> list[list[str]]:
    """What, measured, beside, ratio: each of ours beside its peers and beside the limit."""
    rate = rates(records, tokens)

    def row(name: str, base: str) -> list[str]:
        what, measured = f"small Llama, {name}", f"{rate[name]:,.0f} tokens/s"
        if base not in rate:
            return [what, measured, f"{base} cannot run: {records[base].error}", "-"]
        ratio = statistics.median(ratios(records, name, base))
        return [what, measured, f"{base}: {rate[base]:,.0f} tokens/s", f"{ratio:.2f}"]

    out = [row(LIMIT, PLAIN)]
    for name in LAYOUTS[family]:
        out += [row(name, peer) for peer, (_, _, beside) in PEERS.items() if name in beside]
        out += [row(name, WHOLE[family])] if family in WHOLE else []
        out.append(row(name, LIMIT))
    return out + (memory(records) if family == "data" else [])


def memory(records: dict[str, Record]) -> list[list[str]]:
    """The rows of what a rank of each data-parallel engine has grown by, beside its peers."""

    def mib(name: str) -> str:
        return f"{records[name].grown / 2**20:,.0f} MiB"

    return [
        [
            f"small Llama, {name}, peak of a rank",
            mib(name),
            f"{peer}: {mib(peer)}",
            f"{records[name].grown / records[peer].grown:.2f}",
        ]
        for name in LAYOUTS["data"]
        for peer, (_, _, beside) in PEERS.items()
        if name in beside and records[peer].error is None
    ]


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings beside those of the shape")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="FAMILY")
    parser.add_argument("--megatron", metavar="PYTHON", help="an interpreter with torch and megatron-core")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    warm_up(IMPORTS)
    rounds = 2 if args.quick else args.rounds
    print(json.dumps(measure(args.only, args.overrides, rounds, args.megatron), indent=1))


if __name__ == "__main__":
    main()
