"""`hpctrain lab`: a practice cluster comes up, is used, loses nodes and links on purpose, and goes down."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.groups import Group

FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="HPCTRAIN_LAB",
    help="Where the lab lives; also from HPCTRAIN_LAB.  [default: /var/tmp/hpctrain-lab]",
)


@click.group(cls=Group)
def lab() -> None:
    """Bring up a private Slurm on this machine, and take it down.

    Real daemons on emulated nodes with emulated GPUs, for practice and for tests; nothing of the system is
    changed. Partition batch is preempted by partition high. Needs Debian's Slurm.

    With --rails every node has a network of its own, and links of limited rate to one leaf switch for each rail. That
    needs root; without it the lab comes up plain, where the system gives user namespaces to everybody.
    """


@lab.command(epilog="\b\nExample:  hpctrain lab up --nodes 4 --gpus 4 --rails 4 --rail-mbit 200 --spine-mbit 100")
@click.option("--nodes", type=int, default=4, show_default=True, help="Nodes, n0, n1 and so on.")
@click.option("--gpus", type=int, default=4, show_default=True, help="GPUs of a node.")
@click.option("--cpus", type=int, help="CPUs of a node.  [default: two for each GPU]")
@click.option("--rails", type=int, default=0, show_default=True, help="Rails, with interfaces rail0, rail1 and so on.")
@click.option("--rail-mbit", type=int, default=200, show_default=True, help="Mbit/s of a node's link to a leaf.")
@click.option("--spine-mbit", type=int, default=100, show_default=True, help="Mbit/s of a leaf's link to the spine.")
@click.option("--accounting", is_flag=True, help="With slurmdbd and a database of its own, so that sacct answers.")
@FOLDER
def up(folder: Path | None, cpus: int | None, **sizes: Any) -> None:
    """Bring the lab up, or complete one that has lost parts.

    Comes back when all nodes are idle, in a few seconds. Where the machine cannot give rails, the lab comes up
    without, and a sentence says why.
    """
    from hpctrain.lab import LabSpec, railbind, requirements
    from hpctrain.lab import up as bring_up

    cpus = max(2, 2 * sizes["gpus"]) if cpus is None else cpus
    raised = bring_up(LabSpec(_folder(folder), cpus=cpus, **sizes))
    spec = raised.cluster.spec
    if raised.found:
        click.echo(f"There is a lab in {spec.folder}: {raised.found}.")
    click.echo(f"{spec.nodes} nodes with {spec.gpus} GPUs each are ready after {raised.seconds:.1f} s.")
    if raised.lacks:
        click.echo(f"They have no rails: {raised.lacks}")
    if spec.rails:
        click.echo(f"Each has {spec.rails} rails of {spec.rail_mbit} Mbit/s; leaf to spine: {spec.spine_mbit} Mbit/s.")
    if not requirements.pmix():
        click.echo("srun --mpi=pmix will not work before apt-get install libpmix-dev and a new lab.")
    if spec.rails and (said := railbind.obstacle(spec)):
        click.echo(said[0].upper() + said[1:])
    suffix = "" if folder is None else f" --folder {spec.folder}"
    programs = f" PATH={spec.programs}:$PATH" if spec.rails else ""
    click.echo(f"Use it:  hpctrain lab shell{suffix}\nor:      export SLURM_CONF={spec.slurm_conf}{programs}")


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


@lab.command(epilog="\b\nExample:  hpctrain lab link-down n1:rail2")
@click.argument("target")
@FOLDER
def link_down(target: str, folder: Path | None) -> None:
    """Pull the cables of TARGET: a node, a rail, or n1:rail2."""
    from hpctrain.lab import attach, faults

    faults.link_down(attach(_folder(folder)).spec, target)
    click.echo(f"{target} is down; bring it back with hpctrain lab heal.")


@lab.command(epilog="\b\nExample:  hpctrain lab slow n3 --mbit 20")
@click.argument("target")
@click.option("--mbit", type=int, required=True, help="Mbit/s each way.")
@FOLDER
def slow(target: str, mbit: int, folder: Path | None) -> None:
    """Slow the links of TARGET: a node, a rail, n1:rail2, or spine."""
    from hpctrain.lab import attach, faults

    faults.slow(attach(_folder(folder)).spec, target, mbit)
    click.echo(f"{target} has {mbit} Mbit/s; bring its rate back with hpctrain lab heal.")


@lab.command(epilog="\b\nExample:  hpctrain lab drain n1")
@click.argument("node")
@FOLDER
def drain(node: str, folder: Path | None) -> None:
    """Have Slurm give no more jobs to NODE."""
    from hpctrain.lab import attach, faults

    faults.drain_node(attach(_folder(folder)), node)
    click.echo(f"{node} gets no more jobs; resume it with hpctrain lab heal.")


@lab.command(epilog="\b\nExample:  hpctrain lab heal")
@FOLDER
def heal(folder: Path | None) -> None:
    """Undo every fault: dead and drained nodes, links that are down or slow."""
    from hpctrain.lab import attach, faults

    found = faults.heal(attach(_folder(folder)))
    click.echo(f"Mended: {', '.join(found)}." if found else "Nothing was amiss.")


@lab.command(epilog="\b\nExample:  hpctrain lab counters --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@FOLDER
def counters(as_json: bool, folder: Path | None) -> None:
    """Show the bytes of every interface since its machine came up.

    What the spine has sent is what has crossed between rails.
    """
    from dataclasses import asdict

    from hpctrain.lab import attach
    from hpctrain.lab import counters as read

    found = read(attach(_folder(folder)).spec)
    if as_json:
        plain = {name: {at: asdict(traffic) for at, traffic in rows.items()} for name, rows in found.items()}
        click.echo(json.dumps(plain, indent=2))
        return
    rows = [(name, at, f"{t.sent:,}", f"{t.received:,}") for name, row in found.items() for at, t in row.items()]
    _table(("machine", "interface", "bytes sent", "received"), rows, numbers=2)


def _folder(given: Path | None) -> Path:
    from hpctrain.lab import DEFAULT_FOLDER

    return Path(os.path.abspath(given)) if given else DEFAULT_FOLDER


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"{found['folder']}: {found['slurm']}, {found['jobs']} jobs", soft_wrap=True)
    rows = [(m["name"], m["state"], ", ".join(m["daemons"]), m["address"]) for m in found["machines"]]
    _table(("machine", "state", "daemons", "address"), rows)
    if found["rails"]:
        console.print(f"{found['rails']} rails of {found['rail_mbit']} Mbit/s, spine {found['spine_mbit']} Mbit/s")
        for said in found["amiss"]:
            console.print(said)
    console.print(f"SLURM_CONF={found['slurm_conf']}", soft_wrap=True)


def _table(heads: tuple[str, ...], rows: Sequence[Sequence[str]], numbers: int = 0) -> None:
    """A table whose last `numbers` columns are to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at >= len(heads) - numbers else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
