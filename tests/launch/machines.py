"""Real machines as the tests of binding need them: read from what was captured there, with the names of devices that
such a machine has while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles
from hpctrain.config.schema import RunConfig
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.place.arrange import arrange
from hpctrain.launch.place.bind import Binding, Given, plan
from hpctrain.launch.place.jobplan import JobPlan
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.slurm.profile import Profile, site
from hpctrain.launch.slurm.rules import Slurm

DATA = Path(__file__).parents[1] / "cluster" / "data"
NEW = Slurm((24, 11), "tree")


def captured(*names: str) -> Node:
    """The node of one machine, from what was captured on it."""
    read = [read_node(DATA / name) for name in names]
    return assign_roles(merge(read) if len(read) > 1 else read[0])


def running(node: Node, names: Mapping[str, str] | None = None) -> Node:
    """The machine while it runs: UUIDs, ports up, and NICs by the names that the system gives them."""
    nics = [replace(nic, name=(names or {}).get(nic.name, nic.name), state="active") for nic in node.nics]
    gpus = [replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in node.gpus]
    return replace(node, gpus=tuple(gpus), nics=tuple(nics))


def config(nodes: int, per_node: int, **parallel: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "cluster": {"nodes": nodes, "gpus_per_node": per_node},
            "parallel": parallel,
            "model": {"heads": 8, "kv_heads": 8, "hidden": 64, "layers": 8},
        }
    )


def job(
    node: Node | None,
    hosts: Sequence[str],
    made: RunConfig,
    fabric: Fabric | None = None,
    slurm: Slurm = NEW,
    profile: Profile | None = None,
) -> JobTable:
    """The table of a job on hosts of one kind."""
    profile = profile or site("generic").profile
    return arrange(JobPlan((made,), profile), 0, ("7", 0), hosts, node, fabric, slurm).job


def bindings(
    table: JobTable, host: str, live: Node, env: Mapping[str, str] | None = None, allowed: Sequence[int] = range(1024)
) -> list[Binding]:
    """What every rank of a host is to do."""
    out = []
    for local, rank in enumerate(table.table.ranks_of(host).tolist()):
        me = Identity(rank, len(table.table), local, len(table.table.ranks_of(host)), "srun", "k")
        out.append(plan(table, me, Given((host,), live, tuple(allowed), env or {}, "eth0", (2, 27, 3))))
    return out


def masks(found: Sequence[Binding]) -> list[str]:
    return [format_list(binding.cpus) for binding in found]
