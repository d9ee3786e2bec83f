"""`hpctrain lab`: a practice cluster comes up, is used, loses nodes on purpose, and goes down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="HPCTRAIN_LAB",
    help="Where the lab lives; also from HPCTRAIN_LAB.  [default: /var/tmp/hpctrain-lab]",
)


@click.group()
def lab() -> None:
    """Bring up a private Slurm on this machine, and take it down.

    Real daemons on emulated nodes with emulated GPUs, for practice and for tests; nothing of the system is
    changed. Partition batch is preempted by partition high. Needs root and Debian's Slurm.
    """


@lab.command(epilog="\b\nExample:  hpctrain lab up --nodes 4 --gpus 4")
@click.option("--nodes", type=int, default=4, show_default=True, help="Nodes, n0, n1 and so on.")
@click.option("--gpus", type=int, default=4, show_default=True, help="GPUs of a node.")
@click.option("--cpus", type=int, help="CPUs of a node.  [default: two for each GPU]")
@click.option("--accounting", is_flag=True, help="With slurmdbd and a database of its own, so that sacct answers.")
@FOLDER
def up(nodes: int, gpus: int, cpus: int | None, accounting: bool, folder: Path | None) -> None:
    """Bring the lab up, or complete one that has lost parts.

    Comes back when all nodes are idle, in a few seconds.
    """
    from hpctrain.lab import LabSpec, requirements
    from hpctrain.lab import up as bring_up

    cpus = max(2, 2 * gpus) if cpus is None else cpus
    raised = bring_up(LabSpec(_folder(folder), nodes=nodes, gpus=gpus, cpus=cpus, accounting=accounting))
    spec = raised.cluster.spec
    if raised.found:
        click.echo(f"There is a lab in {spec.folder}: {raised.found}.")
    click.echo(f"{spec.nodes} nodes with {spec.gpus} GPUs each are ready after {raised.seconds:.1f} s.")
    if not requirements.pmix():
        click.echo("srun --mpi=pmix will not work before apt-get install libpmix-dev and a new lab.")
    suffix = "" if folder is None else f" --folder {spec.folder}"
    click.echo(f"Use it:  hpctrain lab shell{suffix}\nor:      export SLURM_CONF={spec.slurm_conf}")


@lab.command(epilog="\b\nExample:  hpctrain lab down")
@FOLDER
def down(folder: Path | None) -> None:
    """End everything in the lab, and remove its folder."""
    from hpctrain.lab import down as take_down

    path = _folder(folder)
    click.echo(f"Took the lab in {path} down." if take_down(path) else f"There is no lab in {path}.")


@lab.command(epilog="\b\nExample:  hpctrain lab status --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@FOLDER
def status(as_json: bool, folder: Path | None) -> None:
    """Show the nodes, the daemons and the jobs of the lab."""
    from hpctrain.lab import attach
    from hpctrain.lab import status as status_of

    found = status_of(attach(_folder(folder)))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


@lab.command(
    epilog="\b\nExample:  hpctrain lab shell -- srun -N2 --gres=gpu:2 hostname",
    context_settings={"ignore_unknown_options": True},
)
@FOLDER
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(folder: Path | None, command: tuple[str, ...]) -> None:
    """Run a shell, or COMMAND, that has the lab as its cluster."""
    from hpctrain.errors import LabError
    from hpctrain.lab import attach

    environment = attach(_folder(folder)).environment()
    command = command or (os.environ.get("SHELL", "/bin/sh"),)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise LabError(f"{command[0]} cannot be run: {error.strerror}.") from error


@lab.command(epilog="\b\nExample:  hpctrain lab kill n1")
@click.argument("node")
@click.option("--slurmd", "slurmd_only", is_flag=True, help="End slurmd alone; jobs on the node live on.")
@FOLDER
def kill(node: str, slurmd_only: bool, folder: Path | None) -> None:
    """Let NODE fail, with everything that runs on it."""
    from hpctrain.lab import attach, kill_node

    kill_node(attach(_folder(folder)).spec, node, slurmd_only)
    click.echo(f"Ended {'slurmd on ' if slurmd_only else ''}{node}; bring it back with hpctrain lab start {node}.")


@lab.command(epilog="\b\nExample:  hpctrain lab start n1")
@click.argument("node")
@FOLDER
def start(node: str, folder: Path | None) -> None:
    """Bring NODE back, and wait until Slurm uses it."""
    from hpctrain.lab import attach, start_node

    start_node(attach(_folder(folder)).spec, node)
    click.echo(f"{node} is back.")


def _folder(given: Path | None) -> Path:
    from hpctrain.lab import DEFAULT_FOLDER

    return Path(os.path.abspath(given)) if given else DEFAULT_FOLDER


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found['folder']}: {found['slurm']}, {found['jobs']} jobs", soft_wrap=True)
    table = Table("machine", "state", "daemons", "address", box=None, pad_edge=False)
    for machine in found["machines"]:
        table.add_row(machine["name"], machine["state"], ", ".join(machine["daemons"]), machine["address"])
    console.print(table)
    console.print(f"SLURM_CONF={found['slurm_conf']}", soft_wrap=True)
