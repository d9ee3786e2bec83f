"""Every rule between settings: what it refuses, the mend it names, and that the mend works."""

from __future__ import annotations

import pytest

from hpctrain.config.load import load
from hpctrain.config.validate import validate
from tests.config.rules import refuses

# overrides of llama-tiny (hidden 128, heads 4, kv_heads 2, ffn 344, vocab 257, global_batch 32, micro_batch 16,
# 300 steps, tp 2), ranks, the setting blamed, words of the sentence, overrides that mend it
CASES = [
    ("parallel.pp=8", 16, "parallel.pp", "there are 4", "parallel.pp=4"),
    ("parallel.pp=8", 16, "parallel.pp", "parallel.stage_layers", "model.layers=8"),
    ("parallel.chunks=2", 2, "parallel.chunks", "no effect without a pipeline", "parallel.chunks=1"),
    ("parallel.schedule=zb-h1", 2, "parallel.schedule", "use 1f1b, or parallel.pp=2", "parallel.schedule=1f1b"),
    ("parallel.schedule=zb-v", 2, "parallel.schedule", "parallel.pp is 1", "parallel.schedule=1f1b"),
    ("parallel.stage_layers=[4]", 2, "parallel.stage_layers", "use null", "parallel.stage_layers=null"),
    ("parallel.pp=2 parallel.chunks=2", 4, "parallel.chunks", "1f1b has 1", "parallel.schedule=interleaved"),
    (
        "parallel.pp=2 parallel.schedule=interleaved",
        4,
        "parallel.chunks",
        "2 or more chunks a rank; use parallel.chunks=2, or ",
        "parallel.chunks=2",
    ),
    ("parallel.pp=2 parallel.schedule=zb-v", 4, "parallel.chunks", "use parallel.chunks=2, or ", "parallel.chunks=2"),
    (
        "parallel.pp=2 parallel.schedule=zb-h1 sharding.stage=1",
        4,
        "parallel.schedule",
        "use 1f1b or interleaved, or sharding.stage=0",
        "sharding.stage=0",
    ),
    (
        "parallel.pp=2 parallel.schedule=zb-v parallel.chunks=2 sharding.stage=3",
        4,
        "parallel.schedule",
        "in the hooks of one whole backward",
        "parallel.schedule=interleaved",
    ),
    (
        "parallel.pp=2 parallel.stage_layers=[3,2]",
        4,
        "parallel.stage_layers",
        "2 numbers (pp x chunks) with the sum 4 (model.layers)",
        "parallel.stage_layers=[3,1]",
    ),
    (
        "parallel.pp=2 parallel.stage_layers=[1,2,1]",
        4,
        "parallel.stage_layers",
        "2 numbers (pp x chunks)",
        "parallel.stage_layers=[1,3]",
    ),
    (
        "parallel.pp=4 parallel.stage_layers=[2,0,2,0]",
        8,
        "parallel.stage_layers",
        "only the first and the last",
        "parallel.stage_layers=[1,1,2,0]",
    ),
    (
        "parallel.cp=4 parallel.cp_method=ulysses",
        8,
        "parallel.cp",
        "must divide the 2 heads of a rank (model.heads / tp), which ulysses splits; use 1 or 2, or",
        "parallel.cp_method=ring",
    ),
    (
        "parallel.cp=2 data.seq=250",
        4,
        "data.seq",
        "multiple of 4 for parallel.cp=2, twice over in a ring; use 248 or 252",
        "data.seq=252",
    ),
    (
        "parallel.cp=2 data.seq=255 parallel.cp_method=ulysses",
        4,
        "data.seq",
        "multiple of 2 for parallel.cp=2; use 254 or 256",
        "data.seq=254",
    ),
    (
        "parallel.cp=2 parallel.sp=true parallel.tp=4 data.seq=252",
        8,
        "data.seq",
        "multiple of 8 for parallel.cp=2, twice over in a ring and parallel.tp=4 with parallel.sp; use 248 or 256",
        "data.seq=248",
    ),
    ("parallel.ep=2", 4, "parallel.ep", "the model has none (model.moe=null); use 1", "parallel.ep=1"),
    ("parallel.etp=2", 4, "parallel.etp", "the model has none (model.moe=null); use 1", "parallel.etp=1"),
    (
        "model.moe.experts=6 parallel.ep=4",
        4,
        "parallel.ep",
        "must divide model.moe.experts=6; use 1 or 2",
        "parallel.ep=2",
    ),
    (
        "model.moe.experts=6 parallel.ep=3",
        4,
        "parallel.ep",
        "must divide the 4 ranks of a stage (dp x cp x tp); use 1 or 2 or 4, or more ranks",
        "parallel.ep=2",
    ),
    (
        "model.moe.experts=8 model.moe.ffn=31 parallel.etp=2",
        2,
        "parallel.etp",
        "must divide the width of an expert, 31; use 1",
        "parallel.etp=1",
    ),
    (
        "model.moe.experts=8 sharding.stage=3",
        4,
        "sharding.stage",
        "unless ep x etp is tp; use 1 or 2, or parallel.ep=2",
        "parallel.ep=2",
    ),
    (
        "model.moe.experts=8 model.moe.dense_layers=2 parallel.pp=2 sharding.stage=1",
        4,
        "parallel.pp",
        "leaves a rank of the pipeline without experts",
        "model.moe.dense_layers=1",
    ),
    ("parallel.sp=true parallel.tp=1", 2, "parallel.sp", "parallel.tp, which is 1; use false", "parallel.sp=false"),
    (
        "parallel.sp=true data.seq=255",
        2,
        "data.seq",
        "multiple of 2 for parallel.tp=2 with parallel.sp; use 254 or 256",
        "data.seq=254",
    ),
    ("sharding.engine=fsdp sharding.stage=1", 2, "sharding.stage", "as stage 3 does; use 3, or", "sharding.stage=3"),
    (
        "sharding.engine=fsdp sharding.replicas=4 parallel.tp=1",
        6,
        "sharding.replicas",
        "must divide the 6 ranks of dp x cp, that share the state; use 1, 2, 3 or 6",
        "sharding.replicas=2 train.global_batch=96",
    ),
    (
        "sharding.engine=fsdp sharding.reduce_dtype=bf16",
        2,
        "sharding.reduce_dtype",
        "more than train.precision=float32 does; use float32, or train.precision=bf16",
        "train.precision=bf16",
    ),
    (
        "sharding.engine=fsdp sharding.offload.params=cpu",
        2,
        "sharding.offload.params",
        "in one place; use cpu for both sharding.offload.params and sharding.offload.optimizer",
        "sharding.offload.optimizer=cpu",
    ),
    (
        "sharding.engine=fsdp sharding.offload.optimizer=nvme",
        2,
        "sharding.offload.optimizer",
        "in host memory; use cpu, or",
        "sharding.offload.params=cpu sharding.offload.optimizer=cpu",
    ),
    (
        "sharding.engine=fsdp parallel.pp=2 parallel.schedule=zb-h1",
        4,
        "parallel.schedule",
        "FSDP2 takes them in the hooks of one whole backward; use 1f1b or interleaved, or sharding.engine=none",
        "sharding.engine=none",
    ),
    (
        "sharding.stage=3 sharding.prefetch=2",
        2,
        "sharding.prefetch",
        "this one is deepspeed; use 1",
        "sharding.prefetch=1",
    ),
    ("sharding.replicas=2", 2, "sharding.replicas", "and this one is none; use 1, or", "sharding.replicas=1"),
    (
        "sharding.reduce_every=step",
        2,
        "sharding.reduce_every",
        "use micro_batch, or sharding.engine=fsdp",
        "sharding.engine=fsdp",
    ),
    ("model.heads=5", 2, "model.heads", "must divide model.hidden=128", "model.heads=4"),
    ("model.kv_heads=3", 2, "model.kv_heads", "use 1, 2 or 4", "model.kv_heads=1"),
    ("model.head_dim=33", 2, "model.head_dim", "even width, and theirs is 33", "model.head_dim=34"),
    ("model.hidden=132", 2, "model.heads", "even width, and theirs is 33", "model.head_dim=34"),
    (
        "model.position=learned model.rope_scaling.factor=2",
        2,
        "model.rope_scaling",
        "needs model.position=rope",
        "model.rope_scaling=null",
    ),
    ("data.seq=512", 2, "data.seq", "at most model.max_seq=256; use model.max_seq=512", "model.max_seq=512"),
    ("sharding.engine=none sharding.stage=1", 2, "sharding.stage", "ZeRO stage 0", "sharding.engine=deepspeed"),
    ("sharding.engine=deepspeed", 2, "sharding.stage", "use sharding.engine=none", "sharding.engine=none"),
    (
        "sharding.stage=2 sharding.reshard_after_forward=false",
        2,
        "sharding.reshard_after_forward",
        "use true, or sharding.stage=3",
        "sharding.stage=3 sharding.reshard_after_forward=false",
    ),
    ("sharding.stage=1 train.precision=float64", 2, "train.precision", "DeepSpeed computes in", "sharding.stage=0"),
    ("sharding.offload.params=cpu", 2, "sharding.offload.params", "keeps its state on the device", "sharding.stage=3"),
    ("sharding.offload.optimizer=cpu", 2, "sharding.offload.optimizer", "on one rank too", "sharding.stage=1"),
    (
        "sharding.stage=2 sharding.offload.params=nvme",
        2,
        "sharding.offload.params",
        "keeps whole weights on the device; use none, or sharding.stage=3",
        "sharding.stage=3",
    ),
    (
        "sharding.stage=1 sharding.offload.optimizer_share=0.5",
        2,
        "sharding.offload.optimizer_share",
        "use optimizer=cpu or nvme",
        "sharding.offload.optimizer=cpu",
    ),
    (
        "sharding.stage=3 sharding.offload.params=cpu sharding.offload.params_share=0.5",
        2,
        "sharding.offload.params_share",
        "of weights on a disk",
        "sharding.offload.params=nvme",
    ),
    (
        "sharding.stage=2 sharding.offload.optimizer=nvme sharding.offload.gradients=nvme",
        2,
        "sharding.offload.gradients",
        "for ZeRO 3 with optimizer=nvme",
        "sharding.stage=3",
    ),
    ("sharding.offload.path=/tmp", 2, "sharding.offload.path", "nothing is nvme", "sharding.offload.path=null"),
    (
        "sharding.stage=1 sharding.offload.optimizer=cpu sharding.torch_adam=false",
        2,
        "sharding.torch_adam",
        "PyTorch's fused AdamW",
        "sharding.torch_adam=true",
    ),
    (
        "train.steps=20",
        2,
        "optimizer.warmup_steps",
        "less than train.steps=20; use at most 19",
        "optimizer.warmup_steps=19",
    ),
    (
        "optimizer.schedule=wsd optimizer.decay_steps=290",
        2,
        "optimizer.decay_steps",
        "warm-up of 20 and decay of 290 must fit in train.steps=300; use at most 280",
        "optimizer.decay_steps=280",
    ),
    (
        "optimizer.schedule=wsd optimizer.warmup_steps=280",
        2,
        "optimizer.decay_steps",
        "decay of 30 must fit in train.steps=300; use at most 20",
        "optimizer.decay_steps=20",
    ),
    ("folder=runs/%s", 2, "folder", "may not hold a %", "folder=runs"),
    ("optimizer.decay_steps=3", 2, "optimizer.decay_steps", "only optimizer.schedule=wsd", "optimizer.schedule=wsd"),
    ("optimizer.batch_rule=sqrt", 2, "optimizer.batch_rule", "base_global_batch", "optimizer.base_global_batch=16"),
    ("optimizer.base_global_batch=8", 2, "optimizer.base_global_batch", "no effect", "optimizer.batch_rule=linear"),
    ("train.eval_every=5 train.eval_batches=0", 2, "train.eval_every", "eval_batches", "train.eval_batches=1"),
    ("data.validation=0", 2, "data.validation", "nothing to evaluate on", "train.eval_batches=0"),
    ("checkpoint.every=301 checkpoint.at_end=false", 2, "checkpoint.every", "saves nothing", "checkpoint.at_end=true"),
    (
        "checkpoint.resume=must checkpoint.continue_from=x",
        2,
        "checkpoint.continue_from",
        "no effect",
        "checkpoint.resume=auto",
    ),
    ("", 3, "parallel.tp", "must divide the 3 ranks", "parallel.tp=1 train.global_batch=48"),
    (
        "parallel.tp=3",
        3,
        "parallel.tp",
        "divide model.heads=4; use 1, or with as many ranks 2 or 4.",
        "parallel.tp=1 train.global_batch=48",
    ),
    ("parallel.tp=8", 8, "parallel.tp", "divide model.heads=4; use 1, 2 or 4", "parallel.tp=4"),
    (
        "model.heads=12 model.head_dim=16 model.kv_heads=6 parallel.tp=4",
        4,
        "parallel.tp",
        "divide model.kv_heads=6 or be a multiple of it; use 1 or 2",
        "parallel.tp=2",
    ),
    ("model.ffn=345", 2, "parallel.tp", "model.ffn=345; use 1", "parallel.tp=1"),
    ("model.vocab=1", 2, "parallel.tp", "at most model.vocab=1; use 1", "parallel.tp=1"),
    (
        "train.global_batch=24",
        2,
        "train.global_batch",
        "1 x 16 = 16; use 16 or 32, or train.micro_batch=12",
        "train.micro_batch=12",
    ),
    (
        "train.global_batch=40",
        4,
        "train.global_batch",
        "dp x micro_batch = 2 x 16 = 32; use 32 or 64, or train.micro_batch=10",
        "train.micro_batch=10",
    ),
    ("train.global_batch=33", 4, "train.global_batch", "use 32 or 64.", "train.global_batch=64"),
    ("train.global_batch=8", 4, "train.global_batch", "use 32, or train.micro_batch=4", "train.micro_batch=4"),
]


EXPERTS = [
    ("model.moe.top_k=9", "model.moe.top_k", "at most model.moe.experts=8", "model.moe.top_k=8"),
    ("model.moe.groups=3", "model.moe.groups", "use 1, 2, 4 or 8", "model.moe.groups=4"),
    ("model.moe.top_groups=2", "model.moe.top_groups", "at most model.moe.groups=1", "model.moe.groups=2"),
    (
        "model.moe.groups=4 model.moe.top_k=3",
        "model.moe.top_k",
        "1 groups (model.moe.top_groups) have 2 experts",
        "model.moe.top_groups=2",
    ),
    ("model.moe.overflow=pad", "model.moe.overflow", "set model.moe.capacity", "model.moe.capacity=1.25"),
    ("model.moe.dense_layers=4", "model.moe.dense_layers", "no layer of model.layers=4", "model.moe.dense_layers=3"),
    ("model.bias=true", "model.bias", "experts have no biases", "model.bias=false"),
]


@pytest.mark.parametrize(("overrides", "path", "words", "mend"), EXPERTS)
def test_rule_of_experts(overrides: str, path: str, words: str, mend: str) -> None:
    refuses(overrides, 2, path, words, mend, "moe-tiny")


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.pp=2",
        "model.moe.router=sigmoid model.moe.bias_rate=0.001 model.moe.shared_ffn=64 sharding.stage=1",
        "model.moe.groups=4 model.moe.top_groups=2 model.moe.capacity=1.5 model.moe.overflow=pad",
        "model.moe.dense_layers=1 parallel.pp=2 parallel.schedule=zb-h1 train.precision=bf16",
        "model.moe=null parallel.tp=2",
    ],
)
def test_experts_accepted(overrides: str) -> None:
    validate(load("moe-tiny", overrides.split()), 2)


@pytest.mark.parametrize(("overrides", "world", "path", "words", "mend"), CASES)
def test_rule(overrides: str, world: int, path: str, words: str, mend: str) -> None:
    refuses(overrides, world, path, words, mend)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ("", 2),
        ("", 4),
        ("parallel.tp=1", 1),
        ("parallel.sp=true train.recompute=full", 2),
        ("parallel.sp=true parallel.tp=4 train.recompute=selective sharding.stage=3", 4),
        ("train.recompute=selective train.recompute_ops=[core_attn,layernorm,activation]", 2),
        ("train.activation_budget=0.5 parallel.pp=2", 4),
        ("parallel.tp=4", 4),  # kv_heads=2 fewer than tp: replicated
        ("model.kv_heads=null", 2),
        ("model.head_dim=64 model.heads=3 model.kv_heads=1 parallel.tp=1", 2),
        ("model.position=learned model.head_dim=33", 2),
        ("sharding.stage=2 train.precision=fp16", 4),
        ("sharding.engine=deepspeed sharding.stage=3 train.precision=bf16", 4),
        ("train.precision=float64", 2),
        ("train.eval_batches=0 data.validation=0", 2),
        ("checkpoint.every=500", 2),
        ("parallel.cp=2", 4),
        ("parallel.cp=2 parallel.sp=true parallel.pp=2 sharding.stage=2 train.recompute=selective", 8),
        ("parallel.cp=4 parallel.tp=1 parallel.cp_method=ulysses sharding.stage=3", 8),
        ("parallel.pp=4", 8),
        ("parallel.pp=2 parallel.schedule=gpipe sharding.stage=3", 8),
        ("parallel.pp=2 parallel.schedule=interleaved parallel.chunks=2 sharding.stage=1", 8),
        ("parallel.pp=2 parallel.schedule=zb-v parallel.chunks=2", 4),
        ("parallel.pp=2 parallel.stage_layers=[0,4]", 4),
        ("checkpoint.resume=never checkpoint.continue_from=x", 2),
        ("model.moe.experts=8 parallel.ep=4", 4),
        ("model.moe.experts=8 parallel.ep=2 parallel.etp=2 parallel.sp=true sharding.stage=2", 4),
        ("model.moe.experts=8 parallel.etp=2 sharding.stage=3", 4),
        ("model.moe.experts=8 model.moe.dense_layers=2 parallel.pp=2", 4),
    ],
)
def test_accepted(overrides: str, world: int) -> None:
    validate(load("llama-tiny", overrides.split()), world)


# overrides of llama-tiny, ranks, the setting blamed, words of the sentence, overrides that mend it
ADAPTERS = [
    ("model.adapter.targets=[q,valu]", 2, "targets", "no linear is called valu", "model.adapter.targets=[q,v]"),
    (
        "model.adapter.targets=[atention]",
        2,
        "targets",
        "use attention, which is nearest",
        "model.adapter.targets=[attention]",
    ),
    (
        "model.adapter.targets=[zzz]",
        2,
        "targets",
        "use some of attention, mlp, experts, q, k",
        "model.adapter.targets=null",
    ),
    ("model.adapter.targets=[]", 2, "targets", "nothing would be trained", "model.adapter.targets=null"),
    (
        "model.adapter.targets=[experts]",
        2,
        "targets",
        "this model has no linear called experts",
        "model.adapter.targets=[q]",
    ),
    (
        "model.adapter.targets=[gate] model.activation=gelu",
        2,
        "targets",
        "no linear called gate; use some of down, k, output, q, up, v",
        "model.activation=swiglu",
    ),
    ("model.adapter.block=32", 2, "block", "has none; use 64, or model.adapter.kind=qlora", "model.adapter.block=64"),
    ("model.adapter.kind=qlora", 2, "block", "use 4, or another parallel.tp", "model.adapter.block=4"),
    ("model.adapter.kind=qlora model.ffn=1024 parallel.tp=4", 4, "block", "use 32, or", "parallel.tp=2"),
    (
        "model.adapter.targets=[experts] model.adapter.kind=dora model.moe={}",
        2,
        "kind",
        "use lora, or leave experts out",
        "model.adapter.kind=lora",
    ),
    (
        "model.adapter.targets=[experts,attention] model.adapter.dropout=0.1 model.moe={}",
        2,
        "dropout",
        "use 0, or leave experts out",
        "model.adapter.targets=[attention]",
    ),
    (
        "model.adapter={} model.moe.bias_rate=0.1",
        2,
        "model.moe.bias_rate",
        "all else stays as it is; use 0",
        "model.moe.bias_rate=0",
    ),
    (
        "model.adapter.targets=[experts] model.moe={} parallel.etp=2",
        2,
        "parallel.etp",
        "adapters of experts are not split",
        "parallel.etp=1",
    ),
    (
        "model.adapter={} parallel.pp=2 parallel.stage_layers=[0,4] sharding.stage=1",
        4,
        "parallel.pp",
        "DeepSpeed needs something to train on each; use sharding.stage=0",
        "sharding.stage=0",
    ),
    (
        "model.adapter={} sharding.stage=3",
        4,
        "sharding.stage",
        "use sharding.engine=auto with sharding.stage=0, 1 or 2",
        "sharding.stage=2",
    ),
    (
        "model.adapter={} sharding.engine=fsdp",
        4,
        "sharding.engine",
        "which is not yet proved beside model.adapter",
        "sharding.engine=auto",
    ),
    (
        "optimizer.paged=true sharding.stage=1",
        4,
        "optimizer.paged",
        "use false, or sharding.stage=0",
        "sharding.stage=0",
    ),
    (
        "checkpoint.base=x checkpoint.continue_from=y",
        2,
        "checkpoint.base",
        "use null, or checkpoint.continue_from=null",
        "checkpoint.base=null",
    ),
]


@pytest.mark.parametrize(("overrides", "world", "path", "words", "mend"), ADAPTERS)
def test_rules_of_fine_tuning(overrides: str, world: int, path: str, words: str, mend: str) -> None:
    refuses(overrides, world, path if "." in path else f"model.adapter.{path}", words, mend)
