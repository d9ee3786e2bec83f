"""Traps of matrices met in practice, imitated; the issue or thread where each was met is named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster import smi_topo
from hpctrain.cluster.affinity import near, unfit
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Distance, Node
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import ConfigError
from tests.cluster.machines import Machine, railed, two_sockets


def maps(node: Node) -> list[list[str]]:
    return [[nic.name for nic in entry.nics] for entry in near(assign_roles(node))]


@pytest.mark.parametrize("style", ["tabbed", "spaced", "indented", "fenced", "ansi"])
def test_styles_read_alike(style: str) -> None:
    machine = railed(extra=2, legend=[f"mlx5_{i}" for i in range(10)])
    text = {
        "tabbed": machine.tabbed(),
        "spaced": machine.spaced(),
        "indented": machine.spaced("    "),
        "fenced": f"```sh\n{machine.spaced()}```\n",
        "ansi": machine.tabbed().replace("\tGPU0\t", "\t\x1b[4mGPU0\t", 1).replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m"),
    }[style]
    node = smi_topo.read(text)
    assert maps(node) == [[f"mlx5_{i}"] for i in range(8)]
    assert [(g.numa, format_list(g.cpus)) for g in node.gpus[3:5]] == [(0, "0-55,112-167"), (1, "56-111,168-223")]
    assert node.problems == () and not node.partial


def test_markdown() -> None:
    node = smi_topo.read(railed(order=[7, 6, 5, 4, 3, 2, 1, 0]).markdown())
    assert maps(node) == [[f"NIC{7 - i}"] for i in range(8)]


def test_glued_columns_and_cells() -> None:  # vllm-project/vllm#13855
    machine = railed(extra=2)
    text = machine.spaced().replace("NIC8    NIC9    CPU", "NIC8NIC9    CPU")
    text = text.replace("NODE    NODE    56-111", "NODENODE    56-111").replace("SYS     PIX", "SYSPIX")
    assert "NIC8NIC9" in text and "NODENODE" in text and "SYSPIX" in text
    node = smi_topo.read(text)
    assert len(node.nics) == 10 and maps(node) == [[f"NIC{i}"] for i in range(8)]
    assert node.distance("gpu4", "NIC9") is Distance.NODE


def test_bonds_with_their_virtual_functions() -> None:  # a node of 36 devices of which four bonds are usable
    names = [f"mlx5_{i}" for i in range(32)] + [f"mlx5_bond_{i}" for i in range(4)]

    def reach(g: int, n: int) -> str:
        card = (n // 8) if n < 32 else n - 32
        return "PIX" if card == g // 2 else "NODE" if card // 2 == g // 4 else "SYS"

    text = Machine(8, 36, reach=reach, affinity=two_sockets, legend=names).tabbed()
    node = assign_roles(smi_topo.read(text.replace("NIC34\tNIC35", "NIC34NIC35")))
    assert [nic.name for nic in node.rails] == [f"mlx5_bond_{i}" for i in range(4)]
    assert maps(node)[0] == maps(node)[1] == ["mlx5_bond_0"]
    assert "beside the bond mlx5_bond_0" in next(nic for nic in node.nics if nic.name == "mlx5_3").why


def test_virtual_functions_of_storage_look_near() -> None:  # vllm-project/vllm#16997: 18 VFs at NODE of GPU4-7
    node = assign_roles(smi_topo.read(railed(extra=18).tabbed()))
    assert [nic.name for nic in node.rails] == [f"NIC{i}" for i in range(8)]
    assert {nic.role for nic in node.nics[8:]} == {"unknown"}


def test_two_gpus_with_three_near_nics_cannot_be_told() -> None:  # kvcache-ai/Mooncake#2039
    def reach(g: int, n: int) -> str:
        near_to = {8: 0, 9: 0, 10: 4, 11: 4}.get(n, n)
        return "PIX" if near_to == g else "NODE" if near_to // 4 == g // 4 else "SYS"

    def odd_even(g: int) -> tuple[str, str, str]:
        return ",".join(str(c) for c in range(g // 4, 64, 2)), str(g // 4), "N/A"

    node = assign_roles(smi_topo.read(Machine(8, 12, reach=reach, affinity=odd_even).tabbed()))
    assert [nic.name for nic in node.rails] == ["NIC1", "NIC2", "NIC3", "NIC5", "NIC6", "NIC7"]
    assert node.gpus[5].cpus == tuple(range(1, 64, 2)) and node.gpus[0].cpus == tuple(range(0, 64, 2))
    assert sum("has 3 NICs at PIX where others have 1" in p for p in node.problems) == 2


def test_order_of_nics_is_computed() -> None:  # NVIDIA/nccl#933: interleaved by socket
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert maps(smi_topo.read(railed(order=order).tabbed())) == [[f"NIC{n}"] for n in order]


def test_columns_out_of_order() -> None:  # NVIDIA/nccl-tests#78: mlx5_0, 2, 1, 3
    names = ["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]

    def reach(g: int, n: int) -> str:
        return "PIX" if int(names[n][-1]) == g // 2 else "PHB"

    machine = Machine(8, 4, reach=reach, names=names, affinity=two_sockets)
    assert maps(smi_topo.read(machine.tabbed())) == [[f"mlx5_{g // 2}"] for g in range(8)]


@pytest.mark.parametrize("spaced", [False, True])
def test_memory_of_gpus_is_no_numa_node_to_bind_to(spaced: bool) -> None:  # sgl-project/sglang#11208, GB200
    def affinity(g: int) -> tuple[str, str, str]:
        own = 2 + 8 * g
        return ("0-71", "0,3-9,11-17", str(own)) if g < 2 else ("72-143", "1,19-25,27-33", str(own))

    machine = Machine(4, 0, affinity=affinity)
    node = smi_topo.read(machine.spaced() if spaced else machine.tabbed())
    assert [gpu.numa for gpu in node.gpus] == [0, 0, 1, 1]
    assert node.gpus[1].memory == (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
    assert {n.index for n in node.numas if not n.of_gpu} == {0, 1}
    assert all(n.cpus == () for n in node.numas if n.of_gpu)
    assert [format_list(entry.cpus) for entry in near(node)] == ["0-71", "0-71", "72-143", "72-143"]


def test_blank_cpus_do_not_shift_columns() -> None:
    machine = Machine(2, 0, affinity=lambda g: ("0-35", "0", "N/A") if g == 0 else ("", "1", "N/A"))
    for text in (machine.tabbed(), machine.spaced()):
        node = smi_topo.read(text)
        assert [(gpu.numa, gpu.cpus[-1:]) for gpu in node.gpus] == [(0, (35,)), (1, ())]
        assert "the CPU affinity of GPU1 is blank" in node.problems


def test_near_several_numa_nodes_and_masks_that_clash() -> None:
    wide = smi_topo.read(Machine(1, 0, affinity=lambda g: ("0-63", "0-1", "N/A")).tabbed())
    assert wide.gpus[0].numa is None and wide.gpus[0].cpus == tuple(range(64))
    assert "GPU0 is near NUMA nodes 0-1, and not one of them more than the others" in wide.problems
    shared = smi_topo.read(Machine(2, 0, affinity=lambda g: (("0-9", "0", "N/A"), ("9-19", "1", "N/A"))[g]).tabbed())
    assert "NUMA nodes 0 and 1 share CPUs" in shared.problems
    unlike = smi_topo.read(Machine(2, 0, affinity=lambda g: (("0-9", "0", "N/A"), ("0-8", "0", "N/A"))[g]).tabbed())
    assert any("GPUs of NUMA node 0 are near different CPUs" in p for p in unlike.problems)
    assert [gpu.cpus for gpu in unlike.gpus] == [(), ()]


def test_one_gpu_and_nothing_else() -> None:
    assert len(smi_topo.read(Machine(1, 0).markdown()).gpus) == 1


def test_glued_affinity_is_taken_apart_only_where_it_can_be() -> None:
    def text(cpus: str) -> str:
        return Machine(1, 0, affinity=lambda g: (cpus, "N/A", "")).spaced()

    sure, unsure = smi_topo.read(text("24-47,120-1431")), smi_topo.read(text("0-350"))
    assert (sure.gpus[0].numa, format_list(sure.gpus[0].cpus)) == (1, "24-47,120-143")
    assert (unsure.gpus[0].numa, unsure.gpus[0].cpus) == (None, ())
    assert any("may be glued" in p for p in unsure.problems)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (lambda a, b: "NODE" if 2 in (a, b) else "NV18", "broken NVLink on gpu2: none"),  # vllm-project/vllm#16336
        (lambda a, b: "NV17" if 5 in (a, b) else "NV18", "broken NVLink on gpu5: 17"),
        (lambda a, b: "NODE" if a // 4 == b // 4 else "SYS", "no GPU has one to another"),  # deepseek-ai/DeepEP#128
        (lambda a, b: "SYS" if 3 in (a, b) else "NV4", "broken NVLink on gpu3: none"),
        (lambda a, b: "NV18", ""),
        (lambda a, b: "SYS" if b - a == 4 else "NV1", ""),  # a board where each GPU lacks one of seven
    ],
)
def test_broken_nvlink(link: object, said: str) -> None:
    node = assign_roles(smi_topo.read(railed(link=link).tabbed()))
    found = " ".join(why for why, _ in unfit(node))
    assert (said in found) if said else found == ""


def test_pcie_nodes_and_bridged_pairs_are_fit() -> None:
    far = Machine(8, 2, link=lambda a, b: "SYS", reach=lambda g, n: "SYS")
    pairs = Machine(3, 0, link=lambda a, b: "NV4" if (a, b) == (0, 1) else "NODE")  # NVIDIA/nccl-tests#320
    for machine in (far, pairs):
        assert unfit(assign_roles(smi_topo.read(machine.tabbed()))) == []


def test_part_of_a_cube_mesh_is_fit() -> None:  # rapidsai/dask-cuda#1358: a job sees three GPUs of eight
    links = {(0, 1): "NV1", (0, 2): "NV2", (1, 2): "NV1"}
    machine = Machine(3, 0, link=lambda a, b: links[a, b], affinity=lambda g: ("20-39", "1", "N/A"))
    node = smi_topo.read(machine.tabbed())
    assert node.partial and unfit(node) == []


def test_only_far_nics_are_no_rails() -> None:
    machine = Machine(4, 1, reach=lambda g, n: "SYS", names=["mlx5_0"])
    node = assign_roles(smi_topo.read(machine.tabbed()))
    assert [nic.role for nic in node.nics] == ["unknown"] and maps(node) == [[]] * 4


def test_cut_anywhere_keeps_whole_rows() -> None:
    text = railed(gpus=4, extra=1, link=lambda a, b: f"NV{12 + b}").spaced()
    whole = smi_topo.read(text)
    for at in range(100, len(text[: text.index("\nLegend")].rstrip())):
        try:
            node = smi_topo.read(text[:at])
        except ConfigError:
            continue
        for pair, distance in node.distances.items():
            assert whole.distance(*pair) is distance, at
        assert all(whole.nvlinks[pair] == links for pair, links in node.nvlinks.items()), at
        assert node.partial, at
        for gpu in node.gpus:
            assert gpu.cpus in ((), whole.gpus[gpu.index].cpus), at


@pytest.mark.parametrize("columns", [1, 3])
def test_cut_in_the_affinity_of_the_last_row(columns: int) -> None:
    text = Machine(8, 0, affinity=lambda g: two_sockets(g)[:columns]).spaced().split("\nLegend")[0].rstrip()
    text = text if columns > 1 else re.sub(r" *NUMA Affinity *GPU NUMA ID", "", text)
    whole = smi_topo.read(text)
    assert format_list(whole.gpus[7].cpus) == "56-111,168-223" and not whole.partial
    for at in range(1, 4):
        node = smi_topo.read(text[:-at] if columns == 1 else text[: text.rindex("168-223") + 7 - at])
        assert node.gpus[7].cpus == () and node.partial
        assert "the affinity of GPU7 is cut off" in node.problems
        assert format_list(node.gpus[6].cpus) == "56-111,168-223"


def test_a_lost_cell_spoils_its_row_only_and_is_said() -> None:
    lines = railed().spaced().split("\n")
    lines[3] = lines[3].replace("SYS", "", 1)
    node = smi_topo.read("\n".join(lines))
    assert any("row GPU2 has 15 of 16 cells" in p for p in node.problems)
    assert maps(node)[2] == ["NIC2"]  # the rows of the NICs say it too


def test_a_name_over_a_column_that_cannot_be_read() -> None:
    node = smi_topo.read(railed().tabbed().replace("\tGPU3\t", "\tGP#3\t", 1))
    assert len(node.gpus) == 8 and maps(node)[3] == ["NIC3"]
    assert any("by its row it is GPU3" in p for p in node.problems)


def test_one_cell_unlike_its_mirror() -> None:
    lines = railed().tabbed().split("\n")
    lines[1] = lines[1].replace("PIX", "PXB", 1)
    node = smi_topo.read("\n".join(lines))
    assert "GPU0 to NIC0 is PXB, NIC0 to GPU0 is PIX" in node.problems
    assert node.distance("gpu0", "NIC0") is Distance.UNKNOWN


def test_cells_of_nics_stay_where_the_header_and_the_rows_of_nics_are_cut_off() -> None:
    lines = railed(extra=2).tabbed().split("\n")[1:9]
    node = assign_roles(smi_topo.read("\n".join(lines)))
    assert maps(node) == [[f"NIC{i}"] for i in range(8)] and node.nvlinks["gpu0", "gpu7"] == 18
    assert [(g.numa, format_list(g.cpus)) for g in node.gpus[3:5]] == [(0, "0-55,112-167"), (1, "56-111,168-223")]
    assert node.partial and any("the 10 after them to be NIC0 to NIC9" in p for p in node.problems)
    lines[2] = lines[2].replace("X", "NV18")
    with pytest.raises(ConfigError, match="no matrix"):
        smi_topo.read("\n".join(lines))


def test_a_second_node_in_one_paste_is_told() -> None:  # two nodes, one command each
    two = railed(order=[1, 0, 2, 3, 4, 5, 6, 7]).tabbed() + "\n$ nvidia-smi topo -m\n" + railed().tabbed()
    node = smi_topo.read(two)
    assert maps(node)[:2] == [["NIC1"], ["NIC0"]]
    assert "a second matrix follows, which is not read" in node.problems


def test_numa_nodes_that_are_not_applicable() -> None:  # virtual machines: two tabs before each N/A
    one = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-7\t\tN/A\t\tN/A\n"
    two = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-31\t\tN/A\nGPU1\tPHB\t X \t0-31\t\tN/A\n"
    for text, cpus in ((one, "0-7"), (two, "0-31")):
        node = smi_topo.read(text)
        assert {(gpu.numa, format_list(gpu.cpus)) for gpu in node.gpus} == {(None, cpus)} and node.problems == ()


def test_pci_alone_says_nothing_of_nvlinks() -> None:  # deepseek-ai/DeepEP#60: `topo -mp` of eight H800
    machine = railed(link=lambda a, b: "NODE" if a // 4 == b // 4 else "SYS")
    node = assign_roles(smi_topo.read("# nvidia-smi topo -mp\n" + machine.tabbed()))
    assert node.nvlinks == {} and unfit(node) == [] and len(node.rails) == 8
    assert any("NVLinks are not known" in p for p in node.problems)
    assert unfit(assign_roles(smi_topo.read(machine.tabbed())))


def test_cpus_of_a_numa_node_that_is_said_to_be_memory_stay() -> None:  # a driver that gives both the same number
    machine = Machine(4, 0, affinity=lambda g: (("0-63", "0", "0"), ("64-127", "1", "1"))[g // 2])
    node = smi_topo.read(machine.tabbed())
    assert [(g.numa, g.memory) for g in node.gpus] == [(0, ()), (0, ()), (1, ()), (1, ())]
    assert [format_list(entry.cpus) for entry in near(node)] == ["0-63", "0-63", "64-127", "64-127"]
    assert sum("taken for CPUs" in p for p in node.problems) == 4


def test_a_crowd_of_functions_cannot_be_told() -> None:  # eight virtual functions and their card at every other GPU
    def reach(g: int, n: int) -> str:
        return "PIX" if n // 9 * 2 == g else "NODE" if n // 18 == g // 4 else "SYS"

    node = assign_roles(smi_topo.read(Machine(8, 36, reach=reach, affinity=two_sockets).tabbed()))
    assert not node.rails
    assert any("9 NICs as near to each GPU: some are virtual functions" in p for p in node.problems)
    few = assign_roles(smi_topo.read(Machine(8, 32, reach=lambda g, n: "PIX" if n // 4 == g else "SYS").tabbed()))
    assert len(few.rails) == 32


def test_rails_beside_cards_of_two_ports() -> (
    None
):  # a DGX H200, and an eight-GPU node whose NUMA is off in its firmware
    own = [0, 3, 4, 5, 6, 9, 10, 11]
    for word in ("PXB", "PIX"):

        def reach(g: int, n: int, word: str = word) -> str:
            return word if own[g] == n else "NODE" if n // 6 == g // 4 else "SYS"

        def beside(a: int, b: int) -> str:
            return "PIX" if (a, b) in ((1, 2), (7, 8)) else "NODE" if a // 6 == b // 6 else "SYS"

        names = [f"mlx5_{i}" for i in range(12)]
        machine = Machine(8, 12, reach=reach, beside=beside, affinity=two_sockets, legend=names)
        node = assign_roles(smi_topo.read(machine.tabbed()))
        assert [nic.name for nic in node.rails] == [f"mlx5_{n}" for n in own]
        assert {nic.role for nic in node.nics[8:]} == {"unknown"} and node.problems == ()


def test_header_cut_off() -> None:
    text = Machine(4, 0, link=lambda a, b: f"NV{a + b}").tabbed()
    node = smi_topo.read(text.split("\n", 1)[1])
    assert len(node.gpus) == 4 and node.nvlinks["gpu1", "gpu3"] == 4
    assert any("header is missing" in p for p in node.problems)


def test_p2p_matrix() -> None:
    node = smi_topo.read(" \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tOK\n GPU2\tCNS\tOK\tX\n")
    assert node.p2p["gpu0", "gpu2"] == "CNS" and node.p2p["gpu0", "gpu1"] == "OK"
    assert any("the chipset does not support it" in p and "gpu0-gpu2" in p for p in node.problems)


CELLS = ["PIX", "PXB", "PHB", "NODE", "SYS"]
WORDS = {"SOC": Distance.SYS, **{word: Distance[word] for word in CELLS}}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    gpus, nics = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    link = draw(st.lists(st.sampled_from(["NV1", "NV4", "NV12", "NV18", *CELLS, "SOC"]), min_size=36, max_size=36))
    reach = draw(st.lists(st.sampled_from(CELLS), min_size=36, max_size=36))
    masks = [("0-15,64-79", "0", "N/A"), ("16-31,80-95", "1", "N/A")]
    side = draw(st.lists(st.integers(0, 1), min_size=6, max_size=6))
    return Machine(
        gpus,
        nics,
        link=lambda a, b: link[6 * a + b],
        reach=lambda g, n: reach[6 * g + n],
        beside=lambda a, b: reach[6 * b + a],
        affinity=lambda g: masks[side[g]],
    )


@settings(max_examples=60, deadline=None)
@given(machines(), st.sampled_from(["tabbed", "spaced", "markdown"]))
def test_any_matrix_reads_as_it_was_made(machine: Machine, style: str) -> None:
    node = smi_topo.read(getattr(machine, style)())
    for a in range(machine.gpus):
        for b in range(a + 1, machine.gpus):
            cell = machine.link(a, b)
            assert node.nvlinks[f"gpu{a}", f"gpu{b}"] == (int(cell[2:]) if cell.startswith("NV") else 0)
            want = Distance.NVLINK if cell.startswith("NV") else WORDS[cell]
            assert node.distance(f"gpu{a}", f"gpu{b}") is want
        for n in range(machine.nics):
            assert node.distance(f"gpu{a}", f"NIC{n}") is WORDS[machine.reach(a, n)]
        if style != "markdown":
            assert str(node.gpus[a].numa) == machine.affinity(a)[1]
            assert format_list(node.gpus[a].cpus) == machine.affinity(a)[0]
