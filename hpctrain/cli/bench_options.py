"""Options that the commands of `hpctrain bench` have in common, how they start ranks, and what they write."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.cli.bench_unused import of_jobs, refuse_unused
from hpctrain.cli.outputs import check_output, picture_file
from hpctrain.cli.tables import whole_lines
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.comms.result import Result
    from hpctrain.comms.spec import Spec
    from hpctrain.launch.life.identity import Identity

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
READ = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Place:
    """Where ranks run, and what is written of it.

    Attributes:
        ranks: on this machine, or on each node of a job; 0: one a GPU, or two.
        nodes: node counts, a job each; empty: no job.
        detach: do not wait for jobs.
    """

    ranks: int
    folder: Path
    nodes: tuple[int, ...]
    profile: str
    partition: str | None
    account: str | None
    time: str | None
    detach: bool = False


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in this order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def place_options(function: F) -> F:
    """Where ranks run."""
    return together(
        click.option(
            "--backend",
            default="auto",
            help="nccl, gloo or mpi.  [default: nccl with GPUs, else gloo; of a job, by its profile]",
        ),
        click.option(
            "--ranks",
            type=click.IntRange(1, 4096),
            help="On this machine, or a node.  [default: GPUs, or 2; of a job without GPUs 1]",
        ),
        click.option("--submit", is_flag=True, help="As a job of Slurm, with --nodes."),
        click.option("--detach", is_flag=True, help="Return when jobs are queued; results come into --folder."),
        click.option("--nodes", default="1", show_default=True, help="Of the job; with commas, a job for each number."),
        click.option("--profile", default="generic", show_default=True, help="Site profile of the job: NAME or FILE."),
        click.option("--partition", help="Where the job goes, over the profile."),
        click.option("--account", help="Who pays, over the profile."),
        click.option("--time", "time_limit", metavar="TIME", help="Time limit of the job, over the profile."),
        click.option(
            "--env",
            "variables",
            multiple=True,
            metavar="NAME=VALUE",
            help="For the ranks; {local_rank} and {address:eth0} are its own.",
        ),
        click.option(
            "--timeout", type=click.FloatRange(0.1), default=60.0, show_default=True, help="Of one wait, seconds."
        ),
        click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads of a rank; 0 shares the CPUs."),
        click.option("--folder", type=FOLDER, default=Path("bench"), show_default=True, help="Results are kept in it."),
    )(function)


def output_options(function: F) -> F:
    """What is written."""
    return together(
        click.option("--json", "as_json", is_flag=True, help="Print nccl-tests' JSON, with ours in it."),
        click.option("--csv", "csv_file", type=FILE, help="Write a tidy table."),
        click.option("--store", type=FILE, help="Add every iteration of every rank to an HDF5 file."),
        click.option("--png", type=picture_file("--png"), help="Draw it."),
    )(function)


def place(given: dict[str, Any]) -> Place:
    """The options of `place_options`, taken out of all that a command was given.

    Raises:
        ConfigError: numbers of nodes, or a variable, that are none; or options of a job, without one.
    """
    refuse_unused(of_jobs())
    nodes, variables = given.pop("nodes"), given["variables"]
    if not all(part.isdigit() and int(part) for part in nodes.split(",")):
        raise ConfigError("--nodes", nodes, "must be a number, or numbers with commas between")
    for pair in variables:
        if not pair.partition("=")[1] or not pair.partition("=")[0].isidentifier():
            raise ConfigError("--env", pair, "must be NAME=VALUE")
    submitted = given.pop("submit")
    return Place(
        given.pop("ranks") or 0,
        given.pop("folder"),
        tuple(map(int, nodes.split(","))) if submitted else (),
        given.pop("profile"),
        given.pop("partition"),
        given.pop("account"),
        given.pop("time_limit"),
        given.pop("detach"),
    )


def backend_of(asked: str, at: Place) -> str:
    """The backend that is meant where none is named: by what this machine has, or a job by its profile, since the
    machine that submits it may be another kind: gloo where a job has no GPUs, or emulated ones.

    Raises:
        ConfigError: the profile does not say whether its jobs have GPUs.
    """
    if asked != "auto":
        return asked
    if at.nodes:
        from hpctrain.launch.slurm.profile import site

        profile = site(at.profile).profile
        if profile.gpus == "none" or profile.emulated:
            return "gloo"
        if "gpus" not in profile.model_fields_set:
            said = f"the profile {at.profile} does not say that its jobs have GPUs"
            raise ConfigError("--backend", asked, said, "name nccl, gloo or mpi, or set gpus in the profile")
        return "nccl"
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"


def prepare(at: Place, files: Mapping[str, Path | None]) -> None:
    """Make the folder, and refuse files that cannot be written, before anything is measured. One of several ranks that
    a launcher started does so.

    Args:
        files: by option; --store is an HDF5 file.

    Raises:
        ConfigError: they cannot be.
        DataError: a store that is none.
    """
    from hpctrain.comms.store import check
    from hpctrain.launch.life.identity import detect

    identity = detect(os.environ)
    if identity is not None and identity.rank:
        return
    try:
        at.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--folder", str(at.folder), f"cannot be made ({error.strerror})", "name another one"
        ) from None
    for key, path in files.items():
        if path is not None:
            check_output(key, path)
            if key == "--store":
                check(path)


def ranks_of_a_node(backend: str, asked: int) -> int:
    """How many of a job, where nobody says: one.

    Raises:
        ConfigError: one GPU would be measured, of as many as a node has.
    """
    if backend == "nccl" and not asked:
        raise ConfigError("--ranks", 0, "a profile does not say how many GPUs a node has", "give --ranks, one a GPU")
    return asked or 1


def ranks_here(backend: str, asked: int) -> int:
    """How many, where nobody says: one a GPU, or two."""
    if asked:
        return asked
    import torch

    return max(1, torch.cuda.device_count()) if backend == "nccl" else 2


def measure(spec: Spec, at: Place, kind: str) -> list[tuple[Path, Result]]:
    """Have it measured, wherever that is: a result for each job, or one. A process that a launcher started is one of
    its ranks; the first of them has the result, the others have none.

    Raises:
        ConfigError: such a rank is to start others.
    """
    from hpctrain.launch.life.identity import detect

    identity = detect(os.environ)
    if identity is not None:
        _refuse_ranks(at, identity)
        return _as_rank(spec, at.folder / f"{kind}-{identity.key}", identity.rank)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}-{kind}"
    if at.nodes:
        from hpctrain.comms.jobs import run_jobs

        ranks, folder = ranks_of_a_node(spec.backend, at.ranks), at.folder.absolute() / stamp
        return run_jobs(spec, at.nodes, ranks, folder, job_options(at), at.profile, warn, at.detach)
    from hpctrain.comms.local import run_here

    folder, count = at.folder / stamp, ranks_here(spec.backend, at.ranks)
    with working(f"{kind} on {count} ranks"):
        return [(folder, run_here(spec, count, folder))]


def _refuse_ranks(at: Place, identity: Identity) -> None:
    started = f"this process is rank {identity.rank} of {identity.world} that {identity.source} has started"
    if at.nodes:
        raise ConfigError("--submit", True, started, "give it outside of that")
    if at.ranks and at.ranks != identity.local_world:
        raise ConfigError("--ranks", at.ranks, f"{started}, {identity.local_world} on this node", "leave it out")


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    from hpctrain.launch.life.identity import detect

    return detect(os.environ) is not None


def job_options(at: Place) -> Any:
    """Of sbatch."""
    from hpctrain.launch.slurm.profile import check_time
    from hpctrain.launch.submit.sbatch import Options

    return Options(at.partition, at.account, check_time(at.time) if at.time else None)


def _as_rank(spec: Spec, folder: Path, rank: int) -> list[tuple[Path, Result]]:
    from hpctrain.comms.local import read
    from hpctrain.comms.rank import rank_main
    from hpctrain.launch.rank.body import run_rank

    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):  # what comes out of this command is its own
        run_rank(rank_main, (spec.plain(), str(folder.absolute())))
    return [] if rank else [(folder, read(folder))]


def warn(text: str) -> None:
    """One line on stderr."""
    click.echo(f"warning: {text}", err=True)


def working(text: str) -> Any:
    """Something that turns, on a terminal."""
    return whole_lines(sys.stderr).status(text) if sys.stderr.isatty() else nullcontext()


def show(folder: Path, result: Result, as_json: bool, csv_file: Path | None, store: Path | None) -> None:
    """Print and write it."""
    from hpctrain.comms import nccltests, tidy
    from hpctrain.comms import store as stored
    from hpctrain.comms.table import lines

    if csv_file:
        tidy.write(result, csv_file)
    if store:
        stored.append(store, result)
    if as_json:
        click.echo(json.dumps(nccltests.document(result, sys.argv)))
        return
    for line in lines(result):
        click.echo(line)
    click.echo(f"# Result               : {folder / 'result.json'}")
