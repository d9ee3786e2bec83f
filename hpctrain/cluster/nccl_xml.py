"""Reads topology files of NCCL and RCCL: dumps (NCCL_TOPO_DUMP_FILE) and those that vendors write for their VMs.

A `pci` element with others in it is one switch. Format: NCCL src/graph/xml.cc; what a path is called: topo.cc, paths.cc
(PIX below one switch, PXB over several, PHB over the CPU; there is no NODE).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpctrain.cluster import pci
from hpctrain.cluster.cpus import parse_mask
from hpctrain.cluster.node import Cpus, Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.smi_topo import overlaps
from hpctrain.cluster.source import number, read_xml

SWITCH = "0x068000"
"""Class of an NVSwitch, as the target of a link."""


TAGS = {"system", "cpu", "pci", "gpu", "nic", "net", "nvlink", "xgmi", "c2c", "pcilink"}


@dataclass
class _Found:
    gpus: dict[str, Gpu] = field(default_factory=dict)
    nics: list[Nic] = field(default_factory=list)
    masks: dict[int, Cpus] = field(default_factory=dict)
    numas: list[int] = field(default_factory=list)
    links: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    leaves: dict[str, tuple[tuple[str, ...], int | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(text: str, source: str = "NCCL topology XML") -> Node:
    """The node of a topology file.

    Raises:
        ConfigError: not such a file.
    """
    root, breaks = read_xml(text, source, ("system",))
    found = _Found(problems=list(breaks))
    strange = sorted({str(element.tag) for element in root.iter()} - TAGS)
    if strange:
        found.problems.append(f"elements called {', '.join(strange)[:60]} are none of NCCL's and are not read")
    for place, cpu in enumerate(root.iter("cpu")):
        _cpu(found, cpu, f"cpu{place}")
    _unclassed(found)
    gpus = pci.numbered(found.gpus)
    keys = {gpu.pci: gpu.key for gpu in gpus}
    nvlinks = _nvlinks(found, keys)
    problems = found.problems + overlaps(found.masks)
    if not found.masks and found.numas:
        problems.append("the file gives no CPUs of NUMA nodes")
    if not gpus:
        problems.append("the file lists no GPUs; where they are, another source must say")
    if not (found.gpus or found.nics or found.leaves):
        problems.append("the file lists no devices")
    gpus = tuple(replace(gpu, cpus=found.masks.get(gpu.numa, ()) if gpu.numa is not None else ()) for gpu in gpus)
    node = pci.measure(
        Node(
            gpus=gpus,
            nics=_unique(found.nics),
            numas=tuple(Numa(n, found.masks.get(n, ())) for n in sorted(set(found.numas))),
            nvlinks=nvlinks,
            sources=(source,),
            problems=tuple(problems),
            partial=bool(breaks),
            unclassed={leaf: numa for leaf, (_, numa) in found.leaves.items()},
        )
    )
    return _with_nvlinks(node)


def _with_nvlinks(node: Node) -> Node:
    linked = {pair: Distance.NVLINK for pair, count in node.nvlinks.items() if count}
    return replace(node, distances={**node.distances, **linked})


def _cpu(found: _Found, cpu: ET.Element, root: str) -> None:
    numa = number(cpu.get("numaid"))
    if numa is None and cpu.get("numaid") not in (None, "-1"):
        found.problems.append(f"numaid={cpu.get('numaid')!r} is not the number of a NUMA node")
    mask = cpu.get("affinity")
    if numa is not None:
        if numa in found.numas:
            found.problems.append(f"NUMA node {numa} is listed twice")
        found.numas.append(numa)
        if mask is not None:
            try:
                found.masks[numa] = parse_mask(mask)
            except ValueError:
                found.problems.append(f"the CPUs of NUMA node {numa} cannot be read: {mask[:60]!r}")
    _walk(found, cpu, (root,), numa, None)


def _walk(
    found: _Found, element: ET.Element, path: tuple[str, ...], numa: int | None, above: ET.Element | None
) -> None:
    for child in element:
        if child.tag == "nic":
            _nets(found, child, "", (*path, f"nic{len(found.nics)}"), numa)
        elif child.tag == "pci":
            _device(found, child, path, numa, above)


def _device(
    found: _Found, element: ET.Element, path: tuple[str, ...], numa: int | None, above: ET.Element | None
) -> None:
    bus = element.get("busid", "")
    where = pci.address(bus)
    if not where:
        found.problems.append(f"busid={bus!r} is not a PCI address")
        where = f"?{len(found.leaves) + len(found.gpus) + len(found.nics)}"
    vendor, device, code = element.get("vendor", ""), element.get("device", ""), element.get("class", "")
    kind = pci.kind(code, vendor)
    if code and not re.fullmatch(r"0x[0-9a-fA-F]{6}", code):
        found.problems.append(f"{where} has class={code!r}, which is none")
        kind = ""
    if above is not None:
        _check_speed(found, element, above)
    inner = {child.tag for child in element}
    if "gpu" in inner or (kind == "gpu" and "pci" not in inner):
        _gpu(found, element, where, path, numa)
    if "nic" in inner:
        for nic in element.findall("nic"):
            _nets(found, nic, where, path, numa, pci.link_layer(code, vendor, device), "pci" in inner)
    elif kind == "nic" and "pci" not in inner:
        layer = pci.link_layer(code, vendor, device)
        found.nics.append(
            Nic(where, pci=where, numa=numa, link_layer=layer, path=path, verbs=layer != "ethernet" or None)
        )
    if "pci" in inner:
        # A switch is its upstream port and a downstream port for each child, as bridges are in `Gpu.path`.
        for child in element.findall("pci"):
            port = f"{where}>{child.get('busid', '')}"
            _device(found, child, (*path, where, port), numa, element)
    elif not kind and not inner & {"gpu", "nic"}:
        found.leaves[where] = (path, numa)


def _gpu(found: _Found, element: ET.Element, where: str, path: tuple[str, ...], numa: int | None) -> None:
    if where in found.gpus:
        found.problems.append(f"GPU {where} is listed twice")
        return
    found.gpus[where] = Gpu(0, pci=where if not where.startswith("?") else "", numa=numa, path=path)
    gpu = element.find("gpu")
    if gpu is None:
        return
    links = [link for link in gpu if link.tag in ("nvlink", "xgmi")]
    for link in links:
        target, count = pci.address(link.get("target", "")), number(link.get("count"))
        switch = link.get("tclass", "") == SWITCH
        if target == where:
            found.problems.append(f"an NVLink of GPU {where} leads to itself")
        elif count is None or not (target or switch):
            found.problems.append(f"a link of GPU {where} cannot be read: {dict(link.attrib)}")
        else:
            found.links.setdefault(where, []).append(("" if switch else target, count, link.tag))
    if links:
        found.links.setdefault(where, [])


def _nets(
    found: _Found,
    nic: ET.Element,
    where: str,
    path: tuple[str, ...],
    numa: int | None,
    layer: str = "",
    deep: bool = False,
) -> None:
    nets = nic.findall("net")
    if not nets and where:
        found.nics.append(Nic(where, pci=where, numa=numa, path=path))
    for net in nets:
        name = net.get("name", "") or where
        speed, guid = number(net.get("speed")), net.get("guid", "")
        if not name:
            found.problems.append("a net without a name is left out")
            continue
        if speed is None or speed <= 0:
            found.problems.append(f"the speed of {name} cannot be read: {net.get('speed')!r}")
        socket = (guid in ("0x0", "0") and not where) or name.startswith(("eth", "en"))
        found.nics.append(
            Nic(
                name,
                pci=where if not where.startswith("?") else "",
                port=number(net.get("port")) or 1,
                numa=numa,
                interface=name if socket else "",
                guid="" if guid in ("0x0", "0", "") else guid,
                link_layer="ethernet" if socket else layer,  # type: ignore[arg-type]
                rate_gbit=speed / 1000 if speed else None,
                path=path,
                verbs=not socket,
            )
        )


def _unique(nics: list[Nic]) -> tuple[Nic, ...]:
    """Second ports have the name of the first: they get theirs with the port behind it."""
    seen: dict[str, Nic] = {}
    for nic in nics:
        name = nic.name if nic.name not in seen else f"{nic.name}:{nic.port}"
        while name in seen:
            name += "'"
        seen[name] = replace(nic, name=name)
    return tuple(seen.values())


def _unclassed(found: _Found) -> None:
    """Devices without a class code: below switches of a file without GPUs they are the NICs that AWS's files list."""
    if found.gpus or found.nics:
        kinds = "" if not found.leaves else f"{len(found.leaves)} devices have no class code and are left out"
    else:
        below = {leaf: place for leaf, place in found.leaves.items() if len(place[0]) > 1}
        for leaf, (path, numa) in below.items():
            found.nics.append(Nic(leaf, pci=pci.address(leaf), numa=numa, path=path))
            del found.leaves[leaf]
        if below:
            found.problems.append(
                f"no class codes: {len(below)} devices below switches are taken for NICs, as AWS's files mean them"
            )
        kinds = ""
        if found.leaves:
            kinds = f"no class codes: whether {len(found.leaves)} devices are GPUs or NICs, the file does not tell"
    if kinds:
        found.problems.append(kinds)


def _nvlinks(found: _Found, keys: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Links of each pair. Over an NVSwitch a pair has as many as the GPU with fewer of them."""
    if not any(found.links.values()):
        return {}
    pairs: dict[tuple[str, str], int] = {}
    switched = {gpu: sum(n for target, n, _ in links if not target) for gpu, links in found.links.items()}
    for a in keys:
        for b in keys:
            if a >= b:
                continue
            one = sum(n for target, n, _ in found.links.get(a, ()) if target == b)
            two = sum(n for target, n, _ in found.links.get(b, ()) if target == a)
            if one != two:
                found.problems.append(f"{a} has {one} links to {b}, {b} has {two} to {a}")
            pairs[keys[a], keys[b]] = min(one, two) + min(switched.get(a, 0), switched.get(b, 0))
    for gpu, links in found.links.items():
        for target, _, _ in links:
            if target and target not in keys:
                found.problems.append(f"a link of GPU {gpu} leads to {target}, which is not listed")
    return pairs


def _check_speed(found: _Found, below: ET.Element, above: ET.Element) -> None:
    """A switch said to be much slower than what is under it: NCCL believes that (NVIDIA/nccl#749)."""

    def rate(element: ET.Element) -> float:
        speed = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*GT/s", element.get("link_speed", ""))
        return float(speed[1]) * (number(element.get("link_width")) or 0) if speed else 0.0

    if 0 < rate(above) * 8 < rate(below):
        found.problems.append(
            f"{above.get('busid')} is said to run at {above.get('link_speed')} x{above.get('link_width')}, its device "
            f"{below.get('busid')} at {below.get('link_speed')} x{below.get('link_width')}: NCCL would throttle it"
        )
