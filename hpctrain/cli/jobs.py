"""`hpctrain jobs`, `logs`, `cancel`, `requeue`: submitted runs, by run folder or by job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.tables import columns
from hpctrain.errors import LaunchError

if TYPE_CHECKING:
    from hpctrain.launch.slurm.jobs import Job
    from hpctrain.launch.slurm.state import JobState

FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are."
)
POLL_S = 0.5


@click.command(epilog="\b\nExample:  hpctrain jobs")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def jobs(folder: Path, as_json: bool) -> None:
    """List submitted runs, the latest last, with the state of their jobs and the last step that was recorded."""
    from hpctrain.launch.slurm.jobs import runs, states

    found = list(runs(folder))
    ids = [job_id for _, job in found for job_id in job.ids]
    known = states(ids) if ids else {}
    rows = [_row(run, job, known[job_id]) for run, job in found for job_id in job.ids]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(f"no run in {folder} was submitted")
        return
    for line in columns(rows):
        click.echo(line)


def _row(run: Path, job: Job, state: JobState) -> dict[str, Any]:
    return {
        "run": str(run),
        "job": state.id,
        "state": state.state,
        "reason": state.reason,
        "nodes": state.nodes,
        "step": _last_step(run),
        "submitted": job.submitted,
    }


def _last_step(run: Path) -> int | None:
    from hpctrain.telemetry.metrics import read_records
    from hpctrain.telemetry.sinks import METRICS_FILE

    path = run / METRICS_FILE
    steps = [record["step"] for record in read_records(path)] if path.exists() else []
    return int(steps[-1]) if steps and isinstance(steps[-1], (int, float)) else None


@click.command(epilog="\b\nExample:  hpctrain logs -f gpt-tiny")
@click.argument("what", metavar="RUN|JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank printed, in place of the run's records.")
@FOLDER
def logs(what: str, follow: bool, rank: int | None, folder: Path) -> None:
    """Show how a run trains: its records, or what one of its ranks printed."""
    from hpctrain.launch.slurm.jobs import locate
    from hpctrain.telemetry.sinks import METRICS_FILE

    own = next((run for run in (Path(what), folder / what) if (run / METRICS_FILE).exists()), None)
    if follow or rank is not None or own is None:
        run, job = _one(*locate(what, folder))
    if rank is not None:
        _show_rank(job, rank, follow)
    elif follow:
        show_records(run, job, _steps(run))
    else:
        _show_so_far(own or run)  # also of a run that never was a job


def _show_so_far(run: Path) -> None:
    from hpctrain.telemetry.sinks import METRICS_FILE

    if not (run / METRICS_FILE).exists():
        raise LaunchError(f"{run} has no records yet: its job waits or starts; hpctrain jobs shows which.")
    _print_records(run, lambda: True, _steps(run))
    _show_failures(run)


def _show_failures(run: Path) -> None:
    from hpctrain.launch.slurm.client import has_slurm
    from hpctrain.launch.slurm.jobs import Job, states

    job = Job.read(run)
    if job is not None and has_slurm():
        for state in states(job.ids).values():
            if state.ended and not state.good and not (state.state == "FORGOTTEN" and _complete(run)):
                _show_end(job, state)


def _complete(run: Path) -> bool:
    """Whether a run has done all its steps."""
    last, steps = _last_step(run), _steps(run)
    return last is not None and steps is not None and last >= steps


def _one(run: Path, job: Job) -> tuple[Path, Job]:
    """Refuse the folder of a sweep."""
    from hpctrain.launch.slurm.jobs import is_sweep

    if is_sweep(run):
        raise LaunchError(f"{run} is a sweep: name one of its runs, which hpctrain jobs lists.")
    return run, job


def _steps(run: Path) -> int | None:
    """Length of a run; None before it has begun."""
    from hpctrain.config.load import load

    path = run / "config.yaml"
    return load(path).train.steps if path.exists() else None


def show_records(run: Path, job: Job, steps: int | None) -> list[JobState]:
    """Show a run's records until its jobs have ended. Returns how they did."""
    from hpctrain.launch.slurm.jobs import Watch

    watch = Watch(job.ids)
    _print_records(run, watch.ended, steps)
    for state in watch.states:
        _show_end(job, state)
    return watch.states


def _show_end(job: Job, state: JobState) -> None:
    """How a job ended and, if not well, what its logs say about it."""
    from hpctrain.launch.submit.postmortem import reasons

    click.echo(str(state), err=True)
    if state.ended and not state.good:
        for reason in reasons(job.logs, state.id):
            click.echo(f"  {reason}", err=True)


def _print_records(run: Path, stop: Callable[[], bool], steps: int | None) -> None:
    from hpctrain.telemetry.console import ConsoleView, follow
    from hpctrain.telemetry.sinks import METRICS_FILE

    view = ConsoleView(steps, sys.stdout)
    try:
        for record in follow(run / METRICS_FILE, stop, POLL_S):
            view.write(record)
    finally:
        view.close()


def _show_rank(job: Job, rank: int, follow: bool) -> None:
    from hpctrain.launch.slurm.jobs import Watch

    paths = [job.logs / job_id / f"rank-{rank}.log" for job_id in job.ids]
    stop = Watch(job.ids).ended if follow else lambda: True
    shown = False
    for text in _grown(paths, stop):
        shown = True
        click.echo(text, nl=False)
    if not shown:
        raise LaunchError(
            f"there is no {paths[0]}: the job has not started, or has fewer ranks; "
            f"what its batch script printed is in {job.logs}/slurm-{job.ids[0]}.out."
        )


def _grown(paths: list[Path], stop: Callable[[], bool]) -> Iterator[str]:
    """What files hold, and what is added to them until `stop`."""
    read = dict.fromkeys(paths, 0)
    while True:
        last = stop()
        for path in paths:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(read[path])
                found = file.read()
            read[path] += len(found)
            if found:
                yield found.decode(errors="replace")
        if last:
            return
        time.sleep(POLL_S)


@click.command(epilog="\b\nExample:  hpctrain cancel gpt-tiny")
@click.argument("what", metavar="RUN|JOB")
@FOLDER
def cancel(what: str, folder: Path) -> None:
    """End the jobs of a run, those of a chain that still wait included. Its checkpoints stay."""
    from hpctrain.launch.slurm.jobs import cancel as end
    from hpctrain.launch.slurm.jobs import is_sweep, locate, states, whole

    run, job = locate(what, folder)
    running = [state.id for state in states(job.ids).values() if not state.ended]
    if not running:
        raise LaunchError(f"no job of {run} waits or runs: there is nothing to cancel.")
    end(whole(running) if is_sweep(run) else running)
    click.echo(f"cancelled job {', '.join(running)}")


@click.command(epilog="\b\nExample:  hpctrain requeue gpt-tiny")
@click.argument("what", metavar="RUN|JOB")
@FOLDER
def requeue(what: str, folder: Path) -> None:
    """Have the job of a run start anew, under the same id, from the newest checkpoint."""
    from hpctrain.launch.slurm.jobs import locate, states
    from hpctrain.launch.slurm.jobs import requeue as again

    run, job = _one(*locate(what, folder))
    known = states(job.ids)
    runs_now = (known[job_id] for job_id in job.ids if known[job_id].state in ("RUNNING", "SUSPENDED"))
    chosen = next(runs_now, known[job.ids[-1]])
    if chosen.state in ("PENDING", "REQUEUED"):
        raise LaunchError(f"{chosen}: it waits in the queue already.")
    if chosen.state == "FORGOTTEN":
        raise LaunchError(f"Slurm knows job {chosen.id} no more: submit {run} again, and it continues.")
    again(chosen.id)
    click.echo(f"requeued job {chosen.id}; Slurm starts it after a delay, of 120 s where nothing else is set")
