"""NCCL's, hwloc's and nvidia-smi's XML: traps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster import hwloc_xml, nccl_xml, smi_query
from hpctrain.cluster.affinity import near, unfit
from hpctrain.cluster.node import Distance
from hpctrain.cluster.read import read_node, read_text
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import ConfigError

DATA = Path(__file__).parent / "data"
GPU, HCA, SWITCH = "0x030200", "0x020700", "0x060400"


def pci(bus: str, code: str = "", inside: str = "", more: str = "") -> str:
    return f'<pci busid="{bus}"' + (f' class="{code}"' if code else "") + f" {more}>{inside}</pci>"


def system(*cpus: str) -> str:
    return '<system version="1">' + "".join(cpus) + "</system>"


def cpu(numa: int, mask: str, inside: str) -> str:
    return f'<cpu numaid="{numa}" affinity="{mask}" arch="x86_64">{inside}</cpu>'


def net(name: str, port: int = 1, speed: int = 400000) -> str:
    return f'<nic><net name="{name}" port="{port}" speed="{speed}" guid="0x{port:x}abc" maxconn="1" gdr="1"/></nic>'


def test_distances_as_nccl_names_them() -> None:
    text = system(
        cpu(
            0,
            "ff",
            pci(
                "0000:01:00.0", SWITCH, pci("0000:02:00.0", GPU) + pci("0000:03:00.0", SWITCH, pci("0000:04:00.0", HCA))
            )
            + pci("0000:05:00.0", HCA),
        ),
        cpu(1, "ff00", pci("0000:81:00.0", SWITCH, pci("0000:82:00.0", GPU) + pci("0000:83:00.0", HCA))),
    )
    node = nccl_xml.read(text)
    one = {nic.name: node.distance("gpu0", nic.name).name for nic in node.nics}
    assert one == {"0000:04:00.0": "PXB", "0000:05:00.0": "PHB", "0000:83:00.0": "SYS"}
    assert node.distance("gpu1", "0000:83:00.0") is Distance.PIX
    assert node.gpus[1].cpus == tuple(range(8, 16)) and node.problems == ()


def test_links_over_switches_and_between_pairs() -> None:
    def gpu(bus: str, links: str) -> str:
        return pci(bus, GPU, f'<gpu dev="0" sm="90" rank="0" gdr="1">{links}</gpu>')

    over = "".join(f'<nvlink target="fffffff:ffff:ff" count="{n}" tclass="0x068000"/>' for n in (9, 9))
    poor = '<nvlink target="fffffff:ffff:ff" count="17" tclass="0x068000"/>'
    text = system(
        cpu(
            0,
            "f",
            gpu("0000:01:00.0", over)
            + gpu("0000:02:00.0", over)
            + gpu("0000:03:00.0", over)
            + gpu("0000:04:00.0", poor),
        )
    )
    node = nccl_xml.read(text)
    assert node.nvlinks["gpu0", "gpu1"] == 18 and node.nvlinks["gpu0", "gpu3"] == 17
    assert node.distance("gpu0", "gpu1") is Distance.NVLINK
    assert "broken NVLink on gpu3" in unfit(node)[0][0]
    one_way = text.replace(poor, '<nvlink target="0000:01:00.0" count="2" tclass="0x030200"/>')
    assert any("0000:04:00.0 has 2 to" in p for p in nccl_xml.read(one_way).problems)


def test_boards_that_are_wired_unevenly_are_fit() -> None:
    """Eight halves of four cards: half of them have seven links, half have six. One link less is a fault."""
    node = assign_roles(read_node(DATA / "nccl_xml_rccl/topo_8p1h.xml"))
    assert node.nvlinks["gpu0", "gpu1"] == 4 and unfit(node) == []
    weak = replace(node, nvlinks={**node.nvlinks, ("gpu0", "gpu1"): 3})
    assert unfit(weak)[0][0] == "broken NVLink on gpu1: 5 in all, others have 7"


def test_comments_that_only_strict_xml_refuses() -> None:
    text = "<!------ made by ---- hand ------>\n" + system(cpu(0, "f", "<!-- a -- b -->\n" + pci("0000:01:00.0", GPU)))
    node = read_text(text)
    assert len(node.gpus) == 1 and node.problems == ()
    assert any("breaks off in line 3" in p for p in read_text(text.replace("</cpu>", "</spu>")).problems)


def test_ports_of_one_card_have_names_of_their_own() -> None:
    inside = net("mlx5_0", 1) + net("mlx5_0", 2)
    node = nccl_xml.read(system(cpu(0, "f", pci("0000:01:00.0", HCA, inside))))
    assert [(nic.name, nic.port, nic.rate_gbit) for nic in node.nics] == [("mlx5_0", 1, 400), ("mlx5_0:2", 2, 400)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (system(cpu(0, "ff", ""), cpu(1, "ff0", "")), "NUMA nodes 0 and 1 share CPUs"),
        (system(cpu(0, "xyz", "")), "the CPUs of NUMA node 0 cannot be read"),
        (system(cpu(0, "f", pci("0000:zz:00.0", GPU))), "is not a PCI address"),
        (system(cpu(0, "f", pci("0000:01:00.0", "0x03"))), "has class='0x03'"),
        (system(cpu(0, "f", pci("0000:01:00.0", GPU) * 2)), "GPU 0000:01:00.0 is listed twice"),
        (system(cpu(0, "f", pci("0000:01:00.0", HCA, net("mlx5_0", speed=0)))), "the speed of mlx5_0 cannot be read"),
        (system(cpu(0, "f", "") * 2), "NUMA node 0 is listed twice"),
        (system(cpu(0, "f", "<pcx/>")), "elements called pcx"),
        (
            system(  # NVIDIA/nccl#749
                cpu(
                    0,
                    "f",
                    pci(
                        "0000:01:00.0",
                        SWITCH,
                        pci("0000:02:00.0", GPU, more='link_speed="16 GT/s" link_width="16"'),
                        'link_speed="2.5 GT/s" link_width="1"',
                    ),
                )
            ),
            "NCCL would throttle it",
        ),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    assert any(said in problem for problem in nccl_xml.read(text).problems)


def test_azure_order_of_numa_nodes() -> None:
    node = read_node(DATA / "nccl_xml/azure_ndv4-topo.xml")
    assert [gpu.numa for gpu in node.gpus] == [1, 1, 0, 0, 3, 3, 2, 2]
    table = near(assign_roles(node))
    assert [entry.picks[0].name for entry in table] == [f"010{i}:00:00.0" for i in range(1, 9)]


def test_cut_xml_gives_the_part_before() -> None:
    text = (DATA / "nccl_xml/azure_ndv5-topo.xml").read_text()
    whole = nccl_xml.read(text)
    part = text[: text.index('<cpu numaid="1"') + 400]
    cut = nccl_xml.read(part)
    assert cut.partial and f"breaks off in line {len(part.splitlines())}" in cut.problems[0]
    assert len(cut.gpus) == 5 and cut.gpus == whole.gpus[:5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<!DOCTYPE x [<!ENTITY a "b">]><system><cpu numaid="&a;"/></system>', "declares entities"),
        ("<html><body>no</body></html>", "none of"),
        ("<system", "with the root"),
        ("<" + "a>" * 3, "none of"),
        ("<system>" + "<pci>" * 200, "levels deep"),
    ],
)
def test_other_xml_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_text(text)


def test_hwloc_finds_memory_of_gpus() -> None:
    node = read_node(DATA / "hwloc_xml/flux_001N_exclusive_01-brokers-sierra2_0.xml.gz")
    assert {n.index for n in node.numas if n.of_gpu} == {252, 253, 254, 255}
    assert {entry.numa for entry in near(node)} == {0, 8}


def test_hwloc_three_counts_device_types_in_bits() -> None:
    node = read_node(DATA / "hwloc_xml/hwloc_32em64t-2n8c+dax+nvme+mic+dimms.xml.gz")
    assert [(nic.name, nic.interface, nic.verbs) for nic in node.nics][2] == ("mlx4_0", "ib0", True)


@pytest.mark.parametrize(("version", "nics"), [("2.0", 1), ("3.0", 0)])
def test_what_hwloc_means_by_three(version: str, nics: int) -> None:
    osdev = '<object type="OSDev" name="x0" osdev_type="3"/>'
    card = f'<object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0502 [8086:0001] [0000:0000] 00">{osdev}</object>'
    host = f'<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-01]">{card}</object>'
    text = f'<topology version="{version}"><object type="Machine" cpuset="0x1" nodeset="0x1">{host}</object></topology>'
    assert len(hwloc_xml.read(text).nics) == nics


def test_hwloc_bridges() -> None:
    bridge = '<object type="Bridge" bridge_type="1-1" pci_busid="{}" pci_type="0604 [10b5:8725] [0:0] 00">{}</object>'
    device = '<object type="PCIDev" pci_busid="{}" pci_type="{} [{}:0001] [0000:0000] 00"/>'
    gpu, nic = device.format("0000:04:00.0", "0302", "10de"), device.format("0000:05:00.0", "0207", "15b3")
    far = device.format("0000:09:00.0", "0207", "15b3")
    inner = bridge.format("0000:03:00.0", gpu) + bridge.format("0000:03:01.0", nic)
    own = bridge.format("0000:0b:00.0", device.format("0000:0c:00.0", "0207", "15b3"))  # a card with a bridge on it
    inner += bridge.format("0000:03:03.0", own)
    deep = bridge.format("0000:03:02.0", bridge.format("0000:06:00.0", bridge.format("0000:07:00.0", far)))
    tree = bridge.format("0000:00:01.0", bridge.format("0000:02:00.0", inner + deep))
    host = f'<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-0f]">{tree}</object>'
    numa = '<object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1"/>'
    text = f'<topology version="2.0"><object type="Machine" cpuset="0xf" nodeset="0x1">{numa}{host}</object></topology>'
    node = hwloc_xml.read(text)
    assert node.distance("gpu0", "0000:05:00.0") is Distance.PIX
    assert node.distance("gpu0", "0000:09:00.0") is Distance.PXB
    assert node.distance("gpu0", "0000:0c:00.0") is Distance.PXB
    assert [d.numa for d in node.devices] == [0, 0, 0, 0] and node.gpus[0].cpus == (0, 1, 2, 3)


QUERY = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><attached_gpus>2</attached_gpus>
<gpu id="00000000:9B:00.0"><product_name>NVIDIA A100-SXM4-80GB</product_name>
<mig_mode><current_mig>Enabled</current_mig></mig_mode><uuid>GPU-11111111-aaaa</uuid></gpu>
<gpu id="00000000:1B:00.0"><product_name>NVIDIA A100-SXM4-80GB</product_name>
<mig_mode><current_mig>Disabled</current_mig></mig_mode><uuid>GPU-22222222-aaaa</uuid>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows></gpu></nvidia_smi_log>
"""


def test_query_orders_gpus_by_address() -> None:
    node = read_text(QUERY)
    assert [(g.index, g.pci, g.mig) for g in node.gpus] == [(0, "0000:1b:00.0", False), (1, "0000:9b:00.0", True)]
    assert "MIG instances on gpu1" in unfit(node)[0][0]
    assert any("wait for a reset" in p for p in node.problems)


def test_query_that_lacks_a_gpu() -> None:
    node = smi_query.read_query(QUERY[: QUERY.index('<gpu id="00000000:1B')])
    assert node.partial and len(node.gpus) == 1
    assert any("2 GPUs are attached and lists 1" in p for p in node.problems)


def test_mig_list() -> None:
    node = read_node(DATA / "smi_misc/nvitop8_a100_mig_L.txt")
    assert [gpu.mig for gpu in node.gpus] == [False, True, True, True]
    damaged = (DATA / "smi_misc/nvitop8_a100_mig_L.txt").read_text().replace("GPU 2: NVIDIA", "GPU 7: NVIDIA")
    assert any("some are missing" in p for p in read_text(damaged).problems)
