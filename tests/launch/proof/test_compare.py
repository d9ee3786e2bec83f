"""One rank held against its plan, at the edges of what is still as planned. Without processes, and without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cluster.cpus import parse_list
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.proof.compare import of_rank
from hpctrain.launch.proof.finding import Rank
from hpctrain.launch.proof.probe import UNLIMITED, Found
from hpctrain.launch.proof.verdict import examine
from tests.launch.machines import captured, config, job

EIGHT = "smi_topo/sglang_env_8gpu_8nic_clean.txt"
ENOUGH = 1 << 40


def said(binding: Binding, ranks_here: int = 1, **found: object) -> list[tuple[str, str, str, bool]]:
    """What, planned, found and whether it stops, of a rank that has found what is given and is well otherwise."""
    rank = Rank(0, binding, Found(**{"shm_bytes": ENOUGH, **found}), ranks_here)  # type: ignore[arg-type]
    return [(one.what, one.planned, one.found, one.stops) for one in of_rank(rank)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"mems": "0-1", "policy": "default"}, None),
        ({"mems": "0-1", "policy": "bind:1"}, None),
        ({"mems": "0-1", "policy": "bind:0-1"}, None),
        ({"mems": "0-1", "policy": "interleave:0"}, None),  # spread on purpose
        ({"mems": "", "policy": ""}, None),  # not known
        ({"mems": "0,2-3", "policy": "default"}, ("NUMA memory", "1", "0,2-3", False)),
        ({"mems": "0-1", "policy": "bind:0"}, ("memory policy", "node 1", "bind:0", False)),
        ({"mems": "0-1", "policy": "bind=static:0"}, ("memory policy", "node 1", "bind=static:0", False)),
    ],
)
def test_memory_of_another_numa_node(found: dict[str, object], expected: tuple[str, str, str, bool] | None) -> None:
    assert said(Binding(numa=1), **found) == ([expected] if expected else [])
    assert said(Binding(), **found) == [], "no NUMA node was planned"


@pytest.mark.parametrize(
    ("planned", "found", "expected"),
    [
        (("GPU-5", "0000:05:00.0"), ("GPU-5", "0000:05:00.0"), None),
        (("GPU-5", ""), ("5", ""), None),  # torch leaves out what nvidia-smi puts first
        (("5", ""), ("GPU-5", ""), None),
        (("GPU-5", "0000:05:00.0"), ("GPU-6", "0000:05:00.0"), ("GPU-5", "GPU-6")),  # the UUID is believed first
        (("GPU-5", "0000:05:00.0"), ("GPU-5", "0000:06:00.0"), None),
        (("", "0000:05:00.0"), ("GPU-6", "0000:06:00.0"), ("0000:05:00.0", "0000:06:00.0")),
        (("GPU-5", "0000:05:00.0"), ("", "0000:06:00.0"), ("0000:05:00.0", "0000:06:00.0")),
        (("GPU-5", ""), ("", "0000:06:00.0"), None),  # nothing to compare
        (("GPU-5", "0000:05:00.0"), ("", ""), None),
    ],
)
def test_which_gpu_a_rank_has(
    planned: tuple[str, str], found: tuple[str, str], expected: tuple[str, str] | None
) -> None:
    """By UUID where both know one, else by address."""
    binding = Binding(gpu=0, uuid=planned[0], pci=planned[1])
    assert said(binding, devices=8, uuid=found[0], pci=found[1], limits={"stack": 8 << 20}) == (
        [("GPU", *expected, True)] if expected else []
    )


@pytest.mark.parametrize(("devices", "gpu", "ranks_here", "hidden"), [(4, 3, 4, 0), (4, 4, 4, 5), (3, 2, 4, 4)])
def test_how_many_gpus_a_rank_sees(devices: int, gpu: int, ranks_here: int, hidden: int) -> None:
    expected = [("visible GPUs", f"all {hidden} of the node", str(devices), True)] if hidden else []
    assert said(Binding(gpu=gpu), ranks_here, devices=devices, limits={"stack": 8 << 20}) == expected


@pytest.mark.parametrize(
    ("stack", "shown"), [(UNLIMITED, "unlimited"), ((1 << 20) - 1, "1023 KiB"), (1 << 20, None), (8 << 20, None)]
)
def test_stacks_that_are_unlimited_or_small(stack: int, shown: str | None) -> None:
    """Looked at on GPUs alone."""
    expected = [("stack", "8192 KiB", shown, False)] if shown else []
    assert said(Binding(), devices=1, limits={"stack": stack}) == expected
    assert said(Binding(), limits={"stack": stack}) == []


def test_limits_that_are_unlimited_are_none() -> None:
    verbs = Binding(hcas="=mlx5_0:1")
    for memlock, stops in ((UNLIMITED, None), ((64 << 20) - 1, True), (64 << 20, False)):
        rows = said(verbs, hcas="=mlx5_0:1", limits={"memlock": memlock, "nofile": UNLIMITED})
        assert [stop for *_, stop in rows] == ([] if stops is None else [stops])
    assert [what for what, *_ in said(verbs, hcas="=mlx5_0:1", limits={"nofile": 129})] == ["open files"]
    assert said(verbs, hcas="=mlx5_0:1", limits={"nofile": 130}) == [], "128 and two for each rank"


@pytest.mark.parametrize("name", ["=eth0", "^docker0"])
def test_nccls_syntax_for_gloo(name: str) -> None:
    """It is told from a name that does not exist, whose mend is another."""
    binding = Binding(interface="eth0", kept={"GLOO_SOCKET_IFNAME": "eth0"})
    rank = Rank(0, binding, Found(shm_bytes=ENOUGH, interface=name, up=None))
    (one,) = of_rank(rank)
    assert (one.what, one.planned, one.found, one.stops) == ("interface", "eth0", name, True)
    assert one.cause == "gloo takes plain names, not NCCL's syntax"


def table_of_two() -> JobTable:
    """Two hosts with 192 CPUs each, all planned."""
    return job(captured(EIGHT), ["n0", "n1"], config(2, 8, tp=8))


@pytest.mark.parametrize(("cpus", "stops"), [("0-47,96-143", False), ("0-46,96-143", True)])
def test_a_node_with_half_of_its_cpus(cpus: str, stops: bool) -> None:
    """Half of what was planned may be meant; less stops the job."""
    table = replace(table_of_two(), exclusive=True)
    assert len({cpu for own in table.table.cpus("n0") for cpu in own}) == 192
    reports = {
        rank: (Binding("n0", rank, allowed=parse_list(cpus)), Found("n0", cpus, 192, shm_bytes=ENOUGH))
        for rank in range(8)
    }
    made = examine(table, reports)
    assert [(one.rank, one.what, one.planned, one.stops) for one in made.findings] == (
        [(rank, "CPUs of the node", "192 for 8 ranks", True) for rank in range(8)] if stops else []
    )


@pytest.mark.parametrize(("rate", "slow"), [(200.0, True), (200.5, False)])
def test_a_port_of_half_the_rate(rate: float, slow: bool) -> None:
    reports = {
        rank: (
            Binding("n0", rank, allowed=(0, 1), nic=f"mlx5_{rank}"),
            Found("n0", "0-1", 2, rate_gbit=gbit, shm_bytes=ENOUGH),
        )
        for rank, gbit in enumerate((400.0, rate))
    }
    found = [(one.rank, one.what, one.planned, one.found, one.stops) for one in examine(None, reports).findings]
    assert found == ([(1, "rate of NIC", "400 Gbit/s", "mlx5_1 200 Gbit/s", False)] if slow else [])
