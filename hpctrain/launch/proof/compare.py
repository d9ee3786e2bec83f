"""Holds what ranks found against what they were to have. Pure.

A finding stops the job if the job would fail, hang, or run at a fraction of its speed; one that costs a little is a
warning. Causes and mends are those of failures seen in the field; their numbers are in `docs/binding.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.cluster.cpus import format_list, parse_list
from hpctrain.launch.proof.finding import Finding, Rank
from hpctrain.launch.proof.network import of_network
from hpctrain.launch.proof.probe import NOT_LOOKED_AT, UNLIMITED

MEMLOCK = 64 << 20
"""Bytes of locked memory without which NICs cannot register buffers."""
SHM = 512 << 20
"""Free bytes of /dev/shm below which data loaders and NCCL run out."""
STACK = 1 << 20
FILES = 128
"""Open files of a rank besides its connections."""


def of_rank(one: Rank) -> list[Finding]:
    """What one rank has otherwise than planned."""
    return [*_cpus(one), *_memory(one), *_device(one), *of_network(one), *_limits(one), *_kept(one), *_machine(one)]


def _cpus(one: Rank) -> Iterator[Finding]:
    found, real = one.found, set(_list(one.found.cpus))
    if one.binding is not None and one.binding.cpus:
        planned = set(one.binding.cpus)
        if real != planned:
            wrong = not real > planned and (bool(real - planned) or 2 * len(real) <= len(planned))
            yield Finding(
                one.rank,
                "CPUs",
                format_list(one.binding.cpus),
                found.cpus,
                "a mask was set after the rank had set its own, by a wrapper, OMP_PROC_BIND or GOMP_CPU_AFFINITY",
                "unset OMP_PROC_BIND, GOMP_CPU_AFFINITY, KMP_AFFINITY; start ranks without numactl or taskset",
                stops=wrong,
            )
    given = len(one.binding.allowed) if one.binding is not None else len(real)
    asked = min(found.asked_cpus, found.cpu_count)
    if given < asked:
        yield Finding(
            one.rank,
            "number of CPUs",
            f"{asked} (SLURM_CPUS_PER_TASK)",
            str(given),
            "srun was not told --cpus-per-task (Slurm 22.05, 23.02), or SLURM_CPU_BIND of another job was inherited",
            "submit with hpctrain submit, which strips SLURM_CPU_BIND and repeats --cpus-per-task",
        )
    for said in one.binding.said if one.binding is not None else ():
        if "near its GPU" in said:
            yield Finding(
                one.rank,
                "CPUs",
                "near its GPU",
                found.cpus,
                "Slurm gave the job CPUs of another socket",
                "set exclusive: true in the profile, or more cpus_per_task",
                stops=False,
            )


def _memory(one: Rank) -> Iterator[Finding]:
    numa = one.binding.numa if one.binding is not None else None
    if numa is None:
        return
    cause, mend = "a cpuset or numactl --membind of another NUMA node", "leave --mem-bind and numactl out of srun_args"
    if one.found.mems and numa not in _list(one.found.mems):
        yield Finding(one.rank, "NUMA memory", str(numa), one.found.mems, cause, mend, stops=False)
    kind, _, nodes = one.found.policy.partition(":")
    if kind.startswith("bind") and numa not in _list(nodes):
        yield Finding(one.rank, "memory policy", f"node {numa}", one.found.policy, cause, mend, stops=False)


def _device(one: Rank) -> Iterator[Finding]:
    found, binding = one.found, one.binding
    words = [word for word in (found.visible or "").split(",") if word]
    if any(word.startswith("MIG") for word in words):
        yield Finding(
            one.rank,
            "GPU",
            "a whole one",
            words[0],
            "MIG is on: NCCL takes instances of one GPU for one device",
            "turn MIG off (nvidia-smi -mig 0), or use other nodes",
        )
    if binding is None or binding.gpu is None:
        return
    seen = found.devices or len(words)
    if seen and (seen < one.ranks_here or binding.gpu >= seen):
        yield Finding(
            one.rank,
            "visible GPUs",
            f"all {max(one.ranks_here, binding.gpu + 1)} of the node",
            found.visible if found.visible is not None else str(seen),
            "--gpus-per-task or --gpu-bind hides the others, so peers cannot be reached over NVLink",
            "leave them out of srun_args and sbatch; ask with --gres or --gpus-per-node",
        )
    elif found.devices:
        planned, real = (binding.uuid, found.uuid) if binding.uuid and found.uuid else (binding.pci, found.pci)
        if planned and real and planned.removeprefix("GPU-") != real.removeprefix("GPU-"):
            yield Finding(
                one.rank,
                "GPU",
                planned,
                real,
                "devices were counted in another order (CUDA_DEVICE_ORDER=FASTEST_FIRST), or something set the device",
                "unset CUDA_DEVICE_ORDER; let hpctrain choose the device",
            )


def _limits(one: Rank) -> Iterator[Finding]:
    found = one.found
    memlock, files, stack = (found.limits.get(name, UNLIMITED) for name in ("memlock", "nofile", "stack"))
    verbs = one.binding is not None and bool(one.binding.hcas)
    if verbs and memlock != UNLIMITED:
        yield Finding(
            one.rank,
            "locked memory",
            "unlimited",
            f"{memlock >> 10} KiB",
            "slurmd was started under the system's default, or the submitter's limit was propagated",
            "LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK (administrator)",
            stops=memlock < MEMLOCK,
        )
    need = FILES + 2 * one.world
    if files != UNLIMITED and files < need:
        yield Finding(
            one.rank,
            "open files",
            f"{need} or more",
            str(files),
            "ulimit -n of the shell that submitted",
            "ulimit -n 65536 in the prologue",
        )
    if found.devices and (stack == UNLIMITED or stack < STACK):
        yield Finding(
            one.rank,
            "stack",
            "8192 KiB",
            "unlimited" if stack == UNLIMITED else f"{stack >> 10} KiB",
            "ulimit -s; where it is unlimited, glibc makes stacks of threads small",
            "ulimit -s 8192 in the prologue",
            stops=False,
        )
    if found.shm_bytes is None or found.shm_bytes < SHM:
        yield Finding(
            one.rank,
            "/dev/shm",
            f"{SHM >> 20} MiB free",
            "none" if found.shm_bytes is None else f"{found.shm_bytes >> 20} MiB free",
            "a container's default of 64 MiB, or what dead processes left behind",
            "give the container more (--shm-size), or clear /dev/shm",
            stops=False,
        )


def _kept(one: Rank) -> Iterator[Finding]:
    skip = ("GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
    for name, planned in one.binding.kept.items() if one.binding is not None else ():
        if name not in skip:
            yield Finding(
                one.rank,
                f"variable {name}",
                planned,
                "set by hand",
                "the profile, the prologue or the submitter's shell sets it",
                f"unset {name}, unless you know better",
                stops=False,
            )
    yield from _changed(one)


def _machine(one: Rank) -> Iterator[Finding]:
    """What is wrong with the machine itself, or with NCCL's picture of it."""
    for said in one.found.faults:
        cause, mend = "a broken link or device", f"exclude {one.found.host}"
        if said.startswith("NCCL_TOPO_FILE"):
            cause, mend = "a file of another machine", "unset NCCL_TOPO_FILE, or mend it"
        if said == NOT_LOOKED_AT:
            cause, mend = "Python's pynvml is not installed", "pip install nvidia-ml-py, or 'hpctrain[nvml]'"
        yield Finding(
            one.rank, "machine", "sound", said, cause, mend, stops="disagree" not in said and said != NOT_LOOKED_AT
        )


def _changed(one: Rank) -> Iterator[Finding]:
    """Variables that something has set anew after the rank did; those looked at elsewhere are left out."""
    stops = {"UCX_NET_DEVICES": "NIC", "NCCL_SOCKET_IFNAME": "interface of NCCL"}
    for name, value in one.found.changed.items():
        if one.binding is None or name in ("GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
            continue
        yield Finding(
            one.rank,
            stops.get(name, f"variable {name}"),
            one.binding.set[name],
            value or "not set",
            f"something has set {name} after the rank did",
            f"set {name} in the profile's environment, or not at all",
            stops=name in stops,
        )


def _list(text: str) -> Sequence[int]:
    try:
        return parse_list(text) if text else ()
    except ValueError:
        return ()
