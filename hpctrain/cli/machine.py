"""What a machine has that training uses, and what it costs where it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import GIB, MIB


@dataclass(frozen=True)
class Fact:
    """One thing a machine may have, what was found, and what its absence costs (empty where it is there)."""

    name: str
    found: str
    costs: str = ""


@dataclass(frozen=True)
class Disk:
    """The disk of a folder.

    Attributes:
        folder: that it is of.
        kind: of its file system; empty if unknown.
        free: bytes.
        direct: files are read and written past the page cache; None where no file could be made.
        rates: as they were measured and kept there.
    """

    folder: Path
    kind: str
    free: int
    direct: bool | None
    rates: DiskRates | None


def machine() -> list[Fact]:
    """All facts of this machine."""
    from hpctrain.config.schema import OffloadConfig
    from hpctrain.launch.proof.probe import free_bytes, limits
    from hpctrain.telemetry.memory import cgroup_available

    return [
        *software(),
        *fabric(Path("/sys/class/infiniband")),
        *memory(cgroup_available()),
        *of_limits(limits(), free_bytes("/dev/shm")),
        of_disk(look_at(OffloadConfig().folder)),
    ]


def software() -> Iterator[Fact]:
    """Python, torch, DeepSpeed, what connects ranks, and what compiles."""
    from ctypes.util import find_library

    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    devices = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else "no device"
    nccl = "none"
    if cuda and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    mpi = importlib.util.find_spec("mpi4py") is not None and any(map(shutil.which, ("mpirun", "mpiexec")))
    yield Fact("python", platform.python_version())
    yield Fact("torch", str(torch.__version__))
    yield deepspeed()
    yield Fact("CUDA", devices, "" if cuda else "ranks run on the CPU")
    yield Fact("NCCL", nccl, "" if nccl != "none" else "ranks talk over gloo")
    yield Fact("MPI", "mpi4py and mpirun" if mpi else "none", "" if mpi else "ranks find each other over TCP")
    slurm = bool(shutil.which("sbatch"))
    lacks = "hpctrain submit has nowhere to go; hpctrain lab up brings up a cluster to practise on"
    yield Fact("Slurm", "sbatch" if slurm else "none", "" if slurm else lacks)
    compiler = shutil.which("c++") or ""
    yield Fact("C++ compiler", compiler or "none", "" if compiler else "ops cannot be built")
    aio = find_library("aio")
    yield Fact(
        "libaio", aio or "none", "" if aio else "DeepSpeed's own offloading to a disk cannot run; ours does without"
    )


def deepspeed() -> Fact:
    """The version that our code beside it was written for is the one that is taken."""
    from hpctrain.sharding.deepspeed.patches import VERSION

    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return Fact("DeepSpeed", "none", f"no ZeRO: pip install deepspeed=={VERSION}")
    return Fact("DeepSpeed", found, "" if found == VERSION else f"ZeRO is refused: pip install deepspeed=={VERSION}")


def fabric(folder: Path) -> Iterator[Fact]:
    """NICs that move data without the CPU.

    Args:
        folder: in which the kernel lists them.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    costs = "" if names else "nodes are connected over TCP"
    yield Fact("RDMA devices", ", ".join(names) or "none", costs)


def memory(limit: int | None) -> Iterator[Fact]:
    """Memory of the machine, and what a control group leaves of it.

    Args:
        limit: bytes left under the tightest limit; None without one.
    """
    import psutil

    now = psutil.virtual_memory()
    yield Fact("memory", f"{now.total / GIB:.1f} GiB, {now.available / GIB:.1f} available")
    if limit is None:
        yield Fact("control group", "no limit of memory")
    else:
        tight = limit < now.available
        costs = (
            "a run has this and no more, what it offloads to the host included; Slurm: ask with --mem" if tight else ""
        )
        yield Fact("control group", f"{limit / GIB:.1f} GiB left under its limit", costs)


def of_limits(found: Mapping[str, int], shm: int | None) -> Iterator[Fact]:
    """Limits of a process, held to what a rank wants.

    Args:
        found: by name, -1 is none.
        shm: free bytes of /dev/shm; None if there is none.
    """
    from hpctrain.launch.proof.compare import FILES, MEMLOCK, SHM
    from hpctrain.launch.proof.probe import UNLIMITED

    def shown(name: str, unit: int, of: str) -> str:
        return "unlimited" if found[name] == UNLIMITED else f"{found[name] // unit} {of}"

    locked = found["memlock"] == UNLIMITED
    little = found["memlock"] < MEMLOCK
    few = f"over RDMA devices {'connections fail' if little else 'large jobs may fail'}; ulimit -l unlimited"
    yield Fact("locked memory (ulimit -l)", shown("memlock", 1024, "KiB"), "" if locked else few)
    enough = found["nofile"] == UNLIMITED or found["nofile"] >= 8 * FILES
    costs = "" if enough else f"{FILES} and 2 for each other rank are needed: ulimit -n 65536"
    yield Fact("open files (ulimit -n)", shown("nofile", 1, "files"), costs)
    lacks = f"NCCL and loaders of data want {SHM // MIB} MiB: a container gets more by --shm-size"
    roomy = shm is not None and shm >= SHM
    yield Fact("/dev/shm", "none" if shm is None else f"{shm // MIB} MiB free", "" if roomy else lacks)


def look_at(folder: Path) -> Disk:
    """The disk of a folder as it is."""
    from hpctrain.files import file_system
    from hpctrain.scratch import ScratchFile
    from hpctrain.telemetry.disk import kept_rates

    try:
        file = ScratchFile(folder, 0)
        direct, free = file.direct, shutil.disk_usage(folder).free
        file.close()
    except OSError:
        return Disk(folder, file_system(folder), 0, None, None)
    return Disk(folder, file_system(folder), free, direct, kept_rates(folder))


def of_disk(disk: Disk) -> Fact:
    """What offloading to a disk meets there."""
    from hpctrain.files import MEMORY, NETWORK

    name = f"disk of {disk.folder}"
    other = "name another with sharding.offload.path"
    if disk.direct is None:
        return Fact(name, "no file can be made", f"nothing can be offloaded there; {other}")
    rates = disk.rates
    measured = f", reads {rates.read / 1e9:.3g} and writes {rates.write / 1e9:.3g} GB/s" if rates else ""
    found = f"{disk.kind or 'file system unknown'}, {disk.free / GIB:.1f} GiB free{measured}"
    if disk.kind in MEMORY:
        return Fact(name, found, f"it is in memory: offloading there saves none; {other}")
    if disk.kind in NETWORK:
        return Fact(name, found, f"it is on the network, slow and shared; {other}")
    if not disk.direct:
        return Fact(name, found, "files go through the page cache, which takes memory of the job")
    return Fact(name, found, "" if rates else f"not measured: hpctrain bench nvme {disk.folder} --keep")
