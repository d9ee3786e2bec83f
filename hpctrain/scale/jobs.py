"""The runs of a study, through the launcher: as jobs of Slurm one size after the other, or on this machine.

The repeats of a size are a job array; sizes wait for each other, so that none disturbs the next. Nothing is remembered
but what is in the run folders: a run that has recorded its last step is done, a job that waits or runs is waited for,
and whatever else is missing is started.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.local.run import run_local
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.client import SlurmError
from hpctrain.launch.slurm.jobs import Job, Watch, queued
from hpctrain.launch.slurm.jobs import cancel as end_jobs
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.submit.postmortem import reasons
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request, submit
from hpctrain.layout.units import MIB, in_gib
from hpctrain.scale.measure import done, missing
from hpctrain.scale.study import Study, of_size
from hpctrain.telemetry.memory import host_memory
from hpctrain.train.preflight import PROCESS, check_here, preflight
from hpctrain.train.run import rank_main

Warn = Callable[[str], None]

POLL_S = 1.0
PATIENCE_S = 60.0
"""For so long an NFS client may go on believing that a file is not there (`acdirmax`)."""

OPEN = 32
"""Files that the process which starts the ranks has open besides their logs, one of each."""


def check(study: Study) -> None:
    """Refuse what can be known to fail at any size, before anything is queued or written.

    Raises:
        HpctrainError: a setting cannot run, the corpus does not fit, or this machine is too small for the ranks.
    """
    if study.here:
        _check_ranks(study)
    for nodes in study.nodes:
        size = study.size(nodes)
        preflight(size, size.cluster.nodes * size.cluster.gpus_per_node)
        if study.here and missing(study, nodes):
            try:
                check_here(size, size.cluster.gpus_per_node)
            except ConfigError as error:
                raise of_size(error, nodes) from None


def _check_ranks(study: Study) -> None:
    """Refuse sizes of more ranks than this machine can start, whatever they do.

    Raises:
        ConfigError: names the largest size, and what would do.
    """
    nodes = max((number for number in study.nodes if missing(study, number)), default=0)
    per_node = study.base.cluster.gpus_per_node
    most, why = ranks_here()
    if nodes * per_node <= most:
        return
    possible = most // per_node
    instead = f"use nodes of at most {possible}" if possible else f"use cluster.gpus_per_node={most}" if most else ""
    reason = f"{nodes * per_node:,} ranks are more than the {most:,} that this machine can start: {why}"
    raise ConfigError("nodes", nodes, reason, f"{instead}, or a cluster with Slurm".removeprefix(", or "))


def ranks_here() -> tuple[int, str]:
    """How many ranks this machine can start at most, and what sets that, in words."""
    memory = host_memory().bytes
    most = memory // PROCESS
    why = f"each takes {PROCESS // MIB} MiB at the least, of {in_gib(memory)} GiB"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or most <= files - OPEN:
        return most, why
    return max(0, files - OPEN), f"each has a file open, of {files:,} (ulimit -n)"


def requests(study: Study, options: Options) -> list[Request]:
    """A submission for each size that has runs to do and no job that will do them."""
    at = site(study.base.cluster.profile)
    live = _live(study)
    made = []
    for nodes in study.nodes:
        runs = tuple(run for run in missing(study, nodes) if run.run_folder not in live)
        if runs:
            entries = tuple((rank_main, (run.model_dump(mode="json"), False)) for run in runs)
            array = len(runs) if study.repeats > 1 else 0
            home = runs[0].folder if array else runs[0].run_folder
            made.append(Request(runs, entries, home, at, replace(options, elements=array)))
    return made


def _live(study: Study) -> dict[Path, Job]:
    """Jobs of runs that wait or run, by run folder."""
    jobs = {run.run_folder: job for n in study.nodes for run in study.runs(n) if (job := Job.read(run.run_folder))}
    if not jobs or not client.has_slurm():
        return {}
    known = queued()
    return {folder: job for folder, job in jobs.items() if any(i in known and not known[i].ended for i in job.ids)}


def queue(study: Study, options: Options, warn: Warn) -> list[Job]:
    """Submit what is missing, each size to begin when the one before it has ended; all of it or nothing.

    Raises:
        LaunchError: Slurm refuses, in its own words.
    """
    jobs: list[Job] = []
    after = next((job.ids[-1].split("_")[0] for job in reversed(list(_live(study).values()))), None)
    try:
        for request in requests(study, options):
            sent = submit(replace(request, options=replace(request.options, after=after)), warn)
            jobs += sent
            after = sent[-1].ids[-1].split("_")[0]
            warn(f"job {after}: {', '.join(str(c.run_folder) for c in request.configs)}")
    except BaseException:
        cancel(jobs)
        raise
    return jobs


def cancel(jobs: list[Job]) -> None:
    """End jobs."""
    ids = list(dict.fromkeys(job_id.split("_")[0] for job in jobs for job_id in job.ids))
    with suppress(SlurmError):
        if ids:
            end_jobs(ids)


def collected(study: Study) -> Iterator[int]:
    """Sizes as they are measured, in the order in which that happens; those that are already are first.

    Raises:
        LaunchError: at the end, where jobs failed: in their own words.
    """
    waiting = [nodes for nodes in study.nodes if missing(study, nodes)]
    yield from (nodes for nodes in study.nodes if nodes not in waiting)
    live = _live(study)
    watches = {
        nodes: [(run, live[run.run_folder]) for run in missing(study, nodes) if run.run_folder in live]
        for nodes in waiting
    }
    looks = {
        nodes: Watch([i for _, job in pairs for i in job.ids], POLL_S) for nodes, pairs in watches.items() if pairs
    }
    failed: list[str] = []
    while waiting:
        for nodes in list(waiting):
            look = looks.get(nodes)
            if look is not None and missing(study, nodes) and not look.ended():
                continue
            waiting.remove(nodes)
            if _settled(study, nodes, look):
                yield nodes
            else:
                failed += _blame(study, nodes, watches[nodes], look)
        if waiting:
            time.sleep(POLL_S)
    if failed:
        raise LaunchError(f"{'; '.join(failed)}. The same command tries again what is missing.")


def _settled(study: Study, nodes: int, watch: Watch | None) -> bool:
    """Whether a size is done whose jobs have ended."""
    well = watch is not None and all(state.good for state in watch.states)
    deadline = time.monotonic() + (PATIENCE_S if well else 0.0)
    while missing(study, nodes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return not missing(study, nodes)


def _blame(study: Study, nodes: int, pairs: list[tuple[RunConfig, Job]], watch: Watch | None) -> list[str]:
    states = {state.id: state for state in (watch.states if watch else ())}
    out = []
    for run, job in pairs:
        if done(run):
            continue
        for state in (states[i] for i in job.ids if i in states):
            said = reasons(job.logs, state.id)
            out.append(f"{nodes} nodes: {state}: {said[0] if said else f'its logs are in {job.logs}'}".rstrip("."))
    return out or [f"{nodes} nodes: no job of {study.folder} does its runs"]


def run_here(study: Study) -> Iterator[int]:
    """The sizes of a study on this machine, one after the other, as they are measured.

    Raises:
        HpctrainError: a rank failed.
    """
    for nodes in study.nodes:
        for run in missing(study, nodes):
            run.run_folder.mkdir(parents=True, exist_ok=True)
            world = run.cluster.gpus_per_node
            run_local(rank_main, (run.model_dump(mode="json"), False), world, run.run_folder, run.cluster.threads)
        yield nodes
