"""This machine as this process has it: names, GPUs that it may use, CPUs."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster import nvml, sysfs
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Cpus, Node
from hpctrain.cluster.wiring import with_gpus
from hpctrain.errors import ConfigError


def host_names() -> tuple[str, ...]:
    """What Slurm and the system call this machine, also without the domain."""
    found = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    return tuple(dict.fromkeys(name for full in found for name in (full, full.partition(".")[0]) if name))


def this_machine(root: Path = Path("/")) -> Node:
    """/sys, and NVML where there are GPUs; a few milliseconds.

    GPUs of other jobs are left out: control groups close their device nodes, and neither NVML nor torch shows them,
    while /sys does.

    Args:
        root: under which /sys, /proc and /dev lie.
    """
    node = sysfs.read(root, os.environ)
    if not any(gpu.pci for gpu in node.gpus):
        return node
    mine = {gpu.pci for gpu in node.gpus if may_open(gpu.pci, root)}
    if root == Path("/"):
        with suppress(ConfigError):
            shown = nvml.read()
            mine = {gpu.pci for gpu in shown.gpus}
            node = merge([node, shown])
    kept = [gpu for gpu in node.gpus if gpu.pci in mine]
    return with_gpus(node, kept) if 0 < len(kept) < len(node.gpus) else node


def may_open(pci: str, root: Path = Path("/")) -> bool:
    """Whether this process may open the device node of a GPU; True where its number is not known."""
    with suppress(OSError):
        said = (root / "proc/driver/nvidia/gpus" / pci / "information").read_text(errors="replace")
        if minor := re.search(r"Device Minor:\s*(\d+)", said):
            return os.access(root / f"dev/nvidia{minor[1]}", os.R_OK | os.W_OK)  # control groups count for it
    return True


def allowed_cpus() -> Cpus:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def set_affinity(cpus: Cpus) -> None:
    """Have all threads of this process run on some CPUs; threads of libraries that began at import too."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended, or the system refuses: the proof will tell
            os.sched_setaffinity(int(thread), cpus)
