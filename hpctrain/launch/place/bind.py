"""A rank takes the place that the rank table has for it: CPUs, GPU, NIC and variables. Before torch is there.

What is to be done is a pure function of the table, this machine and what this process was given (`plan`); `bind` does
it. Nothing is widened: CPUs are those of the plan that the process may use. Variables that somebody has set stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.cluster.binding import cpu_sets, near_cpus
from hpctrain.cluster.cpus import format_list, parse_list
from hpctrain.cluster.node import Cpus, Node
from hpctrain.cluster.ranktable import Place
from hpctrain.cluster.roles import assign_roles
from hpctrain.cluster.wiring import Here, gpu_rails, here, visible, with_cpus, with_gpus
from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import TABLE_VARIABLE, Identity
from hpctrain.launch.place import variables
from hpctrain.launch.place.machine import allowed_cpus, host_names, set_affinity, this_machine
from hpctrain.launch.place.routes import interface_to
from hpctrain.launch.place.tablefile import JobTable, load


@dataclass(frozen=True)
class Binding:
    """Where a rank is meant to be, and what it did about it.

    Attributes:
        host: this machine, as the table names it.
        row: rank whose place in the table it has; its own unless Slurm put it elsewhere.
        allowed: CPUs that the process was given.
        cpus: to be used; (): not known, so those that were given.
        gpu: index among the GPUs that are visible; None without GPUs.
        uuid, pci: of the GPU; "" if not known.
        numa: NUMA node of the CPUs.
        nic, rail: it sends by; "" and None if not known.
        interface: of gloo; "" where gloo chooses.
        hcas: the list for NCCL; "" where it chooses.
        verbs: ports of all verbs devices of the machine, of which NCCL takes those in its list.
        set: variables that were set.
        kept: variables that differ from the plan because somebody had set them.
        missing, unseen: what of the described node is not on this machine, or could not be looked for, a sentence each.
        said: other remarks.
    """

    host: str = ""
    row: int = 0
    allowed: Cpus = ()
    cpus: Cpus = ()
    gpu: int | None = None
    uuid: str = ""
    pci: str = ""
    numa: int | None = None
    nic: str = ""
    rail: int | None = None
    interface: str = ""
    hcas: str = ""
    verbs: tuple[str, ...] = ()
    set: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; CPUs as a list such as 0-13."""
        return {**asdict(self), "allowed": format_list(self.allowed), "cpus": format_list(self.cpus)}

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Binding:
        """From JSON."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
        cpus = {name: parse_list(tree[name]) if tree[name] else () for name in ("allowed", "cpus")}
        return Binding(**{**values, **cpus})


@dataclass(frozen=True)
class Given:
    """What a process has before anything is done.

    Attributes:
        host: names of this machine, the likeliest first.
        live: the machine as it shows itself.
        allowed: CPUs.
        env: variables.
        route: interface to the other hosts of the job.
        nccl: version.
    """

    host: tuple[str, ...]
    live: Node
    allowed: Cpus
    env: Mapping[str, str]
    route: str = ""
    nccl: tuple[int, ...] | None = None


def place_of(job: JobTable, identity: Identity, names: tuple[str, ...]) -> Place:
    """The row of the table for a rank: its own if it is on that host, else that of its local rank on the host it is on.

    Raises:
        LaunchError: the table knows nothing of this host, or of so many ranks on it.
    """
    table = job.table
    if len(table) != identity.world:
        raise LaunchError(
            f"the rank table of job {job.job} has {len(table)} ranks, and there are {identity.world}: start the ranks "
            "with the nodes and tasks that the job was submitted with."
        )
    host = next((name for name in names if name in table.hosts), None)
    if host is None:
        raise LaunchError(
            f"rank {identity.rank} runs on {names[0]}, and the rank table of job {job.job} has {_some(table.hosts)}: "
            "the nodes of the job have changed since it was made; requeue the job."
        )
    own: Place = table[identity.rank]
    if own.host == host and own.local_rank == identity.local_rank:
        return own
    here_ranks = table.ranks_of(host)
    if identity.local_rank >= len(here_ranks):
        raise LaunchError(
            f"rank {identity.rank} is number {identity.local_rank} on {host}, for which the rank table of job "
            f"{job.job} has {len(here_ranks)}: unset SLURM_DISTRIBUTION and SLURM_TASKS_PER_NODE, and submit again."
        )
    place: Place = table[int(here_ranks[identity.local_rank])]
    return place


def _some(hosts: tuple[str, ...]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def plan(job: JobTable, identity: Identity, given: Given) -> Binding:
    """What a rank is to do. Pure.

    Raises:
        LaunchError: as `place_of`.
    """
    place = place_of(job, identity, given.host)
    said = []
    if place.rank != identity.rank:
        own = job.table[identity.rank]
        said.append(f"it was to be number {own.local_rank} on {own.host}: takes the place of rank {place.rank}")
    binding = Binding(place.host, place.rank, given.allowed, said=tuple(said))
    if job.node is None:
        return _with_variables(binding, job, given, None)
    found = here(job.node, given.live) if job.node.gpus else Here(assign_roles(given.live))
    described, missing = found.node, found.missing
    seen = visible(given.env.get("CUDA_VISIBLE_DEVICES"), given.live.gpus or described.gpus)
    if described.gpus and 0 < len(seen) < len(described.gpus):
        mine = {gpu.pci or gpu.index for gpu in seen}
        described = with_gpus(described, [g for g in described.gpus if (g.pci or g.index) in mine])
        missing = tuple(word for word in missing if not word.startswith("gpu"))
    binding = replace(binding, missing=missing, unseen=found.unseen)
    return _with_variables(_with_devices(binding, job, place, given, described), job, given, described)


def _with_devices(binding: Binding, job: JobTable, place: Place, given: Given, node: Node) -> Binding:
    """CPUs, GPU and NIC of a row on the node at hand."""
    gpus = job.table.gpus_of(place.host)
    usable = with_cpus(node, given.allowed)
    own = len(set(filter(None, given.env.get("SLURM_CPU_BIND_LIST", "").split(",")))) > 1
    if own and place.gpu in {gpu.index for gpu in usable.gpus}:  # Slurm has divided them already
        cpus = near_cpus(usable, usable.gpus[[g.index for g in usable.gpus].index(place.gpu)])[1]
    else:
        cpus = cpu_sets(usable, gpus)[place.local_rank]
    found = {gpu.index: gpu for gpu in node.gpus}.get(place.gpu)
    wide = gpu_rails(node) if node.gpus else ()
    rail = wide[place.gpu] if place.gpu < len(wide) else place.rail
    nic = node.rails[rail] if rail < len(node.rails) else None
    said = list(binding.said)
    if found is not None and not cpus and cpu_sets(node, gpus)[place.local_rank]:
        said.append("none of the CPUs that it was given is near its GPU: it keeps all of them")
    return replace(
        binding,
        cpus=cpus,
        gpu=place.gpu,
        uuid=found.uuid if found else "",
        pci=found.pci if found else "",
        numa=found.numa if found else None,
        nic=nic.name if nic else "",
        rail=rail if nic else None,
        said=tuple(said),
    )


def _with_variables(binding: Binding, job: JobTable, given: Given, node: Node | None) -> Binding:
    rails = node.rails if node is not None else ()
    traffic = variables.Traffic(
        rails=rails,
        nic=next((nic for nic in rails if nic.name == binding.nic), None),
        route=given.route,
        crosses=job.crosses,
        nccl=given.nccl,
        topo_file=job.topo_file,
        bound=bool(binding.cpus),
        hosts=len(job.table.hosts),
    )
    planned, said = variables.variables(traffic)
    nics = given.live.nics or (node.nics if node is not None else ())
    new, kept = variables.apply(planned, given.env)
    return replace(
        binding,
        interface=planned.get("GLOO_SOCKET_IFNAME", ""),
        hcas=planned.get("NCCL_IB_HCA", ""),
        verbs=tuple(variables.device(nic) for nic in nics if nic.verbs is not False and nic.link_layer != "efa"),
        set=new,
        kept={name: planned[name] for name in kept},
        said=(*binding.said, *said),
    )


def bind(identity: Identity) -> tuple[JobTable, Binding] | None:
    """Take this rank's place; None where no table was made for it.

    Raises:
        LaunchError: the table does not fit the ranks.
    """
    path = os.environ.get(TABLE_VARIABLE)
    if not path or identity.source not in ("srun", "mpirun"):
        return None
    job = load(Path(path))
    if job is None or job.job != os.environ.get("SLURM_JOB_ID", job.job):  # of a job around this one
        return None
    return job, _take(job, identity, _given(job))


def settled(bound: tuple[JobTable, Binding], identity: Identity, seen: Sequence[str]) -> tuple[JobTable, Binding]:
    """The same once torch is there, and knows which GPUs the job has.

    Where nothing else said it (no NVML, and the numbers of device nodes not known), the plan may be of GPUs of another
    job. Then the place is taken anew, among those that torch sees.

    Args:
        seen: PCI addresses of torch's devices.

    Raises:
        LaunchError: as `bind`.
    """
    job, old = bound
    if not old.pci or old.pci in seen:
        return bound
    given = _given(job)
    mine = [gpu for gpu in given.live.gpus if gpu.pci in seen]
    if not mine:
        return bound
    for name, value in old.set.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    given = replace(given, live=with_gpus(given.live, mine), allowed=old.allowed, env=dict(os.environ))
    return job, _take(job, identity, given)


def _given(job: JobTable) -> Given:
    names = host_names()
    route = interface_to([host for host in job.table.hosts if host not in names])
    return Given(names, this_machine(), allowed_cpus(), dict(os.environ), route, variables.nccl_version())


def _take(job: JobTable, identity: Identity, given: Given) -> Binding:
    binding = plan(job, identity, given)
    os.environ.update(binding.set)
    set_affinity(binding.cpus or given.allowed)
    return binding
