"""The text of a batch script. Pure: settings go in, a script comes out."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain import __version__
from hpctrain.cluster.hostlist import expand, fold
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.life.identity import MPI_VARIABLE, TABLE_VARIABLE
from hpctrain.launch.life.limit import END_VARIABLE, LEAD_VARIABLE
from hpctrain.launch.life.stop import SIGNALS, STOPPED_VARIABLE
from hpctrain.launch.place.badnodes import REFUSED
from hpctrain.launch.place.jobplan import orders, wanted
from hpctrain.launch.slurm.profile import Profile, Site
from hpctrain.launch.slurm.rules import Directives, Slurm, directives
from hpctrain.launch.submit import container, healthshell, shell

WARNING_SIGNAL = SIGNALS[0].name.removeprefix("SIG")
"""Sent to every rank before the time limit and at preemption."""

_END = "SLURM_TIME_FORMAT=%s timeout 60 squeue --noheader --jobs=$job --format=%e"
"""Slurm says it in the environment since 23.02."""

_JOB = "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"


@dataclass(frozen=True)
class Options:
    """What one submission asks for, over what the profile says.

    Attributes:
        elements: of a job array; 0 for a job that is none.
        after: job that has to end first, however it ends.
        exclude: nodes that are known to be broken, besides those of the profile.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    qos: str | None = None
    elements: int = 0
    after: str | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobFolders:
    """Where a job's files are. All paths are absolute.

    Attributes:
        home: working directory of the job: the run folder, or that of a sweep.
        stamp: names the submission. Job ids come round again when a cluster loses its state, and a rank must not find
            the settings of another job.
        code: snapshot that the ranks import from; None to import what is installed.
        mounts: what a container needs besides `home` and `code`.
    """

    home: Path
    stamp: str
    code: Path | None = None
    mounts: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        # Slurm expands %, bash the others, and neither has a way to write a line's end.
        for path in self.used:
            if found := re.search(r"[%\\\"'`$,\s]", str(path)):
                raise ConfigError(
                    "folder", str(path), f"no path with {found.group()!r} can be told to Slurm", "use another folder"
                )

    @property
    def logs(self) -> Path:
        """Output of the batch script; in a folder named by the job's id, of the ranks."""
        return self.home / "logs"

    @property
    def used(self) -> tuple[Path, ...]:
        """What ranks read or write."""
        return (self.home, *([self.code] if self.code else []), *self.mounts)

    @property
    def jobs(self) -> Path:
        """Submitted script and pickle, in submitit's naming."""
        return self.home / "jobs" / self.stamp / "%j"


def sbatch_text(
    config: RunConfig,
    site: Site,
    options: Options,
    folders: JobFolders,
    python: str,
    slurm: Slurm | None = None,
) -> str:
    """The script that sbatch is given.

    Args:
        config: of the run, or of any element of the array.
        site: profile and prologue.
        options: of this submission.
        folders: where things are.
        python: interpreter of the ranks, outside a container.
        slurm: that will read it, as far as known.
    """
    slurm = slurm or Slurm()
    head = f"# hpctrain {__version__}, Slurm {slurm.release or 'of unknown version'}, profile {site.name}"
    made = directives(slurm, replace(wanted(config, site.profile), bind=False))
    flags = [f"#SBATCH --{line}" for line in (*_flags(config, site.profile, options, folders), *made.sbatch)]
    notes = [f"# {said}" for said in made.left_out]
    return "\n".join(["#!/bin/bash", head, *flags, *notes, *_body(config, site, folders, python, made)]) + "\n"


def _flags(config: RunConfig, profile: Profile, options: Options, folders: JobFolders) -> Iterator[str]:
    per_node = config.cluster.gpus_per_node
    yield f"job-name={config.name}"
    yield f"nodes={config.cluster.nodes + profile.spares}"
    yield f"ntasks-per-node={per_node}"
    gpu = f"{profile.gpu_type}:{per_node}" if profile.gpu_type else str(per_node)
    sizes = {
        "cpus-per-task": profile.cpus_per_task,
        "gres": f"gpu:{gpu}" if profile.gpus == "gres" else None,
        "gpus-per-node": gpu if profile.gpus == "gpus-per-node" else None,
        "mem": profile.mem,
        "partition": options.partition or profile.partition,
        "account": options.account or profile.account,
        "qos": options.qos or profile.qos,
        "constraint": profile.constraint,
        "time": options.time or profile.time,
    }
    yield from (f"{flag}={shlex.quote(str(value))}" for flag, value in sizes.items() if value is not None)
    if profile.exclusive:
        yield "exclusive"
    yield f"signal={WARNING_SIGNAL}@{profile.signal_lead_s}"
    yield "requeue"
    yield "open-mode=append"
    yield f"chdir={folders.home}"
    yield f"output={folders.logs}/slurm-{'%A_%a' if options.elements else '%j'}.out"
    if options.elements:
        yield f"array=0-{options.elements - 1}"
    if options.after:
        yield f"dependency=afterany:{options.after}"
    for flag, value in _excluding(profile, options).items():
        if value is not False:
            yield flag if value is True else f"{flag}={shlex.quote(str(value))}"


def _excluding(profile: Profile, options: Options) -> dict[str, object]:
    """Flags of the profile, with the nodes to leave out among those that it excludes. A file of its own stays."""
    told = str(profile.sbatch.get("exclude") or "")
    if not options.exclude or "/" in told:
        return dict(profile.sbatch)
    return {**profile.sbatch, "exclude": fold({*expand(told), *options.exclude}, sort=True)}


def _body(config: RunConfig, site: Site, folders: JobFolders, python: str, made: Directives) -> Iterator[str]:
    yield from ("", shell.WITHDRAWN.format(folder=folders.jobs.parent))
    if site.profile.environment:
        yield ""
    for name, value in site.profile.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    if site.prologue:
        yield from ("", f"# Prologue {site.profile.prologue}", shell.CHECKED)
        yield from (site.prologue.rstrip("\n"), shell.UNCHECKED)
    yield shell.REQUEUE
    yield ""
    yield "# Ranks"
    yield f"export {LEAD_VARIABLE}={site.profile.signal_lead_s}"
    if site.profile.mpi not in (None, "none"):
        yield f"export {MPI_VARIABLE}={site.profile.mpi}"
    if folders.code:
        yield f'export PYTHONPATH="{folders.code}${{PYTHONPATH:+:$PYTHONPATH}}"'
    yield "export SUBMITIT_EXECUTOR=slurm"
    yield _JOB
    yield "job=${job:-$SLURM_JOB_ID}"
    yield "unset ${!SQUEUE_@} SLURM_CLUSTERS  # here Slurm's commands speak of this job, on this cluster"
    yield f'export {END_VARIABLE}="${{SLURM_JOB_END_TIME:-$({_END})}}"'
    life = str(folders.jobs).replace("%j", "$job") + "/{}-${{SLURM_RESTART_COUNT:-0}}"
    yield f'export {STOPPED_VARIABLE}="{life.format("stopped")}"'
    yield f'mkdir -p "{folders.logs}/$job"'
    yield f"trap : {' '.join(shell.NAMES)}  # they are for the ranks; this shell has to outlive those"
    placed = " ".join(_placed(config, site.profile, made))
    if site.profile.health:
        yield healthshell.step(config, site.profile, folders, python, life.format("health"))
        placed = f"{placed} ${healthshell.LEFT_OUT}"
    if orders(site.profile):
        table = life.format("rank_table") + ".json"
        step = shell.ORDERED.format(
            variable=TABLE_VARIABLE,
            table=table,
            python=shlex.quote(python),
            folder=folders.jobs.parent,
            refused=REFUSED,
            home=folders.home,
            spares=site.profile.spares,
        )
        yield step.replace("PLACED", placed)
        placed = "$placed"
    yield _srun(config, site.profile, folders, python, placed)
    yield from ("status=$?", shell.LEAVE)


def _placed(config: RunConfig, profile: Profile, made: Directives) -> Iterator[str]:
    """Where tasks go if nothing better is found when the job begins."""
    yield from made.srun
    if profile.spares:
        yield f"--nodes={config.cluster.nodes}"
        yield f"--ntasks={config.cluster.nodes * config.cluster.gpus_per_node}"


def _srun(config: RunConfig, profile: Profile, folders: JobFolders, python: str, placed: str) -> str:
    # Where sbatch exports nothing (SBATCH_EXPORT=NONE), srun does not either unless told to.
    arguments = ["srun", "--export=ALL", placed, "--kill-on-bad-exit=1", "--open-mode=append"]
    # A site's WaitTime would end ranks that are still on their way out when the first has left.
    arguments.append(f"--wait={max(60, math.ceil(config.cluster.timeout_s))}")
    if profile.mpi:
        arguments.append(f"--mpi={profile.mpi}")
    command = [shlex.quote(python), "-u", "-m", "submitit.core._submit", str(folders.jobs)]
    held = shell.held(python)
    if profile.container:
        arguments += container.srun_args(profile.container, folders.used)
        command = container.in_container(profile, profile.container, folders.used, command)
        held = shell.held(profile.container.python if profile.container.kind == "pyxis" else "python3")
    arguments += [f'--output="{folders.logs}/$job/rank-%t.log"', *map(shlex.quote, profile.srun_args)]
    return " \\\n  ".join([*arguments, held, " ".join(command)])
