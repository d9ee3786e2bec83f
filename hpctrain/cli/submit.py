"""`hpctrain submit`: from a recipe to a job in the queue, or to all that is known about one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.overrides import overrides_argument
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from hpctrain.config.schema import RunConfig
    from hpctrain.launch.slurm.jobs import Job
    from hpctrain.launch.slurm.profile import Profile
    from hpctrain.launch.slurm.state import JobState
    from hpctrain.launch.submit.send import Request

RANKS_SHOWN = 32
"""Above that, the plan has one line a node."""


@click.command(epilog="\b\nExample:  hpctrain submit gpt-tiny cluster.nodes=2 cluster.gpus_per_node=2 --dry-run")
@click.argument("recipe")
@overrides_argument()
@click.option("--dry-run", is_flag=True, help="Print the batch script and where each rank goes; queue nothing.")
@click.option("--profile", metavar="NAME|FILE", help="Site profile.  [default: cluster.profile]")
@click.option("--partition", help="Where the job goes, over the profile.")
@click.option("--account", help="Who pays, over the profile.")
@click.option("--qos", help="Quality of service, over the profile.")
@click.option("--time", "time_limit", metavar="TIME", help="Time limit as Slurm writes it, over the profile.")
@click.option("--health", is_flag=True, help="Measure nodes and links first, and leave out slow ones.")
@click.option("--array", "axes", metavar="KEY=V1,V2", multiple=True, help="Sweep as a job array; again for products.")
@click.option("--chain", type=click.IntRange(1, 1000), default=1, help="Jobs in a row that continue the same run.")
@click.option("--wait", is_flag=True, help="Return when the job has ended, with its success as exit status.")
@click.option("--follow", is_flag=True, help="The same, and show the run's records.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def submit(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    profile: str | None,
    partition: str | None,
    account: str | None,
    qos: str | None,
    time_limit: str | None,
    health: bool,
    axes: tuple[str, ...],
    chain: int,
    wait: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Train RECIPE, a name from `hpctrain config list` or a YAML file, as a Slurm job.

    What can be known to fail is refused before anything is queued. Where there is no Slurm it trains on this
    machine, as `hpctrain train` does.
    """
    from hpctrain.launch.slurm import client
    from hpctrain.launch.slurm.profile import check_lead, check_time, healthy, site
    from hpctrain.launch.submit.sbatch import Options
    from hpctrain.launch.submit.send import Request
    from hpctrain.launch.submit.sweep import anchored, sweep
    from hpctrain.train.run import rank_main

    if profile:
        overrides = (*overrides, f"cluster.profile={profile}")
    configs = sweep(recipe, overrides, axes) if axes else (anchored(_load(recipe, overrides)),)
    home = configs[0].folder if axes else configs[0].run_folder
    request = Request(
        configs=configs,
        entries=tuple((rank_main, (config.model_dump(mode="json"), False)) for config in configs),
        home=home,
        site=healthy(site(configs[0].cluster.profile), configs[0], health),
        options=Options(partition, account, check_time(time_limit) if time_limit else None, qos, len(axes and configs)),
        chain=chain,
    )
    check_lead(request.site.profile, request.options.time)
    if axes and follow:
        raise ConfigError("--follow", "--array", "shows one run", "use --wait, and hpctrain logs for each")
    if dry_run:
        _show_plan(request, as_json)
    for config in configs:
        _check(config, request.site.profile)
    if dry_run:
        return
    if not client.has_slurm():
        _here(request, health, as_json)
        return
    _queue(request, wait, follow, as_json)


def _load(recipe: str, overrides: tuple[str, ...]) -> RunConfig:
    from hpctrain.config.load import load

    return load(recipe, overrides)


def _check(config: RunConfig, profile: Profile) -> None:
    from hpctrain.launch.slurm.profile import node_memory
    from hpctrain.train.preflight import check_node, preflight

    preflight(config, config.cluster.nodes * config.cluster.gpus_per_node)
    if memory := node_memory(profile):
        check_node(config, memory, profile.gpus != "none")


def _show_plan(request: Request, as_json: bool) -> None:
    from hpctrain.launch.place.jobplan import foreseen
    from hpctrain.launch.place.plan import known_rows, rank_plan, rows, summary
    from hpctrain.launch.place.tablefile import by_link
    from hpctrain.launch.slurm import client
    from hpctrain.launch.submit import snapshot
    from hpctrain.launch.submit.lint import lint
    from hpctrain.launch.submit.send import folders, script

    asks = request.site.profile.fabric == "slurm" and client.has_slurm()
    table = foreseen(request.configs[0], request.site, client.topology_text() if asks else "")
    places = table if table is not None else rank_plan(request.configs[0])
    listed = known_rows(table) if table is not None else rows(places)
    text = script(request, folders(request, "STAMP", snapshot.checkout() is not None))
    for said in lint(text):
        click.echo(f"warning: {said}", err=True)
    if as_json:
        runs = [str(config.run_folder) for config in request.configs]
        found = {"bytes": by_link(table), "problems": list(table.problems)} if table is not None else {}
        click.echo(json.dumps({"script": text, "runs": runs, "ranks": listed, **found}, indent=2))
        return
    click.echo(text)
    for line in columns(summary(places) if len(places) > RANKS_SHOWN else listed):
        click.echo(line)
    if table is not None:
        click.echo("")
        for line in columns([{k: f"{v:.3g}" if k != "link" else v for k, v in row.items()} for row in by_link(table)]):
            click.echo(line)
        click.echo("bytes of all ranks in a step, by link; as if the job had the first nodes of the fabric")
    for config in request.configs:
        click.echo(f"run folder {config.run_folder}")


def _here(request: Request, health: bool, as_json: bool) -> None:
    """Without Slurm: on this machine, through the local executor."""
    from hpctrain.cli.train import on_this_machine

    for flag, value in (
        ("--chain", request.chain if request.chain > 1 else None),
        ("--health", health or None),
        ("--json", as_json or None),
    ):
        if value is not None:
            raise ConfigError(flag, value, "there is no Slurm here: no sbatch on PATH", "leave it out")
    options = request.options
    given = [f"--{name}" for name in ("partition", "account", "qos", "time") if getattr(options, name)]
    click.echo(
        "there is no Slurm here (no sbatch on PATH): training on this machine, with the local executor"
        + (f"; {', '.join(given)} mean nothing to it" if given else ""),
        err=True,
    )
    for config in request.configs:
        on_this_machine(config)


def _queue(request: Request, wait: bool, follow: bool, as_json: bool) -> None:
    from hpctrain.launch.slurm.client import SlurmError
    from hpctrain.launch.slurm.jobs import first_states
    from hpctrain.launch.submit.send import submit as send

    jobs = send(request, lambda text: click.echo(f"warning: {text}", err=True))
    folders = [config.run_folder for config in request.configs]
    if as_json:
        listed = [{"run": str(folder), "jobs": list(job.ids)} for folder, job in zip(folders, jobs)]
        click.echo(json.dumps(listed, indent=2))
    else:
        for folder, job in zip(folders, jobs):
            click.echo(f"job {', '.join(job.ids)}: run folder {folder}")
    ids = [job_id for job in jobs for job_id in job.ids]
    with suppress(SlurmError):  # it is queued, whether Slurm answers now or not
        for state in first_states(ids).values():
            if state.stuck:
                click.echo(f"warning: {state}: it will not start before that changes", err=True)
    try:
        _stay(request, jobs, wait, follow)
    except KeyboardInterrupt:
        click.echo(f"the job goes on; hpctrain cancel {request.home} ends it", err=True)
        raise


def _stay(request: Request, jobs: list[Job], wait: bool, follow: bool) -> None:
    """Wait for jobs, where that was asked for, and report how they ended."""
    if follow:
        from hpctrain.cli.jobs import show_records

        ended = show_records(request.home, jobs[0], request.configs[0].train.steps)
    elif wait:
        from hpctrain.launch.slurm.jobs import wait as wait_for

        ended = wait_for([job_id for job in jobs for job_id in job.ids])
    else:
        return
    succeed(ended, jobs, request.home)


def succeed(ended: Sequence[JobState], jobs: Sequence[Job], folder: Path) -> None:
    """Raise a `LaunchError` unless every run came to its end. Of a chain the last job counts."""
    last = {job.ids[-1] for job in jobs}
    for state in ended:
        if state.id in last and not state.good:
            raise LaunchError(f"{state}: hpctrain logs {folder} --rank 0 shows what its first rank printed.")
