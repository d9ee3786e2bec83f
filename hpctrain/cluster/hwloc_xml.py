"""Reads what `lstopo out.xml` writes: hwloc 1, 2 and 3.

In hwloc 1 a NUMA node holds what is near it; since 2 it is a leaf beside the I/O of its package or group. In both an
object's `nodeset` says which NUMA nodes it is near. Format: hwloc2.dtd and hwloc.dtd.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace

from hpctrain.cluster import pci
from hpctrain.cluster.cpus import cores, parse_mask
from hpctrain.cluster.node import Cpus, Gpu, Nic, Node, Numa
from hpctrain.cluster.smi_topo import overlaps
from hpctrain.cluster.source import number, read_xml
from hpctrain.cluster.sysfs import gpu_memory

NETWORK, VERBS = {"2", "16"}, {"3", "32", "48"}
"""`osdev_type` of network interfaces and verbs devices: a number up to hwloc 2, bits since 3 (16 and 32)."""


TYPES = {
    "System",
    "Machine",
    "Package",
    "Socket",
    "Die",
    "Group",
    "NUMANode",
    "MemCache",
    "Core",
    "PU",
    "Bridge",
    "PCIDev",
}
TYPES |= {"OSDev", "Misc", "Cache", *(f"L{i}Cache" for i in range(1, 6)), *(f"L{i}iCache" for i in range(1, 4))}


@dataclass
class _Found:
    three: bool
    gpus: dict[str, Gpu] = field(default_factory=dict)
    nics: list[Nic] = field(default_factory=list)
    numas: dict[int, Numa] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(text: str, source: str = "hwloc XML") -> Node:
    """The node of an hwloc file.

    Raises:
        ConfigError: not such a file.
    """
    root, breaks = read_xml(text, source, ("topology",))
    found = _Found(three=(root.get("version") or "1").startswith("3"), problems=list(breaks))
    strange = sorted({o.get("type", "") for o in root.iter("object")} - TYPES)
    if strange:
        found.problems.append(f"objects of type {', '.join(map(repr, strange))[:60]} are none of hwloc's")
    for machine in root.findall("object"):
        _numas(found, machine)
    for machine in root.findall("object"):
        _walk(found, machine, (), None)
    host = next((i.get("value", "") for i in root.iter("info") if i.get("name") == "HostName"), "")
    gpus = tuple(_with_cpus(gpu, found) for gpu in pci.numbered(found.gpus))
    nics = _unique(found.nics)
    problems = found.problems + overlaps({n.index: n.cpus for n in found.numas.values()})
    several = sum(1 for n in found.numas.values() if n.cpus) > 1
    lost = [gpu.key for gpu in gpus if gpu.numa is None]
    if lost and several:
        problems.append(f"the NUMA node of {len(lost)} GPUs is not told: the machine shows its PCI devices flat")
    return pci.measure(
        Node(
            name=host,
            gpus=gpus,
            nics=nics,
            numas=gpu_memory((found.numas[n] for n in sorted(found.numas)), len(gpus)),
            sources=(source,),
            problems=tuple(problems),
            partial=bool(breaks),
            cores=cores(_mask(one, "cpuset") or () for one in root.iter("object") if one.get("type") == "Core"),
        )
    )


def _with_cpus(gpu: Gpu, found: _Found) -> Gpu:
    return replace(gpu, cpus=found.numas[gpu.numa].cpus) if gpu.numa in found.numas else gpu


def _mask(element: ET.Element, name: str) -> Cpus | None:
    try:
        return parse_mask(element.get(name, ""))
    except ValueError:
        return None


def _numas(found: _Found, machine: ET.Element) -> None:
    nodes = [o for o in machine.iter("object") if o.get("type") == "NUMANode"]
    for node in nodes:
        index, cpus = number(node.get("os_index")), _mask(node, "cpuset")
        if index is None or cpus is None:
            found.problems.append(f"a NUMA node cannot be read: os_index={node.get('os_index')!r}")
            continue
        if index in found.numas:
            found.problems.append(f"NUMA node {index} is listed twice")
        found.numas[index] = Numa(index, cpus, number(node.get("local_memory")), of_gpu=_of_gpu(node, cpus))
    if not nodes:  # hwloc 1 leaves it out if there is one
        cpus = _mask(machine, "cpuset")
        if cpus:
            found.numas[0] = Numa(0, cpus, number(machine.get("local_memory")))


def _of_gpu(node: ET.Element, cpus: Cpus) -> bool:
    """Memory of a GPU: no CPUs, and said to be so (subtype GPUMemory since hwloc 2.8)."""
    return not cpus and "GPU" in (node.get("subtype") or "")


def _walk(found: _Found, element: ET.Element, path: tuple[str, ...], numa: int | None) -> None:
    for child in element.findall("object"):
        kind = child.get("type", "")
        if kind == "Bridge":
            _walk(found, child, _below(found, child, path), numa)
        elif kind == "PCIDev":
            _device(found, child, path, numa)
        elif kind == "OSDev" and not path:
            continue  # a device of no card, as the OpenCL view of a GPU
        elif kind == "NUMANode":
            _walk(found, child, path, number(child.get("os_index")))
        else:
            near = _mask(child, "nodeset") or ()
            _walk(found, child, path, near[0] if len(near) == 1 else _by_cpus(found, child, numa))
    if not path and element.get("type") == "Machine" and len(_numbers(found)) == 1:
        only = _numbers(found)[0]
        found.gpus = {k: replace(g, numa=only) for k, g in found.gpus.items()}
        found.nics = [replace(n, numa=only) for n in found.nics]


def _numbers(found: _Found) -> list[int]:
    return [n.index for n in found.numas.values() if n.cpus]


def _by_cpus(found: _Found, element: ET.Element, numa: int | None) -> int | None:
    """The NUMA node whose CPUs hold those of an object."""
    cpus = set(_mask(element, "cpuset") or ())
    holding = [n.index for n in found.numas.values() if cpus and cpus <= set(n.cpus)]
    return holding[0] if len(holding) == 1 else numa


def _below(found: _Found, bridge: ET.Element, path: tuple[str, ...]) -> tuple[str, ...]:
    if bridge.get("bridge_type", "").startswith("0") or not path:
        match = re.match(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-", bridge.get("bridge_pci", ""))
        if not match:
            found.problems.append(f"a host bridge cannot be read: bridge_pci={bridge.get('bridge_pci')!r}")
        name = f"pci{match[1]}:{match[2]}" if match else f"pci?{id(bridge)}"
        if bridge.get("bridge_type", "").startswith("0"):
            return (name,)
        return (name, pci.address(bridge.get("pci_busid", "")))
    return (*path, pci.address(bridge.get("pci_busid", "")) or f"?{id(bridge)}")


def _device(found: _Found, element: ET.Element, path: tuple[str, ...], numa: int | None) -> None:
    where = pci.address(element.get("pci_busid", ""))
    said = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", element.get("pci_type", ""))
    if not where or not said:
        found.problems.append(
            f"a PCI device cannot be read: pci_busid={element.get('pci_busid')!r}, pci_type={element.get('pci_type')!r}"
        )
        return
    code, vendor, device = said[1], said[2], said[3]
    kind = pci.kind(code, vendor)
    osdevs = [o for o in element.iter("object") if o.get("type") == "OSDev"]
    infos = {i.get("name", ""): i.get("value", "") for i in element.iter("info")}
    if kind == "gpu":
        if where in found.gpus:
            found.problems.append(f"GPU {where} is listed twice")
        found.gpus[where] = Gpu(
            0,
            name=infos.get("GPUModel") or infos.get("PCIDevice", ""),
            pci=where,
            uuid=infos.get("NVIDIAUUID", ""),
            numa=numa,
            path=path,
        )
    elif kind == "nic" or any(_is_verbs(found, o) for o in osdevs):
        _nics(found, osdevs, where, pci.link_layer(code, vendor, device), infos, path, numa)


def _is_verbs(found: _Found, osdev: ET.Element) -> bool:
    """Whether it is a verbs device. In hwloc 3 the number 3 is the bits of storage and memory."""
    return osdev.get("osdev_type") in VERBS - ({"3"} if found.three else set())


def _nics(
    found: _Found,
    osdevs: list[ET.Element],
    where: str,
    layer: str,
    infos: dict[str, str],
    path: tuple[str, ...],
    numa: int | None,
) -> None:
    """NICs of a PCI function: its verbs device with the interface beside it, or its interfaces."""
    network = [o.get("name", "") for o in osdevs if o.get("osdev_type") in NETWORK]
    verbs = [o for o in osdevs if _is_verbs(found, o)]
    named = verbs or [o for o in osdevs if o.get("osdev_type") in NETWORK] or [ET.Element("object", name=where)]
    for device in named:
        own = {i.get("name", ""): i.get("value", "") for i in device.iter("info")}
        state = own.get("Port1State", "")
        name = device.get("name", "") or where
        found.nics.append(
            Nic(
                name,
                pci=where,
                numa=numa,
                interface=name if not verbs and network else (network[0] if len(network) == 1 else ""),
                guid=own.get("NodeGUID", ""),
                link_layer=layer,  # type: ignore[arg-type]
                state="active" if state == "4" else "down" if state in ("1", "2", "3") else "",
                virtual=True if "Virtual Function" in infos.get("PCIDevice", "") else None,
                path=path,
                verbs=bool(verbs) or layer in ("slingshot", "efa", "omnipath"),
            )
        )


def _unique(nics: list[Nic]) -> tuple[Nic, ...]:
    seen: dict[str, Nic] = {}
    for nic in nics:
        name = nic.name if nic.name not in seen else f"{nic.name}@{nic.pci}"
        seen[name] = replace(nic, name=name)
    return tuple(seen.values())
