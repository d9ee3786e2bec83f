"""Rules between settings, and between settings and the number of ranks.

Each rule is one small function of the configuration and the layout that raises `ConfigError` with the mend.
What concerns one setting alone is in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpctrain.config.adapters import check_adapters, check_adapters_of
from hpctrain.config.keys import as_written
from hpctrain.config.schema import OF_FSDP, RunConfig, TrainConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.context import misfit as does_not_split
from hpctrain.layout.context import multiple
from hpctrain.layout.layout import Layout, divisors
from hpctrain.layout.placement import misfit, tp_sizes, zero_misfit
from hpctrain.layout.recompute import without_effect
from hpctrain.layout.schedule import ZERO_BUBBLE, make_schedule

Rule = Callable[[RunConfig], None]
LayoutRule = Callable[[RunConfig, Layout], None]


def validate(config: RunConfig, world: int) -> None:
    """Check that a configuration can run on `world` ranks.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for rule in RULES:
        rule(config)
    layout = Layout.of(config.parallel, world)
    for layout_rule in LAYOUT_RULES:
        layout_rule(config, layout)


def _experts(config: RunConfig) -> None:
    model, moe = config.model, config.model.moe
    if moe is None:
        return
    if moe.top_k > moe.experts:
        _refuse("model.moe.top_k", moe.top_k, f"must be at most model.moe.experts={moe.experts}", "use fewer")
    if moe.experts % moe.groups:
        allowed = _either(divisors(moe.experts))
        _refuse("model.moe.groups", moe.groups, f"must divide model.moe.experts={moe.experts}", f"use {allowed}")
    if moe.top_groups > moe.groups:
        _refuse("model.moe.top_groups", moe.top_groups, f"must be at most model.moe.groups={moe.groups}", "use fewer")
    reach = moe.top_groups * (moe.experts // moe.groups)
    if moe.top_k > reach:
        reason = f"{moe.top_groups} groups (model.moe.top_groups) have {reach} experts"
        _refuse("model.moe.top_k", moe.top_k, reason, "use fewer, or more groups")
    if moe.overflow == "pad" and moe.capacity is None:
        _refuse("model.moe.overflow", "pad", "pads to a capacity", "set model.moe.capacity, for example to 1.25")
    if moe.dense_layers >= model.layers:
        reason = f"leaves no layer of model.layers={model.layers} with experts"
        _refuse("model.moe.dense_layers", moe.dense_layers, reason, "use fewer, or model.moe=null")
    if model.bias:
        _refuse("model.bias", True, "experts have no biases", "use model.bias=false")


def _attention_shape(config: RunConfig) -> None:
    model = config.model
    if model.head_dim is None and model.hidden % model.heads:
        _refuse("model.heads", model.heads, f"must divide model.hidden={model.hidden}", "or give model.head_dim")
    if model.heads % model.kv:
        allowed = _either(divisors(model.heads))
        _refuse("model.kv_heads", model.kv_heads, f"must divide model.heads={model.heads}", f"use {allowed}")


def _positions(config: RunConfig) -> None:
    model, seq = config.model, config.data.seq
    if model.position == "rope" and model.head_width % 2:
        path = "model.head_dim" if model.head_dim else "model.heads"
        value = model.head_dim or model.heads
        reason = f"rotary positions need heads of even width, and theirs is {model.head_width}"
        _refuse(path, value, reason, "give an even model.head_dim")
    if model.rope_scaling and model.position != "rope":
        _refuse("model.rope_scaling", "set", "needs model.position=rope", "use model.rope_scaling=null")
    if model.max_seq < seq:
        _refuse("data.seq", seq, f"must be at most model.max_seq={model.max_seq}", f"use model.max_seq={seq}")


def _sharding_rules(config: RunConfig) -> None:
    engine, stage = config.engine, config.sharding.stage
    if engine == "none" and stage:
        _refuse("sharding.stage", stage, "sharding.engine=none is ZeRO stage 0", "use sharding.engine=deepspeed")
    if engine == "deepspeed" and not stage:
        reason = "sharding.engine=deepspeed has stages 1 to 3"
        _refuse("sharding.stage", 0, reason, "use sharding.engine=none, which is stage 0")
    if engine == "deepspeed" and config.train.precision == "float64":
        reason = "is no precision that DeepSpeed computes in"
        _refuse("train.precision", "float64", reason, "use float32, bf16 or fp16, or sharding.stage=0")
    if engine == "fsdp":
        _fsdp_rules(config)
        return
    for key, usual in OF_FSDP.items():
        if (value := getattr(config.sharding, key)) != usual:
            reason = f"is of sharding.engine=fsdp, and this one is {engine}"
            _refuse(f"sharding.{key}", value, reason, f"use {usual}, or sharding.engine=fsdp")
    if stage < 3 and not config.sharding.reshard_after_forward:
        reason = f"sharding.stage={stage} shards no weights that could be let go"
        _refuse("sharding.reshard_after_forward", False, reason, "use true, or sharding.stage=3")


def _paged(config: RunConfig) -> None:
    if config.optimizer.paged and config.engine != "none":
        reason = f"is for sharding.engine=none; {config.engine} makes its own optimizer state"
        _refuse("optimizer.paged", True, reason, "use false, or sharding.stage=0")


def _recompute(config: RunConfig) -> None:
    train = config.train
    if train.activation_budget is not None and train.recomputation != TrainConfig().recomputation:
        reason = "chooses train.recompute, train.recompute_ops and train.recompute_every, and these are set"
        _refuse("train.activation_budget", train.activation_budget, reason, "leave them out, or use null")
    if train.activation_budget is not None and (place := config.sharding.offload.activations) != "none":
        reason = (
            f"is of activations that stay on the device, and sharding.offload.activations={place} takes them off it"
        )
        fix = "use null, or sharding.offload.activations=none"
        _refuse("train.activation_budget", train.activation_budget, reason, fix)
    if train.recompute == "none" and (every := train.recompute_every) != 1:
        reason = "says which layers are computed again, and train.recompute=none computes none of them again"
        _refuse("train.recompute_every", every, reason, "use 1, or train.recompute=full or selective")
    operations = list(train.recompute_ops)
    if train.recompute != "selective" and train.recompute_ops != TrainConfig().recompute_ops:
        reason = f"says what train.recompute=selective computes again, and it is {train.recompute}"
        _refuse("train.recompute_ops", operations, reason, "leave it out, or use train.recompute=selective")
    if not operations:
        _refuse("train.recompute_ops", operations, "names nothing", "use train.recompute=none")
    for operation in operations:
        if reason := without_effect(config.model, train.recompute_ops, operation):
            once = tuple(dict.fromkeys(operations))
            others = [other for other in once if not without_effect(config.model, once, other)]
            rest = as_written(others or TrainConfig().recompute_ops)
            _refuse("train.recompute_ops", operations, reason, f"use {rest}")


def _offload(config: RunConfig) -> None:
    offload, stage = config.sharding.offload, config.sharding.stage
    for what in ("optimizer", "params"):
        if (place := getattr(offload, what)) != "none" and config.engine == "none":
            fix = "use none, or sharding.stage=1, 2 or 3, on one rank too"
            _refuse(f"sharding.offload.{what}", place, "sharding.engine=none keeps its state on the device", fix)
    if offload.params != "none" and stage < 3 and config.engine == "deepspeed":
        reason = f"sharding.stage={stage} keeps whole weights on the device"
        _refuse("sharding.offload.params", offload.params, reason, "use none, or sharding.stage=3")
    if offload.optimizer == "none" and offload.optimizer_share != 1.0:
        reason = "is of what sharding.offload.optimizer takes off the device, which is nothing"
        _refuse("sharding.offload.optimizer_share", offload.optimizer_share, reason, "use optimizer=cpu or nvme")
    if offload.optimizer_share != 1.0 and config.engine == "fsdp":
        reason = "sharding.engine=fsdp keeps all weights and state in one place"
        _refuse("sharding.offload.optimizer_share", offload.optimizer_share, reason, "use 1")
    if offload.params != "nvme" and offload.params_share != 1.0:
        reason = f"is of weights on a disk, and sharding.offload.params is {offload.params}"
        _refuse("sharding.offload.params_share", offload.params_share, reason, "use 1, or params=nvme")
    if offload.gradients != "auto" and (stage < 3 or offload.optimizer != "nvme"):
        reason = "is for ZeRO 3 with optimizer=nvme; elsewhere gradients wait where they are reduced, or on the host"
        _refuse("sharding.offload.gradients", offload.gradients, reason, "use auto")
    if offload.path is not None and not offload.on_disk:
        _refuse("sharding.offload.path", str(offload.path), "has no effect: nothing is nvme", "leave it out")
    if offload.state and not config.sharding.torch_adam and config.engine == "deepspeed":
        reason = "state that is offloaded is updated by PyTorch's fused AdamW, which needs no op of DeepSpeed's"
        _refuse("sharding.torch_adam", False, reason, "use true")


def _fsdp_rules(config: RunConfig) -> None:
    sharding = config.sharding
    if sharding.stage in (1, 2):
        reason = "sharding.engine=fsdp shards weights, gradients and optimizer state, as stage 3 does"
        _refuse("sharding.stage", sharding.stage, reason, "use 3, or sharding.engine=deepspeed")
    if sharding.reduce_dtype != "float32" and config.train.precision != "bf16":
        reason = f"rounds gradients more than train.precision={config.train.precision} does"
        _refuse("sharding.reduce_dtype", sharding.reduce_dtype, reason, "use float32, or train.precision=bf16")
    places = {what: getattr(sharding.offload, what) for what in ("params", "optimizer")}
    for what, place in places.items():
        if place == "nvme":
            reason = "sharding.engine=fsdp keeps what is not on the device in host memory"
            _refuse(f"sharding.offload.{what}", place, reason, "use cpu, or sharding.engine=deepspeed")
    if len(set(places.values())) > 1:
        what = "optimizer" if places["params"] == "none" else "params"
        reason = "sharding.engine=fsdp keeps weights and optimizer state in one place"
        _refuse(
            f"sharding.offload.{what}",
            "cpu",
            reason,
            "use cpu for both sharding.offload.params and sharding.offload.optimizer",
        )


def _folder(config: RunConfig) -> None:
    """submitit puts a job's number in the place of %j, and a rank's in that of %t."""
    if "%" in str(config.folder):
        _refuse("folder", str(config.folder), "the path of a run may not hold a %", "use another folder")


def _learning_rate(config: RunConfig) -> None:
    options, steps = config.optimizer, config.train.steps
    if options.warmup_steps >= steps:
        _refuse(
            "optimizer.warmup_steps",
            options.warmup_steps,
            f"must be less than train.steps={steps}",
            f"use at most {steps - 1}",
        )
    if options.schedule == "wsd":
        decay = options.final_decay(steps)
        if options.warmup_steps + decay > steps:
            reason = f"warm-up of {options.warmup_steps} and decay of {decay} must fit in train.steps={steps}"
            _refuse("optimizer.decay_steps", options.decay_steps, reason, f"use at most {steps - options.warmup_steps}")
    elif options.decay_steps:
        _refuse("optimizer.decay_steps", options.decay_steps, "only optimizer.schedule=wsd has a final decay", "use 0")
    if options.batch_rule != "none" and not options.base_global_batch:
        _refuse("optimizer.batch_rule", options.batch_rule, "needs optimizer.base_global_batch", "or use none")
    if options.batch_rule == "none" and options.base_global_batch:
        reason = "has no effect with optimizer.batch_rule=none"
        _refuse("optimizer.base_global_batch", options.base_global_batch, reason, "use batch_rule linear or sqrt")


def _evaluation(config: RunConfig) -> None:
    train = config.train
    if train.eval_every and not train.eval_batches:
        _refuse("train.eval_every", train.eval_every, "needs train.eval_batches of at least 1", "or use 0")
    if train.eval_batches and not config.data.validation:
        fix = "set train.eval_batches=0 or a share such as data.validation=0.01"
        _refuse("data.validation", config.data.validation, "leaves nothing to evaluate on", fix)


def _checkpoints(config: RunConfig) -> None:
    checkpoint, steps = config.checkpoint, config.train.steps
    if checkpoint.every > steps and not checkpoint.at_end:
        reason = f"saves nothing in train.steps={steps}"
        _refuse("checkpoint.every", checkpoint.every, reason, "use a smaller one, or checkpoint.at_end=true")
    if checkpoint.resume == "must" and checkpoint.continue_from:
        reason = "has no effect with checkpoint.resume=must, which continues this run or stops"
        _refuse("checkpoint.continue_from", str(checkpoint.continue_from), reason, "use checkpoint.resume=auto")
    if checkpoint.base and checkpoint.continue_from and config.model.adapter is None:
        reason = "has no effect with checkpoint.continue_from, which brings weights and all else of a run"
        _refuse("checkpoint.base", str(checkpoint.base), reason, "use null, or checkpoint.continue_from=null")


def _tensor_parallel(config: RunConfig, layout: Layout) -> None:
    model, tp = config.model, layout.tp
    reasons = {
        "heads": f"must divide model.heads={model.heads}",
        "kv_heads": f"must divide model.kv_heads={model.kv} or be a multiple of it",
        "ffn": f"must divide the MLP's width, model.ffn={model.ffn_width}",
        "shared_ffn": f"must divide the width of the shared MLP, model.moe.shared_ffn={_shared(config)}",
        "vocab": f"must be at most model.vocab={model.vocab}",
    }
    if cut := misfit(model, tp):
        fits = tp_sizes(model, layout.world)
        others = [size for size in tp_sizes(model) if size not in fits]
        fix = f"use {_either(fits)}" + (f", or with as many ranks {_either(others)}" if others else "")
        _refuse("parallel.tp", tp, reasons[cut], fix)


def _pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.model.layers
    number = parallel.pp * parallel.chunks
    if parallel.pp == 1:
        for key, usual in (("schedule", "1f1b"), ("chunks", 1), ("stage_layers", None)):
            if (value := getattr(parallel, key)) != usual:
                value = list(value) if key == "stage_layers" else value
                reason = "has no effect without a pipeline, and parallel.pp is 1"
                _refuse(f"parallel.{key}", value, reason, f"use {as_written(usual)}, or parallel.pp=2")
    make_schedule(parallel.schedule, parallel.pp, parallel.chunks, 1)
    if parallel.schedule in ZERO_BUBBLE and config.engine != "none":
        who = {"deepspeed": "DeepSpeed", "fsdp": "FSDP2"}[config.engine]
        reason = f"leaves gradients of weights for later, and {who} takes them in the hooks of one whole backward"
        mend = "sharding.stage=0" if config.sharding.engine == "auto" else "sharding.engine=none"
        _refuse("parallel.schedule", parallel.schedule, reason, f"use 1f1b or interleaved, or {mend}")
    sizes = parallel.stage_layers
    if sizes is None and layers < number:
        reason = (
            f"pp x chunks = {parallel.pp} x {parallel.chunks} virtual stages need as many layers; there are {layers}"
        )
        _refuse("parallel.pp", parallel.pp, reason, "use fewer, or name the layers of each in parallel.stage_layers")
    if sizes is None:
        return
    if len(sizes) != number or sum(sizes) != layers:
        reason = f"must be {number} numbers (pp x chunks) with the sum {layers} (model.layers)"
        _refuse("parallel.stage_layers", list(sizes), reason, "use null for a balanced split")
    if 0 in sizes[1:-1]:
        reason = "only the first and the last stage can do without layers"
        _refuse("parallel.stage_layers", list(sizes), reason, "give every other stage at least 1")


def _expert_parallel(config: RunConfig, layout: Layout) -> None:
    model, stage, world = config.model, config.sharding.stage, layout.world // layout.pp
    if model.moe is None:
        for axis in ("ep", "etp"):
            if (size := getattr(layout, axis)) > 1:
                _refuse(f"parallel.{axis}", size, "splits experts, and the model has none (model.moe=null)", "use 1")
        return
    if model.moe.experts % layout.ep:
        allowed = _either(ep for ep in divisors(model.moe.experts) if world % (ep * layout.etp) == 0)
        _refuse("parallel.ep", layout.ep, f"must divide model.moe.experts={model.moe.experts}", f"use {allowed}")
    if model.expert_width % layout.etp:
        _refuse("parallel.etp", layout.etp, f"must divide the width of an expert, {model.expert_width}", "use 1")
    unfit = zero_misfit(model, layout, stage if config.engine == "deepspeed" else 0)
    if unfit == "stage":
        reason = "shards every parameter over dp x cp, and experts lie elsewhere unless ep x etp is tp"
        fix = f"use 1 or 2, or parallel.ep={layout.tp // layout.etp}"
        _refuse("sharding.stage", 3, reason, fix)
    if unfit == "pp":
        reason = (
            "leaves a rank of the pipeline without experts, and DeepSpeed takes the norm of as many kinds everywhere"
        )
        _refuse("parallel.pp", layout.pp, reason, "use sharding.stage=0, or a smaller model.moe.dense_layers")


def _sequence_parallel(config: RunConfig, layout: Layout) -> None:
    if layout.sp and layout.tp == 1:
        _refuse("parallel.sp", True, "splits the sequence over the ranks of parallel.tp, which is 1", "use false")


def _sequence(config: RunConfig, layout: Layout) -> None:
    """Every rank of cp, and with sp every rank of tp, has the same share of a sequence."""
    seq, parallel, cp = config.data.seq, config.parallel, layout.cp
    cut = does_not_split(config.model, parallel, seq)
    if cut == "heads":
        heads = config.model.heads // layout.tp
        reason = f"must divide the {heads} heads of a rank (model.heads / tp), which ulysses splits"
        _refuse("parallel.cp", cp, reason, f"use {_either(divisors(heads))}, or parallel.cp_method=ring")
    if cut == "seq":
        ring = ", twice over in a ring" if parallel.cp_method == "ring" else ""
        reasons = [f"parallel.cp={cp}{ring}"] if cp > 1 else []
        reasons += [f"parallel.tp={layout.tp} with parallel.sp"] if layout.sp else []
        size = multiple(parallel)
        near = [n for n in (seq // size * size, (seq // size + 1) * size) if n]
        _refuse("data.seq", seq, f"must be a multiple of {size} for {' and '.join(reasons)}", f"use {_either(near)}")


def _replicas(config: RunConfig, layout: Layout) -> None:
    ranks, replicas = layout.dp * layout.cp, config.sharding.replicas
    if ranks % replicas:
        reason = f"must divide the {ranks} ranks of dp x cp, that share the state"
        _refuse("sharding.replicas", replicas, reason, f"use {_either(divisors(ranks))}")


def _batch(config: RunConfig, layout: Layout) -> None:
    batch, micro = config.train.global_batch, config.train.micro_batch
    group = layout.dp * micro
    if batch % group == 0:
        return
    near = [n for n in (batch // group * group, (batch // group + 1) * group) if n]
    fix = f"use {_either(near)}"
    if batch % layout.dp == 0:
        fits = [m for m in divisors(batch // layout.dp) if m < micro]
        fix += f", or train.micro_batch={fits[-1]}"
    reason = f"must be a multiple of dp x micro_batch = {layout.dp} x {micro} = {group}"
    _refuse("train.global_batch", batch, reason, fix)


RULES: tuple[Rule, ...] = (
    _experts,
    _attention_shape,
    _positions,
    _sharding_rules,
    _recompute,
    _offload,
    _paged,
    check_adapters,
    _pipeline,
    _folder,
    _learning_rate,
    _evaluation,
    _checkpoints,
)
LAYOUT_RULES: tuple[LayoutRule, ...] = (
    _tensor_parallel,
    _expert_parallel,
    check_adapters_of,
    _sequence_parallel,
    _sequence,
    _replicas,
    _batch,
)


def _refuse(path: str, value: object, allowed: str, fix: str = "") -> None:
    raise ConfigError(path, value, allowed, fix)


def _shared(config: RunConfig) -> int:
    return config.model.moe.shared_ffn if config.model.moe else 0


def _either(values: Iterable[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
