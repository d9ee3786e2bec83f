"""Reads a node from Linux: /sys and /proc under a root, so that a captured tree reads as the live one does.

On practice clusters there is no such hardware: HPCTRAIN_RAILS and HPCTRAIN_GPUS name the interfaces and device nodes
that stand for it (`rail0,rail1` and `/x/gpu0,/x/gpu1`); GPU i is wired to rail i.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster import pci
from hpctrain.cluster.cpus import cores, parse_list
from hpctrain.cluster.node import Cpus, Distance, Gpu, LinkLayer, Nic, Node, Numa, State
from hpctrain.cluster.smi_topo import overlaps

RAILS, GPUS = "HPCTRAIN_RAILS", "HPCTRAIN_GPUS"
_LAYERS: dict[str, LinkLayer] = {"infiniband": "infiniband", "ethernet": "ethernet", "omni-path": "omnipath"}


def read(root: Path | str = "/", environ: Mapping[str, str] | None = None) -> Node:
    """The node whose /sys and /proc lie under a root."""
    base = Path(root)
    environ = environ or {}
    problems: list[str] = []
    gpus = _gpus(base, problems)
    numas = gpu_memory(_numas(base, problems), len(gpus))
    nics = _nics(base, environ)
    masks = {n.index: n.cpus for n in numas}
    only = [n.index for n in numas if n.cpus]
    fill = only[0] if len(only) == 1 else None  # on a machine with one NUMA node the kernel says -1
    gpus = tuple(replace(g, numa=fill if g.numa is None else g.numa) for g in gpus)
    gpus = tuple(replace(g, cpus=masks.get(g.numa, ()) if g.numa is not None else ()) for g in gpus)
    nics = tuple(replace(n, numa=fill if n.numa is None and n.pci else n.numa) for n in nics)
    if len(only) > 1:
        lost = [d.pci for d in Node(gpus=gpus, nics=nics).devices if d.pci and d.numa is None]
        if lost:
            problems.append(f"the kernel does not tell the NUMA node of {len(lost)} devices, first {lost[0]}")
    node = Node(
        name=_text(base / "proc/sys/kernel/hostname"),
        gpus=gpus,
        nics=nics,
        numas=numas,
        sources=("sysfs" if base == Path("/") else f"sysfs under {base}",),
        problems=(*problems, *overlaps(masks)),
        partial=any("not given to this process" in p for p in problems),
        cores=_cores(base),
    )
    return _emulated(pci.measure(node), environ, base)


def gpu_memory(numas: Iterable[Numa], gpus: int) -> tuple[Numa, ...]:
    """NUMA nodes, with those marked that are memory of GPUs: without CPUs, and as many for each GPU.

    POWER9 numbers them from 255 down, Grace gives eight to each GPU, one for each MIG instance and one for it all.
    """
    numas = tuple(numas)
    bare = [n for n in numas if not n.cpus]
    mine = bool(bare) and gpus > 0 and len(bare) % gpus == 0
    return tuple(replace(n, of_gpu=n.of_gpu or (mine and not n.cpus)) for n in numas)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip("\0 \n\t")
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _numas(base: Path, problems: list[str]) -> tuple[Numa, ...]:
    found = []
    folder = base / "sys/devices/system/node"
    for name in _names(folder):
        if not (match := re.fullmatch(r"node(\d+)", name)):
            continue
        said = _text(folder / name / "cpulist")
        cpus: Cpus = ()
        try:
            cpus = parse_list(said) if said else ()
        except ValueError:
            problems.append(f"the CPUs of NUMA node {match[1]} cannot be read: {said!r}")
        total = re.search(r"MemTotal:\s*(\d+) kB", _text(folder / name / "meminfo"))
        found.append(Numa(int(match[1]), cpus, int(total[1]) * 1024 if total else None))
    return tuple(sorted(found, key=lambda n: n.index))


def _cores(base: Path) -> tuple[Cpus, ...]:
    """The threads of each core; () where a CPU does not tell its siblings."""
    folder = base / "sys/devices/system/cpu"
    found: list[Cpus] = []
    for name in _names(folder):
        topology = folder / name / "topology"
        if not re.fullmatch(r"cpu\d+", name) or not topology.is_dir():  # a CPU that is off has none
            continue
        said = _text(topology / "thread_siblings_list") or _text(topology / "core_cpus_list")
        try:
            found.append(parse_list(said))
        except ValueError:
            return ()
    return cores(found)


def _place(device: Path) -> tuple[str, tuple[str, ...]]:
    """Address and path of the PCI device at the end of a link."""
    try:
        parts = device.resolve().parts
    except (OSError, RuntimeError):
        return "", ()
    for i, part in enumerate(parts):
        if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part):
            chain = [part]
            for deeper in parts[i + 1 :]:
                if not (where := pci.address(deeper)):
                    break
                chain.append(where)
            return (chain[-1], tuple(chain[:-1])) if len(chain) > 1 else ("", ())
    return "", ()


def _numa(device: Path) -> int | None:
    said = _text(device / "numa_node")
    return int(said) if re.fullmatch(r"\d{1,4}", said) else None


def _gpus(base: Path, problems: list[str]) -> tuple[Gpu, ...]:
    gpus: dict[str, Gpu] = {}
    devices = base / "sys/bus/pci/devices"
    driver = base / "proc/driver/nvidia/gpus"
    absent = []
    for name in _names(devices):
        device = devices / name
        if pci.kind(_text(device / "class"), _text(device / "vendor")) != "gpu" or (device / "physfn").exists():
            continue
        where, path = _place(device)
        facts = dict(re.findall(r"(?m)^([\w ]+):\s*(.*?)\s*$", _text(driver / name / "information")))
        minor = facts.get("Device Minor", "")
        if minor.isdigit() and (base / "dev").is_dir() and not (base / f"dev/nvidia{minor}").exists():
            absent.append(where)
            continue
        uuid = facts.get("GPU UUID", "")
        gpus[where] = Gpu(0, facts.get("Model", ""), where, uuid if "?" not in uuid else "", _numa(device), path=path)
    if absent:
        problems.append(f"{len(absent)} of {len(absent) + len(gpus)} GPUs are not given to this process")
    return pci.numbered(gpus)


def _route(base: Path) -> set[str] | None:
    """Interfaces of the default route; None if the table cannot be read."""
    lines = _text(base / "proc/net/route").splitlines()
    rows = [line.split() for line in lines[1:]]
    found = {row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"}
    return found if lines else None


def _nics(base: Path, environ: Mapping[str, str]) -> tuple[Nic, ...]:
    routes = _route(base)
    nics: list[Nic] = []
    owned: set[str] = set()
    for hca in _names(base / "sys/class/infiniband"):
        folder = base / "sys/class/infiniband" / hca
        for port in [n for n in _names(folder / "ports") if n.isdigit()] or ["1"]:
            nic = _port(base, folder, hca, int(port))
            nics.append(nic)
            owned |= {i for i in _names(folder / "device/net") if i == nic.interface or nic.port == 1}
    rails = [r for r in environ.get(RAILS, "").split(",") if r]
    for interface in _names(base / "sys/class/net"):
        folder = base / "sys/class/net" / interface
        if interface not in owned and interface not in rails and (folder / "device").exists():
            nics.append(_interface(folder, interface))
    return tuple(_routed(base, nic, routes) for nic in nics)


def _routed(base: Path, nic: Nic, routes: set[str] | None) -> Nic:
    if not nic.interface:
        return nic if routes is None else replace(nic, default_route=False)
    master = base / "sys/class/net" / nic.interface / "master"
    bond = master.resolve().name if master.exists() and (master / "bonding").exists() else ""
    leaves = None if routes is None else nic.interface in routes or (bond != "" and bond in routes)
    return replace(nic, default_route=leaves, bond=bond or nic.bond)


def _port(base: Path, folder: Path, hca: str, port: int) -> Nic:
    where, path = _place(folder / "device")
    facts = folder / "ports" / str(port)
    state = _text(facts / "state")
    rate = re.match(r"([0-9.]+) Gb/sec", _text(facts / "rate"))
    layer = _LAYERS.get(_text(facts / "link_layer").lower(), "")
    device = folder / "device"
    if not layer or _text(device / "vendor") == f"0x{pci.AMAZON}":
        layer = pci.link_layer(_text(device / "class"), _text(device / "vendor"), _text(device / "device")) or layer
    beside = _names(device / "net")
    mine = [i for i in beside if _text(device / "net" / i / "dev_port") == str(port - 1)] or beside
    return Nic(
        hca if port == 1 else f"{hca}:{port}",
        pci=where,
        port=port,
        numa=_numa(device),
        interface=mine[0] if len(mine) == 1 else "",
        guid=_text(folder / "node_guid"),
        link_layer=layer,
        rate_gbit=float(rate[1]) if rate else None,
        state=_state(state),
        virtual=(device / "physfn").exists(),
        path=path,
        verbs=True,
        bond=hca if "bond" in hca else "",
    )


def _state(said: str) -> State:
    if not said:
        return ""
    return "active" if said.startswith("4") or "ACTIVE" in said.upper() else "down"


def _interface(folder: Path, name: str) -> Nic:
    device = folder / "device"
    where, path = _place(device)
    speed = _text(folder / "speed")
    up = _text(folder / "operstate")
    return Nic(
        name,
        pci=where,
        numa=_numa(device),
        interface=name,
        link_layer=pci.link_layer(_text(device / "class"), _text(device / "vendor"), _text(device / "device")),
        rate_gbit=int(speed) / 1000 if re.fullmatch(r"[1-9]\d{0,7}", speed) else None,
        state="active" if up == "up" else "down" if up in ("down", "lowerlayerdown") else "",
        virtual=(device / "physfn").exists(),
        path=path,
        verbs=False,
    )


def _emulated(node: Node, environ: Mapping[str, str], base: Path) -> Node:
    """The node with the rails and GPUs that the environment names."""
    rails = [r for r in environ.get(RAILS, "").split(",") if r]
    devices = [d for d in environ.get(GPUS, "").split(",") if d]
    if not rails and not devices:
        return node
    cpus = next((n.cpus for n in node.numas if n.cpus), ())
    gpus = tuple(
        Gpu(i, f"device node {d}", uuid=d, numa=0 if cpus else None, cpus=cpus, mig=False)
        for i, d in enumerate(devices)
    )
    nics = tuple(
        replace(_interface(base / "sys/class/net" / r, r), link_layer="ethernet", role="rail", why=f"named in {RAILS}")
        for r in rails
    )
    distances = {
        (gpu.key, nic.name): Distance.PIX if gpu.index % len(nics) == i else Distance.NODE
        for gpu in gpus
        for i, nic in enumerate(nics)
    }
    others = tuple(nic for nic in node.nics if nic.name not in rails)
    return replace(
        node,
        gpus=gpus or node.gpus,
        nics=(*nics, *others),
        distances={**node.distances, **distances},
        sources=(*node.sources, "the environment"),
    )
