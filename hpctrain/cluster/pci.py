"""PCI: addresses, what a class code stands for, and how far two devices are by the bridges above them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from hpctrain.cluster.node import Distance, Gpu, LinkLayer, Nic, Node

NVIDIA, AMD, AMAZON, HPE = "10de", "1002", "1d0f", "17db"
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


def address(text: str) -> str:
    """An address as sysfs writes it, lower case: 0000:1b:00.0; "" for anything else.

    NVML writes the domain with eight digits, `lspci` leaves it out.
    """
    match = _ADDRESS.fullmatch(text.strip())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def order(pci: str) -> tuple[int, ...]:
    """Key that sorts addresses as the bus does; what is no address comes last."""
    return tuple(int(part, 16) for part in re.split("[:.]", pci)) if address(pci) else (1 << 32,)


def card(pci: str) -> str:
    """The address without its function: what the ports of one card share."""
    return pci.rpartition(".")[0]


def kind(code: str, vendor: str) -> str:
    """`gpu`, `nic`, `bridge`, `other` or "" (no code) by class code (0302, 0x030200) and vendor (10de).

    Display controllers of other vendors are those of the board's management. AMD's accelerators are 0380 or 1200.
    Classes: PCI Code and ID Assignment Specification.
    """
    digits = code.lower().removeprefix("0x")[:4]
    maker = vendor.lower().removeprefix("0x")
    if len(digits) < 4:
        return ""
    if digits in ("0302", "0380", "1200") or (digits == "0300" and maker in (NVIDIA, AMD)):
        return "gpu"
    if digits.startswith("02") or digits == "0c06":
        return "nic"
    return "bridge" if digits in ("0604", "0600") else "other"


def link_layer(code: str, vendor: str, device: str) -> LinkLayer:
    """Link layer as far as class code and vendor tell it; a port knows it better."""
    digits, maker = code.lower().removeprefix("0x")[:4], vendor.lower().removeprefix("0x")
    if maker == AMAZON:
        return "efa" if device.lower().removeprefix("0x").startswith("efa") else "ethernet"
    if maker == HPE:
        return "slingshot"
    table: dict[str, LinkLayer] = {"0207": "infiniband", "0c06": "infiniband", "0208": "omnipath", "0200": "ethernet"}
    return table.get(digits, "")


def distance(a: Gpu | Nic, b: Gpu | Nic, numas: int) -> Distance:
    """How far two devices are by their paths, else by their NUMA nodes.

    Below a common bridge: PIX if at most one bridge more leads to each (a switch is an upstream port and its
    downstream ports), else PXB. Below a common host bridge alone: PHB.

    Args:
        numas: NUMA nodes of the machine that have CPUs; 0 if not known. With one, two host bridges are NODE apart.
    """
    if a.path and b.path and a.path[0] == b.path[0]:
        shared = sum(1 for _ in _common(a.path, b.path))
        if shared == 1:
            return Distance.PHB
        below = max(len(a.path), len(b.path)) - shared
        return Distance.PIX if below <= 1 else Distance.PXB
    if a.numa is not None and b.numa is not None:
        return Distance.NODE if a.numa == b.numa else Distance.SYS
    return Distance.NODE if numas == 1 and a.path and b.path else Distance.UNKNOWN


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> list[str]:
    same = []
    for x, y in zip(a, b):
        if x != y:
            break
        same.append(x)
    return same


def measure(node: Node) -> Node:
    """The node with every distance that its paths and NUMA nodes tell and that it does not hold yet.

    Devices of one host bridge are on one NUMA node, so one that lacks it takes it from its neighbour.
    """
    near: dict[str, set[int]] = {}
    for device in node.devices:
        if device.path and device.numa is not None:
            near.setdefault(device.path[0], set()).add(device.numa)

    def numa(device: Gpu | Nic) -> int | None:
        told = near.get(device.path[0], set()) if device.path and device.numa is None else set()
        return next(iter(told)) if len(told) == 1 else device.numa

    gpus = tuple(replace(gpu, numa=numa(gpu)) for gpu in node.gpus)
    nics = tuple(replace(nic, numa=numa(nic)) for nic in node.nics)
    numas = sum(1 for n in node.numas if not n.of_gpu and n.cpus)
    devices: dict[str, Gpu | Nic] = {**{g.key: g for g in gpus}, **{n.name: n for n in nics}}
    distances = dict(node.distances)
    for (x, a), (y, b) in combinations(devices.items(), 2):
        if node.distance(x, y) is Distance.UNKNOWN and (d := distance(a, b, numas)) is not Distance.UNKNOWN:
            distances.pop((y, x), None)
            distances[x, y] = d
    return replace(node, gpus=gpus, nics=nics, distances=distances)


def numbered(gpus: Mapping[str, Gpu]) -> tuple[Gpu, ...]:
    """GPUs by address, with the index that CUDA_DEVICE_ORDER=PCI_BUS_ID gives them."""
    return tuple(replace(gpus[pci], index=i) for i, pci in enumerate(sorted(gpus, key=order)))
