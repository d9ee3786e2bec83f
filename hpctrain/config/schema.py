"""The typed configuration of a run: what every key means, its default and its own limits.

Values are frozen after construction. A rule that involves one field is here; a rule that involves several
fields, or the number of ranks, is in `hpctrain.config.validate`. Keys, not code, are the public interface:
`hpctrain config schema` prints this file's content.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST = 10**12
"""Of what is counted: above, numbers are slips of the finger, and take for ever to divide or are no float."""

Count = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
NonNegative = Annotated[float, Field(ge=0.0)]

Precision = Literal["float32", "bf16", "fp16", "float64"]
CpMethod = Literal["ring", "ulysses"]
Operation = Literal["core_attn", "layernorm", "activation", "mlp", "moe", "shared_experts"]
"""What of a layer can be computed again, by Megatron-LM's names (`activation` is its `moe_act`, of dense MLPs too)."""


class Section(BaseModel):
    """Base of all sections: frozen, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class RopeScaling(Section):
    """Llama-3 scaling of the rotary frequencies for contexts longer than the one trained on."""

    factor: Positive = Field(8.0, description="How much longer the longest wavelengths become.")
    low_freq_factor: Positive = Field(
        1.0, description="Wavelengths above original_max_seq over this are stretched fully."
    )
    high_freq_factor: Positive = Field(4.0, description="Wavelengths below original_max_seq over this are kept.")
    original_max_seq: Count = Field(8192, description="Longest sequence before the scaling.")


class MoeConfig(Section):
    """Mixture of experts: in the place of MLPs, many of which each token uses a few."""

    experts: Count = Field(8, description="Experts of a layer.")
    top_k: Count = Field(2, description="Experts that a token is sent to.")
    ffn: Count | None = Field(None, description="Width of an expert; default that of the MLP.")
    router: Literal["softmax", "sigmoid"] = Field("softmax", description="What makes scores of the router's logits.")
    normalize: bool = Field(True, description="The weights of a token's experts sum to 1, before scale.")
    scale: Positive = Field(1.0, description="Factor on these weights.")
    groups: Count = Field(1, description="Groups the experts are in, consecutive ones in each.")
    top_groups: Count = Field(1, description="Groups that a token's experts come from, the best by two experts each.")
    shared_ffn: Annotated[int, Field(ge=0, le=MOST)] = Field(
        0, description="Width of an MLP that every token goes through besides; 0 has none."
    )
    capacity: Annotated[float, Field(gt=0.0, le=MOST)] | None = Field(
        None, description="Most tokens of a sample that an expert takes, over the mean; null takes all."
    )
    overflow: Literal["drop", "pad"] = Field(
        "drop", description="Capacity: both drop what is above it; pad computes with that many rows always."
    )
    aux_loss: NonNegative = Field(0.0, description="Weight of the load-balancing loss of a layer.")
    z_loss: NonNegative = Field(0.0, description="Weight of the squared log-partition of the router's logits.")
    bias_rate: NonNegative | None = Field(
        None, description="Step of biases that balance the load without a loss; null has none, 0 leaves them."
    )
    dense_layers: Natural = Field(0, description="First layers that have an MLP and no experts.")

    def room(self, seq: int) -> int:
        """Most tokens of a sample of `seq` that an expert takes where there is a capacity."""
        assert self.capacity is not None
        return math.ceil(self.capacity * seq * self.top_k / self.experts)


TARGETS = {"attention": ("q", "k", "v", "output"), "mlp": ("gate", "up", "down"), "experts": ("experts",)}
"""Linears of a layer that can be adapted, by the groups that `model.adapter.targets` may name in their place."""


class AdapterConfig(Section):
    """Low-rank adapters: the weights stay as they are, and what is trained lies beside the linears."""

    kind: Literal["lora", "dora", "qlora"] = Field(
        "lora", description="dora trains a magnitude of each output too; qlora is lora over a base in 4 bits (NF4)."
    )
    rank: Count = Field(8, description="Width between the two factors of an adapter.")
    alpha: Positive = Field(16.0, description="What an adapter adds is multiplied by alpha / rank.")
    dropout: Fraction = Field(0.0, description="On the input of adapters.")
    targets: tuple[str, ...] | None = Field(
        None,
        description="Linears with adapters: q, k, v, output, gate, up, down, experts, or attention or mlp for those of "
        "one; null: attention and mlp.",
    )
    block: Annotated[int, Field(ge=2, multiple_of=2)] = Field(
        64, description="qlora: consecutive weights of a row that have a scale of their own."
    )

    @property
    def scale(self) -> float:
        """Factor on what an adapter adds."""
        return self.alpha / self.rank

    def adapts(self, linear: str) -> bool:
        """Whether a linear of this name gets an adapter."""
        named = ("attention", "mlp") if self.targets is None else self.targets
        return any(linear == name or linear in TARGETS.get(name, ()) for name in named)


class ModelConfig(Section):
    """The shape of a decoder-only transformer."""

    layers: Annotated[int, Field(ge=1, le=10000)] = Field(4, description="Transformer layers.")
    hidden: Count = Field(128, description="Width of the residual stream.")
    heads: Count = Field(4, description="Query heads of a layer.")
    kv_heads: Count | None = Field(None, description="Fewer than heads is GQA, 1 is MQA; default heads.")
    head_dim: Count | None = Field(None, description="Width of a head; default hidden / heads.")
    ffn: Count | None = Field(None, description="Width of the MLP; default 4 x hidden.")
    vocab: Count = Field(257, description="Token ids; bytes and one end of document are 257.")
    max_seq: Count = Field(2048, description="Longest sequence; the length of the table of learned positions.")
    norm: Literal["rmsnorm", "layernorm"] = Field(
        "rmsnorm", description="Before attention, before the MLP and at the end."
    )
    norm_eps: Positive = Field(1e-5, description="Added to the variance in a norm.")
    position: Literal["rope", "learned"] = Field(
        "rope", description="Rotary positions, or a learned table added to the embedding."
    )
    rope_theta: Positive = Field(10000.0, description="Base of the rotary wavelengths.")
    rope_scaling: RopeScaling | None = None
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = Field("swiglu", description="Of the MLP; swiglu has a gate.")
    bias: bool = Field(False, description="Biases on the linear layers.")
    tied: bool = Field(False, description="The output head is the embedding.")
    qk_norm: bool = Field(False, description="RMSNorm of every head's queries and keys, before rotation.")
    dropout: Fraction = Field(0.0, description="On the embedding and on what each block adds to the residual.")
    init_std: Positive = Field(0.02, description="Standard deviation of initial weights.")
    moe: MoeConfig | None = None
    adapter: AdapterConfig | None = None

    @property
    def kv(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return (self.moe.ffn if self.moe else None) or self.ffn_width

    def routed(self, layer: int) -> bool:
        """Whether a layer has experts in the place of the MLP."""
        return self.moe is not None and layer >= self.moe.dense_layers

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation == "swiglu"


class ParallelConfig(Section):
    """Sizes of the parallel axes. dp is what is left: world / (pp x cp x tp)."""

    tp: Count = Field(1, description="Tensor parallelism: heads, MLP width and vocabulary are split.")
    sp: bool = Field(
        False, description="Beside tp: norms, dropout and residuals are split over the sequence, on the same ranks."
    )
    pp: Count = Field(1, description="Pipeline parallelism: the layers are split; ranks hand hidden states on.")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = Field(
        "1f1b", description="Order of a pipeline's work; interleaved and zb-v need chunks, zb-* engine none."
    )
    chunks: Count = Field(1, description="Virtual stages a rank of the pipeline holds.")
    stage_layers: tuple[Natural, ...] | None = Field(
        None, description="Layers of each of the pp x chunks virtual stages; null balances them, the head counted."
    )
    cp: Count = Field(1, description="Context parallelism: every sequence is split, all layers included.")
    cp_method: CpMethod = Field(
        "ring", description="How attention sees it whole: keys and values go around, or heads are split instead."
    )
    ep: Count = Field(1, description="Expert parallelism: the experts of a layer are spread over the ranks of a stage.")
    etp: Count = Field(1, description="Tensor parallelism inside an expert: 1 or tp.")


Place = Literal["none", "cpu", "nvme"]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class OffloadConfig(Section):
    """Where training state lives when it is not on the device: in memory of the host (cpu), or on its disk (nvme)."""

    optimizer: Place = Field("none", description="Where master weights and AdamW's moments live; ZeRO 1 to 3.")
    optimizer_share: Share = Field(
        1.0, description="Part of it that does; the rest stays on the device, or in host memory where it is nvme."
    )
    gradients: Literal["auto", "cpu", "nvme"] = Field(
        "auto", description="Where they wait for an update on the disk, ZeRO 3; auto is host memory where they fit."
    )
    params: Place = Field("none", description="Where weights wait until a layer needs them; ZeRO 3.")
    params_share: Share = Field(1.0, description="Part of them on the disk; the rest waits in host memory.")
    activations: Place = Field(
        "none", description="Where what backward needs of a layer waits, or with recompute its input."
    )
    path: UserPath | None = Field(
        None,
        description="Folder on each node's own disk, for nvme; null is TMPDIR, or /tmp. Files there have no names.",
    )

    @property
    def on_disk(self) -> bool:
        """Whether anything goes to a disk."""
        return "nvme" in (self.optimizer, self.params, self.activations)

    @property
    def state(self) -> bool:
        """Whether anything goes that an engine keeps from step to step."""
        return (self.optimizer, self.params) != ("none", "none")

    @property
    def folder(self) -> Path:
        """Where the disk is."""
        return self.path or Path(os.environ.get("TMPDIR") or "/tmp")


class ShardingConfig(Section):
    """What is done with the state that data-parallel ranks would otherwise each hold whole."""

    engine: Literal["auto", "none", "deepspeed", "fsdp"] = Field(
        "auto", description="auto is deepspeed for stage 1-3, none for stage 0; fsdp shards all as stage 3, by FSDP2."
    )
    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters."
    )
    bucket_mib: Annotated[float, Field(gt=0.0, le=65536.0)] = Field(25.0, description="Size of a gradient bucket, MiB.")
    reshard_after_forward: bool = Field(
        True,
        description="ZeRO 3, fsdp: let gathered weights go between forward and backward; false gathers less often.",
    )
    replicas: Count = Field(
        1, description="fsdp: groups that dp x cp is cut into; each has all state, sharded over its ranks (HSDP)."
    )
    reduce_every: Literal["micro_batch", "step"] = Field(
        "micro_batch", description="fsdp: when gradients are reduced; step sends less and holds them whole until then."
    )
    reduce_dtype: Literal["float32", "bf16"] = Field(
        "float32", description="fsdp with bf16: of gradients while they are reduced."
    )
    prefetch: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="fsdp: layers whose weights are gathered ahead of the one that computes."
    )
    torch_adam: bool = Field(True, description="DeepSpeed: torch's AdamW, which needs no compiled op.")
    offload: OffloadConfig = OffloadConfig()


OF_FSDP = {"replicas": 1, "reduce_every": "micro_batch", "reduce_dtype": "float32", "prefetch": 1}
"""Settings of sharding that are of engine fsdp alone, and their defaults."""


class ClusterConfig(Section):
    """What the job runs on."""

    nodes: Count = Field(1, description="Machines of the job; a launcher that started the ranks knows better.")
    gpus_per_node: Count = Field(1, description="Ranks on a node, without GPUs on its CPUs; a launcher knows better.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    timeout_s: Annotated[float, Field(gt=0.0, le=1e7)] = Field(
        600.0, description="Longest wait of any collective, seconds."
    )
    silence_s: Annotated[float, Field(gt=0.0, le=1e7)] = Field(
        30.0, description="Seconds without a sign of life after which a rank that others wait for counts as hung."
    )
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="CPU threads a rank; 0 is its CPUs over the ranks on the node."
    )
    health: bool = Field(False, description="Measure nodes and links first; a job leaves out those that are slow.")
    spares: Natural = Field(0, description="Nodes to ask for beyond `nodes`, for those that are left out.")
    profile: str = Field("generic", description="Site profile of `hpctrain submit`: a name, or a YAML file.")


class DataConfig(Section):
    """What is read, and in which pieces."""

    corpus: UserPath = Field(Path("corpus.h5"), description="HDF5 file written by `hpctrain data build`.")
    blend: tuple[UserPath, ...] | None = Field(None, description="Corpora to mix, in the place of corpus.")
    weights: tuple[NonNegative, ...] | None = Field(
        None, description="Share of the samples of each corpus of blend, in any unit; null: equal shares."
    )
    anneal: tuple[str, ...] | None = Field(
        None, description="Other weights from a global sample count on, each 'SAMPLES w w ...'."
    )
    seq: Count = Field(256, description="Tokens in a sample.")
    packing: Literal["windows", "best_fit"] = Field(
        "windows", description="Samples run across documents, or hold whole ones and are filled up (fine-tuning)."
    )
    validation: Fraction = Field(0.01, description="Share of the documents, the last ones, kept for validation.")
    document_mask: bool = Field(True, description="Attention and loss stop at document boundaries.")
    prefetch: Natural = Field(2, description="Batches read ahead; 0 reads when they are asked for.")
    workers: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Threads of a rank that read ahead.")
    cache: UserPath | None = Field(
        None, description="Folder on each node's own disk: corpora are copied there once, and read from there."
    )


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    lr: Positive = Field(3e-4, description="Peak learning rate.")
    beta1: Fraction = Field(0.9, description="Decay of AdamW's first moment.")
    beta2: Fraction = Field(0.95, description="Decay of AdamW's second moment.")
    eps: Positive = Field(1e-8, description="Added to the root of AdamW's second moment.")
    weight_decay: NonNegative = Field(0.1, description="On matrices; never on norms, biases or other vectors.")
    clip: NonNegative = Field(1.0, description="Largest global gradient norm; 0 does not clip.")
    paged: bool = Field(
        False, description="Moments in memory that a GPU shares with its host and gives up when it is full."
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After warm-up; wsd is warm-up, stable, decay."
    )
    warmup_steps: Natural = Field(0, description="Steps of linear warm-up.")
    decay_steps: Natural = Field(0, description="wsd: steps of the final decay; 0 is a tenth of the steps.")
    min_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.1, description="Final learning rate over lr.")
    batch_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="How lr follows train.global_batch when it differs from base_global_batch."
    )
    base_global_batch: Natural = Field(0, description="Global batch that lr was chosen for, for batch_rule.")

    def final_decay(self, steps: int) -> int:
        """Steps of wsd's final decay in a run of `steps`."""
        return self.decay_steps or max(1, steps // 10)


class TrainConfig(Section):
    """Length, batch, precision and what is reported."""

    steps: Count = Field(100, description="Optimizer steps of the whole run.")
    global_batch: Count = Field(16, description="Samples in an optimizer step, over all ranks.")
    micro_batch: Count = Field(4, description="Samples in one forward pass of a rank.")
    precision: Precision = Field(
        "float32", description="Of the computation; bf16 and fp16 keep float32 master weights."
    )
    seed: Natural = Field(0, description="Of initial weights, order of samples and dropout.")
    label_smoothing: Fraction = Field(0.0, description="Share of the target spread over the vocabulary.")
    z_loss: NonNegative = Field(0.0, description="Weight of the squared log-partition of the logits.")
    eval_every: Natural = Field(0, description="Steps between evaluations; 0 evaluates at the end only.")
    eval_batches: Natural = Field(8, description="Global batches in an evaluation; 0 does not evaluate.")
    log_every: Count = Field(10, description="Steps between lines of the log.")
    max_skipped: Count = Field(5, description="Non-finite steps in a row after which the job stops.")
    loss_scale: Annotated[float, Field(ge=1.0, le=1e30)] = Field(65536.0, description="fp16: initial loss scale.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations computed again in backward: none, those of recompute_ops, or those of whole layers.",
    )
    recompute_ops: tuple[Operation, ...] = Field(
        ("core_attn",),
        description="Operations of a layer that recompute=selective computes again: core_attn, layernorm (both norms), "
        "activation (of MLP, experts, shared experts), mlp, moe (with its router and all-to-all), shared_experts.",
    )
    recompute_every: Count = Field(
        1, description="Of each chunk the first layer is computed again, and every so many-th after it; 1 is all."
    )
    activation_budget: Positive | None = Field(
        None,
        description="GiB of a device that activations and logits may take: before the run the cheapest recompute, "
        "recompute_ops and recompute_every that keep to it on every rank are chosen. null: these are as they are set.",
    )
    overlap: bool = Field(True, description="Reductions run beside computation where that is exact.")

    @property
    def recomputation(self) -> tuple[str, tuple[Operation, ...], int]:
        """All that says what is computed again."""
        return self.recompute, self.recompute_ops, self.recompute_every

    def settled(self) -> dict[str, Any]:
        """The same by name."""
        return dict(zip(("recompute", "recompute_ops", "recompute_every"), self.recomputation))

    def recomputing(self, recompute: str, operations: tuple[Operation, ...], every: int) -> TrainConfig:
        """The same with another `recomputation`."""
        changed = {"recompute": recompute, "recompute_ops": operations, "recompute_every": every}
        return self.model_copy(update=changed)


class CheckpointConfig(Section):
    """When state is saved, how many are kept, and where a run starts from."""

    every: Natural = Field(0, description="Steps between checkpoints; 0 saves at the end only.")
    keep: Count = Field(2, description="Committed checkpoints kept.")
    at_end: bool = Field(True, description="Save after the last step.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto", description="auto continues from the newest valid checkpoint of the run folder if there is one."
    )
    base: UserPath | None = Field(
        None, description="A checkpoint whose weights a new run starts with, and nothing else of it: fine-tuning."
    )
    continue_from: UserPath | None = Field(
        None, description="A checkpoint of another run to go on from, its step included, if this run has none."
    )


class RunConfig(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run folder.")
    folder: UserPath = Field(Path("runs"), description="Run folders are made in here.")
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    sharding: ShardingConfig = ShardingConfig()
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def engine(self) -> str:
        """The sharding engine that `sharding.engine=auto` stands for."""
        if self.sharding.engine != "auto":
            return self.sharding.engine
        return "deepspeed" if self.sharding.stage else "none"

    @property
    def engine_name(self) -> str:
        """Engine and ZeRO stage in one word, for records."""
        return f"{self.engine}-{self.sharding.stage}" if self.engine == "deepspeed" else self.engine

    @property
    def run_folder(self) -> Path:
        """Where this run keeps everything it writes."""
        return self.folder / self.name
