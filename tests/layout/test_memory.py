"""Memory against published figures and hand numbers."""

from __future__ import annotations

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import activation_bytes
from hpctrain.layout.activations import activations as activations_of
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Memory, away_of, estimate
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.units import GIB, in_gib

# The 22B model of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), tables 3 and 5.
GPT_22B = (
    "model.layers=48 model.hidden=6144 model.heads=64 model.vocab=51200 model.max_seq=2048 data.seq=2048 "
    "data.document_mask=false parallel.tp=8 train.micro_batch=4 train.global_batch=4 train.precision=bf16"
)


def of(overrides: str, world: int, recipe: str = "gpt-tiny") -> tuple[RunConfig, Layout]:
    config = load(recipe, overrides.split())
    return config, Layout.of(config.parallel, world)


def activations(config: RunConfig, tp: int) -> int:
    return activation_bytes(config, Layout(tp=tp, sp=config.parallel.sp))


def test_published_state_of_22b() -> None:
    """Figure 1: 45.5625 GiB a GPU for parameters and optimizer, which counts the matrices of the layers alone."""
    memory = estimate(*of(GPT_22B, 8))
    state = memory.total - memory.activations
    matrices = 18 * 12 * 48 * 6144**2 / 8
    assert matrices == 45.5625 * GIB
    biases_and_norms = 48 * (6144 * (3 + 4) / 8 + 6144 * (2 + 4)) + 2 * 6144
    embeddings = 51200 / 8 * 6144 + 2048 * 6144
    assert state == matrices + 18 * (biases_and_norms + embeddings)


def test_published_activations_of_22b() -> None:
    """Equation 2, s b h (10 + 24/t) a layer, less dropout masks (2) and attention scores, which are not stored."""
    config, _ = of(GPT_22B, 8)
    short = config.model_copy(update={"model": config.model.model_copy(update={"layers": 47})})
    assert activations(config, 8) - activations(short, 8) == 2048 * 4 * 6144 * (8 + 24 / 8)


def test_published_activations_of_22b_with_sequence_parallelism() -> None:
    """Equation 4, s b h 34/t, less the same; table 2 for full recomputation: 2 s b h, of which sp keeps 1/t."""
    config, _ = of(GPT_22B + " parallel.sp=true", 8)
    model, train = config.model, config.train

    def at(layers: int, recompute: str, every: int = 1) -> int:
        changed = {
            "model": model.model_copy(update={"layers": layers}),
            "train": train.model_copy(update={"recompute": recompute, "recompute_every": every}),
        }
        return activations(config.model_copy(update=changed), 8)

    assert at(48, "none") - at(47, "none") == 2048 * 4 * 6144 * 32 / 8
    assert at(48, "full") - at(47, "full") == 2048 * 4 * 6144 * 2 / 8
    assert at(1, "full") == at(1, "selective") == at(1, "none")
    whole, inputs = (at(48, what) - at(47, what) for what in ("none", "full"))
    # of 5 layers 3 are computed again, the last of them first; of 4 the last is kept, and has left room before one is
    assert at(5, "full", 2) - at(1, "none") == 2 * whole + 2 * inputs
    assert at(4, "full", 2) - at(1, "none") == whole + 2 * inputs
    assert at(4, "full", 1) < at(4, "full", 2) < at(4, "full", 4) < at(4, "none")


def test_weights_on_a_disk_are_read_again_for_the_layers_that_are_computed_again() -> None:
    """Of 4 layers, 2 stages of 2; with 3 a chunk's first and third."""

    def read(more: str, rest: str = "") -> int:
        state = "sharding.stage=3 sharding.offload.params=nvme parallel.tp=1 train.micro_batch=4 train.global_batch=16"
        return away_of(*of(f"{state} {more} {rest}", 2, "llama-tiny")).read

    for rest, share in (("", 1 / 2), ("parallel.pp=2", 1 / 2), ("model.layers=3", 2 / 3)):
        none, some, full = (read(more, rest) for more in (
            "train.recompute=none", "train.recompute=full train.recompute_every=2", "train.recompute=full"
        ))  # fmt: skip
        assert full == none * 3 / 2 and some - none == pytest.approx(share * (full - none), abs=1)


def test_of_operations_those_with_weights_read_them_again() -> None:
    """llama-tiny: an MLP has 3 x 344 of the rows of 128 of a layer, attention 128 + 2 x 64 + 128, and norms 2."""

    def read(more: str) -> int:
        state = "sharding.stage=3 sharding.offload.params=nvme parallel.tp=1 train.micro_batch=4 train.global_batch=16"
        return away_of(*of(f"{state} {more}", 2, "llama-tiny")).read

    none, full, norms, mlps = (read(f"train.recompute={more}") for more in (
        "none", "full", "selective train.recompute_ops=[core_attn,layernorm,activation]",
        "selective train.recompute_ops=[layernorm,mlp]",
    ))  # fmt: skip
    assert norms == none
    assert (mlps - none) / (full - none) == pytest.approx(3 * 344 / (3 * 344 + 3 * 128 + 2), rel=1e-6)


def test_selective_recomputation_keeps_keys_and_values_once() -> None:
    """llama-8b, 32 heads over 8 of keys and values, bf16: 24 heads of 128 less of each, but for one layer."""
    less, none = (of(f"parallel.tp=1 train.precision=bf16 train.recompute={r}", 8, "llama-8b")[0] for r in
                  ("selective", "none"))  # fmt: skip
    tokens = none.train.micro_batch * none.data.seq
    assert activations(none, 1) - activations(less, 1) == tokens * 31 * 2 * 24 * 128 * 2


def test_llama_layer_by_hand() -> None:
    overrides = "data.document_mask=false train.micro_batch=1 data.seq=1"
    two, one = (activations(load("llama-tiny", [*overrides.split(), f"model.layers={n}"]), 2) for n in (2, 1))
    # float32, tp 2: four norms' ends of 128, q k v o of 2 heads x 32, four tensors of 344 / 2
    assert two - one == 4 * (4 * 128 + 4 * 64 + 4 * 172)
    # the rest: embedding and final norm, the larger part of 257 logits and its gradient
    assert one - (two - one) == 4 * (2 * 128 + 2 * 129)


def test_document_mask_is_a_number_for_every_pair() -> None:
    """In float32, however many layers there are."""
    with_mask, without = (activations(load("llama-tiny", [f"data.document_mask={b}"]), 2) for b in ("true", "false"))
    assert with_mask - without == 16 * 256 * 256 * 4


def test_what_backward_computes_again_is_there_once_however_many_micro_batches_wait() -> None:
    """1F1B of 4 stages with 2 layers each, bf16: in the first wait 4 micro-batches, of which full recomputation keeps
    each layer's input and what is handed on; besides there is room for one layer's other 15 widths and for 2 received.
    """
    overrides = (
        "parallel.pp=4 parallel.tp=1 model.layers=8 model.vocab=256 data.document_mask=false train.precision=bf16 "
        "train.recompute=full train.global_batch=64 train.micro_batch=1 data.seq=256"
    )
    config, layout = of(overrides, 4)
    assert config.model.ffn_width == 4 * config.model.hidden and not config.model.dropout
    hidden = 256 * config.model.hidden * 2
    assert estimate(config, layout).activations == (4 * (2 + 1) + 15 + 2) * hidden


def test_a_trillion_parameters_over_64_stages() -> None:
    """arXiv 2104.04473 trains the 1T model of table 1 on GPUs of 80 GB; 64 micro-batches keep an eighth of 2 layers'
    inputs and of an output each, [1, 2048, 25600] in bf16."""
    config, layout = of("train.recompute=full", 3072, "gpt-1t")
    kept = 64 * 3 * 2048 * 25600 * 2 // 8
    assert kept < estimate(config, layout).activations < 2 * kept


@pytest.mark.parametrize(
    ("method", "kept", "spared"),
    [
        ("ring", (4 + 2 * 2 + 4) * 32 + 4, 4),  # queries, keys and values, output; a sum of each query
        ("ulysses", 5 * 4 * 32, (5 - 3) * 4 * 32),  # keys and values of all heads; the output twice
    ],
)
@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_keeps_a_part(cp: int, method: str, kept: int, spared: int) -> None:
    """float32, 4 heads of 32 over 2 of keys and values, one document."""
    base = f"parallel.tp=1 parallel.cp={cp} parallel.cp_method={method} data.document_mask=false model.layers="
    two, one, less = (
        activation_bytes(*of(base + rest, 4, "llama-tiny")) for rest in ("2", "1", "2 train.recompute=selective")
    )
    tokens = 16 * 256 // cp
    assert two - one == tokens * 4 * (4 * 128 + kept + 4 * 344)
    assert two - less == tokens * 4 * spared


def test_context_parallelism_shards_state_over_all_its_ranks() -> None:
    whole, parts = (estimate(*of(f"parallel.tp=1 sharding.stage=3 parallel.cp={cp}", 4)) for cp in (1, 4))
    assert (whole.weights, whole.gradients, whole.optimizer) == (parts.weights, parts.gradients, parts.optimizer)


@pytest.mark.parametrize(
    ("more", "tp", "outputs"),
    [
        ("", 1, 4 * 32 + 2 * 2 * 32 + 128 + 2 * 344 + 128),
        ("parallel.tp=2", 2, 2 * 32 + 2 * 32 + 128 + 2 * 172 + 128),
        ("parallel.tp=2 parallel.sp=true", 2, 2 * 32 + 2 * 32 + 64 + 2 * 172 + 64),
        ("model.adapter.targets=[q,down]", 1, 4 * 32 + 128),
        ("model.activation=gelu model.adapter.targets=[mlp]", 1, 344 + 128),
    ],
)
def test_dora_keeps_what_its_magnitudes_are_multiplied_with(more: str, tp: int, outputs: int) -> None:
    """float32, 4 heads of 32 over 2 of keys and values, 4 layers."""
    dora, lora = (
        activation_bytes(*of(f"parallel.tp=1 model.adapter.kind={kind} {more}", tp, "llama-tiny"))
        for kind in ("dora", "lora")
    )
    assert dora - lora == 4 * outputs * 4 * 16 * 256


def test_an_mlp_that_is_computed_again_spares_what_its_magnitudes_are_multiplied_with() -> None:
    """Those of attention stay: 4 heads of 32 over 2 of keys and values, and 128 columns of its output."""

    def kept(kind: str) -> int:
        more = f"parallel.tp=1 model.adapter.kind={kind} train.recompute=selective train.recompute_ops=[mlp]"
        return activations_of(*of(more, 1, "llama-tiny")).kept

    assert kept("dora") - kept("lora") == 4 * (4 * 32 + 2 * 2 * 32 + 128) * 4 * 16 * 256


def test_experts_by_hand() -> None:
    """A token in float32, of moe-tiny without groups of heads: 2 of 8 experts 172 wide, and what a capacity changes."""
    base = "data.document_mask=false train.micro_batch=1 data.seq=1 model.kv_heads=4"

    def layer(more: str = "") -> int:
        two, one = (
            activation_bytes(load("moe-tiny", [*base.split(), *more.split(), f"model.layers={n}"]), Layout())
            for n in (2, 1)
        )
        return two - one

    attention, router = 4 * 128 + 4 * 128, 3 * 8
    sent, inner, returned = 2 * 128, 2 * 4 * 172, 2 * 128
    assert layer() == layer("model.moe.capacity=2") == 4 * (attention + router + sent + inner + returned)
    assert layer("model.moe.capacity=0.5") == 4 * (attention + router + (sent + inner) // 2 + returned)
    padded = "model.moe.capacity=1.5 model.moe.overflow=pad"
    assert layer(padded) == 4 * (attention + router + 3 * (sent + inner) // 2 + returned)
    assert layer("model.moe.shared_ffn=64") == layer() + 4 * 4 * 64
    assert layer("train.recompute=full") == 4 * 128
    both, one = (
        activation_bytes(load("moe-tiny", [*base.split(), f"model.moe.dense_layers={n}"]), Layout()) for n in (0, 1)
    )
    assert both - one == layer() - 4 * (attention + 4 * 344)


P = 859_008
"""Parameters of gpt-tiny."""
SHARD = -(-P // 4)


@pytest.mark.parametrize(
    ("overrides", "weights", "gradients", "optimizer"),
    [
        ("train.precision=float32", 4 * P, 4 * P, 8 * P),
        ("train.precision=float64", 8 * P, 8 * P, 16 * P),
        ("train.precision=bf16", 2 * P, 4 * P, 12 * P),
        ("train.precision=fp16", 2 * P, 4 * P, 12 * P),
        ("sharding.stage=1", 4 * P, 4 * P, 12 * SHARD),
        ("sharding.stage=2", 4 * P, 4 * SHARD, 12 * SHARD),
        ("sharding.stage=3", 4 * SHARD, 4 * SHARD, 12 * SHARD),
        ("sharding.stage=3 train.precision=bf16", 2 * SHARD, 4 * SHARD, 12 * SHARD),
        ("sharding.engine=fsdp", 4 * SHARD, 4 * SHARD, 8 * SHARD),
        ("sharding.engine=fsdp train.precision=float64", 8 * SHARD, 8 * SHARD, 16 * SHARD),
        ("sharding.engine=fsdp train.precision=bf16", 4 * SHARD, 4 * SHARD, 8 * SHARD),
        ("sharding.engine=fsdp sharding.reshard_after_forward=false", 4 * (SHARD + P), 4 * SHARD, 8 * SHARD),
        ("sharding.engine=fsdp sharding.reduce_every=step train.precision=bf16", 4 * SHARD, 4 * P, 8 * SHARD),
        ("sharding.engine=fsdp sharding.replicas=2", 8 * SHARD, 8 * SHARD, 16 * SHARD),
    ],
)
def test_state_of_every_engine(overrides: str, weights: int, gradients: int, optimizer: int) -> None:
    config, layout = of(f"parallel.tp=1 {overrides}", 4)
    assert sum(s.numel for s in parameter_specs(config.model)) == P
    memory = estimate(config, layout)
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, optimizer)


def test_tp_divides_what_it_cuts() -> None:
    whole, half = estimate(*of("parallel.tp=1", 1)), estimate(*of("parallel.tp=2", 2))
    assert whole.weights / 2 < half.weights < 0.6 * whole.weights
    assert half.activations < whole.activations


@pytest.mark.parametrize(
    ("stage", "fragment"), [(1, 128256 * 4096), (2, 128256 * 4096), (3, 128256 * 4096 // 8)], ids=str
)
def test_building_counts_where_it_is_more(stage: int, fragment: int) -> None:
    """Two float32 copies of the largest fragment: of the vocabulary's matrix, or of an eighth of it."""
    overrides = f"parallel.tp=1 sharding.stage={stage} train.micro_batch=1 data.seq=1"
    memory = estimate(*of(overrides, 8, "llama-8b"))
    there = memory.weights + memory.optimizer + (memory.gradients if stage == 3 else 0)
    assert memory.building == there + 8 * fragment
    assert memory.total == (memory.training if stage == 1 else memory.building)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "0.000000000931"),
        (88064, "0.000082"),
        (GIB, "1"),
        (100 * GIB - 1, "100"),
        (1234567 * GIB, "1,234,567"),
    ],
)
def test_gib_have_three_digits_and_no_exponent(size: int, text: str) -> None:
    assert in_gib(size) == text


def test_description() -> None:
    assert Memory(GIB, GIB // 2, 2 * GIB, 0).describe() == "weights 1, gradients 0.5, optimizer 2, activations 0 GiB"


MOE = "model.moe.experts=8 model.moe.ffn=64 model.bias=false parallel.tp=1"


@pytest.mark.parametrize(
    ("overrides", "split", "dense_ranks", "edp"),
    [
        ("", 1, 4, 4),
        ("parallel.ep=2", 2, 4, 2),
        ("parallel.ep=4", 4, 4, 1),
        ("parallel.tp=2", 1, 2, 4),
        ("parallel.tp=2 parallel.ep=4", 4, 2, 1),
        ("parallel.tp=2 parallel.ep=2 parallel.etp=2", 4, 2, 1),
    ],
)
def test_state_of_experts(overrides: str, split: int, dense_ranks: int, edp: int) -> None:
    """4 ranks under ZeRO 2: dense parameters are sharded over dp, experts over edp."""
    config, layout = of(f"{MOE} sharding.stage=2 {overrides}", 4)
    experts = sum(s.numel for s in parameter_specs(config.model) if "experts" in s.cuts) // split
    memory = estimate(config, layout)
    dense = memory.weights // 4 - experts
    shard = -(-dense // dense_ranks) - (-experts // edp)
    assert (memory.gradients, memory.optimizer) == (4 * shard, 12 * shard)
    whole = sum(s.numel for s in parameter_specs(config.model) if "experts" not in s.cuts)
    assert dense == whole if layout.tp == 1 else dense < whole
