"""The health step in the batch script. Pure: settings go in, shell comes out."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from hpctrain.config.schema import RunConfig
from hpctrain.launch.health.place import TABLE
from hpctrain.launch.health.step import REQUEUED
from hpctrain.launch.life.identity import TABLE_VARIABLE
from hpctrain.launch.place import badnodes
from hpctrain.launch.place.jobplan import orders
from hpctrain.launch.slurm.profile import Profile
from hpctrain.launch.submit import container

if TYPE_CHECKING:
    from hpctrain.launch.submit.sbatch import JobFolders

LEFT_OUT = "left_out"
"""Variable of the shell: srun's flag for nodes that are not used, or nothing."""
LIMIT_S = 600
"""Of the measurement; nodes that have not reported by then count as broken."""

_STEP = """\
# Are devices and links as good as each other? Nodes that are not are left out, or the job asks for others.
export health="{life}"
mkdir -p "$health"
{placed}timeout {limit} {srun}
[ $? -eq 0 ] || echo "warning: not all nodes came through the health step; look at {logs}/health-*.log" >&2
# No timeout, no subshell: a requeue ends those, and this has to tell Slurm which nodes are excluded.
{decide} > "$health/{left_out}"
case $? in
  {requeued}) exit 0 ;;
  {refused}) exit 1 ;;
esac
{left_out}=$(cat "$health/{left_out}")"""


_PLACED = """\
export {variable}="$health/{table}"
placed=$(timeout 300 {place}) || placed="{unplaced}"
"""


def step(config: RunConfig, profile: Profile, folders: JobFolders, python: str, life: str) -> str:
    """Lines that measure all nodes of a job, and set `LEFT_OUT`.

    Args:
        life: folder of this life of the job, in the shell's words.
    """
    cluster = config.cluster
    limit = min(LIMIT_S, math.ceil(cluster.timeout_s))
    logs = f"{folders.logs}/$job"
    unplaced = "--distribution=block" + (f" --cpus-per-task={profile.cpus_per_task}" if profile.cpus_per_task else "")
    ordered = orders(profile)
    arguments = ["srun", "--export=ALL", "$placed" if ordered else unplaced]
    arguments += [f"--ntasks-per-node={cluster.gpus_per_node}", "--nodes=$SLURM_JOB_NUM_NODES"]
    arguments += ["--kill-on-bad-exit=0", "--open-mode=append"]
    command = [shlex.quote(python), "-u", "-m", "hpctrain.launch.health.step"]
    measure = [*command, "measure", '"$health"', cluster.device, str(limit)]
    if profile.container:
        arguments += container.srun_args(profile.container, folders.used)
        measure = container.in_container(profile, profile.container, folders.used, measure)
    arguments += [f'--output="{logs}/health-%t.log"', *map(shlex.quote, profile.srun_args)]
    sizes = [str(cluster.nodes), str(cluster.gpus_per_node)]
    decide = [*command, "decide", f'"{folders.home}"', '"$health"', '"$job"', *sizes]
    place = " ".join([*command, "place", f'"{folders.jobs.parent}"', '"$health"'])
    placed = _PLACED.format(variable=TABLE_VARIABLE, table=TABLE, place=place, unplaced=unplaced) if ordered else ""
    return _STEP.format(
        life=life,
        placed=placed,
        limit=limit + 60,
        srun=" \\\n  ".join([*arguments, " ".join(measure)]),
        logs=logs,
        decide=" ".join(decide),
        left_out=LEFT_OUT,
        requeued=REQUEUED,
        refused=badnodes.REFUSED,
    )
