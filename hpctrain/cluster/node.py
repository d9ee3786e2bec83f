"""One node as far as ranks care: GPUs, NICs, NUMA nodes, and how far they are from each other.

Everything that reads a node (sysfs, `nvidia-smi`, NCCL's and hwloc's XML, Kubernetes) gives a `Node`. What a source
does not say is empty or None and never guessed; what it says wrongly or leaves out is a sentence in `problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

Cpus = tuple[int, ...]
"""Logical CPUs by the numbers of the operating system, ascending; empty: not known."""

Role = Literal["rail", "storage", "management", "unknown"]
LinkLayer = Literal["infiniband", "ethernet", "omnipath", "efa", "slingshot", ""]
State = Literal["active", "down", ""]


class Distance(IntEnum):
    """How far two devices are on the board; the lower, the nearer. Words are those of `nvidia-smi topo -m`.

    NVLINK and C2C are links of their own; PIX is at most one PCIe bridge, PXB several, PHB the host bridge of a
    CPU, NODE several host bridges of a NUMA node, SYS another NUMA node (SOC in drivers up to 2017).
    """

    SELF = 0
    NVLINK = 1
    C2C = 2
    PIX = 3
    PXB = 4
    PHB = 5
    NODE = 6
    SYS = 7
    UNKNOWN = 8


@dataclass(frozen=True)
class Numa:
    """A NUMA node. One that is the memory of a GPU has no CPUs, and nothing is bound to it."""

    index: int
    cpus: Cpus = ()
    memory_bytes: int | None = None
    of_gpu: bool = False


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        index: its place in the order of PCI addresses, as `nvidia-smi` and CUDA_DEVICE_ORDER=PCI_BUS_ID count.
        pci: address as sysfs writes it, lower case: 0000:1b:00.0; "" if not known.
        uuid: GPU-..., or "" if not known.
        numa: NUMA node whose CPUs are near; None if the source cannot tell.
        cpus: the CPUs that are near.
        mig: cut into MIG instances; None if not known.
        path: the PCI host bridge (pci0000:15) and the bridges under it down to the device; () if not known.
        memory: NUMA nodes that are memory of this GPU. Nothing runs there.
        clique: NVLink domain of several nodes that it is in, as UUID of the cluster and number of the clique; "" for
            none, None if not known.
    """

    index: int
    name: str = ""
    pci: str = ""
    uuid: str = ""
    numa: int | None = None
    cpus: Cpus = ()
    mig: bool | None = None
    path: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    clique: str | None = None

    @property
    def key(self) -> str:
        """Its name in `Node.distances`."""
        return f"gpu{self.index}"


@dataclass(frozen=True)
class Nic:
    """A network device, one port of it.

    Attributes:
        name: what NCCL calls it: the verbs device (mlx5_0, rdmap16s27), or the interface if it has no verbs.
        interface: network interface (ib0, ens32), "" if not known.
        rate_gbit: Gbit/s of the port.
        virtual: a virtual function of another device.
        default_route: the node's default route leaves by it.
        role, why: what it is for, and the signals that say so.
        path: as of `Gpu.path`.
        verbs: RDMA verbs (or libfabric) reach it; None if not known.
        bond: the bond that it is a port of, or its own name if it is a bond; "" for none.
    """

    name: str
    pci: str = ""
    port: int = 1
    numa: int | None = None
    interface: str = ""
    guid: str = ""
    link_layer: LinkLayer = ""
    rate_gbit: float | None = None
    state: State = ""
    virtual: bool | None = None
    default_route: bool | None = None
    role: Role = "unknown"
    why: str = ""
    path: tuple[str, ...] = ()
    verbs: bool | None = None
    bond: str = ""


@dataclass(frozen=True)
class Node:
    """A node, as read from one source or merged from several.

    Attributes:
        distances: from a pair of keys (`Gpu.key` and `Nic.name`, in either order) to how far they are.
        nvlinks: from a pair of `Gpu.key` to the number of NVLinks between them; 0: there are none.
        sources: what it was read from, in words.
        problems: what is missing, damaged or contradictory, a sentence each.
        partial: the source ended early or shows a part of the node only.
        p2p: from a pair of `Gpu.key` to a word of `nvidia-smi topo -p2p`: OK, or why they do not reach each other.
        unclassed: PCI addresses of devices that the source does not say the kind of, and their NUMA node.
        cores: the CPUs of each core, where a source tells which of them are threads of one; () if none does.
    """

    name: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numas: tuple[Numa, ...] = ()
    distances: Mapping[tuple[str, str], Distance] = field(default_factory=dict)
    nvlinks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    partial: bool = False
    p2p: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unclassed: Mapping[str, int | None] = field(default_factory=dict)
    cores: tuple[Cpus, ...] = ()

    def distance(self, a: str, b: str) -> Distance:
        """How far two devices are, by their keys; UNKNOWN if no source said."""
        if a == b:
            return Distance.SELF
        return self.distances.get((a, b), self.distances.get((b, a), Distance.UNKNOWN))

    @property
    def devices(self) -> tuple[Gpu | Nic, ...]:
        """GPUs, then NICs."""
        return (*self.gpus, *self.nics)

    @property
    def rails(self) -> tuple[Nic, ...]:
        """NICs that carry collectives, in the order of their rails."""
        return tuple(nic for nic in self.nics if nic.role == "rail")
