"""Reads Kubernetes ResourceSlices: `kubectl get resourceslices -o yaml`, of GPU drivers and of the network driver.

They tell PCI root, NUMA node (of NICs) and verbs device, but not the bridges: two devices under one root are PHB apart
or nearer. Format: resource.k8s.io, drivers gpu.nvidia.com and dra.net.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpctrain.cluster import pci
from hpctrain.cluster.node import Gpu, LinkLayer, Nic, Node, Numa
from hpctrain.cluster.source import refusal
from hpctrain.config import plain_yaml

GRACE = re.compile(r"\b(GB200|GB300|GH200)\b")
"""GPUs beside a Grace CPU. Its PCI domains begin at 16 times the socket, and sockets are NUMA nodes."""
CUT = 60
"""Lines that may be cut off the end of a document to make it one."""


def read(text: str, source: str = "ResourceSlice", node: str = "") -> Node:
    """The node of ResourceSlices.

    Args:
        node: which node, if the slices are of several.

    Raises:
        ConfigError: no slices, or those of several nodes.
    """
    problems: list[str] = []
    slices = [s for document in _documents(text, source, problems) for s in _slices(document)]
    if slices and not text.endswith("\n"):
        problems.append("the text does not end with a line end: it may be cut")
    if any("driver" not in spec or not ("pool" in spec or "nodeName" in spec) for spec in slices):
        problems.append("a slice does not say its driver or its node: it is cut")
    cut = bool(problems)
    names = sorted({name for spec in slices if (name := _node_name(spec))})
    if node:
        slices = [spec for spec in slices if _node_name(spec) == node]
    if not slices:
        raise refusal(source, f"there is no ResourceSlice of {node or 'a node'} in it")
    if not node and len(names) > 1:
        raise refusal(source, f"it holds slices of {len(names)} nodes ({', '.join(names[:4])})", "name one of them")
    gpus: dict[str, Gpu] = {}
    nics: list[Nic] = []
    for spec in slices:
        devices = spec.get("devices")
        for device in devices if isinstance(devices, list) else []:
            _device(device, gpus, nics, problems)
    found = pci.numbered(gpus)
    numas = sorted({nic.numa for nic in nics if nic.numa is not None})
    if not gpus and not nics:
        problems.append("the slices list no GPUs and no NICs")
    for spec in slices:
        told = spec.get("pool", {}).get("resourceSliceCount") if isinstance(spec.get("pool"), dict) else None
        if isinstance(told, int) and told > sum(1 for s in slices if s.get("driver") == spec.get("driver")):
            problems.append(f"the pool of {spec.get('driver')} has {told} slices, not all are here")
            cut = True
            break
    grace = tuple(replace(g, numa=_grace_numa(g)) for g in found)
    if any(g.numa is not None for g in grace):
        problems.append("NUMA nodes of GPUs are taken from their PCI domains, as Grace numbers them")
    return pci.measure(
        Node(
            name=node or (names[0] if names else ""),
            gpus=grace,
            nics=tuple({nic.name: nic for nic in nics}.values()),
            numas=tuple(Numa(n) for n in sorted({*numas, *(g.numa for g in grace if g.numa is not None)})),
            sources=(source,),
            problems=tuple(problems),
            partial=cut,
        )
    )


def _documents(text: str, source: str, problems: list[str]) -> Iterator[Any]:
    for part in re.split(r"(?m)^---[^\n]*$", text):
        if not part.strip():
            continue
        lines = part.rstrip().split("\n")
        reason = ""
        for cut in range(min(CUT, len(lines))):
            try:
                value = plain_yaml.read("\n".join(lines[: len(lines) - cut]))
            except (ValueError, RecursionError) as error:
                reason = reason or str(error)
                if (at := re.match(r"line (\d+):", reason)) and int(at[1]) < len(lines) - CUT:
                    raise refusal(source, f"it is not YAML ({reason})") from None
                continue
            if cut:
                problems.append(f"the YAML breaks off ({reason}): {cut} lines are left out")
            yield value
            break
        else:
            raise refusal(source, f"it is not YAML ({reason})")


def _slices(document: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(document, dict):
        return
    items = document.get("items")
    for item in items if isinstance(items, list) else [document]:
        if isinstance(item, dict) and item.get("kind") == "ResourceSlice" and isinstance(item.get("spec"), dict):
            yield item["spec"]


def _node_name(spec: Mapping[str, Any]) -> str:
    pool = spec.get("pool")
    name = spec.get("nodeName") or (pool.get("name") if isinstance(pool, dict) else "")
    return name if isinstance(name, str) else ""


def _attributes(device: Any) -> dict[str, Any]:
    """Attributes by their name without its domain; v1beta1 wraps them in `basic`."""
    if not isinstance(device, dict):
        return {}
    holder = device["basic"] if isinstance(device.get("basic"), dict) else device
    found = holder.get("attributes")
    values: dict[str, Any] = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, dict) and len(value) == 1:
            values[str(key).rpartition("/")[2]] = next(iter(value.values()))
    return values


def _device(device: Any, gpus: dict[str, Gpu], nics: list[Nic], problems: list[str]) -> None:
    found = _attributes(device)
    name = str(device.get("name", "")) if isinstance(device, dict) else ""
    said = next((str(found[k]) for k in ("pciBusID", "pciAddress", "pciAddr", "pciBusId") if k in found), "")
    where = pci.address(said)
    root = str(found.get("pcieRoot", ""))
    path = (root,) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", root) else ()
    if (root and not path) or (said and not where):
        problems.append(f"the place of {name} cannot be read: {said or root!r}")
    elif not said and (name.startswith("pci-") or "productName" in found):
        problems.append(f"{name} has no PCI address")
    if found.get("type") == "mig":
        parent = str(found.get("parentUUID", ""))
        for key, gpu in gpus.items():
            if gpu.uuid == parent or key == where:
                gpus[key] = replace(gpu, mig=True)
        return
    if "productName" in found or found.get("type") in ("gpu", "amdgpu"):
        key = where or f"ffff:ff:{len(gpus):02x}.0"
        if key in gpus:
            problems.append(f"GPU {where} is listed twice")
        uuid = str(found.get("uuid", ""))
        gpus[key] = Gpu(0, str(found.get("productName", "")), where, uuid, _numa(found, name, problems), path=path)
    elif where:
        nics.append(_nic(found, where, path, _numa(found, name, problems)))


def _numa(found: Mapping[str, Any], name: str, problems: list[str]) -> int | None:
    numa = found.get("numaNode", found.get("numa"))
    if numa is None or numa == -1:
        return None
    if isinstance(numa, bool) or not isinstance(numa, int) or not 0 <= numa < 1024:
        problems.append(f"the NUMA node of {name} cannot be read: {numa!r}")
        return None
    return numa


def _nic(found: Mapping[str, Any], where: str, path: tuple[str, ...], numa: int | None) -> Nic:
    interface = str(found.get("ifName", ""))
    model = str(found.get("pciDevice", ""))
    layers: dict[str, LinkLayer] = {"infiniband": "infiniband", "ether": "ethernet"}
    layer = "efa" if "Elastic Fabric" in model else layers.get(str(found.get("encapsulation", "")), "")
    state = str(found.get("state", ""))
    rdma = found.get("rdma")
    return Nic(
        str(found.get("rdmaDevice") or interface or where),
        pci=where,
        numa=numa,
        interface=interface,
        link_layer=layer,
        state="active" if state == "up" else "down" if state == "down" else "",
        virtual=True if "Virtual Function" in model or found.get("isSriovVf") is True else found.get("isSriovVf"),
        path=path,
        verbs=rdma if isinstance(rdma, bool) else None,
    )


def _grace_numa(gpu: Gpu) -> int | None:
    if gpu.numa is None and gpu.pci and GRACE.search(gpu.name):
        return int(gpu.pci.partition(":")[0], 16) >> 4
    return gpu.numa
