"""What a rank does about its place in the rank table; and ranks that are on wrong places on purpose, caught in time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from hpctrain.cluster.fabrics import fat_tree, rail_optimized
from hpctrain.cluster.node import Gpu, Nic, Node, Numa
from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.place.bind import place_of
from hpctrain.launch.place.machine import allowed_cpus, set_affinity
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.place.variables import Traffic, apply, gloo_interface, hca_list, hca_names, variables
from hpctrain.launch.proof.record import ranks_of
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.launch.slurm.profile import site
from tests.launch.machines import bindings, captured, config, job, masks, running

NODE = captured("smi_topo/sglang_env_8gpu_8nic_clean.txt")
HOSTS = ["n0", "n1"]


def table(**parallel: object):
    return job(NODE, HOSTS, config(2, 8, **(parallel or {"tp": 8})))


def test_rails_and_variables_of_a_node() -> None:
    found = bindings(table(), "n1", running(NODE))
    assert [b.nic for b in found] == [f"mlx5_{i}" for i in range(8)]
    assert {b.set["NCCL_IB_HCA"] for b in found} == {"=" + ",".join(f"mlx5_{i}:1" for i in range(8))}
    assert [b.set["UCX_NET_DEVICES"] for b in found] == [f"mlx5_{i}:1" for i in range(8)]
    assert {(b.set["GLOO_SOCKET_IFNAME"], b.set["NCCL_SOCKET_IFNAME"]) for b in found} == {("eth0", "=eth0")}
    assert {b.set["NCCL_IGNORE_CPU_AFFINITY"] for b in found} == {"1"}
    assert masks(found)[0] == "0-11,96-107" and masks(found)[7] == "84-95,180-191"


def test_cross_nic_is_set_only_where_rails_are_known_to_be_apart() -> None:
    """And no message has to cross: with pp of two on three nodes a stage begins in the midst of one."""

    def seen(made: JobTable) -> set[str | None]:
        return {b.set.get("NCCL_CROSS_NIC") for b in bindings(made, "n0", NODE)}

    apart, unsaid = site("dgx-h100").profile, site("generic").profile
    assert seen(job(NODE, HOSTS, config(2, 8, tp=8), profile=apart)) == {"0"}
    assert seen(job(NODE, HOSTS, config(2, 8, tp=8), rail_optimized(HOSTS, 8), profile=unsaid)) == {"0"}
    assert seen(job(NODE, HOSTS, config(2, 8, tp=8), fat_tree(HOSTS, 2), profile=unsaid)) == {None}
    assert seen(job(NODE, HOSTS, config(2, 8, tp=8), profile=unsaid)) == {None}
    assert seen(job(NODE, [*HOSTS, "n2"], config(3, 8, pp=2), profile=apart)) == {None}


def test_names_come_from_the_machine_at_hand() -> None:
    """Images shift names of devices: places are compared by address."""
    nics = tuple(replace(nic, pci=f"0000:{i:02x}:00.0") for i, nic in enumerate(NODE.nics))
    here = replace(NODE, nics=nics)
    live = running(here, {f"mlx5_{i}": f"mlx5_{i + 10}" for i in range(8)})
    made = job(here, HOSTS, config(2, 8, tp=8))
    assert [b.nic for b in bindings(made, "n0", live)] == [f"mlx5_{i + 10}" for i in range(8)]
    gone = replace(live, nics=tuple(nic for nic in live.nics if nic.name != "mlx5_13"))
    assert bindings(made, "n0", gone)[0].missing == ("rail mlx5_3 (0000:03:00.0) is not on this machine",)


def test_cpus_are_never_widened() -> None:
    allowed = [*range(8), *range(48, 56)]
    found = bindings(table(), "n0", running(NODE), allowed=allowed)
    assert masks(found) == ["0-1", "2-3", "4-5", "6-7", "48-49", "50-51", "52-53", "54-55"]
    one_socket = bindings(table(), "n0", running(NODE), allowed=range(8))
    assert masks(one_socket)[4:] == [""] * 4
    assert one_socket[4].said == ("none of the CPUs that it was given is near its GPU: it keeps all of them",)


def test_masks_that_slurm_has_divided_are_not_divided_again() -> None:
    bound = {"SLURM_CPU_BIND_LIST": "0xfff,0xfff000"}
    assert masks(bindings(table(), "n0", running(NODE), bound, allowed=range(12)))[0] == "0-11"
    assert masks(bindings(table(), "n0", running(NODE), {}, allowed=range(12)))[0] == "0-2"


def test_a_part_of_a_node() -> None:
    """The job has GPUs 4 to 7 on this host: their CPUs and NICs, not those of the first four."""
    live = replace(running(NODE), gpus=tuple(replace(g, pci=f"0000:{g.index:02x}:00.0") for g in NODE.gpus))
    node = replace(NODE, gpus=live.gpus)
    made = job(node, HOSTS, config(2, 4, tp=4))
    found = bindings(made, "n0", live, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [b.pci for b in found] == [f"0000:0{i}:00.0" for i in range(4, 8)]
    assert [b.nic for b in found] == [f"mlx5_{i}" for i in range(4, 8)]
    assert masks(found) == ["48-59,144-155", "60-71,156-167", "72-83,168-179", "84-95,180-191"]
    assert [b.gpu for b in found] == [0, 1, 2, 3]


def test_what_somebody_has_set_stays_and_is_told() -> None:
    first = bindings(table(), "n0", NODE, {"NCCL_IB_HCA": "mlx5_1", "GLOO_SOCKET_IFNAME": "eth0"})[0]
    assert "NCCL_IB_HCA" not in first.set and first.kept == {"NCCL_IB_HCA": first.hcas}
    assert apply({"A": "1", "B": "2"}, {"B": "2"}) == ({"A": "1"}, ())


def test_ranks_that_slurm_put_elsewhere() -> None:
    made = table()
    me = Identity(3, 16, 3, 8, "srun", "k")
    assert place_of(made, me, ("n1",)).rank == 11, "the place of the rank that was to be there"
    with pytest.raises(
        LaunchError, match=r"^rank 3 runs on n7, and the rank table of job 7 has n0, n1: the nodes of the"
    ):
        place_of(made, me, ("n7", "n7.cluster"))
    with pytest.raises(LaunchError, match="has 16 ranks, and there are 8"):
        place_of(made, Identity(3, 8, 3, 8, "srun", "k"), ("n0",))
    with pytest.raises(LaunchError, match="number 8 on n0, for which the rank table of job 7 has 8"):
        place_of(made, Identity(8, 16, 8, 9, "srun", "k"), ("n0",))


def test_lists_of_hcas() -> None:
    """Field failure 10: without = a list is one of prefixes."""
    rails = [Nic("mlx5_1", role="rail"), Nic("mlx5_10:2", port=2, role="rail")]
    assert hca_list(rails) == "=mlx5_1:1,mlx5_10:2"
    assert hca_list(rails, (2, 30, 4)) == "=mlx5_1:1,mlx5_10:2"
    assert hca_list(rails, (2, 30, 5)) == "=mlx5_1:1:0,mlx5_10:2:1"
    assert hca_names("=mlx5_1:1:0,mlx5_10:2:1") == ("mlx5_1:1", "mlx5_10:2")
    assert hca_names("==mlx5_1") == ("mlx5_1:1",)
    assert hca_names("mlx5_1") is None


def test_more_rails_than_nccl_takes() -> None:
    rails = [Nic(f"mlx5_{i}", role="rail") for i in range(33)]
    found, said = variables(Traffic(rails=rails, nic=rails[0], route="ib0", hosts=2))
    assert "NCCL_IB_HCA" not in found and said == (
        "33 rails are more than the 32 that NCCL takes in a list: it chooses itself",
    )
    found, said = variables(Traffic(rails=rails[:32], nic=rails[0], hosts=2))
    assert len(found["NCCL_IB_HCA"].split(",")) == 32 and said == ()


def test_on_one_host_nothing_is_said_of_networks() -> None:
    found, _ = variables(Traffic(rails=[Nic("mlx5_0", role="rail")], route="eth0", bound=True, topo_file="/x", hosts=1))
    assert found == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_IGNORE_CPU_AFFINITY": "1", "NCCL_TOPO_FILE": "/x"}


def test_rails_that_are_interfaces() -> None:
    """On a practice cluster; a rail that is down is not taken for gloo."""
    rails = [Nic(f"rail{i}", interface=f"rail{i}", verbs=False, role="rail", state="active") for i in range(2)]
    found, _ = variables(Traffic(rails=rails, nic=rails[1], route="eth0", hosts=2))
    assert (found["GLOO_SOCKET_IFNAME"], found["UCX_NET_DEVICES"]) == ("rail1", "rail1")
    assert gloo_interface(Traffic(rails, replace(rails[1], state="down"), "eth0")) == "eth0"


# Ranks with a table, forked


CPUS = allowed_cpus()
LIVE = Node(
    gpus=tuple(Gpu(i, uuid=str(i), numa=0, cpus=CPUS) for i in range(2)),
    nics=(Nic("lo", interface="lo", verbs=False, role="rail"),),
    numas=(Numa(0, CPUS),),
)
OTHER = next((name for name in psutil.net_if_stats() if name != "lo"), "nope0")


def wrong_mask() -> None:
    set_affinity(tuple(cpu for cpu in CPUS if cpu not in os.sched_getaffinity(0)))


def wrong_device() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"


def neighbours_gpu() -> None:
    """As if torch computed on the other GPU of the host."""
    from hpctrain.launch.rank import bootstrap

    torch.cuda.device_count = lambda: 2
    bootstrap.names_of = lambda place: ("1", "")


def wrong_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = OTHER


def wrong_nic() -> None:
    os.environ["UCX_NET_DEVICES"] = OTHER


def nothing() -> None:
    pass


SPOILS = {one.__name__: one for one in (wrong_mask, wrong_device, neighbours_gpu, wrong_nic, wrong_interface, nothing)}


def rank_of_a_job(folder: Path, path: Path, wrong: str, counts: bool = False):
    """One of four ranks on two hosts, both of which are this machine; rank 2 spoils something once it is bound."""
    import contextlib
    import io

    from hpctrain.launch.meet import rendezvous
    from hpctrain.launch.rank import bootstrap

    rank = dist.get_rank()
    dist.destroy_process_group()  # the test's own is out of the way
    os.environ.update(
        SLURMD_NODENAME=HOSTS[rank // 2],
        HPCTRAIN_RANK_TABLE=str(path),
        HPCTRAIN_RAILS="lo",
        HPCTRAIN_GPUS="0,1",
        CUDA_VISIBLE_DEVICES="0,1",
    )
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    called: dict[str, int] = {}

    class Counted:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            called[name] = called.get(name, 0) + 1
            return getattr(self._store, name)

    choose, call = bootstrap.choose, rendezvous.roll_call
    spoil = SPOILS[wrong] if rank == 2 else nothing

    def choose_and_spoil(*args):
        spoil()
        return choose(*args)

    bootstrap.choose = choose_and_spoil
    rendezvous.roll_call = lambda store, *args: call(Counted(store), *args)
    me = Identity(rank, 4, rank % 2, 2, "srun" if not counts else "submitit", "slurm-7-0-0")
    out = io.StringIO()
    try:
        with contextlib.redirect_stderr(out), process_group(me, folder, "cpu", 20.0) as world:
            mine = {"cpus": sorted(os.sched_getaffinity(0)), "gloo": os.environ.get("GLOO_SOCKET_IFNAME")}
            dist.barrier()  # a rank that leaves at once would break the others' connecting
            return {"said": world.proof, "called": called, **mine}
    except LaunchError as error:
        return {"error": str(error), "table": out.getvalue()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A rank table of two hosts with two ranks each."""
    where = tmp_path / "table.json"
    where.write_text(job(LIVE, HOSTS, config(2, 2, tp=2)).dump())
    return where


def test_ranks_take_their_places_and_prove_it(ranks, tmp_path: Path, path: Path) -> None:
    found = ranks(4, rank_of_a_job, tmp_path, path, "nothing")
    cut = [*CPUS[: len(CPUS) - len(CPUS) // 2]], [*CPUS[len(CPUS) - len(CPUS) // 2 :]]
    if len(CPUS) in (2, 4):
        assert [one["cpus"] for one in found] == [*cut, *cut], "half each, on both hosts"
    assert {one["gloo"] for one in found} == {"lo"}
    assert [bool(one["said"]) for one in found] == [True, False, False, False]
    assert found[0]["said"].startswith("proof: 4 ranks on 2 hosts, 4 of them placed by the rank table: all as planned")
    kept = ranks_of(json.loads((tmp_path / "proof.json").read_text()))
    assert [row["planned"]["row"] for row in kept] == [0, 1, 2, 3]
    assert {row["found"]["versions"]["torch"] for row in kept} == {torch.__version__}
    record = json.loads((tmp_path / "rank_table.json").read_text())
    assert [(row["host"], row["gpu"], row["nic"]) for row in record["ranks"]] == [
        ("n0", 0, "lo"),
        ("n0", 1, "lo"),
        ("n1", 0, "lo"),
        ("n1", 1, "lo"),
    ]


@pytest.mark.parametrize(
    ("wrong", "what", "planned"),
    [
        ("wrong_mask", "CPUs", ""),
        ("wrong_device", "visible GPUs", "all 2 of the node"),
        ("neighbours_gpu", "GPU", "0"),
        ("wrong_nic", "NIC", "lo"),
        ("wrong_interface", "interface", "lo"),
    ],
)
def test_a_rank_on_a_wrong_place_stops_all(
    ranks, tmp_path: Path, path: Path, wrong: str, what: str, planned: str
) -> None:
    found = ranks(4, rank_of_a_job, tmp_path, path, wrong)
    sentence = f"ranks 2 of 4 are not as planned ({what}): rank 0 shows what was planned and found, the usual cause"
    assert all(one["error"].startswith(sentence) for one in found), found
    header, row = found[0]["table"].splitlines()[:2]
    assert header.split() == ["rank", "what", "planned", "found", "usual", "cause", "mend"]
    assert row.startswith("2 ") and what in row and planned in row
    assert [one["table"] for one in found[1:]] == ["", "", ""], "one table"
    (finding,) = [f for f in json.loads((tmp_path / "proof.json").read_text())["findings"] if f["stops"]]
    assert (finding["rank"], finding["what"]) == (2, what)


def test_a_rank_without_its_nic_stops_all(ranks, tmp_path: Path, path: Path) -> None:
    two = replace(LIVE, nics=(*LIVE.nics, Nic("gone0", interface="gone0", verbs=False, role="rail")))
    path.write_text(job(two, HOSTS, config(2, 2, tp=2)).dump())
    found = ranks(4, rank_of_a_job, tmp_path, path, "nothing")
    assert all(one["error"].startswith("ranks 0-3 of 4 are not as planned (device, NIC, interface)") for one in found)
    assert "rail gone0 (no address)" in found[0]["table"] and "gone0 absent" in found[0]["table"]


def test_the_proof_costs_no_message(ranks, tmp_path: Path, path: Path) -> None:
    """What ranks found travels with their arrival: as many calls of the store as without."""
    with_proof = ranks(4, rank_of_a_job, tmp_path / "a", path, "nothing")
    without = ranks(4, rank_of_a_job, tmp_path / "b", path, "nothing", True)
    assert without[0]["said"] == "" != with_proof[0]["said"]
    for one, other in zip(with_proof[1:], without[1:]):
        for called in (one["called"], other["called"]):
            assert (called["add"], called["set"]) == (3, 1) and called["get"] <= 2 and "multi_get" not in called
    assert "get" not in with_proof[0]["called"] and with_proof[0]["called"]["multi_get"] <= 3
