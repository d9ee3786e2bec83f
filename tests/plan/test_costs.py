"""Products, collectives and layers: values by hand, and FLOPs held against the one counter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.config.load import load, recipes
from hpctrain.launch.slurm.rules import segment
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs, trained_specs
from hpctrain.plan import attention, layer, products
from hpctrain.plan.constants import Constants, Line, Link, Measured, MeasuredLine, Profile, Training, constants
from hpctrain.plan.gemm import FEED, FILL, NORM, Device, gemm
from hpctrain.plan.goodput import goodput, interval
from hpctrain.plan.hardware import Hardware, hardware
from hpctrain.plan.links import CHANNELS, Group, Machine
from hpctrain.plan.played import price
from hpctrain.plan.step import ADAM_BYTES, partly_hidden
from hpctrain.plan.work import Points, Runtime, Work
from hpctrain.telemetry.flops import flops_per_token

DEVICE = Device(rate=100e12, sms=100, bandwidth=1e15, gap=0.0)


def test_a_product_takes_whole_waves_of_tiles() -> None:
    one_wave = gemm(DEVICE, 256 * 10, 128 * 10, 4096)
    assert one_wave == pytest.approx(256 * 128 * 2 * (4096 + FILL) / 1e12)  # 100 tiles on 100 units
    assert gemm(DEVICE, 256 * 10, 128 * 10 + 1, 4096) > 1.2 * one_wave  # a wave more, or smaller tiles


def test_small_products_take_small_tiles() -> None:
    time = gemm(DEVICE, 640, 640, 1000)
    assert time == pytest.approx(64 * 64 * (1 + FEED / 32) / NORM * 2 * (1000 + FILL) / 1e12)  # 100 tiles of 64


def test_a_thin_product_is_bound_by_memory() -> None:
    slow = Device(rate=1e18, sms=100, bandwidth=1e9, gap=2e-6)
    assert gemm(slow, 1, 1000, 1000) == pytest.approx((1000 * 1000 + 2000) * 2 / 1e9 + 2e-6)
    assert gemm(slow, 1, 1000, 1000, 3, 1.0, 8.0) == pytest.approx(3 * (1000 * 1000 + 1000 + 8000) / 1e9 + 2e-6)


def plain(hop: float = 0.0, fast: float = 1.0, net: float = 1.0) -> Machine:
    """An H100 cluster whose links do what their data sheets say."""
    lines = {"nvlink4": fast, "infiniband-ndr": net}
    links = {k: Link(lines=(Line(latency=0, rate=r),), hop=hop, source="test") for k, r in lines.items()}
    training = Training(matmul=1, memory=1, collective=1, source="test")
    return Machine(hardware("dgx-h100"), Constants(matmul={}, links=links, training=training))


def seconds(machine: Machine, operation: str, payload: float, group: Group) -> float:
    return float(machine.collective(operation, payload, group))


def test_collectives_in_a_domain_are_rings() -> None:
    machine, group = plain(), Group(8, 8, 8)
    assert seconds(machine, "all_reduce", 8e9, group) == pytest.approx(2 * 7 / 8 * 8e9 / 450e9)
    assert seconds(machine, "all_gather", 1e9, group) == pytest.approx(7e9 / 450e9)
    assert seconds(machine, "reduce_scatter", 8e9, group) == pytest.approx(7e9 / 450e9)
    assert seconds(machine, "all_reduce", 8e9, Group(1, 1, 1)) == 0


def test_steps_reach_less_of_links_inside_a_domain_and_all_of_networks() -> None:
    """What T5 tells is of collectives over NVLink. A ring through whole hosts goes at the rate of its ports."""
    training = Training(matmul=1, memory=1, collective=0.5, source="test")
    half = Constants(matmul={}, links=plain().constants.links, training=training)
    machine, inside = Machine(hardware("dgx-h100"), half), Group(8, 8, 8)
    for operation, sent in (("all_reduce", 14e9), ("all_gather", 56e9), ("reduce_scatter", 7e9), ("all_to_all", 7e9)):
        assert seconds(machine, operation, 8e9, inside) == pytest.approx(sent / 225e9), operation
    assert float(machine.copied("all_gather", 8e9, inside)) == pytest.approx(56e9 / 225e9)
    assert [float(machine.send(9e9, away)) for away in (False, True)] == pytest.approx([9e9 / 225e9, 9e9 / 50e9])
    ports, hosts = machine.group(16, 8), machine.group(16, 1)
    assert seconds(machine, "all_gather", 1e9, ports) == pytest.approx(15e9 / 50e9)
    assert seconds(machine, "all_gather", 1e9, hosts) == pytest.approx(15e9 / 400e9)
    assert seconds(machine, "all_to_all", 16e9, hosts) == pytest.approx(max(7e9 / 225e9, 8e9 / 50e9))
    between = dict(machine.ways("all_reduce", 8e9, hosts))["hierarchy"]
    assert float(between) == pytest.approx(2 * 7e9 / 225e9 + 1e9 / 50e9)


def test_one_port_is_slower_and_has_no_more_hops() -> None:
    machine = plain(hop=1e-5)
    group = machine.group(64, 1)
    one = machine.of_one_port()
    ring = dict(one.ways("all_gather", 1e9, group))["ring"]
    assert float(ring) == pytest.approx(63e9 / 50e9 + (56 + 8) * 1e-5)
    assert one.group(64, 1) == group


def test_latency_is_of_the_steps_of_a_ring() -> None:
    """Above the first line's: 14 steps of an all-reduce of 8 ranks, 7 of a gather, 1 of a gather of 2, 1 of sends."""
    lines = (Line(latency=1e-5, rate=1e-9), Line(latency=1.5e-4, rate=1.0))
    links = {"nvlink4": Link(lines=lines, hop=0, source="test"), "infiniband-ndr": plain().net}
    machine = Machine(hardware("dgx-h100"), Constants(matmul={}, links=links, training=plain().constants.training))
    message = 1e3
    for operation, size, expected in (
        ("all_reduce", 8, 1e-5 + 14e-5), ("all_gather", 8, 0.5e-5 + 7e-5), ("all_gather", 2, 0.5e-5 + 1e-5),
        ("all_to_all", 8, 0.5e-5 + 1e-5),
    ):  # fmt: skip
        assert seconds(machine, operation, message, Group(size, size, size)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "devices", "inside"),
    [
        ("gb200-nvl72", 64, 72),  # one rack has them
        ("gb200-nvl72", 128, 64),
        ("gb200-nvl72", 144, 72),
        ("gb200-nvl72", 76, 4),  # 19 hosts
        ("gb200-nvl72", 2, 72),
        ("dgx-h100", 512, 8),
    ],
)
def test_a_job_takes_equally_many_hosts_of_each_domain(cluster: str, devices: int, inside: int) -> None:
    """As `launch` asks Slurm for segments."""
    machine = Machine(hardware(cluster), constants()).of(devices)
    assert machine.hardware.domain.devices == inside
    if devices > 72 and cluster == "gb200-nvl72":
        assert inside == 4 * segment(devices // 4)


def test_across_domains_a_ring_uses_the_ports_of_its_ranks() -> None:
    machine = plain()
    one_a_host, all_of_host = machine.group(16, 8), machine.group(16, 1)
    assert (float(one_a_host.inside), float(all_of_host.inside)) == (1, 8)
    assert seconds(machine, "all_gather", 1e9, one_a_host) == pytest.approx(15e9 / 50e9)
    assert seconds(machine, "all_gather", 1e9, all_of_host) == pytest.approx(15e9 / 400e9)


def test_the_way_is_chosen_by_size_and_latency() -> None:
    machine = plain(hop=1e-5)
    wide = machine.group(4096, 1)
    assert machine.chosen("all_reduce", 1e3, wide) == "tree"  # log2 of the hosts instead of all of them
    assert machine.chosen("all_reduce", 1e12, wide) == "ring"
    assert machine.chosen("reduce_scatter", 1e8, wide) == "hierarchy"  # an eighth of the ring's hops
    assert machine.chosen("all_reduce", 1e6, machine.group(8, 1)) == "in-domain ring"


def test_a_reduction_in_the_switch_needs_more_than_four_ranks() -> None:
    machine = Machine(hardware("dgx-h100"), constants())
    assert machine.chosen("all_reduce", 1e9, machine.group(8, 1)) == "in-switch"
    assert machine.chosen("all_reduce", 1e9, machine.group(4, 1)) == "in-domain ring"
    assert machine.chosen("reduce_scatter", 1e9, machine.group(8, 1)) == "in-domain ring"  # NVLS reduces whole


def test_all_to_all_pays_what_is_oversubscribed_and_rings_do_not() -> None:
    machine = plain()
    level = machine.hardware.fabric.levels[0]
    thin = level.model_copy(update={"oversubscription": level.oversubscription.model_copy(update={"value": 4.0})})
    fabric = machine.hardware.fabric.model_copy(update={"levels": (thin, *machine.hardware.fabric.levels[1:])})
    poor = Machine(machine.hardware.model_copy(update={"fabric": fabric}), machine.constants)
    far, near = machine.group(512, 1), machine.group(256, 1)
    ratio = seconds(poor, "all_to_all", 1e9, far) / seconds(machine, "all_to_all", 1e9, far)
    assert ratio == pytest.approx(4)
    assert seconds(poor, "all_to_all", 1e9, near) == seconds(machine, "all_to_all", 1e9, near)
    assert seconds(poor, "all_reduce", 1e9, far) == seconds(machine, "all_reduce", 1e9, far)


def count_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product takes a second a FLOP, and so does attention."""

    def counted(device: Device, m: float, n: float, k: float, batch: float = 1.0, *_: float) -> float:
        return 2.0 * m * n * k * batch

    monkeypatch.setattr(products, "gemm", counted)
    monkeypatch.setattr(layer, "core", lambda machine, work, points: attention.Core(
        attention.core_flops(work, points), 2 * attention.core_flops(work, points)))  # fmt: skip


@pytest.mark.parametrize("recipe", [n for n in recipes() if "tiny" not in n and load(n).model.adapter is None])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_steps_products_are_those_of_the_flop_counter(recipe: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a product's time its FLOPs, and no others, a step takes what the counter says (routers apart)."""

    config = load(recipe)
    model, seq = config.model, config.data.seq
    count_flops(monkeypatch)
    layout = Layout(tp=tp)
    made = price(plain(), Work(model, seq, 1, "bf16"), layout, Points.one(layout, 1))
    flops = tp * (float(made.detail["matmul"]) + float(made.detail["attention"])) / seq
    routers = 0
    if model.moe:
        routed = sum(map(model.routed, range(model.layers)))
        routers = 6 * routed * model.moe.experts * model.hidden * (tp - 1)  # each rank of tp has all tokens
    kv = max(0, tp - model.kv)
    assert kv == 0 and flops - routers == pytest.approx(flops_per_token(model, seq).causal, rel=1e-9)


@pytest.mark.parametrize(
    ("recipe", "adapter"),
    [
        ("llama-8b", ["kind=lora", "rank=16"]),
        ("llama-8b", ["kind=lora", "targets=[q,v]"]),
        ("gpt-tiny", ["kind=lora", "targets=[mlp]"]),
        ("llama-8b", ["kind=qlora", "rank=64"]),
        ("mixtral-8x7b", ["kind=lora", "targets=[attention,experts]"]),
    ],
)
def test_products_beside_adapters_are_those_of_the_flop_counter(
    recipe: str, adapter: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights have no gradients: 4 FLOPs an element and token, and 6 for what adapters have."""
    config = load(recipe, [f"model.adapter.{key}" for key in adapter])
    count_flops(monkeypatch)
    work = Work(config.model, config.data.seq, 1, "bf16")
    made = price(plain(), work, Layout(), Points.one(Layout(), 1))
    flops = (float(made.detail["matmul"]) + float(made.detail["attention"])) / work.seq
    assert flops == pytest.approx(flops_per_token(config.model, work.seq).causal, rel=1e-9)


def test_state_and_reductions_beside_adapters_are_of_their_elements() -> None:
    """The optimizer passes over the elements of adapters alone, and so does the reduction of gradients."""
    layout, machine = Layout(dp=16), Machine(hardware("dgx-h100"), constants())
    whole, lora = (load("llama-8b", given) for given in ([], ["model.adapter.kind=lora", "model.adapter.rank=128"]))
    parts = {}
    for config in (whole, lora):
        work = Work(config.model, 2048, 16, "bf16", Runtime(dp_overlap=False))
        made = price(machine, work, layout, Points.one(layout, 1, stage=1))
        trained = sum(spec.numel for spec in trained_specs(config.model))
        parts[trained] = made.parts
        assert made.parts["optimizer"] == pytest.approx(trained / 16 * ADAM_BYTES / machine.device("bf16").bandwidth)
    (large, small), (all_, few) = sorted(parts, reverse=True), (parts[n]["dp"] for n in sorted(parts, reverse=True))
    assert few / all_ == pytest.approx(small / large, rel=0.05)


def test_four_bits_are_made_into_values_before_every_product() -> None:
    """Half a byte and a share of a scale are read, two bytes written, of every linear, adapted or not, twice."""
    made = {}
    for kind in ("lora", "qlora"):
        config = load("llama-8b", [f"model.adapter.kind={kind}", "model.adapter.targets=[q]"])
        work = Work(config.model, 2048, 1, "bf16")
        made[kind] = float(price(plain(), work, Layout(), Points.one(Layout(), 1)).detail["pointwise"])
    numel = sum(spec.numel for spec in parameter_specs(config.model) if spec.block)
    expected = 2 * numel * (0.5 + 1 / 64 + 2) / plain().device("bf16").bandwidth
    assert made["qlora"] - made["lora"] == pytest.approx(expected)


def test_skewed_experts_take_longer() -> None:
    config = load("mixtral-8x7b")
    layout, times = Layout(dp=8, ep=8), []
    for skew in (1.0, 1.5):
        work = Work(config.model, 4096, 8, "bf16", skew=skew)
        made = price(Machine(hardware("dgx-h100"), constants()), work, layout, Points.one(layout, 1))
        times.append(made.at(0))
    assert 1.25 < times[1]["ep"] / times[0]["ep"] < 1.5  # a latency does not grow
    assert 1.2 < times[1]["compute"] / times[0]["compute"] < 1.5


def test_recomputation_adds_a_forward() -> None:
    model = load("llama-8b").model
    machine, layout = Machine(hardware("dgx-h100"), constants()), Layout()
    made = {
        kind: price(machine, Work(model, 8192, 1, "bf16"), layout, Points.one(layout, 1, kind)).detail
        for kind in ("none", "selective", "full")
    }
    assert made["full"]["matmul"] / made["none"]["matmul"] == pytest.approx(4 / 3, rel=0.04)
    assert made["selective"]["matmul"] == made["none"]["matmul"]
    assert made["selective"]["attention"] > 1.2 * made["none"]["attention"]


def test_overlap_leaves_the_units_it_takes() -> None:
    assert layer.hidden_part(np.array(1.0), np.array(4.0)) == pytest.approx(0.2)
    assert layer.hidden_part(np.array(5.0), np.array(4.0)) == pytest.approx(1 + 0.8)


def test_collectives_between_hosts_take_units_by_their_ports() -> None:
    """Of 8, 2 and 1 ranks of each H100 host: 16, 8 and 4 channels; of A100 hosts 16, 4 and 2. Inside: as many as go."""
    for cluster, channels in (("dgx-h100", (16, 8, 4)), ("dgx-a100", (16, 4, 2))):
        machine = Machine(hardware(cluster), constants())
        sms = machine.hardware.gpu.sms.value
        busy = [float(machine.busy(Group(4 * inside, inside, 32))) for inside in (8, 2, 1)]
        assert busy == pytest.approx([number / sms for number in channels])
        assert float(machine.busy(Group(8, 8, 8))) == CHANNELS > busy[0]


def test_what_is_reduced_last_runs_beside_nothing() -> None:
    free, cut = partly_hidden(2.0, 10.0, 0.5, 0.1), partly_hidden(2.0, 1.0, 0.5, 0.1)
    assert free == pytest.approx(0.5 + 0.15) and cut == pytest.approx(1.0 + 0.1)


def test_whole_chunks_are_reduced_later_than_buckets() -> None:
    """Of four interleaved chunks of a rank the last is reduced alone: a quarter of its layers, and the embedding."""
    model, layout = load("llama-8b").model, Layout(pp=4, dp=16, schedule="interleaved", chunks=4)
    layout = replace(layout, stage_layers=(2,) * 16)
    machine, own = Machine(hardware("dgx-h100"), constants()), Runtime(scattered=True, bucket=2.0**20)
    works = [Work(model, 8192, 256, "bf16", replace(own, whole_chunks=whole)) for whole in (False, True)]
    times = [price(machine, work, layout, Points.one(layout, 1, stage=1)) for work in works]
    numel = sum(spec.numel for spec in parameter_specs(model) if spec.layer is not None) / 4
    group = machine.group(np.array(16), np.array(1))
    alone = machine.collective("reduce_scatter", 4 * (numel / 4 - 2.0**20), group)
    more = times[1].at(0)["dp"] - times[0].at(0)["dp"]
    assert more == pytest.approx(float(alone * (1 - machine.busy(group))), rel=0.05)


def test_fp8_halves_products_and_adds_casts() -> None:
    model, layout = load("llama-8b").model, Layout()
    machine = Machine(hardware("dgx-h100"), constants())
    bf16, fp8 = (
        price(machine, Work(model, 8192, 1, dtype), layout, Points.one(layout, 1)).detail for dtype in ("bf16", "fp8")
    )
    assert 0.4 < fp8["matmul"] / bf16["matmul"] < 0.65  # the head stays in bf16
    assert fp8["pointwise"] > 1.3 * bf16["pointwise"] and fp8["attention"] == bf16["attention"]


def test_unfused_attention_moves_the_scores() -> None:
    model, layout = load("gpt-175b").model, Layout(tp=8)
    machine = Machine(hardware("dgx-a100"), constants())
    work = Work(model, 2048, 1, "fp16", Runtime(attention="unfused"))
    size = 2048 * 2048 * model.heads / 8
    assert attention.core_bytes(work, Points.one(layout, 1))[0] == pytest.approx(size * 4)
    made = price(machine, work, layout, Points.one(layout, 1))
    least = model.layers * size * 10 / (2.039e12)
    assert least < made.detail["attention"]


def test_the_interval_of_young_and_daly() -> None:
    assert interval(60, 1e6) == pytest.approx(math.sqrt(2 * 60 * 1e6), rel=0.01)
    assert interval(1e6, 1e5) == 1e5  # a checkpoint takes longer than the time between failures


def test_goodput_is_best_at_its_interval_and_falls_with_size() -> None:
    h100 = hardware("dgx-h100")
    best = goodput(h100, 16384, 60)
    assert best.mtbf == pytest.approx(54 * 86400 / 419, rel=1e-3)
    for factor in (0.5, 2):
        assert goodput(h100, 16384, 60, best.interval * factor).share < best.share
    assert 0.5 < goodput(h100, 100_000, 60).share < best.share < goodput(h100, 1024, 60).share < 1


def test_a_profile_goes_before_the_constants() -> None:
    fits = tuple(
        Measured(
            operation="all_reduce", backend="nccl", devices=n, hosts=1, lines=(MeasuredLine(latency=1e-3, rate=rate),)
        )
        for n, rate in ((2, 1e9), (8, 2e9))
    )
    profile = Profile(cluster="dgx-h100", matmul={"bf16": 500e12}, memory_bandwidth=1e12, collectives=fits)
    machine = Machine(hardware("dgx-h100"), constants(), profile)
    sizes = np.array([2, 4, 8, 16])
    times = machine.collective("all_reduce", 1e9, machine.group(sizes, np.ones(4, dtype=int)))
    assert times[0] == pytest.approx(1e-3 + 1.0) and times[2] == pytest.approx(1e-3 + 1.75 / 2)
    assert times[1] == pytest.approx(1e-3 + 1.5)  # as near to 2 as to 8: the first
    plain_machine = Machine(hardware("dgx-h100"), constants())
    assert times[3] == plain_machine.collective("all_reduce", 1e9, plain_machine.group(16, 1))
    device = machine.device("bf16")
    assert (device.rate, device.bandwidth) == (500e12, 1e12)


def test_a_tree_takes_the_logarithm_of_the_hosts() -> None:
    """512 hosts of 8: down and up 7 hops inside and 9 between."""
    machine = plain(hop=1e-5)
    ways = dict(machine.ways("all_reduce", 0.0, machine.group(4096, 1)))
    assert float(ways["tree"]) == pytest.approx(2 * (7 + 9) * 1e-5)
    assert float(ways["ring"]) == pytest.approx(2 * 4096 * 1e-5)


def test_goodput_pays_checkpoints_and_restarts() -> None:
    h100 = hardware("dgx-h100")
    restart = h100.failures.restart_seconds.model_copy(update={"value": 0.0})
    quick = h100.model_copy(update={"failures": h100.failures.model_copy(update={"restart_seconds": restart})})
    assert goodput(quick, 1, 100, 900).share == pytest.approx(0.9, rel=1e-4)  # failures are years apart
    slow, fast = goodput(h100, 16384, 60), goodput(quick, 16384, 60)
    assert slow.share / fast.share == pytest.approx(math.exp(-600 / slow.mtbf))


def failing(hours: float, restart: float = 600.0) -> Hardware:
    """An H100 cluster whose devices fail so often."""
    h100 = hardware("dgx-h100")
    often = h100.failures.device_mtbf_hours.model_copy(update={"value": hours})
    again = h100.failures.restart_seconds.model_copy(update={"value": restart})
    failures = h100.failures.model_copy(update={"device_mtbf_hours": often, "restart_seconds": again})
    return h100.model_copy(update={"failures": failures})


def test_failures_that_let_nothing_be_done_are_told_in_words() -> None:
    assert goodput(failing(50674), 16384, 60).hopeless == ""
    for devices, hours, restart in ((65536, 5.8, 600), (16384, 5.8, 600), (1, 1e-3, 1e7), (2**24, 1e-3, 1e7)):
        left = goodput(failing(hours, restart), devices, 60)
        assert 0 <= left.share < 1e-10 and left.hopeless == "failures come faster than it restarts"
    slow = goodput(failing(50674), 16, 1e11)
    assert slow.share == 0 and slow.hopeless == "failures come faster than it writes a checkpoint"


def test_goodput_is_that_of_dalys_stretch() -> None:
    """M exp(R/M) (exp((T + C)/M) - 1), of which T trains."""
    left = goodput(failing(1000, 300), 4096, 60, 500)
    spent = left.mtbf * math.exp(300 / left.mtbf) * math.expm1(560 / left.mtbf)
    assert left.share == pytest.approx(500 / spent, rel=1e-12)
