"""Whether a run fits, and the mends that a refusal names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout import alive
from hpctrain.layout.activations import ON_CPU, OURS
from hpctrain.layout.fits import Room, check_memory, needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import estimate
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.phases import fullest, phases
from hpctrain.layout.schedule import Schedule, make_schedule
from hpctrain.layout.units import GIB, MIB, in_gib


def of(overrides: str, world: int, recipe: str = "gpt-tiny") -> tuple[RunConfig, Layout]:
    config = load(recipe, overrides.split())
    return config, Layout.of(config.parallel, world)


MOE = "model.moe.experts=8 model.moe.ffn=64 model.bias=false parallel.tp=1"


def mends(
    overrides: str, world: int, share: float, recipe: str = "llama-8b", host: int | None = None, disk: int | None = None
) -> list[str]:
    """What a refusal at `share` of the need proposes; each proposal is checked to run and to fit.

    Args:
        host, disk: bytes of these; without host the device is a CPU.
    """
    config, layout = of(overrides, world, recipe)
    available = Room(int(needed(config, layout, Room(0, host).keeps).total * share), host, disk)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, layout, available, validate)
    if not caught.value.fix.startswith("use ") or "more ranks" in caught.value.fix:
        return []
    proposals = caught.value.fix.removeprefix("use ").split(", or ")
    for proposal in proposals:
        mended, changed = of(f"{overrides} {proposal}", world, recipe)
        validate(mended, world)
        check_memory(mended, changed, available, validate)
    return proposals


def test_mends_keep_to_what_sequence_parallelism_allows() -> None:
    """Of 4, 8, 16 and 32 ranks, over which llama-8b's heads divide, only 4 divide 12 places."""
    state = "sharding.engine=none sharding.stage=0 parallel.tp=2 train.micro_batch=1"
    assert mends(f"{state} data.seq=12 parallel.sp=true", 32, 0.6) == ["parallel.tp=4"]
    assert mends(f"{state} data.seq=12 parallel.sp=true", 32, 0.3) == []
    assert mends(f"{state} data.seq=16 parallel.sp=true", 32, 0.3) == ["parallel.tp=8"]


def test_a_sequence_that_is_too_long_is_to_be_split() -> None:
    assert "parallel.cp=8" in mends("parallel.tp=1 data.seq=65536 model.max_seq=65536 train.micro_batch=1 "
                                    "sharding.stage=3 train.recompute=full parallel.cp=2", 8, 0.7)  # fmt: skip


def test_what_fits_is_named_and_fits() -> None:
    eight = "parallel.tp=1 sharding.stage=1 train.micro_batch=4 data.seq=4096"
    assert mends(eight, 8, 0.9) == [
        "train.micro_batch=2",
        "train.recompute=full",
        "sharding.stage=2",
        "parallel.cp=2",
        "parallel.tp=2",
    ]


def test_named_operations_give_way_to_whole_layers() -> None:
    """On one rank nothing else makes room."""
    some = "parallel.tp=1 sharding.engine=none sharding.stage=0 train.micro_batch=1 train.global_batch=1 data.seq=8192"
    named = "train.recompute=selective train.recompute_ops=[layernorm]"
    assert mends(f"{some} {named}", 1, 0.9) == ["train.recompute=full train.recompute_ops=[core_attn]"]


LESS = "parallel.tp=1 train.micro_batch=1 train.recompute=full"
LORA = "model.adapter.kind=lora"
NVME = "sharding.stage=3 sharding.offload.optimizer=nvme"
HOST = ["sharding.offload.optimizer=cpu sharding.offload.gradients=auto"]


@pytest.mark.parametrize(
    ("overrides", "world", "share", "room", "found"),
    [
        ("sharding.stage=1 sharding.torch_adam=false", 1, 0.6, (1 << 40,), []),
        ("optimizer.paged=true", 4, 0.7, (), ["parallel.tp=2"]),
        (f"{LORA} sharding.stage=1 train.precision=bf16", 4, 0.9, (), ["parallel.cp=2", "parallel.tp=2"]),
        (f"{LORA} model.adapter.kind=qlora model.adapter.block=8", 4, 0.9, (), ["parallel.cp=2"]),
        (f"{NVME} sharding.offload.path=/tmp", 1, 1.2, (1 << 40, 1 << 20), []),
        (f"{NVME} sharding.offload.gradients=nvme", 1, 1.2, (1 << 40, 1 << 20), HOST),
    ],
    ids=["torch_adam", "paged", "lora", "qlora", "path", "gradients"],
)  # fmt: skip
def test_what_would_break_another_rule_is_not_offered(
    overrides: str, world: int, share: float, room: tuple[int, ...], found: list[str]
) -> None:
    """Though it would fit: offloading, a stage or tp that another setting excludes."""
    assert mends(f"{LESS} {overrides}", world, share, "llama-tiny", *room) == found


def test_two_changes_where_one_does_not_do() -> None:
    found = mends("parallel.tp=1 sharding.stage=1 train.micro_batch=32 data.seq=4096", 8, 0.04)
    assert found
    assert all(len(proposal.split()) == 2 for proposal in found)


def test_nothing_fits() -> None:
    assert mends("", 2, 0.001, "gpt-tiny") == []


def test_enough_is_enough() -> None:
    config, layout = of("", 2)
    need = needed(config, layout, ON_CPU).total
    check_memory(config, layout, need, validate)
    with pytest.raises(
        ConfigError, match=r"^memory='.* GiB': more than the .* GiB that a rank has; needed are weights .*; use "
    ):
        check_memory(config, layout, need - 1, validate)


def test_memory_of_the_host_is_that_of_a_cpu() -> None:
    """What is offloaded to it is still there."""
    config, layout = of(f"{LESS} sharding.stage=3 sharding.offload.optimizer=cpu", 2, "llama-tiny")
    need = needed(config, layout, ON_CPU)
    assert need.host > 0
    check_memory(config, layout, need.total + need.host, validate)
    with pytest.raises(ConfigError):
        check_memory(config, layout, need.total + need.host - 1, validate)


def test_the_rank_that_needs_most_decides() -> None:
    """Of two stages the last, whose logits are much, though it has less state."""
    pipeline = "parallel.pp=2 parallel.tp=1 parallel.stage_layers=[3,1] train.micro_batch=4 train.global_batch=4"
    config, layout = of(f"{pipeline} model.vocab=4096 model.tied=false", 2, "llama-tiny")
    first, last = (phases(config, layout, rank, ON_CPU) for rank in range(2))
    assert first.at["start"].weights > last.at["start"].weights and first.peak < last.peak
    assert needed(config, layout, ON_CPU).total == last.peak


@pytest.mark.parametrize("fixed", ["train.precision=float64", "sharding.engine=none"])
def test_stages_are_not_offered_where_they_cannot_be(fixed: str) -> None:
    found = mends(f"{fixed} parallel.tp=1", 4, 0.6, "llama-tiny")
    assert found
    assert not any("stage" in proposal for proposal in found)


def test_no_stage_is_offered_beside_a_zero_bubble_schedule() -> None:
    """Where it would be a change that is enough, as it is beside 1f1b."""
    state = "parallel.tp=1 parallel.pp=2 train.micro_batch=1 train.recompute=full data.seq=17"
    assert mends(f"{state} parallel.schedule=1f1b", 8, 0.95, "llama-tiny")[0] == "sharding.stage=1"
    assert not any("stage" in p for p in mends(f"{state} parallel.schedule=zb-h1", 8, 0.95, "llama-tiny"))


def test_building_is_named_where_it_is_more() -> None:
    """Where AdamW makes no temporaries."""
    settings = "parallel.tp=1 sharding.stage=2 sharding.torch_adam=false train.micro_batch=1 data.seq=1"
    config, layout = of(settings, 8, "llama-8b")
    need = needed(config, layout, ON_CPU)
    with pytest.raises(ConfigError, match=rf" GiB, and {need.total / GIB:.3g} GiB while it is built; "):
        check_memory(config, layout, need.total - 1, validate)


def test_mends_of_a_model_with_experts_run() -> None:
    state = "parallel.tp=2 parallel.ep=2 parallel.etp=2 train.micro_batch=1 train.recompute=full data.seq=255"
    assert mends(f"{MOE} {state} sharding.engine=none", 8, 0.9, "gpt-tiny") == ["parallel.ep=4"]
    spread = f"{MOE} model.moe.experts=2 {state} sharding.engine=none"
    assert mends(spread, 8, 0.9, "gpt-tiny") == ["parallel.tp=4 parallel.etp=4"]
    assert not any("stage=3" in proposal for proposal in mends(f"{MOE} {state}", 8, 0.5, "gpt-tiny"))


def test_a_disk_with_too_little_room_is_refused() -> None:
    config, layout = of("parallel.tp=1 sharding.stage=1 sharding.offload.optimizer=nvme", 2)
    need = needed(config, layout, ON_CPU)
    assert need.disk >= 12 * sum(math.prod(spec.shape) for spec in parameter_specs(config.model)) // 2
    check_memory(config, layout, Room(1 << 40, None, need.disk), validate)
    with pytest.raises(ConfigError, match=r"GiB': on its disk, more than the .* that a rank finds free there"):
        check_memory(config, layout, Room(1 << 40, None, need.disk - 1), validate)


@pytest.mark.parametrize(
    ("room", "kind"),
    [((-1, 1 << 40, 1 << 40), "total"), ((0, -1, 1 << 40), "host"), ((0, 0, -1), "disk")],
)
def test_the_figure_is_of_what_there_is_too_little_of(room: tuple[int, int, int], kind: str) -> None:
    """Not of all that is needed anywhere.

    Args:
        room: beside what is needed of device, host and disk.
    """
    config, layout = of(f"{LESS} {NVME}", 1, "llama-tiny")
    need = needed(config, layout)
    assert len({need.total, need.host, need.disk}) == 3
    there = Room(need.total + room[0], need.host + room[1], need.disk + room[2])
    with pytest.raises(ConfigError, match=rf"^memory='{in_gib(getattr(need, kind))} GiB': "):
        check_memory(config, layout, there, validate)


def test_a_model_larger_than_its_memory_is_offered_a_disk() -> None:
    """docs/offload.md shows this refusal. What is offered moves state out of this memory, and never within it."""
    large = (
        "model.layers=36 model.hidden=512 model.heads=4 model.ffn=2048 model.max_seq=64 data.seq=64 "
        "train.global_batch=2 train.micro_batch=2 parallel.tp=1"
    )
    found = mends(large, 1, 0.11, "gpt-tiny")
    assert found and all("=nvme" in proposal and "=cpu" not in proposal for proposal in found), found


ZERO_3 = "parallel.tp=1 sharding.stage=3 train.micro_batch=1 data.seq=4096 train.recompute=full"


def test_a_gathered_unit_and_a_bucket_are_counted() -> None:
    """llama-8b over 64 ranks in bf16: two units at the most, of the largest, the vocabulary's matrix. State and
    activations alone would fit."""
    config, layout = of(ZERO_3, 64, "llama-8b")
    need, available = needed(config, layout, ON_CPU), 6 * GIB
    assert need.buffers == 2 * 2 * 128256 * 4096 + config.sharding.bucket_mib * MIB
    assert need.total - need.buffers < estimate(config, layout).total < available < need.total
    with pytest.raises(ConfigError, match=r"activations [\d.]+, buffers 1\.98 GiB; use "):
        check_memory(config, layout, available, validate)
    assert "parallel.cp=2" in mends(ZERO_3, 64, available / need.total)


def test_the_figure_is_that_of_the_fullest_phase() -> None:
    """In ZeRO's update of the same over 8 ranks: no activations, and AdamW's temporaries, fewer on a GPU."""
    config, layout = of(ZERO_3, 8, "llama-8b")
    shard = -(-sum(spec.numel for spec in parameter_specs(config.model)) // 8)
    bucket = round(config.sharding.bucket_mib * MIB)
    for keeps, copies in ((ON_CPU, 4), (OURS, 3)):  # of gradients in float32 there is one before, and one more
        need = needed(config, layout, keeps)
        assert (need.activations, need.buffers) == (0, (copies - 1) * 4 * shard + bucket)
        assert need.training == fullest(config, layout, keeps).peak


def test_a_gpu_is_asked_for_what_is_kept_there() -> None:
    config, layout = of(ZERO_3, 8, "llama-8b")
    gpu, cpu = (needed(config, layout, keeps).total for keeps in (OURS, ON_CPU))
    assert gpu < cpu
    check_memory(config, layout, Room(gpu, 0), validate)
    with pytest.raises(ConfigError):
        check_memory(config, layout, Room(gpu), validate)


@pytest.mark.parametrize(
    ("overrides", "recipe", "found"),
    [
        (f"train.micro_batch={10**12} train.global_batch={10**12}", "gpt-tiny", ["train.micro_batch=976562500"]),
        (f"model.moe.experts={10**12}", "moe-tiny", []),
        (f"model.heads={10**12} model.head_dim=2", "gpt-tiny", []),
    ],
)
def test_the_largest_numbers_come_to_an_end(overrides: str, recipe: str, found: list[str]) -> None:
    """What is tried are divisors, which are few."""
    assert mends(f"parallel.tp=1 {overrides}", 1, 1e-3, recipe) == found


def test_a_large_refusal_plays_few_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schedule once, and of 1,024 micro-batches a few: 16,384 actions would be one of them in full. The number of
    layers does not matter."""
    played: list[int] = []

    def counted(*shape: Any) -> Schedule:
        made = make_schedule(*shape)
        played.append(sum(map(len, made.ranks)))
        return made

    monkeypatch.setattr(alive, "make_schedule", counted)
    alive._of_all.cache_clear()
    deep = (
        "model.layers=128 model.hidden=64 model.heads=4 model.vocab=512 data.seq=64 parallel.tp=1 parallel.pp=8 "
        "parallel.schedule=1f1b train.micro_batch=1 train.global_batch=4096 sharding.engine=none sharding.stage=0"
    )
    config, layout = of(deep, 32)
    assert layout.dp == 4
    with pytest.raises(ConfigError, match="; use "):
        check_memory(config, layout, int(0.8 * needed(config, layout, ON_CPU).total), validate)
    assert 0 < sum(played) < 16_384 / 4
