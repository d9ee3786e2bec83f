"""Run by the batch script before srun: which rank goes where, now that the nodes are known.

    python -m hpctrain.launch.place.arrange FOLDER_OF_THE_SUBMISSION

It writes the rank table of this life of the job, and the hosts of the ranks beside it; on stdout are srun's flags.
Whatever it cannot do costs the order alone: it says so, and Slurm's own order stands. But for one thing: a node that
was found broken in an earlier life of the run ends the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.affinity import unfit
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.ranktable import RankTable
from hpctrain.cluster.read import read_live, read_node
from hpctrain.cluster.readfabric import fabric_in
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.life.identity import TABLE_VARIABLE
from hpctrain.launch.place import badnodes
from hpctrain.launch.place.jobplan import JobPlan, described, reads_live, tables
from hpctrain.launch.place.tablefile import JobTable, by_link, crosses_rails, leaf_changes
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.profile import SLURM, Profile
from hpctrain.launch.slurm.rules import Slurm, directives, own_order

ANSWER_S = 30.0
"""How long Slurm may take to say what it is."""

HOSTS = ".hosts"
"""Instead of the table's `.json`: SLURM_HOSTFILE."""


@dataclass(frozen=True)
class Arrangement:
    """Who goes where.

    Attributes:
        job: the table and what ranks need with it.
        flags: of srun.
        said: sentences for the log.
    """

    job: JobTable
    flags: tuple[str, ...]
    said: tuple[str, ...]


def arrange(
    plan: JobPlan,
    element: int,
    life: tuple[str, int],
    hosts: Sequence[str],
    node: Node | None,
    fabric: Fabric | None,
    slurm: Slurm,
    left_out: int = 0,
) -> Arrangement:
    """The best order of ranks that Slurm lets them have. Pure.

    Args:
        element: of the sweep; 0 for a run.
        life: id of the job, and how often it was restarted.
        hosts: of the allocation, in Slurm's order, without those known to be broken.
        node: what they are like.
        slurm: that was found.
        left_out: hosts of the allocation that are known to be broken.
    """
    config, profile = plan.configs[element], plan.profile
    own = _own(hosts, fabric, slurm)
    best, given = tables(config, profile, list(hosts), node, fabric, own)
    chosen, arbitrary = (given, False) if not _better(best, given) else (best, not _as_it_is(best, own))
    made = directives(slurm, plan.wanted(arbitrary))
    if arbitrary and "--distribution=arbitrary" not in made.srun:
        chosen, arbitrary = given, False
    flags = made.srun
    if len(hosts) + left_out > len(chosen.hosts):
        flags = (*flags, f"--nodes={len(chosen.hosts)}", f"--ntasks={len(chosen)}")
        flags = flags if arbitrary else (*flags, f"--nodelist={','.join(chosen.hosts)}")
    job = JobTable(
        *life,
        chosen,
        node,
        "arbitrary" if arbitrary else "block:block",
        profile.nccl_topo or "",
        profile.cpus_per_task or 0,
        profile.exclusive,
        tuple(why for why, _ in unfit(node)) if node is not None and node.gpus else (),
        not rails_apart(profile, fabric) or crosses_rails(chosen, config),
    )
    said = [*made.left_out, *chosen.problems, *report(chosen, given, arbitrary)]
    return Arrangement(job, flags, tuple(said))


def rails_apart(profile: Profile, fabric: Fabric | None) -> bool:
    """Whether rails are known to hang on switches of their own: NCCL_CROSS_NIC=0 costs bandwidth where they do not."""
    return profile.rail_leaves == "separate" or (fabric is not None and fabric.kind == "rails")


def _own(hosts: Sequence[str], fabric: Fabric | None, slurm: Slurm) -> list[str]:
    """Hosts as Slurm numbers the nodes of a step. The list of a job is in that order before 26.05."""
    new = slurm.version is not None and slurm.version >= (26, 5)
    if fabric is None or not new or own_order(slurm) == "by name":
        return list(hosts)
    mine = set(hosts)
    listed = [host for host in fabric.leaves if host in mine]
    return listed if len(listed) == len(hosts) else list(hosts)


def _better(best: RankTable, given: RankTable) -> bool:
    """Whether it is worth a list of hosts; it is also taken where it uses other nodes of the allocation."""
    return best.bytes.order_key < given.bytes.order_key or set(best.hosts) != set(given.hosts)


def _as_it_is(best: RankTable, own: Sequence[str]) -> bool:
    """Whether Slurm gives this order by itself: hosts filled one after the other, in its order."""
    used = set(best.hosts)
    return best.in_blocks and list(best.hosts) == [host for host in own if host in used]


def report(chosen: RankTable, given: RankTable, arbitrary: bool) -> list[str]:
    """Lines about an order: what it sends over which links, and what Slurm's own would."""
    how = (
        "each rank has its host in SLURM_HOSTFILE" if arbitrary else "hosts in the order of Slurm, one after the other"
    )
    lines = [
        f"ranks: {how}; the leaf switch changes {leaf_changes(chosen)} times, {leaf_changes(given)} in Slurm's order"
    ]
    for row in by_link(chosen):
        values = ", ".join(f"{name} {count:.3g}" for name, count in row.items() if name != "link")
        if any(count for name, count in row.items() if name != "link"):
            lines.append(f"ranks: bytes a step over {row['link']}: {values}")
    return [*lines, *(f"ranks: Slurm {said}" for said in chosen.against_slurm())]


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The step of the batch script."""
    try:
        folder, path = Path(argv[0]), Path(env[TABLE_VARIABLE])
        plan = JobPlan.read(folder)
        hosts = expand(env["SLURM_JOB_NODELIST"])
        badnodes.check(folder.parents[1], hosts, plan.profile.spares)
        sound = [host for host in hosts if host not in badnodes.known(folder.parents[1])]
        made = _made(plan, env, sound, len(hosts) - len(sound))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.with_suffix(HOSTS), "".join(f"{host}\n" for host in made.job.table.host_file()))
        write_whole(path, made.job.dump())
    except badnodes.BadNodes as error:
        print(f"error: {error}", file=sys.stderr)
        return badnodes.REFUSED
    except HpctrainError as error:
        return _left(str(error).rstrip("."))
    except Exception as error:
        return _left(f"{type(error).__name__}: {error}")
    for line in made.said:
        print(line, file=sys.stderr)
    print(*made.flags)
    return 0


def _left(why: str) -> int:
    print(f"warning: ranks are where Slurm puts them, and nothing is bound: {why}", file=sys.stderr)
    return 1


def _made(plan: JobPlan, env: Mapping[str, str], hosts: Sequence[str], left_out: int) -> Arrangement:
    said: list[str] = []
    slurm = slurm_of(said)
    life = (env["SLURM_JOB_ID"], int(env.get("SLURM_RESTART_COUNT") or 0))
    element = int(env.get("SLURM_ARRAY_TASK_ID") or 0)
    fabric = _fabric(plan, plan.profile, said)
    made = arrange(plan, element, life, hosts, node_of(plan, env, said), fabric, slurm, left_out)
    return Arrangement(made.job, made.flags, (*said, *made.said))


def slurm_of(said: list[str]) -> Slurm:
    """The Slurm of this job; why it is not known goes to `said`."""
    slurm = client.installed(ANSWER_S)
    if slurm.unanswered:
        said.append(f"warning: {slurm.unanswered}")
    return slurm


def node_of(plan: JobPlan, env: Mapping[str, str], said: list[str]) -> Node | None:
    """What the nodes of a job are like: as described, or as this one, the first, shows itself; None where nothing is
    to be known. What is odd about it goes to `said`."""
    if plan.node:
        return described(plan.node, plan.profile.node or "")
    if not reads_live(plan.profile):
        return None
    node = read_live(env)
    if plan.profile.nccl_topo:
        try:
            node = merge([node, read_node(Path(plan.profile.nccl_topo))])
        except HpctrainError as error:
            said.append(f"warning: nccl_topo: {error}")
    node = assign_roles(node)
    said += [f"warning: the first node: {problem}" for problem in node.problems]
    return node


def _fabric(plan: JobPlan, profile: Profile, said: list[str]) -> Fabric | None:
    try:
        if plan.fabric:
            return fabric_in(plan.fabric, profile.fabric or "")
        if profile.fabric == SLURM:
            text = client.show_topology(ANSWER_S)
            return fabric_in(text, "scontrol show topology")
    except (HpctrainError, LaunchError) as error:
        said.append(f"warning: the fabric is not known: {error}")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
