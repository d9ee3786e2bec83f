"""What a rank really has: read back after everything was set, for `proof/compare.py` to judge."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.cluster.affinity import nvlink_fault
from hpctrain.cluster.cpus import format_list, parse_list
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.read import matrices, read_node
from hpctrain.cluster.wiring import with_gpus
from hpctrain.errors import ConfigError
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.place.machine import allowed_cpus, this_machine
from hpctrain.launch.place.routes import is_up, networks, taken

UNLIMITED = -1
NOT_LOOKED_AT = "NVLinks were not looked at"


@dataclass(frozen=True)
class Found:
    """One rank as it is.

    Attributes:
        host: name of the machine.
        cpus: it runs on, as a list such as 0-13.
        cpu_count: that any job could have on the machine.
        asked_cpus: of a task, as Slurm was asked; 0 where it was not.
        mems, policy: NUMA nodes of which it may have memory, and how it takes it: default, bind:0, interleave:0-1.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        devices: GPUs that torch sees; 0 on the CPU.
        uuid, pci: of the one that it computes on; "" on the CPU.
        nic, rate_gbit: state of the port that it is to send by (active, down, absent), and its rate.
        interface, up: GLOO_SOCKET_IFNAME, and whether that is up; None if there is no such interface.
        at: addresses of that, such as 10.1.0.11/24.
        hcas: NCCL_IB_HCA.
        sockets: NCCL_SOCKET_IFNAME.
        socket, socket_at: the interface that NCCL takes by it, "" for none, and its addresses.
        addresses: of the machine; by one rank of each host.
        changed: variables that were set for it and have another value now.
        limits: memlock, nofile, stack: bytes, files, bytes; -1 is unlimited.
        shm_bytes: free in /dev/shm; None if there is none.
        versions: of what has to be alike on all ranks.
        faults: of the machine's NVLinks and of NCCL's picture of it, a sentence each; by one rank of each host.
    """

    host: str = ""
    cpus: str = ""
    cpu_count: int = 0
    asked_cpus: int = 0
    mems: str = ""
    policy: str = ""
    visible: str | None = None
    devices: int = 0
    uuid: str = ""
    pci: str = ""
    nic: str = ""
    rate_gbit: float | None = None
    interface: str = ""
    up: bool | None = None
    at: tuple[str, ...] = ()
    hcas: str = ""
    sockets: str = ""
    socket: str = ""
    socket_at: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    shm_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Found:
        """From JSON."""
        known = {item.name for item in fields(Found)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items() if k in known}
        return Found(**values)


def probe(
    binding: Binding | None,
    devices: int = 0,
    uuid: str = "",
    pci: str = "",
    versions: Mapping[str, str] | None = None,
    first: bool = False,
    topo_file: str = "",
) -> Found:
    """Look at this process and its machine; takes milliseconds.

    Args:
        devices, uuid, pci: of the GPU, as torch has them.
        versions: further ones.
        first: of its host, so it looks at what is the same for all of them.
        topo_file: NCCL's picture of the machine.
    """
    env = os.environ
    looks = binding is not None and binding.nic and not binding.unseen
    nic, rate = _port(binding.nic) if binding is not None and looks else ("", None)
    interface, sockets = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    taken_first = next(iter(taken(sockets, [name for _, name in socket.if_nameindex()])), "") if sockets else ""
    return Found(
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        cpus=format_list(allowed_cpus()),
        cpu_count=machine_cpus(),
        asked_cpus=int(said) if (said := env.get("SLURM_CPUS_PER_TASK", "")).isdecimal() else 0,
        mems=_status("Mems_allowed_list"),
        policy=_policy(),
        visible=env.get("CUDA_VISIBLE_DEVICES"),
        devices=devices,
        uuid=uuid,
        pci=pci,
        nic=nic,
        rate_gbit=rate,
        interface=interface,
        up=is_up(interface) if interface else None,
        at=networks(interface.split(",")) if interface else (),
        hcas=env.get("NCCL_IB_HCA", ""),
        sockets=sockets,
        socket=taken_first,
        socket_at=networks([taken_first]) if taken_first else (),
        addresses=networks() if first else (),
        changed={n: env.get(n, "") for n, v in (binding.set if binding else {}).items() if env.get(n) != v},
        limits=limits(),
        shm_bytes=free_bytes("/dev/shm"),
        versions={
            "hpctrain": hpctrain.__version__,
            "python": platform.python_version(),
            "driver": _driver(),
            **(versions or {}),
        },
        faults=_faults(topo_file) if first and (devices or topo_file) else (),
    )


def _faults(topo_file: str) -> tuple[str, ...]:
    """Of this machine; NVLinks are read from a matrix where NVML tells nothing, which it does not without pynvml."""
    live = this_machine()
    if len(live.gpus) < 2 or "NVML" in live.sources:
        return machine_faults(live, topo_file)
    shown = [drawn for drawn in matrices([]) if len(drawn.gpus) == len(live.gpus)]
    found = machine_faults(merge([live, *shown]) if shown else live, topo_file)
    return found if shown else (*found, NOT_LOOKED_AT)


def machine_faults(live: Node, topo_file: str = "", root: Path = Path("/")) -> tuple[str, ...]:
    """Broken NVLinks, and devices in NCCL's picture of the machine that are not there.

    Args:
        live: with the GPUs that this process was given; others of the file are left out if they are on the bus.
        root: above /sys.
    """
    found = [fault] if (fault := nvlink_fault(live)) else []
    found += [said for said in live.problems if "disagree on the CPUs" in said]
    if topo_file:
        try:
            drawn = read_node(Path(topo_file))
        except ConfigError as error:
            return (*found, f"NCCL_TOPO_FILE: {error}")
        mine = {gpu.pci for gpu in live.gpus}
        on_bus = root / "sys/bus/pci/devices"
        drawn = with_gpus(drawn, [gpu for gpu in drawn.gpus if gpu.pci in mine or not (on_bus / gpu.pci).exists()])
        both = merge([live, drawn]).problems
        known = {*live.problems, *drawn.problems}
        found += [
            f"NCCL_TOPO_FILE: {said}" for said in both if said not in known and ("not in" in said or "disagree" in said)
        ]
    return tuple(found)


def limits() -> dict[str, int]:
    """Soft limits of this process."""
    names = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "stack": resource.RLIMIT_STACK}
    soft = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    return {name: UNLIMITED if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _port(name: str) -> tuple[str, float | None]:
    """State and rate of a port of a verbs device, or of an interface."""
    device, _, port = name.partition(":")
    folder = Path("/sys/class/infiniband") / device / "ports" / (port or "1")
    if folder.is_dir():
        state, rate = _read(folder / "state"), _read(folder / "rate").split(" ")[0]
        return "active" if "ACTIVE" in state else "down", float(rate) if rate else None
    up = is_up(name)
    return ("absent" if up is None else "active" if up else "down"), None


def machine_cpus(root: Path = Path("/")) -> int:
    """CPUs that any job could have here: those of the container or machine, not of the first process, which a site may
    keep on a few, and which in a container is the job itself.

    The control group at the top of what is mounted has the CPUs of a container; of a machine, all that are online.
    """
    groups = root / "sys/fs/cgroup"
    for path in (
        groups / "cpuset.cpus.effective",  # version 2
        groups / "cpuset/cpuset.effective_cpus",  # version 1
        root / "sys/devices/system/cpu/online",
    ):
        with suppress(ValueError):
            return len(parse_list(_read(path)))
    return os.cpu_count() or 0


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _status(key: str) -> str:
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{key}:"):
            return line.partition(":")[2].strip()
    return ""


def _policy() -> str:
    """The policy of the first mapping: that of the process, unless somebody set another for it."""
    with suppress(OSError, IndexError), open("/proc/self/numa_maps") as file:
        return file.readline().split()[1]
    return ""


def _driver() -> str:
    """Version of the kernel's driver: the first number of two dots in NVIDIA's line."""
    line = _read(Path("/proc/driver/nvidia/version")).partition("\n")[0]
    return next((word for word in line.split() if word.count(".") >= 1 and word[0].isdigit()), "")


def free_bytes(folder: str) -> int | None:
    """Of a file system; None if it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def torch_facts() -> dict[str, str]:
    """Versions that torch knows, where it is in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    out = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return out
