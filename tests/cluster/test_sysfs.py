"""A tree of /sys and /proc made to order, read as the live one is."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.cluster import sysfs
from hpctrain.cluster.affinity import near
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Distance
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent.resolve()))


class Tree:
    """A /sys tree under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        put(root / "proc/sys/kernel/hostname", "n7")
        for numa, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15")):
            put(root / f"sys/devices/system/node/node{numa}/cpulist", cpus)
            put(root / f"sys/devices/system/node/node{numa}/meminfo", f"Node {numa} MemTotal:  1024 kB")

    def device(self, path: str, code: str, vendor: str, numa: int, number: str = "0x1021") -> Path:
        """A PCI device; path from the host bridge on: `pci0000:10/0000:10:01.0/0000:11:00.0`."""
        folder = self.root / "sys/devices" / path
        for name, text in (("class", code), ("vendor", vendor), ("device", number), ("numa_node", str(numa))):
            put(folder / name, text)
        link(self.root / "sys/bus/pci/devices" / folder.name, folder)
        return folder

    def gpu(self, path: str, numa: int) -> Path:
        return self.device(path, "0x030200", "0x10de", numa)

    def hca(
        self,
        name: str,
        path: str,
        numa: int,
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        layer: str = "InfiniBand",
        interface: str = "",
        kind: tuple[str, str, str] = ("0x020700", "0x15b3", "0x1021"),
    ) -> Path:
        code, vendor, number = kind
        device = self.device(path, code, vendor, numa, number)
        folder = device / "infiniband" / name
        for leaf, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            put(folder / "ports/1" / leaf, text)
        put(folder / "node_guid", f"0000:0000:0000:{len(name):04x}")
        link(folder / "device", device)
        link(self.root / "sys/class/infiniband" / name, folder)
        if interface:
            self.net(interface, device)
        return device

    def net(self, name: str, device: Path, speed: str = "25000") -> Path:
        folder = device / "net" / name
        put(folder / "operstate", "up")
        put(folder / "speed", speed)
        put(folder / "dev_port", "0")
        link(folder / "device", device)
        link(self.root / "sys/class/net" / name, folder)
        return folder

    def route(self, interface: str) -> None:
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask"
        rows = f"{interface}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\nib9\t0000000A\t0\t1\t0\t0\t0\t0000FFFF"
        put(self.root / "proc/net/route", f"{head}\n{rows}")


def switch(numa: int, leaf: str) -> str:
    """A place below the switch of a socket."""
    bus = f"{1 + 8 * numa:x}"
    return f"pci0000:{bus}0/0000:{bus}0:01.0/0000:{bus}1:00.0/0000:{bus}2:0{leaf}.0/0000:{bus}{leaf}:00.0"


def node_tree(root: Path) -> Tree:
    """Two sockets, each with a switch that holds a GPU and an HCA; a management port; storage on socket 0."""
    tree = Tree(root)
    for numa in (0, 1):
        tree.gpu(switch(numa, "3"), numa)
        tree.hca(f"mlx5_{1 - numa}", switch(numa, "4"), numa, interface=f"ib{numa}")
    tree.hca("mlx5_2", "pci0000:20/0000:20:01.0/0000:21:00.0", 0, rate="200 Gb/sec (4X HDR)")
    plain = tree.device("pci0000:30/0000:30:01.0/0000:31:00.0", "0x020000", "0x8086", 0)
    tree.net("eno1", plain)
    tree.route("eno1")
    return tree


def test_a_node(tmp_path: Path) -> None:
    node_tree(tmp_path)
    node = assign_roles(read_node(tmp_path))
    assert node.name == "n7" and node.problems == () and not node.partial
    assert [(n.index, format_list(n.cpus), n.memory_bytes) for n in node.numas] == [
        (0, "0-3,8-11", 1 << 20),
        (1, "4-7,12-15", 1 << 20),
    ]
    assert [(g.pci, g.numa, format_list(g.cpus)) for g in node.gpus] == [
        ("0000:13:00.0", 0, "0-3,8-11"),
        ("0000:93:00.0", 1, "4-7,12-15"),
    ]
    assert [(nic.name, nic.role) for nic in node.nics] == [
        ("mlx5_1", "rail"),
        ("mlx5_0", "rail"),
        ("mlx5_2", "storage"),
        ("eno1", "management"),
    ]
    assert node.nics[0].interface == "ib0" and node.nics[0].rate_gbit == 400 and node.nics[0].state == "active"
    assert node.distance("gpu0", "mlx5_1") is Distance.PIX
    assert node.distance("gpu0", "mlx5_2") is Distance.NODE and node.distance("gpu1", "mlx5_2") is Distance.SYS
    assert [[nic.name for nic in entry.picks] for entry in near(node)] == [["mlx5_1"], ["mlx5_0"]]


def test_virtual_functions_go_where_real_ones_are(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    function = tree.hca("mlx5_9", switch(0, "5"), 0)
    link(function / "physfn", tmp_path / "sys/devices" / switch(0, "4"))
    node = assign_roles(sysfs.read(tmp_path))
    nic = next(nic for nic in node.nics if nic.name == "mlx5_9")
    assert nic.virtual and nic.role == "unknown" and "virtual function" in nic.why
    assert [nic.name for nic in node.rails] == ["mlx5_1", "mlx5_0"]


def test_in_a_virtual_machine_all_are_virtual_functions(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    for numa in (0, 1):
        link(tmp_path / "sys/devices" / switch(numa, "4") / "physfn", tree.root / "sys/devices/pci0000:10")
    link(tmp_path / "sys/devices/pci0000:20/0000:20:01.0/0000:21:00.0/physfn", tree.root / "sys/devices/pci0000:10")
    assert [nic.name for nic in assign_roles(sysfs.read(tmp_path)).rails] == ["mlx5_1", "mlx5_0"]


def test_a_rail_that_is_down_is_said(tmp_path: Path) -> None:
    node_tree(tmp_path)
    put(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    node = assign_roles(sysfs.read(tmp_path))
    assert "rail mlx5_0 is down" in node.problems and [nic.name for nic in node.rails] == ["mlx5_1", "mlx5_0"]


def test_a_down_port_beside_one_that_is_up_is_no_rail(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    tree.hca("mlx5_7", switch(0, "6"), 0, state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    node = assign_roles(sysfs.read(tmp_path))
    assert [nic.name for nic in node.rails] == ["mlx5_1", "mlx5_0"]
    assert "down, and mlx5_1 is as near" in next(nic.why for nic in node.nics if nic.name == "mlx5_7")


def test_a_near_port_with_the_default_route_is_management(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    tree.hca("mlx5_8", switch(0, "7"), 0, layer="Ethernet", rate="100 Gb/sec (4X EDR)", interface="ens8")
    tree.route("ens8")
    node = assign_roles(sysfs.read(tmp_path))
    assert next(nic for nic in node.nics if nic.name == "mlx5_8").role == "management"
    assert [nic.name for nic in node.rails] == ["mlx5_1", "mlx5_0"]


def test_a_near_ethernet_port_beside_infiniband_is_no_rail(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    tree.hca("mlx5_8", switch(0, "7"), 0, layer="Ethernet", rate="10 Gb/sec")
    node = assign_roles(sysfs.read(tmp_path))
    nic = next(nic for nic in node.nics if nic.name == "mlx5_8")
    assert (nic.role, nic.why) == ("management", "10 Gbit/s, others have 400")


def test_ports_of_a_bond(tmp_path: Path) -> None:
    tree = node_tree(tmp_path)
    bond = tmp_path / "sys/devices/virtual/net/bond0"
    put(bond / "bonding/mode", "802.3ad 4")
    for i, leaf in enumerate("56"):
        tree.hca(f"mlx5_{5 + i}", switch(0, leaf), 0, layer="Ethernet", interface=f"ens{i}")
        link(tmp_path / f"sys/class/net/ens{i}/master", bond)
    node = assign_roles(sysfs.read(tmp_path))
    assert {nic.bond for nic in node.nics if nic.name in ("mlx5_5", "mlx5_6")} == {"bond0"}
    assert [nic.name for nic in node.rails] == ["mlx5_1", "mlx5_0"]


def test_gpus_that_a_job_was_not_given(tmp_path: Path) -> None:
    node_tree(tmp_path)
    for minor, bus in enumerate(("0000:13:00.0", "0000:93:00.0")):
        facts = f"Model: \t NVIDIA H100\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}"
        put(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", facts)
    put(tmp_path / "dev/nvidia1", "")
    node = sysfs.read(tmp_path)
    assert [(gpu.pci, gpu.uuid, gpu.name) for gpu in node.gpus] == [("0000:93:00.0", "GPU-1", "NVIDIA H100")]
    assert node.partial and "1 of 2 GPUs are not given to this process" in node.problems


def test_memory_nodes_of_gpus(tmp_path: Path) -> None:
    node_tree(tmp_path)
    for numa in range(2, 18):
        put(tmp_path / f"sys/devices/system/node/node{numa}/cpulist", "")
    assert {n.index for n in sysfs.read(tmp_path).numas if n.of_gpu} == set(range(2, 18))


def test_numa_not_told_by_the_kernel(tmp_path: Path) -> None:
    node_tree(tmp_path)
    put(tmp_path / "sys/devices" / switch(1, "3") / "numa_node", "-1")
    node = sysfs.read(tmp_path)
    assert "the kernel does not tell the NUMA node of 1 devices, first 0000:93:00.0" in node.problems
    assert node.gpus[1].numa == 1  # as the HCA under the same host bridge


def test_emulated_rails_and_gpus(tmp_path: Path) -> None:
    node_tree(tmp_path)
    environ = {sysfs.RAILS: "rail0,rail1", sysfs.GPUS: "/n/gpu0,/n/gpu1,/n/gpu2,/n/gpu3"}
    node = assign_roles(sysfs.read(tmp_path, environ))
    assert [nic.name for nic in node.rails] == ["rail0", "rail1"]
    assert [[nic.name for nic in entry.nics] for entry in near(node)] == [["rail0"], ["rail1"], ["rail0"], ["rail1"]]


def test_an_empty_tree(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    node = read_node(tmp_path)
    assert node.gpus == () and node.nics == ()
