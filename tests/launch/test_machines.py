"""Profiles of machines on such machines: CPUs, NIC and list of NICs of every rank, by their vendors' own descriptions.

What a rank sees is a /sys tree that was written by hand (`boxes.py`); what is planned with is that, as `node: live` has
it, or what was captured on such a machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.affinity import near
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Distance, Node
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.slurm.profile import profiles, site
from hpctrain.launch.slurm.rules import Slurm
from hpctrain.launch.submit.sbatch import JobFolders, Options, sbatch_text
from tests.launch import boxes
from tests.launch.machines import DATA, bindings, captured, config, job, masks

TWO = ["a", "b"]


def on(profile: str, node: Node, live: Node, per_node: int = 8) -> list[Binding]:
    """What ranks of a host do, where tp fills it."""
    table = job(node, TWO, config(2, per_node, tp=per_node), profile=site(profile).profile)
    found = bindings(table, "b", live)
    assert masks(bindings(table, "a", live)) == masks(found), "hosts of one kind are bound alike"
    assert [binding.uuid for binding in found] == [f"GPU-{i}" for i in range(per_node)]
    assert [said for binding in found for said in (*binding.missing, *binding.unseen)] == []
    return found


def hcas(found: list[Binding]) -> str:
    (only,) = {binding.set.get("NCCL_IB_HCA", "") for binding in found}
    return only


def split(cores: range, ranks: int, second: int = 0) -> list[str]:
    """Cores shared evenly, as lists of CPUs, with the threads that are so much further."""
    width = len(cores) // ranks
    firsts = [cores[0] + width * i for i in range(ranks)]
    return [f"{a}-{a + width - 1}" + (f",{a + second}-{a + second + width - 1}" if second else "") for a in firsts]


def in_a_job(live: Node, file: str) -> Node:
    """What the batch script plans with where the profile names NCCL's picture of the machine."""
    return assign_roles(merge([live, read_node(DATA / file)]))


IB = [f"mlx5_ib{i}" for i in range(8)]


@pytest.mark.parametrize("names", [IB, [f"mlx5_{(i + 3) % 8}" for i in range(8)]], ids=["named", "shifted"])
def test_azure_ndv4(tmp_path: Path, names: list[str]) -> None:
    """GPU 0 is near NUMA node 1, GPU 4 near 3. The guest shows no switch, the image's XML names no NIC: they are found
    by their addresses, whatever this image calls them."""
    live = boxes.AZURE_NDV4.read(tmp_path, lambda name: names[int(name[-1])])
    node = in_a_job(live, "nccl_xml/azure_ndv4-topo.xml")
    assert {entry.distance for entry in near(assign_roles(live))} == {Distance.NODE}, "by itself"
    assert {entry.distance for entry in near(node)} == {Distance.PIX}
    found = on("azure-ndv4", node, live)
    assert masks(found) == [
        *split(range(24, 48), 2),
        *split(range(24), 2),
        *split(range(72, 96), 2),
        *split(range(48, 72), 2),
    ]
    assert [b.nic for b in found] == names
    assert hcas(found) == "=" + ",".join(f"{name}:1" for name in names)
    assert {b.set["NCCL_TOPO_FILE"] for b in found} == {"/opt/microsoft/ndv4/topo.xml"}
    assert not any("NCCL_CROSS_NIC" in b.set for b in found), "whether rails are apart there, nobody says"
    by_file = on("azure-ndv4", captured("nccl_xml/azure_ndv4-topo.xml"), live)
    assert (masks(by_file), [b.nic for b in by_file]) == (masks(found), names)


def test_azure_ndv5(tmp_path: Path) -> None:
    live = boxes.AZURE_NDV5.read(tmp_path)
    found = on("azure-ndv5", in_a_job(live, "nccl_xml/azure_ndv5-topo.xml"), live)
    assert masks(found) == split(range(96), 8)
    assert [b.nic for b in found] == IB and hcas(found) == "=" + ",".join(f"{name}:1" for name in IB)
    assert [b.numa for b in found] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_aws_p4d(tmp_path: Path) -> None:
    """Two GPUs share an EFA device. EFA is no verbs device of NCCL's, so there is no list."""
    live = boxes.AWS_P4D.read(tmp_path)
    files = ("nccl_xml/aws_p4d-24xl-topo.xml", "hwloc_xml/aws_p4d.24xl-hwloc.xml")
    slices = [f"k8s_resourceslice/aws_eks_gpu-efa_resourceslice-{what}.yaml" for what in ("gpu", "dranet")]
    for node in (assign_roles(live), captured(*files), captured(*slices, files[0])):
        found = on("aws-p4d", node, live)
        assert [b.nic for b in found] == [f"rdmap{n}s27" for n in (16, 16, 32, 32, 144, 144, 160, 160)]
        assert masks(found) == split(range(48), 8, 48)
        assert hcas(found) == ""


def test_aws_p5(tmp_path: Path) -> None:
    """32 EFA devices, four for each GPU; NCCL's own choice of these comes first: the index with its bits mirrored."""
    live = boxes.AWS_P5.read(tmp_path)
    first = [rail + choice for rail, choice in zip((79, 96, 113, 130, 147, 164, 181, 198), (0, 2, 1, 3) * 2)]
    for node in (assign_roles(live), captured("hwloc_xml/aws_p5.48xl-hwloc.xml.gz")):
        found = on("aws-p5", node, live)
        assert [b.nic for b in found] == [f"rdmap{n}s0" for n in first]
        assert hcas(found) == ""
    assert masks(on("aws-p5", assign_roles(live), live)) == split(range(96), 8, 96)


def test_dgx_h100(tmp_path: Path) -> None:
    """Names of rails have gaps, where cards for storage are."""
    live = boxes.DGX_H100.read(tmp_path)
    found = on("dgx-h100", assign_roles(live), live)
    rails = [f"mlx5_{n}" for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    assert [b.nic for b in found] == rails and hcas(found) == "=" + ",".join(f"{name}:1" for name in rails)
    assert masks(found) == split(range(112), 8, 112)
    assert {b.set["NCCL_CROSS_NIC"] for b in found} == {"0"}, "groups of dp stay on their rails, which are apart"
    roles = {nic.name: nic.role for nic in assign_roles(live).nics}
    assert {roles[f"mlx5_{n}"] for n in (1, 2, 7, 8)} == {"storage"} and roles["eno1"] == "management"


def test_h100_in_reverse() -> None:
    """A machine with 8 H100 and 9 NICs, of which GPU i is near 8 - i (NVIDIA/nccl#1453); its matrix has no names."""
    node = captured("smi_topo/nccl1453_h100_8gpu_9nic_reversed.txt")
    table = job(node, TWO, config(2, 8, tp=8), profile=site("dgx-h100").profile)
    found = bindings(table, "b", node)
    assert [b.nic for b in found] == [f"NIC{i}" for i in range(8, 0, -1)]
    assert masks(found) == split(range(160), 8)
    assert hcas(found) == "=" + ",".join(f"NIC{i}:1" for i in range(8, 0, -1)), "NIC0 is far from every GPU"


def test_dgx_a100(tmp_path: Path) -> None:
    """GPUs 0 and 1 are on NUMA node 3, 2 and 3 on 1. Each pair has two rails as near; NCCL gives each GPU one."""
    live = boxes.DGX_A100.read(tmp_path)
    found = on("dgx-a100", assign_roles(live), live)
    assert [b.nic for b in found] == [f"mlx5_{n}" for n in (0, 1, 2, 3, 6, 7, 8, 9)]
    numas = [split(range(16 * n, 16 * n + 16), 2, 128) for n in (3, 1, 7, 5)]
    assert masks(found) == [mask for both in numas for mask in both]
    seen = captured("smi_topo/nccl1505_dgxa100_8gpu_12nic_truncated.txt")
    half = [(e.distance, e.numa, e.cpus) for e in near(seen)[:4]]
    assert half == [(e.distance, e.numa, e.cpus) for e in near(assign_roles(live))[:4]], "as on a real one (NCCL#1505)"


@pytest.mark.parametrize("second", [112, 1], ids=["second threads above", "threads side by side"])
def test_no_two_ranks_share_a_core(tmp_path: Path, second: int) -> None:
    """CPUs of one socket are the even ones, or threads of a core are neighbours: only /sys tells threads, and ranks of
    a job that was planned without it look there."""
    even = ",".join(map(str, range(0, 224, 2))) if second > 1 else "0-111"
    odd = ",".join(map(str, range(1, 224, 2))) if second > 1 else "112-223"
    live = replace(boxes.DGX_H100, numas={0: even, 1: odd}, second=second).read(tmp_path)
    assert live.cores[1] == ((1, 113) if second > 1 else (2, 3))
    told = replace(assign_roles(live), cores=())
    for allowed in (range(224), range(200), [c for c in range(224) if c % 28 not in (3, 4)]):
        table = job(told, TWO, config(2, 8, tp=8), profile=site("dgx-h100").profile)
        found = bindings(table, "b", live, allowed=allowed)
        owners = [{b.gpu for b in found if {*core} & {*b.cpus}} for core in live.cores]
        assert max(map(len, owners)) == 1, "every core is of one rank"
        assert sorted(cpu for b in found for cpu in b.cpus) == sorted(allowed)


def test_gb200(tmp_path: Path) -> None:
    """A tray of Oracle's GB200: two NICs for each GPU on its side of the board; NUMA nodes that are memory of GPUs."""
    live = boxes.OCI_GB200.read(tmp_path)
    folder = "k8s_resourceslice/oci_oke_BM.GPU.GB200-v3.4_resourceslice"
    for node in (assign_roles(live), captured(f"{folder}-gpu.yaml", f"{folder}-dranet.yaml")):
        found = on("gb200-nvl72", node, live, per_node=4)
        names = [b.nic for b in found]
        assert len(set(names)) == 4 and {*names[:2]} < {f"rdma{i}" for i in range(4)}
        assert {*names[2:]} < {f"rdma{i}" for i in range(4, 8)}
        assert [b.numa for b in found] == [0, 0, 1, 1]
    assert masks(on("gb200-nvl72", assign_roles(live), live, per_node=4)) == split(range(144), 4)
    assert masks(found) == ["", "", "", ""], "the slices tell no CPUs, so with them alone ranks are not bound"
    script = sbatch_text(
        config(36, 4),
        site("gb200-nvl72"),
        Options(),
        JobFolders(DIR, "s"),
        "python3",
        Slurm((24, 5), "block"),
    )
    assert "#SBATCH --segment=18\n" in script


DIR = Path("/runs/x")


@pytest.mark.parametrize("name", [name for name in profiles() if name != "lab"])
def test_profiles_are_short(name: str) -> None:
    text = profiles()[name].read_text()
    assert len(text.splitlines()) <= 20
