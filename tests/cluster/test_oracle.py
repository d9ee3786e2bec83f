"""Files of real machines, and what each of them says.

`oracle.yaml` was held against the table that came with the collection and read by eye. They differ where:
- `azure_ncv4` and RCCL's `topo_8p_rome_vm1` list a `net` with no PCI device: here it counts as a NIC.
- RCCL's `topo_4p2h_2nic` and `topo_8p_pcie_2nic`: GPU and NIC are PXB, not PIX, apart, as NCCL says PXB for a path
  from one switch to another (src/graph/paths.cc).
- `40intel64`: its `qib0` is of PCI class 0c06 and a fabric port all the same.
- `nccltests320`: all GPUs shown are on the second NUMA node; that is a part of a node.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.cluster.affinity import Near, near
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Distance, Node
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles

HERE = Path(__file__).parent
DATA = HERE / "data"
ORACLE: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "oracle.yaml").read_text())
KINDS = ("smi_topo", "smi_misc", "nccl_xml", "nccl_xml_rccl", "hwloc_xml", "k8s_resourceslice")
ROWS = list(csv.DictReader((DATA / "MANIFEST.csv").open()))


def test_every_file_is_judged_and_its_source_named() -> None:
    files = {str(p.relative_to(DATA)) for kind in KINDS for p in (DATA / kind).iterdir()}
    assert files == set(ORACLE) == {row["file"] for row in ROWS}
    assert all(row["source"] and row["origin_type"] for row in ROWS)


def run(words: list[str]) -> str:
    """Words with repeats as `a*3`."""
    said: list[tuple[str, int]] = []
    for word in words:
        if said and said[-1][0] == word:
            said[-1] = (word, said[-1][1] + 1)
        else:
            said.append((word, 1))
    return " ".join(word if n == 1 else f"{word}*{n}" for word, n in said)


def reach(entry: Near) -> str:
    if entry.any_distance is Distance.UNKNOWN:
        return "?"
    names = [nic.name for nic in entry.any_nics]
    short = "+".join(names) if len(names) <= 8 else f"{names[0]}..{names[-1]}({len(names)})"
    return f"{short}@{entry.any_distance.name}"


def facts(node: Node) -> dict[str, Any]:
    return {
        "gpus": len(node.gpus),
        "nics": len(node.nics),
        "partial": node.partial,
        "numa": run(["?" if gpu.numa is None else str(gpu.numa) for gpu in node.gpus]),
        "cpus": " ".join(f"{n.index}={format_list(n.cpus)}" for n in node.numas if n.cpus),
        "nearest": run([reach(entry) for entry in near(node)]),
        "links": " ".join(map(str, sorted(set(node.nvlinks.values())))),
        "rails": " ".join(nic.name for nic in node.rails),
    }


@pytest.mark.parametrize("file", ORACLE)
def test_file(file: str) -> None:
    node = assign_roles(read_node(DATA / file))
    assert facts(node) == ORACLE[file]
    assert all(nic.why for nic in node.nics)
    assert [gpu.index for gpu in node.gpus] == list(range(len(node.gpus)))


TRUNCATED = [row["file"] for row in ROWS if row["truncated"] == "yes"]


@pytest.mark.parametrize("file", TRUNCATED)
def test_truncated_files_say_what_is_missing(file: str) -> None:
    node = read_node(DATA / file)
    assert node.partial
    assert any("rows of" in problem and "are missing" in problem for problem in node.problems)


CLEAN = sorted(set(ORACLE) - set(TRUNCATED) - {"smi_topo/nccltests320_3gpu_2nic_mixed.txt"})
SPOKEN = {
    "smi_topo/gb200_ansi_blank_affinity.txt": "CPU affinity of GPU2 is blank",
    "smi_topo/dranet_aks_gb300_4nic_node.md": "rows of NIC0",
    "smi_topo/gpuallocator17_8x4090_2nic_all_sys.txt": "no legend says",
    "smi_topo/litgpt_rocm_xgmi.txt": "XGMI counts as one link",
    "smi_misc/p2p_rw_2x5090_gns.txt": "GNS, the GPU does not support it",
    "nccl_xml/azure_ncv4-topo.xml": "leads to itself",
    "nccl_xml/aws_g5.48xl-topo.xml": "whether 9 devices are GPUs or NICs",
    "nccl_xml/aws_p5.48xl-topo.xml": "32 devices below switches are taken for NICs",
    "hwloc_xml/aws_g5.48xl-hwloc.xml": "NUMA node of 8 GPUs is not told",
    "hwloc_xml/aws_p3dn.24xl-hwloc.xml": "NUMA node of 8 GPUs is not told",
    "k8s_resourceslice/azure_aks_gb300_resourceslice-gpu.yaml": "as Grace numbers them",
    "k8s_resourceslice/oci_oke_BM.GPU.GB200-v3.4_resourceslice-gpu.yaml": "as Grace numbers them",
}


@pytest.mark.parametrize("file", CLEAN)
def test_whole_files_have_the_problems_they_have_and_no_others(file: str) -> None:
    problems = " | ".join(read_node(DATA / file).problems)
    assert SPOKEN[file] in problems if file in SPOKEN else problems == ""
