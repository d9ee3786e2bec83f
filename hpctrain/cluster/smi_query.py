"""Reads `nvidia-smi -q -x` and `nvidia-smi -L`: which GPUs there are, and whether they are cut into MIG instances."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from hpctrain.cluster import pci
from hpctrain.cluster.node import Gpu, Node
from hpctrain.cluster.source import clean_lines, number, read_xml, refusal


def read_query(text: str, source: str = "nvidia-smi -q -x") -> Node:
    """The GPUs of `nvidia-smi -q -x`.

    Raises:
        ConfigError: not what it writes.
    """
    root, problems = read_xml(text, source, ("nvidia_smi_log",))
    breaks = bool(problems)
    gpus: dict[str, Gpu] = {}
    for place, element in enumerate(root.findall("gpu")):
        said = element.get("id") or _text(element, "pci/pci_bus_id")
        where = pci.address(said)
        if not where:
            problems.append(f"the address of GPU {place} cannot be read: {said!r}")
        if where in gpus:
            problems.append(f"GPU {where} is listed twice")
        uuid = _text(element, "uuid")
        if uuid and not re.fullmatch(r"GPU-[0-9a-f-]{8,}", uuid):
            problems.append(f"the UUID of GPU {where or place} cannot be read: {uuid!r}")
            uuid = ""
        mode = _text(element, "mig_mode/current_mig").lower()
        mig = True if mode == "enabled" else False if mode in ("disabled", "n/a") else None
        if element.find("mig_devices/mig_device") is not None:
            mig = True
        name = _text(element, "product_name")
        gpus[where or f"ffff:ff:{place:02x}.0"] = Gpu(0, name, where, uuid, mig=mig, clique=_clique(element))
        fabric = _text(element, "fabric/state")
        if fabric and fabric not in ("Completed", "N/A"):
            problems.append(f"GPU {where}: its NVLink fabric is in state {fabric!r}")
        problems += _health(element, where)
    told = number(root.findtext("attached_gpus"))
    if told is not None and told != len(gpus):
        problems.append(f"it says {told} GPUs are attached and lists {len(gpus)}")
        breaks = True
    if not gpus:
        problems.append("it lists no GPUs")
    doubles = [u for u in {g.uuid for g in gpus.values()} if u and sum(g.uuid == u for g in gpus.values()) > 1]
    problems += [f"two GPUs have the UUID {uuid}" for uuid in doubles]
    return Node(gpus=pci.numbered(gpus), sources=(source,), problems=tuple(problems), partial=breaks)


def _text(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _clique(element: ET.Element) -> str | None:
    """The NVLink domain of several nodes; "" for none (a cluster of zeros), None where the driver does not say."""
    cluster, clique = _text(element, "fabric/clusterUuid"), _text(element, "fabric/cliqueId")
    if element.find("fabric/clusterUuid") is None:
        return None
    known = re.fullmatch(r"[0-9a-fA-F-]{32,36}", cluster) and cluster.strip("0-") and clique.isdecimal()
    return f"{cluster.lower()}/{clique}" if known else ""


def _health(element: ET.Element, where: str) -> list[str]:
    """What makes a GPU useless: errors of memory that wait for a reset."""
    said = []
    for path, what in (
        ("retired_pages/pending_retirement", "pages of its memory wait for a restart to be retired"),
        ("remapped_rows/remapped_row_pending", "rows of its memory wait for a reset to be remapped"),
        ("remapped_rows/remapped_row_failure", "rows of its memory could not be remapped"),
    ):
        if _text(element, path).lower() == "yes":
            said.append(f"GPU {where}: {what}")
    return said


def looks_like_list(text: str) -> bool:
    """Whether a text is of `nvidia-smi -L`."""
    return bool(re.search(r"(?m)^\s*GPU \d+: .*\(UUID", text))


def read_list(text: str, source: str = "nvidia-smi -L") -> Node:
    """The GPUs of `nvidia-smi -L`, and which of them are cut into MIG instances.

    Raises:
        ConfigError: not what it writes.
    """
    gpus: list[Gpu] = []
    problems: list[str] = []
    partial = False
    migs: dict[str, int] = {}
    for line in clean_lines(text):
        gpu = re.match(r"\s*GPU (\d+): (.*?) \(UUID: (GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\)\s*$", line)
        if gpu:
            if any(g.index == int(gpu[1]) or g.uuid == gpu[3] for g in gpus):
                problems.append(f"GPU {gpu[1]} or its UUID is listed twice")
            gpus.append(Gpu(int(gpu[1]), gpu[2], uuid=gpu[3], mig=False))
        elif re.match(r"\s*MIG \S+\s+Device\s+\d+:", line):
            if not gpus:
                problems.append("a MIG instance is listed before any GPU")
                continue
            gpus[-1] = replace(gpus[-1], mig=True)
            uuid = re.search(r"\(UUID: (MIG-[\w/.-]+)\)", line)
            if uuid is None:
                problems.append(f"a line cannot be read: {line.strip()[:60]!r}")
            elif uuid[1] in migs:
                problems.append(f"the MIG instance {uuid[1]} is listed twice")
            migs[uuid[1] if uuid else line] = gpus[-1].index
        elif line.strip():
            problems.append(f"a line cannot be read: {line.strip()[:60]!r}")
            partial = True
    if not gpus:
        raise refusal(source, "there is no line of `nvidia-smi -L` in it", "capture it anew")
    if sorted(g.index for g in gpus) != list(range(len(gpus))):
        problems.append(f"GPUs are numbered {', '.join(str(g.index) for g in gpus)}: some are missing")
        partial = True
    unique = {g.index: g for g in reversed(gpus)}
    return Node(
        gpus=tuple(unique[i] for i in sorted(unique)), sources=(source,), problems=tuple(problems), partial=partial
    )
