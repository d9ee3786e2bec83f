"""Machines as their vendors describe them, as /sys trees written by hand: what a rank sees that runs there.

Nothing here is derived from the files of `tests/cluster/data`, which are held against them. Sources: user guides of DGX
A100 and DGX H100 (tables of PCI addresses and network ports), and NVIDIA/nccl#1505 for the NUMA node of the first card
for storage; for p5 also lstopo's output of such an instance; for other virtual machines, addresses, names and NUMA
nodes as the table of the collection (MANIFEST.csv) and the ResourceSlices of the same machines have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import sysfs
from hpctrain.cluster.cpus import format_list, parse_list
from hpctrain.cluster.node import Node
from tests.cluster.test_sysfs import Tree, put

EFA = ("0x020000", "0x1d0f", "0xefa1")
"""Class, vendor and device of Amazon's fabric adapter."""
MELLANOX = ("0x020700", "0x15b3", "0x1021")


@dataclass(frozen=True)
class Box:
    """A machine.

    Attributes:
        numas: CPUs of each NUMA node.
        second: from a CPU to the second thread of its core; None for one thread a core.
        gpus: PCI path and NUMA node of each, -1 where the kernel does not tell.
        nics: name, PCI path and NUMA node of each verbs device.
        model: of the GPUs.
        kind, rate, layer: of the verbs devices: class, vendor and device number; as their ports show them.
    """

    numas: Mapping[int, str]
    second: int | None
    gpus: Sequence[tuple[str, int]]
    nics: Sequence[tuple[str, str, int]]
    model: str
    kind: tuple[str, str, str] = MELLANOX
    rate: str = "400 Gb/sec (4X NDR)"
    layer: str = "InfiniBand"

    def read(self, root: Path, renamed: Callable[[str], str] = lambda name: name) -> Node:
        """The machine as its kernel shows it.

        Args:
            renamed: what this image calls a verbs device.
        """
        tree = Tree(root)
        for numa, cpus in self.numas.items():
            put(root / f"sys/devices/system/node/node{numa}/cpulist", cpus)
        every = [cpu for cpus in self.numas.values() for cpu in (parse_list(cpus) if cpus else ())]
        for cpu in every:
            first = cpu - self.second if self.second and cpu // self.second % 2 else cpu
            core = (first, first + self.second) if self.second else (cpu,)
            put(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", format_list(core))
        for i, (path, numa) in enumerate(self.gpus):
            device = tree.gpu(path, numa)
            about = f"Model: \t\t {self.model}\nGPU UUID: \t GPU-{i}\nDevice Minor: \t {i}"
            put(root / "proc/driver/nvidia/gpus" / device.name / "information", about)
        for name, path, numa in self.nics:
            tree.hca(renamed(name), path, numa, rate=self.rate, layer=self.layer, kind=self.kind)
        management = tree.device("pci0000:00/0000:00:1c.0/0000:01:00.0", "0x020000", "0x8086", 0)
        tree.net("eno1", management)
        tree.route("eno1")
        return sysfs.read(root)


def behind(switch: int, port: int, device: str) -> str:
    """A device behind a port of a PCIe switch that has a host bridge of its own."""
    above = f"pci0000:{switch:02x}/0000:{switch:02x}:01.0/0000:{switch + 1:02x}:00.0"
    return f"{above}/0000:{switch + 2:02x}:{port:02x}.0/{device}"


def _bus(number: int, function: int = 0) -> str:
    return f"0000:{number:02x}:00.{function}"


_H100_GPUS = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
_H100_RAILS = {0: 0x18, 3: 0x40, 4: 0x4F, 5: 0x5E, 6: 0x9A, 9: 0xC0, 10: 0xCE, 11: 0xDC}
_H100_STORAGE = {1: (0x29, 0), 2: (0x29, 1), 7: (0xAA, 0), 8: (0xAA, 1)}

DGX_H100 = Box(
    {0: "0-55,112-167", 1: "56-111,168-223"},
    112,
    [(behind(nic - 3, 1, _bus(gpu)), i // 4) for i, (gpu, nic) in enumerate(zip(_H100_GPUS, _H100_RAILS.values()))],
    [(f"mlx5_{n}", behind(bus - 3, 0, _bus(bus)), int(n > 5)) for n, bus in _H100_RAILS.items()]
    + [
        (f"mlx5_{n}", f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/{_bus(bus, port)}", int(n > 5))
        for n, (bus, port) in _H100_STORAGE.items()
    ],
    "NVIDIA H100 80GB HBM3",
)
"""Rails are mlx5_0, 3, 4, 5, 6, 9, 10 and 11; 1, 2, 7 and 8 are the ports of two cards for storage."""

_A100_GPUS = ((0x07, 3), (0x0F, 3), (0x47, 1), (0x4E, 1), (0x87, 7), (0x90, 7), (0xB7, 5), (0xBD, 5))
_A100_RAILS = ((0, 0x0C), (1, 0x12), (2, 0x4B), (3, 0x54), (6, 0x8D), (7, 0x94), (8, 0xBA), (9, 0xCC))
_A100_STORAGE = ((4, 0x61, 0), (5, 0x61, 1), (10, 0xE1, 0), (11, 0xE1, 1))


def _a100(pair: int, leaf: int, port: int, device: str) -> str:
    """Two GPUs and two rails hang on one host bridge: each GPU on a switch of the second level, its rails beside."""
    root = (0x01, 0x41, 0x81, 0xB1)[pair]
    above = f"pci0000:{root:02x}/0000:{root:02x}:01.1/0000:{root + 1:02x}:00.0"
    return f"{above}/0000:{root + 2:02x}:{leaf:02x}.0/0000:{root + 3 + leaf:02x}:{port:02x}.0/{device}"


DGX_A100 = Box(
    {n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{128 + 16 * n + 15}" for n in range(8)},
    128,
    [(_a100(i // 2, i % 2, 0, _bus(bus)), numa) for i, (bus, numa) in enumerate(_A100_GPUS)],
    [(f"mlx5_{n}", _a100(i // 2, 2, i % 2, _bus(bus)), _A100_GPUS[i][1]) for i, (n, bus) in enumerate(_A100_RAILS)]
    + [
        (f"mlx5_{n}", f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.1/{_bus(bus, port)}", 0 if n < 6 else 4)
        for n, bus, port in _A100_STORAGE
    ],
    "NVIDIA A100-SXM4-40GB",
    rate="200 Gb/sec (4X HDR)",
)
"""Two GPUs share two rails at PXB; they are on NUMA nodes 3, 1, 7 and 5. Storage is mlx5_4, 5, 10 and 11."""


def _own_bridge(domain: int) -> str:
    """Hyper-V shows each device of a guest in a PCI domain of its own, whatever switch is above it."""
    return f"pci{domain:04x}:00/{domain:04x}:00:00.0"


AZURE_NDV4 = Box(
    {n: f"{24 * n}-{24 * n + 23}" for n in range(4)},
    None,
    [(_own_bridge(d), n) for d, n in zip((0x1, 0x2, 0x3, 0x4, 0xB, 0xC, 0xD, 0xE), (1, 1, 0, 0, 3, 3, 2, 2))],
    [(f"mlx5_ib{i}", _own_bridge(0x101 + i), (1, 1, 0, 0, 3, 3, 2, 2)[i]) for i in range(8)],
    "NVIDIA A100-SXM4-40GB",
    rate="200 Gb/sec (4X HDR)",
)

AZURE_NDV5 = Box(
    {0: "0-47", 1: "48-95"},
    None,
    [(_own_bridge(d), i // 4) for i, d in enumerate((0x1, 0x2, 0x3, 0x8, 0x9, 0xA, 0xB, 0xC))],
    [(f"mlx5_ib{i}", _own_bridge(0x101 + i), i // 4) for i in range(8)],
    "NVIDIA H100 80GB HBM3",
)

AWS_P4D = Box(
    {0: "0-23,48-71", 1: "24-47,72-95"},
    48,
    [
        (f"pci0000:{bus:02x}/0000:{bus:02x}:{slot}.0", int(bus > 0x80))
        for bus in (0x10, 0x20, 0x90, 0xA0)
        for slot in ("1c", "1d")
    ],
    [(f"rdmap{bus}s27", f"pci0000:{bus:02x}/0000:{bus:02x}:1b.0", int(bus > 0x80)) for bus in (0x10, 0x20, 0x90, 0xA0)],
    "NVIDIA A100-SXM4-40GB",
    EFA,
    "100 Gb/sec (4X EDR)",
    "Unspecified",
)


def _nitro(first: int, port: int, bus: int) -> str:
    """Four adapters and a GPU hang on functions of one port of a switch that has a host bridge of its own."""
    root = first - 11
    above = f"pci0000:{root:02x}/0000:{root:02x}:00.0/0000:{root + 1:02x}:00.0"
    return f"{above}/0000:{root + 2:02x}:01.{port}/{_bus(bus)}"


_P5_GPUS = (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)
_P5_FIRST = (0x4F, 0x60, 0x71, 0x82, 0x93, 0xA4, 0xB5, 0xC6)
AWS_P5 = Box(
    {0: "0-47,96-143", 1: "48-95,144-191"},
    96,
    [(_nitro(first, 4, gpu), i // 4) for i, (gpu, first) in enumerate(zip(_P5_GPUS, _P5_FIRST))],
    [
        (f"rdmap{first + k}s0", _nitro(first, k, first + k), i // 4)
        for i, first in enumerate(_P5_FIRST)
        for k in range(4)
    ],
    "NVIDIA H100 80GB HBM3",
    EFA,
    "100 Gb/sec (4X EDR)",
    "Unspecified",
)
"""Four fabric adapters and a GPU on each switch: buses 4f to 52 and 53, and so on."""

_TRAY = ((0x8, 0), (0x9, 0), (0x18, 1), (0x19, 1))
OCI_GB200 = Box(
    {0: "0-71", 1: "72-143", **dict.fromkeys(range(2, 34), "")},
    None,
    [(f"pci{d:04x}:00/{d:04x}:00:00.0/{d:04x}:06:00.0", numa) for d, numa in _TRAY],
    [
        (f"rdma{2 * i + port}", f"pci{d:04x}:00/{d:04x}:00:00.0/{d:04x}:03:00.{port}", int(d >= 0x10))
        for i, d in enumerate((0x0, 0x2, 0x10, 0x12))
        for port in (0, 1)
    ],
    "NVIDIA GB200",
)
"""NUMA nodes 2 to 33 are memory of the four GPUs, eight each, and have no CPUs."""
