"""Which nodes are called slow or broken, and what becomes of the job."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.schema import RunConfig
from hpctrain.launch.health import step
from hpctrain.launch.health.judge import Device, Limits, Pair, judge, lowest, rounds, shown, slow_ends
from hpctrain.launch.place import badnodes
from hpctrain.launch.slurm import exclude

GPU = Limits.of("cuda")
HOSTS = [f"n{i}" for i in range(8)]
RATE = {"matmul": 6e14, "memory": 3e12, "local": 2e11, "rail": 4.5e10}


def noisy(random: np.random.Generator, middle: float, share: float, number: int = 7) -> tuple[float, ...]:
    return tuple((middle * (1 + share * random.standard_normal(number))).tolist())


def cluster(
    hosts: Sequence[str] = HOSTS,
    per_node: int = 4,
    slow: dict[tuple[str, int, str], float] | None = None,
    noise: float = 0.01,
    seed: int = 0,
) -> tuple[list[Device], list[Pair]]:
    """What a cluster measures whose devices are alike but for some: (host, number, metric) -> share of the usual."""
    random, slow = np.random.default_rng(seed), slow or {}

    def share(host: str, local: int, metric: str) -> float:
        return slow.get((host, local, metric), 1.0)

    devices = [
        Device(h, i, "cuda", "", {m: noisy(random, RATE[m] * share(h, i, m), noise) for m in ("matmul", "memory")})
        for h in hosts
        for i in range(per_node)
    ]
    pairs = []
    for partners in rounds(len(hosts), 8):
        for a, b in enumerate(partners):
            if b is not None and a < b:
                for i in range(per_node):
                    least = min(share(hosts[a], i, "rail"), share(hosts[b], i, "rail"))
                    pairs.append(Pair("rail", (hosts[a], i), (hosts[b], i), noisy(random, RATE["rail"] * least, noise)))
    for host in hosts:
        for partners in rounds(per_node, 8):
            for a, b in enumerate(partners):
                if b is not None and a < b:
                    least = min(share(host, a, "local"), share(host, b, "local"))
                    pairs.append(Pair("local", (host, a), (host, b), noisy(random, RATE["local"] * least, noise)))
    return devices, pairs


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_none_of_nodes_alike_is_blamed(seed: int, noise: float) -> None:
    verdict = judge(*cluster(noise=noise, seed=seed), HOSTS, 4)
    assert verdict.bad == {} and verdict.notes == ()
    assert verdict.medians["rail"] == pytest.approx(4.5e10, rel=0.05)


@pytest.mark.parametrize("metric", RATE)
@pytest.mark.parametrize("hosts", [3, 4, 5, 8])
def test_one_slow_device_is_named_and_no_other(metric: str, hosts: int) -> None:
    """Also where a good node is slow in the pairs with the bad one."""
    mine = HOSTS[:hosts]
    verdict = judge(*cluster(mine, slow={("n1", 2, metric): 0.6}), mine, 4)
    assert verdict.bad.keys() == {"n1"}
    assert "device 2: " in verdict.bad["n1"] and "% below the median of all" in verdict.bad["n1"]
    assert verdict.bad["n1"].count(";") == 0


def test_several_slow_nodes_are_all_named() -> None:
    slow = {("n1", 0, "rail"): 0.3, ("n4", 3, "rail"): 0.5, ("n6", 1, "matmul"): 0.7}
    verdict = judge(*cluster(slow=slow), HOSTS, 4)
    assert verdict.bad.keys() == {"n1", "n4", "n6"}


def test_what_noise_explains_is_no_fault() -> None:
    """12% below the median, where all others are within 1%, or within 10%."""
    for noise, blamed in ((0.01, {"n2"}), (0.10, set())):
        verdict = judge(*cluster(slow={("n2", 1, "matmul"): 0.86}, noise=noise, seed=3), HOSTS, 4)
        assert verdict.bad.keys() == blamed


def test_little_is_no_fault_however_clear() -> None:
    assert judge(*cluster(slow={("n2", 1, "matmul"): 0.93}, noise=0.001), HOSTS, 4).bad == {}


def test_two_nodes_cannot_tell_which_is_odd() -> None:
    mine = HOSTS[:2]
    slow = {("n1", i, metric): 0.5 for i in range(4) for metric in ("matmul",)} | {("n0", 2, "rail"): 0.4}
    verdict = judge(*cluster(mine, slow=slow), mine, 4)
    assert verdict.bad == {}
    assert verdict.notes[0].startswith("matmul: n1 has ") and "cannot be told" in verdict.notes[0]
    assert verdict.notes[1].startswith("between device 2 of n0 and 2 of n1 alone: rail 17.9 GB/s, 60%")


def test_one_node_of_two_with_one_slow_device_can_be_told() -> None:
    mine = HOSTS[:2]
    assert judge(*cluster(mine, slow={("n0", 3, "matmul"): 0.5}), mine, 4).bad.keys() == {"n0"}


def test_a_pair_between_good_ends_is_no_nodes_fault() -> None:
    devices, pairs = cluster()
    at = next(i for i, p in enumerate(pairs) if p.metric == "rail" and {p.a, p.b} == {("n0", 1), ("n5", 1)})
    pairs[at] = Pair("rail", pairs[at].a, pairs[at].b, tuple(v / 10 for v in pairs[at].samples))
    verdict = judge(devices, pairs, HOSTS, 4)
    assert verdict.bad == {}
    assert len(verdict.notes) == 1 and "device 1 of n0 and 1 of n5 alone" in verdict.notes[0]


def test_those_that_do_not_report_or_compute_wrongly() -> None:
    devices, pairs = cluster()
    devices = [d for d in devices if (d.host, d.local) != ("n3", 1)]
    at = next(i for i, d in enumerate(devices) if (d.host, d.local) == ("n5", 0))
    devices[at] = Device(**{**asdict(devices[at]), "wrong": "a product of matrices is wrong"})
    bad = judge(devices, pairs, HOSTS, 4).bad
    assert bad == {
        "n3": "1 of its 4 devices did not report",
        "n5": "device 0: a product of matrices is wrong",
    }


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_no_result_is_no_rate(value: float) -> None:
    values = {("a", 0): (1.0,) * 3, ("b", 0): (value,) * 3}
    assert lowest("matmul", values, 0.1) == {("b", 0): "matmul came to no result"}


def test_when_most_look_bad_none_is_left_out() -> None:
    devices, pairs = cluster()
    verdict = judge([d for d in devices if d.host in ("n0", "n1", "n2")], pairs, HOSTS, 4)
    assert verdict.bad == {} and verdict.notes[0].startswith("5 of 8 nodes look bad")


def test_who_computes_wrongly_is_left_out_however_many() -> None:
    devices, pairs = cluster()
    damaged = [replace(d, wrong="products are wrong") if d.host in HOSTS[:5] else d for d in devices]
    verdict = judge(damaged, pairs, HOSTS, 4)
    assert list(verdict.bad) == list(HOSTS[:5]) and "products are wrong" in verdict.bad["n0"]


def test_the_worst_end_is_taken_first() -> None:
    """With three nodes every good end has half of its pairs with the bad one."""
    pairs = [Pair("rail", (x, 0), (y, 0), (1.0,) * 3) for x, y in (("a", "b"), ("a", "c"))]
    pairs.append(Pair("rail", ("b", 0), ("c", 0), (10.0,) * 3))
    low, notes = slow_ends("rail", pairs, 0.25)
    assert low.keys() == {("a", 0)} and notes == []


@given(number=st.integers(0, 40), most=st.integers(1, 45))
@settings(max_examples=200)
def test_rounds_are_pairs(number: int, most: int) -> None:
    made = rounds(number, most)
    everyone = number - 1 + number % 2
    assert len(made) == (min(most, everyone) if number > 1 else 0)
    for partners in made:
        assert all(b is None or (b != a and partners[b] == a) for a, b in enumerate(partners))
        assert sum(b is None for b in partners) == number % 2
    met = {(a, b) for partners in made for a, b in enumerate(partners) if b is not None}
    assert len(met) == sum(b is not None for partners in made for b in partners), "nobody meets twice"
    if most >= everyone:
        assert len(met) == number * (number - 1) if number > 1 else not met


def test_values_in_words() -> None:
    assert shown("matmul", 6.123e14) == "612 TFLOP/s" and shown("matmul", 2.5e10) == "25 GFLOP/s"
    assert shown("rail", 4.5e10) == "45 GB/s"
    assert shown("memory", 3.35e12) == "3.35 TB/s"


def _measured(folder: str) -> list[Any]:
    import torch
    import torch.distributed as dist

    from hpctrain.launch.health.measure import Sizes, alone, links

    small, begun = Sizes(32, 4096, 4096), []
    samples, wrong = alone(torch.device("cpu"), small)
    met = links(dist.get_rank(), 2, [0, 1], torch.device("cpu"), lambda *at: begun.append(at), sizes=small)
    return [samples, wrong, [(one.metric, one.peer, len(one.samples), one.wrong) for one in met], begun]


def test_ranks_measure_each_other(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Of two nodes with two ranks: the other one of the node, then the same one of the other node."""
    found = ranks(4, _measured, str(tmp_path))
    for rank, (samples, wrong, met, begun) in enumerate(found):
        assert begun == [(0, rank ^ 1), (1, (rank + 2) % 4)]
        assert wrong == "" and samples.keys() == {"matmul", "memory"}
        assert all(len(values) == 7 and min(values) > 0 for values in samples.values())
        assert met == [("local", rank ^ 1, 7, False), ("rail", (rank + 2) % 4, 7, False)]


def report(life: Path, devices: Sequence[Device], pairs: Sequence[Pair]) -> None:
    """What the ranks of a step leave."""
    at = {(d.host, d.local): rank for rank, d in enumerate(devices)}
    for rank, device in enumerate(devices):
        end = (device.host, device.local)
        met = [
            {"metric": p.metric, "peer": at[p.b if p.a == end else p.a], "samples": p.samples, "wrong": False}
            for p in pairs
            if end in (p.a, p.b)
        ]
        life.mkdir(exist_ok=True)
        (life / f"rank-{rank}.json").write_text(json.dumps({"device": asdict(device), "met": met}))


@pytest.fixture
def life(tmp_path: Path) -> Path:
    return tmp_path / "life"


def decide(tmp_path: Path, life: Path, nodes: int, hosts: Sequence[str] = HOSTS) -> int:
    return step.decide(tmp_path, life, "7", nodes, 4, hosts)


def test_what_ranks_left_is_read(life: Path) -> None:
    devices, pairs = cluster(HOSTS[:3])
    report(life, devices, pairs)
    (life / "rank-99.json").write_text("{")
    left = step.read(life)
    assert left.devices == tuple(devices) and left.notes == () and left.hung == {}
    assert sorted(left.pairs, key=repr) == sorted(pairs, key=repr)


def test_a_bad_node_is_left_out_where_there_are_spares(
    tmp_path: Path, life: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(life, *cluster(slow={("n3", 1, "rail"): 0.2}))
    assert decide(tmp_path, life, nodes=7) == 0
    said = capsys.readouterr()
    assert said.out == "--exclude=n3\n"
    assert "health: n3 is left out: rail of device 1: rail 8.98 GB/s, 80%" in said.err
    assert badnodes.known(tmp_path).keys() == {"n3"}
    record = json.loads((tmp_path / step.RECORD).read_text())
    assert record["bad"].keys() == {"n3"} and len(record["devices"]) == 32
    assert record["devices"][0]["rail"].endswith(" GB/s")


def test_all_well_leaves_nobody_out(tmp_path: Path, life: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(life, *cluster())
    assert decide(tmp_path, life, nodes=8) == 0
    assert capsys.readouterr().out == "\n" and badnodes.known(tmp_path) == {}


SCONTROL = """\
echo "$@" >> {log}
case "$*" in
  "show job"*) echo "JobId=7 JobState=RUNNING"; echo "   ReqNodeList=(null) ExcNodeList=n[6-7]" ;;
  update*) [ -e {log}.requeued ] || {{ echo "Job is no longer pending execution for job 7" >&2; exit 1; }} ;;
  requeue*) touch {log}.requeued ;;
esac"""


@pytest.fixture
def scontrol(programs: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    log = tmp_path / "scontrol.log"
    programs("scontrol", SCONTROL.format(log=log))
    monkeypatch.setattr(exclude, "PAUSE_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    yield log  # type: ignore[misc]
    signal.signal(signal.SIGTERM, before)


def test_without_spares_the_job_goes_back_without_the_node(
    tmp_path: Path, life: Path, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(life, *cluster(slow={("n3", 1, "matmul"): 0.2}))
    assert decide(tmp_path, life, nodes=8) == step.REQUEUED
    assert scontrol.read_text().splitlines() == [
        "show job 7",
        "requeue 7",
        "update JobId=7 ExcNodeList=n[3,6-7]",
    ], "nodes that were excluded already stay so, and the list is set when the job is no longer running"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "else the requeue ends this process between the two"
    assert capsys.readouterr().out == ""


def test_a_new_allocation_with_a_node_known_to_be_bad_goes_back(tmp_path: Path, life: Path, scontrol: Path) -> None:
    """A swap of nodes that was none."""
    badnodes.remember(tmp_path, {"n3": "rail of device 1: rail 9 GB/s"})
    report(life, *cluster())
    assert decide(tmp_path, life, nodes=8) == step.REQUEUED
    assert scontrol.read_text().splitlines()[-1] == "update JobId=7 ExcNodeList=n[3,6-7]"


def test_a_node_known_to_be_bad_is_not_used_again_though_it_is_well_now(
    tmp_path: Path, life: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    badnodes.remember(tmp_path, {"n3": "slow"})
    report(life, *cluster())
    assert decide(tmp_path, life, nodes=7) == 0
    assert capsys.readouterr().out == "--exclude=n3\n"


def test_a_job_that_is_to_end_blames_nobody(tmp_path: Path, life: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices, pairs = cluster()
    report(life, devices[:-2], pairs[:0])
    (life / step.STOPPED).touch()
    assert decide(tmp_path, life, nodes=8) == 0
    assert badnodes.known(tmp_path) == {} and "nothing is concluded" in capsys.readouterr().err


def test_excluded_nodes_are_read() -> None:
    assert exclude.excluded("   ReqNodeList=n9 ExcNodeList=n[1-2],m1\n") == ["n1", "n2", "m1"]
    assert exclude.excluded("ReqNodeList=n9 ExcNodeList=(null)\n") == exclude.excluded("") == []


def test_a_controller_that_is_busy_is_asked_again(
    programs: Callable[[str, str], None], tmp_path: Path, scontrol: Path
) -> None:
    count = tmp_path / "count"
    programs(
        "scontrol",
        f'case "$*" in show*) ;; *) echo x >> {count}; [ $(wc -l < {count}) -gt 3 ] || exit 1 ;; esac',
    )
    exclude.requeue_without("7", ["n1"])
    assert len(count.read_text().split()) == 5


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    import torch

    from hpctrain.launch.health.measure import alone

    samples, wrong = alone(torch.device("cuda", 0))
    assert wrong == "" and np.median(samples["matmul"]) > 1e13 and np.median(samples["memory"]) > 1e11


def test_a_run_overrides_its_profile() -> None:
    from hpctrain.launch.slurm.profile import healthy, site

    def profile(health: bool = False, **cluster: object) -> tuple[bool, int]:
        config = RunConfig.model_validate({"cluster": cluster})
        made = healthy(site("lab"), config, health).profile
        return made.health, made.spares

    assert profile() == (False, 0)
    assert profile(health=True) == (True, 0)
    assert profile(spares=2) == (False, 2)
    assert healthy(healthy(site("lab"), RunConfig(), True), RunConfig()).profile.health, "a profile may ask for it"
