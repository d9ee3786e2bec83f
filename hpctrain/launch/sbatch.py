"""The text of a batch script. Pure: settings go in, a script comes out."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain import __version__
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch import shell
from hpctrain.launch.identity import MPI_VARIABLE
from hpctrain.launch.limit import END_VARIABLE, LEAD_VARIABLE
from hpctrain.launch.profile import Container, Profile, Site
from hpctrain.launch.stop import SIGNALS

WARNING_SIGNAL = SIGNALS[0].name.removeprefix("SIG")
"""Sent to every rank before the time limit and at preemption."""

PASSED = (
    "HPCTRAIN_",
    "SLURM",
    "PMI",
    "SUBMITIT",
    "PYTHONPATH$",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "OMP_",
    "TORCH_",
)
"""Beginnings of the variables that enter a container which does not inherit them."""

_END = "SLURM_TIME_FORMAT=%s timeout 60 squeue --noheader --jobs=$job --format=%e"
"""Slurm says it in the environment since 23.02."""

_JOB = "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"


@dataclass(frozen=True)
class Options:
    """What one submission asks for, over what the profile says.

    Attributes:
        elements: of a job array; 0 for a job that is none.
        after: job that has to end first, however it ends.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    qos: str | None = None
    elements: int = 0
    after: str | None = None


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
        for path in (self.home, *([self.code] if self.code else []), *self.mounts):
            if found := re.search(r"[%\\\"'`$,\s]", str(path)):
                raise ConfigError(
                    "folder", str(path), f"no path with {found.group()!r} can be told to Slurm", "use another folder"
                )

    @property
    def logs(self) -> Path:
        """Output of the batch script; in a folder named by the job's id, of the ranks."""
        return self.home / "logs"

    @property
    def jobs(self) -> Path:
        """Submitted script and pickle, in submitit's naming."""
        return self.home / "jobs" / self.stamp / "%j"


def sbatch_text(
    config: RunConfig, site: Site, options: Options, folders: JobFolders, python: str, slurm: str | None = None
) -> str:
    """The script that sbatch is given.

    Args:
        config: of the run, or of any element of the array.
        site: profile and prologue.
        options: of this submission.
        folders: where things are.
        python: interpreter of the ranks, outside a container.
        slurm: version of Slurm, for the record.
    """
    head = f"# hpctrain {__version__}, Slurm {slurm or 'of unknown version'}, profile {site.name}"
    flags = [f"#SBATCH --{line}" for line in _flags(config, site.profile, options, folders)]
    return "\n".join(["#!/bin/bash", head, *flags, *_body(config, site, folders, python)]) + "\n"


def _flags(config: RunConfig, profile: Profile, options: Options, folders: JobFolders) -> Iterator[str]:
    per_node = config.cluster.gpus_per_node
    yield f"job-name={config.name}"
    yield f"nodes={config.cluster.nodes}"
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
    for flag, value in profile.sbatch.items():
        if value is not False:
            yield flag if value is True else f"{flag}={shlex.quote(str(value))}"


def _body(config: RunConfig, site: Site, folders: JobFolders, python: str) -> Iterator[str]:
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
    life = str(folders.jobs).replace("%j", "$job") + "/stopped-${SLURM_RESTART_COUNT:-0}"
    yield f'export {shell.STOPPED_VARIABLE}="{life}"'
    yield f'mkdir -p "{folders.logs}/$job"'
    yield f"trap : {' '.join(shell.NAMES)}  # they are for the ranks; this shell has to outlive those"
    yield _srun(config, site.profile, folders, python)
    yield from ("status=$?", shell.LEAVE)


def _srun(config: RunConfig, profile: Profile, folders: JobFolders, python: str) -> str:
    # Where sbatch exports nothing (SBATCH_EXPORT=NONE), srun does not either unless told to.
    arguments = ["srun", "--export=ALL", "--distribution=block", "--kill-on-bad-exit=1", "--open-mode=append"]
    # A site's WaitTime would end ranks that are still on their way out when the first has left.
    arguments.append(f"--wait={max(60, math.ceil(config.cluster.timeout_s))}")
    if profile.cpus_per_task:
        # srun of Slurm 22.05 to 23.02 does not take it from sbatch, and gives a task one CPU.
        arguments.append(f"--cpus-per-task={profile.cpus_per_task}")
    if profile.mpi:
        arguments.append(f"--mpi={profile.mpi}")
    command = [shlex.quote(python), "-u", "-m", "submitit.core._submit", str(folders.jobs)]
    held = shell.held(python)
    if profile.container:
        arguments += _container_srun_args(profile.container, folders)
        command = _in_container(profile, profile.container, folders, command)
        held = shell.held(profile.container.python if profile.container.kind == "pyxis" else "python3")
    arguments += [f'--output="{folders.logs}/$job/rank-%t.log"', *map(shlex.quote, profile.srun_args)]
    return " \\\n  ".join([*arguments, held, " ".join(command)])


def _mounts(container: Container, folders: JobFolders) -> list[str]:
    """FROM:TO of everything that ranks read or write."""
    paths = dict.fromkeys([folders.home, *([folders.code] if folders.code else []), *folders.mounts])
    inside = [p for p in paths if not any(other in p.parents for other in paths)]
    return [*(f"{path}:{path}" for path in inside), *container.mounts]


def _container_srun_args(container: Container, folders: JobFolders) -> list[str]:
    if container.kind != "pyxis":
        return []
    mounts = ",".join(_mounts(container, folders))
    found = [f"--container-image={container.image}", f"--container-mounts={mounts}", *container.args]
    return [shlex.quote(argument) for argument in found]


def _in_container(profile: Profile, container: Container, folders: JobFolders, command: list[str]) -> list[str]:
    inside = [container.python, *command[1:]]
    mounts = _mounts(container, folders)
    args = [shlex.quote(argument) for argument in container.args]
    if container.kind == "apptainer":
        binds = [f"--bind={mount}" for mount in mounts]
        return ["apptainer", "exec", "--nv", *binds, *args, shlex.quote(container.image), *inside]
    if container.kind == "enroot":
        # It gives the container an environment of its own: what a task needs is passed by name, on its node.
        start = ["enroot", "start", *(f"--mount={mount}" for mount in mounts), *args]
        wanted = "|".join([*PASSED, *(f"{name}$" for name in profile.environment)])
        names = f"$(compgen -e | grep -E '^({wanted})' | sed s/^/--env=/)"
        return ["bash", "-c", shlex.quote(" ".join([*start, names, container.image, *inside]))]
    return inside
