"""Where the ranks of the health step are: on every host of the job, each local rank on its own GPU, CPUs and rail.

The job's own table comes after the step, because it leaves out what the step finds; and spare nodes are in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.node import Node
from hpctrain.cluster.ranktable import RankTable, rank_table
from hpctrain.cluster.wiring import alike, gpu_rails
from hpctrain.files import write_whole
from hpctrain.launch.place.arrange import node_of, slurm_of
from hpctrain.launch.place.jobplan import JobPlan
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.slurm.rules import directives
from hpctrain.layout.layout import Layout

TABLE = "rank_table.json"
"""In the folder of a life's health step."""


def place(folder: Path, life: Path, env: Mapping[str, str]) -> str:
    """Write the table of the step. Returns srun's flags.

    Args:
        folder: of the submission.
        life: of this life's step.
        env: of the batch script.

    Raises:
        ConfigError: what the profile says of nodes cannot be used.
    """
    plan = JobPlan.read(folder)
    config, profile = plan.configs[int(env.get("SLURM_ARRAY_TASK_ID") or 0)], plan.profile
    said: list[str] = []  # the step that arranges the ranks will say it again
    node = node_of(plan, env, said)
    table = everywhere(expand(env["SLURM_JOB_NODELIST"]), node, config.cluster.gpus_per_node)
    made = JobTable(
        env["SLURM_JOB_ID"],
        int(env.get("SLURM_RESTART_COUNT") or 0),
        table,
        node,
        topo_file=profile.nccl_topo or "",
        cpus_per_task=profile.cpus_per_task or 0,
        exclusive=profile.exclusive,
    )
    life.mkdir(parents=True, exist_ok=True)
    write_whole(life / TABLE, made.dump())
    return " ".join(directives(slurm_of(said), plan.wanted()).srun)


def everywhere(hosts: Sequence[str], node: Node | None, per_node: int) -> RankTable:
    """Ranks on all hosts, one after the other, rank i of a host on its GPU i. Pure."""
    shared = None if node is None else alike(node)
    rails = gpu_rails(shared) if shared is not None and len(shared.gpus) >= per_node else None
    layout = Layout(dp=len(hosts) * per_node)
    return rank_table(layout, hosts, shared, per_node=per_node, rails=rails, order="given")
