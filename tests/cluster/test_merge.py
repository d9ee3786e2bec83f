"""Readings of one machine made one node, and what they contradict each other in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpctrain.cluster import resourceslice, smi_topo
from hpctrain.cluster.affinity import near
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles
from tests.cluster.machines import Machine
from tests.cluster.test_xml import GPU, HCA, SWITCH, cpu, net, pci, system

DATA = Path(__file__).parent / "data"


def said(node: Node, *words: str) -> bool:
    return any(all(word in problem for word in words) for problem in node.problems)


def test_one_reading_stays_what_it_is() -> None:
    node = read_node(DATA / "nccl_xml/azure_ndv4-topo.xml")
    again = merge([node, node])
    assert again.gpus == node.gpus and again.nics == node.nics and again.problems == node.problems
    pairs = [(g.key, n.name) for g in node.gpus for n in node.nics]
    assert [again.distance(*p) for p in pairs] == [node.distance(*p) for p in pairs]


def test_kubernetes_gpus_and_nics_come_together() -> None:
    files = ["aws_eks_gpu-efa_resourceslice-gpu.yaml", "aws_eks_gpu-efa_resourceslice-dranet.yaml"]
    node = assign_roles(merge([read_node(DATA / "k8s_resourceslice" / f) for f in files]))
    assert [gpu.numa for gpu in node.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]  # from the NIC under the same PCI root
    assert [[nic.name for nic in entry.nics] for entry in near(node)][::2] == [
        ["rdmap16s27"],
        ["rdmap32s27"],
        ["rdmap144s27"],
        ["rdmap160s27"],
    ]
    assert node.problems == ()


def test_kubernetes_and_the_vendors_xml_agree() -> None:
    slices = [read_node(p) for p in sorted((DATA / "k8s_resourceslice").glob("aws*"))]
    xml = read_node(DATA / "nccl_xml/aws_p4d-24xl-topo.xml")
    node = assign_roles(merge([*slices, xml]))
    assert [nic.name for nic in node.rails] == ["rdmap16s27", "rdmap32s27", "rdmap144s27", "rdmap160s27"]
    assert {entry.distance for entry in near(node)} == {Distance.PIX}
    assert node.gpus[4].uuid.startswith("GPU-") and node.gpus[4].cpus != ()
    assert node.problems == ()


def test_hwloc_and_the_vendors_xml_differ_in_threads() -> None:
    node = merge([read_node(DATA / f) for f in ("hwloc_xml/aws_p4d.24xl-hwloc.xml", "nccl_xml/aws_p4d-24xl-topo.xml")])
    assert said(node, "disagree on the CPUs of 2 NUMA nodes", "0-23,48-71", "0-23")
    assert [nic.name for nic in assign_roles(node).rails][:1] == ["rdmap16s27"]


def test_a_matrix_that_says_sys_everywhere_counts_least() -> None:  # GB200 at OCI: kubernetes-sigs/dranet
    slices = [read_node(p) for p in sorted((DATA / "k8s_resourceslice").glob("oci*"))]
    names = [f"rdma{i}" for i in range(8)]
    flat = Machine(4, 8, reach=lambda g, n: "SYS", legend=names, affinity=lambda g: ("0-143", "0-1", "N/A"))
    node = assign_roles(merge([smi_topo.read(flat.tabbed()), slices[0]]))
    assert said(node, "4 GPUs") is False and node.distance("gpu0", "rdma0") is not Distance.UNKNOWN
    node = assign_roles(merge([*slices, smi_topo.read(flat.tabbed())]))
    assert said(node, "says SYS for every GPU and NIC", "16 pairs")
    assert [[nic.name for nic in entry.nics] for entry in near(node)] == [names[:4], names[:4], names[4:], names[4:]]
    assert [nic.name for nic in node.rails] == names


def test_an_older_xml_of_the_same_machine() -> None:  # one NUMA node and 32 CPUs for NDv4
    old = system(
        cpu(
            0,
            "ffffffff",
            "".join(
                pci(f"ffff:ff:0{i}.0", SWITCH, "".join(pci(f"{bus}:00:00.0", code) for bus, code in group))
                for i, group in enumerate(
                    [
                        [("0003", GPU), ("0103", HCA), ("0004", GPU), ("0104", HCA)],
                        [("0001", GPU), ("0101", HCA), ("0002", GPU), ("0102", HCA)],
                        [("000d", GPU), ("0107", HCA), ("000e", GPU), ("0108", HCA)],
                        [("000b", GPU), ("0105", HCA), ("000c", GPU), ("0106", HCA)],
                    ]
                )
            ),
        )
    )
    from hpctrain.cluster.read import read_text

    node = merge([read_node(DATA / "nccl_xml/azure_ndv4-topo.xml"), read_text(old, "old.xml")])
    assert said(node, "disagree on the NUMA node of 6 GPUs", "gpu0: 0, 1")
    assert said(node, "disagree on the CPUs of 1 NUMA nodes", "0-31, 0-23")
    assert said(node, "NUMA nodes 0, NCCL XML (azure_ndv4-topo.xml) 0-3")
    assert [gpu.numa for gpu in node.gpus] == [1, 1, 0, 0, 3, 3, 2, 2]


def test_names_shift_and_addresses_stay() -> None:  # OCI's H100 with and without Kubernetes
    def machine(first: int) -> Node:
        from hpctrain.cluster.nccl_xml import read

        parts = [
            pci(
                f"0000:{i}0:00.0",
                SWITCH,
                pci(f"0000:{i}1:00.0", GPU) + pci(f"0000:{i}2:00.0", HCA, net(f"mlx5_{first + i}")),
            )
            for i in range(1, 5)
        ]
        return read(system(cpu(0, "ff", "".join(parts))))

    node = merge([machine(0), machine(17)])
    assert said(node, "disagree on the name of 4 NICs", "0000:12:00.0: mlx5_18, mlx5_1")
    assert len(node.nics) == 4 and node.distance("gpu0", "mlx5_1") is Distance.PIX


def test_an_address_that_is_not_there() -> None:
    seen = Node(gpus=(Gpu(0, pci="0000:1b:00.0"), Gpu(1, pci="0000:2b:00.0")), sources=("NVML",))
    told = Node(gpus=(Gpu(0, pci="0000:1b:00.0"), Gpu(1, pci="0000:3b:00.0")), sources=("NCCL XML",))
    node = merge([seen, told])
    assert said(node, "GPU 0000:3b:00.0 is in NCCL XML, not in NVML")
    assert said(node, "GPU 0000:2b:00.0 is in NVML, not in NCCL XML")


def test_masks_that_overlap() -> None:
    one = Node(numas=(Numa(0, (0, 1)),), sources=("sysfs",))
    two = Node(numas=(Numa(1, (1, 2)),), sources=("x",))
    assert said(merge([one, two]), "NUMA nodes 0 and 1 share CPUs")


def test_matrices_match_by_index_only_if_all_are_there() -> None:
    there = Node(gpus=tuple(Gpu(i, pci=f"0000:{i + 1}b:00.0") for i in range(8)), sources=("sysfs",))
    part = smi_topo.read(Machine(4, 0).tabbed())
    node = merge([there, part])
    assert said(node, "shows 4 GPUs without addresses, sysfs 8: they are not matched")
    assert len(node.gpus) == 8 and node.nvlinks == {}
    full = merge([there, smi_topo.read(Machine(8, 0).tabbed())])
    assert full.nvlinks["gpu0", "gpu7"] == 18 and full.gpus[3].numa == 0 and full.gpus[3].pci == "0000:4b:00.0"


def test_names_and_addresses_of_nics_do_not_meet() -> None:
    """A matrix has names and a vendor's XML addresses: each NIC is there twice, and this is said. A reading with both
    brings them together."""
    drawn = Node(nics=(Nic("mlx5_0"), Nic("mlx5_1")), sources=("matrix",))
    xml = Node(nics=(Nic("0101:00:00.0", "0101:00:00.0"), Nic("0102:00:00.0", "0102:00:00.0")), sources=("XML",))
    root = Node(nics=(Nic("mlx5_0", "0101:00:00.0"), Nic("mlx5_1", "0102:00:00.0")), sources=("sysfs",))
    for order in ([drawn, xml], [xml, drawn]):
        both = merge(order)
        assert len(both.nics) == 4 and said(both, "not matched", "counted twice")
    for order in ([root, drawn, xml], [root, xml, drawn]):
        assert [nic.name for nic in merge(order).nics] == ["mlx5_0", "mlx5_1"] and not merge(order).problems


def test_nvlinks_win_over_paths_and_differ_in_words() -> None:
    xml = read_node(DATA / "nccl_xml/azure_ndv5-topo.xml")
    good = smi_topo.read(Machine(8, 0).tabbed(), "matrix")
    node = merge([xml, good])
    assert node.distance("gpu0", "gpu1") is Distance.NVLINK and not said(node, "disagree on the distance")
    bad = smi_topo.read(Machine(8, 0, link=lambda a, b: "NV17" if a == 0 else "NV18").tabbed(), "later")
    assert said(merge([xml, good, bad]), "disagree on the NVLinks of 7 pairs", "gpu0 to gpu1: 17, 18")


def test_a_file_without_classes_places_gpus_of_another() -> None:
    hwloc = read_node(DATA / "hwloc_xml/aws_g5.48xl-hwloc.xml")
    xml = read_node(DATA / "nccl_xml/aws_g5.48xl-topo.xml")
    assert [gpu.numa for gpu in hwloc.gpus] == [None] * 8
    node = merge([hwloc, xml])
    assert [gpu.numa for gpu in node.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert format_list(node.gpus[5].cpus) == "48-95,144-191"


def test_indices_follow_addresses() -> None:
    node = merge(
        [Node(gpus=(Gpu(0, pci="0000:9b:00.0", uuid="a"),)), Node(gpus=(Gpu(0, pci="0000:1b:00.0", uuid="b"),))]
    )
    assert [(gpu.index, gpu.uuid) for gpu in node.gpus] == [(0, "b"), (1, "a")]


def test_two_machines_are_not_one() -> None:
    assert said(merge([Node(name="a"), Node(name="b")]), "are they of one machine?")


def test_slices_of_several_nodes_need_a_name() -> None:
    text = (DATA / "k8s_resourceslice/oci_oke_BM.GPU.GB200-v3.4_resourceslice-gpu.yaml").read_text()
    both = text + "\n---\n" + text.replace("10.140.65.248", "10.140.65.249")
    assert len(resourceslice.read(both, node="10.140.65.249").gpus) == 4
    try:
        resourceslice.read(both)
    except Exception as error:
        assert "slices of 2 nodes" in str(error)
    else:
        raise AssertionError("it was read as one")


def test_slices_cut_between_two_lines() -> None:
    text = (DATA / "k8s_resourceslice/oci_oke_BM.GPU.GB200-v3.4_resourceslice-dranet.yaml").read_text()
    node = resourceslice.read(text[: text.index("\n  - name: pci-0010-03-00-0")])
    assert len(node.nics) == 4 and node.partial and said(node, "does not end with a line end")
    sorted_keys = (DATA / "k8s_resourceslice/azure_aks_mi300x_resourceslice-dranet.yaml").read_text()
    node = resourceslice.read(sorted_keys[: sorted_keys.index("    name: pci-0105") + 27])
    assert node.partial and said(node, "does not say its driver or its node")


def test_devices_without_a_place_are_said() -> None:
    text = (DATA / "k8s_resourceslice/azure_aks_mi300x_resourceslice-dranet.yaml").read_text()
    node = resourceslice.read(text.replace("dra.net/pciAddress", "dra.net/pciAddresx", 1))
    assert len(node.nics) == 7 and said(node, "pci-0101-00-00-0 has no PCI address")
    node = resourceslice.read(
        text.replace("dra.net/numaNode:\n        int: 0", "dra.net/numaNode:\n        int: 0x", 1)
    )
    assert node.nics[0].numa is None and said(node, "the NUMA node of pci-0101-00-00-0 cannot be read")


def test_what_the_first_lacks_the_second_gives() -> None:
    one = Node(nics=(Nic("mlx5_0", pci="0000:1b:00.0"),), sources=("a",))
    two = Node(nics=(Nic("mlx5_0", pci="0000:1b:00.0", rate_gbit=400, numa=1),), sources=("b",))
    assert merge([one, two]).nics[0] == replace(two.nics[0])
