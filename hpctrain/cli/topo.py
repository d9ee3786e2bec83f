"""`hpctrain topo`: what nodes and switches are like, which rank goes where on them and why, and what is amiss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from hpctrain.cli import topo_inputs as inputs
from hpctrain.cli.groups import Group
from hpctrain.cli.outputs import Output, picture_file
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.cli.topo_inputs import Job

PICTURE = picture_file("--picture")


@click.group(cls=Group)
def topo() -> None:
    """See nodes, NICs and switches, and which rank goes where.

    \b
    Files of a node:  nvidia-smi topo -m, nvidia-smi -q -x, NCCL's or hwloc's XML, ResourceSlices, a /sys tree,
                      or what hpctrain topo capture wrote. a.txt+b.xml are two readings of one node.
    Of the fabric:    topology.conf, topology.yaml, scontrol show topology, ibnetdiscover.
    """


@topo.command(epilog="\b\nExample:  hpctrain topo show node.txt+node.xml --fabric topology.conf --picture node.png")
@click.argument("files", nargs=-1)
@inputs.fabric_option
@click.option("--picture", type=PICTURE, help="Draw them, too: .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(files: tuple[str, ...], fabric_words: str | None, picture: Path | None, as_json: bool) -> None:
    """Show nodes, what each NIC is for and why, and switches; of this machine where no FILES are named."""
    from hpctrain.cli import topo_text as text

    seen = inputs.inventory(files, fabric_words)
    if picture:
        from hpctrain.cli.topo_picture import draw_nodes

        draw_nodes([node for _, node in text.kinds(seen.nodes)], seen.fabric, picture)
    if as_json:
        fabric = None if seen.fabric is None else text.fabric_plain(seen.fabric)
        click.echo(json.dumps({"nodes": [text.node_plain(node) for node in seen.nodes], "fabric": fabric}, indent=2))
        return
    parts = [list(text.node_lines(node, names)) for names, node in text.kinds(seen.nodes)]
    parts += [list(text.unlike_lines(seen.nodes)), list(text.fabric_lines(seen.fabric)) if seen.fabric else []]
    click.echo("\n\n".join("\n".join(part) for part in parts if part))


@topo.command(
    "map", epilog="\b\nExample:  hpctrain topo map llama-70b cluster.nodes=64 --nodes h100.yaml --fabric rails:32"
)
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@inputs.job_options
@click.option("--ranks", is_flag=True, help="One line a rank.")
@click.option("--picture", type=PICTURE, help="Draw nodes, rails, ranks and bytes: .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def map_(
    recipe: str,
    overrides: tuple[str, ...],
    node_files: tuple[str, ...],
    profile: str | None,
    hosts: str | None,
    fabric_words: str | None,
    ranks: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Place the ranks of RECIPE: host, GPU, CPUs, NIC, rail and leaf of each, and bytes by kind of link.

    The order is the best one found; beside it are the bytes of the orders that Slurm gives by itself. Hosts are those
    of --hosts, else the first of the fabric, else made up.
    """
    from hpctrain.cli import topo_text as text

    with Console(stderr=True).status("placing ranks"):
        job = inputs.planned(recipe, overrides, node_files, profile, fabric_words, hosts)
    if picture:
        from hpctrain.cli.topo_picture import draw_table

        draw_table(job.table, job.table.fabric, f"{job.config.name}: {job.table.layout.describe()}", picture)
    if as_json:
        click.echo(json.dumps(text.table_plain(job.table, ranks), indent=2))
        return
    click.echo("\n".join(_known(job)))
    click.echo("\n".join(text.table_lines(job.table, ranks)))


@topo.command(epilog="\b\nExample:  hpctrain topo check n1.yaml n2.yaml topology.conf gres.conf")
@click.argument("files", nargs=-1)
@inputs.fabric_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(ctx: click.Context, files: tuple[str, ...], fabric_words: str | None, as_json: bool) -> None:
    """Look for what is amiss: nodes no job can use or unlike the others, switches, gres.conf.

    FILES are of any of these kinds, told apart by what is in them; without any, this machine is looked at.
    The exit status is 1 if something is amiss that has to be mended.
    """
    from dataclasses import asdict

    from hpctrain.cluster.checks import findings

    seen = inputs.inventory(files, fabric_words)
    found = findings(seen)
    amiss = [one for one in found if not one.note]
    if as_json:
        nodes = [node.name for node in seen.nodes]
        click.echo(json.dumps({"nodes": nodes, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        for one in sorted(found, key=lambda f: f.note):
            click.echo(f"{'note' if one.note else 'AMISS'}  {one.where}: {one.what}")
            click.echo(f"{'':{4 if one.note else 5}}  mend: {one.mend}")
        parts = [
            f"{len(seen.nodes)} nodes",
            *(["fabric"] if seen.fabric else []),
            *(["gres.conf"] if seen.gres else []),
        ]
        click.echo(f"{', '.join(parts)}: {f'{len(amiss)} amiss' if amiss else 'nothing amiss'}")
    if amiss:
        ctx.exit(1)


@topo.command(
    epilog="\b\nExample:  hpctrain topo explain 13 llama-70b cluster.nodes=64 --nodes h100.yaml --fabric rails:32"
)
@click.argument("what", metavar="RANK|NIC|GPU")
@click.argument("recipe", required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@inputs.job_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(
    what: str,
    recipe: str | None,
    overrides: tuple[str, ...],
    node_files: tuple[str, ...],
    profile: str | None,
    hosts: str | None,
    fabric_words: str | None,
    as_json: bool,
) -> None:
    """Say why a rank has its GPU, NIC and CPUs (13), what a NIC is for (mlx5_3), or what a GPU is near (gpu3).

    A rank needs its RECIPE. NICs and GPUs are those of --nodes, of the profile, or of this machine.
    """
    sentences = _explained(what, recipe, overrides, node_files, profile, hosts, fabric_words)
    click.echo(json.dumps(sentences, indent=2) if as_json else "\n".join(sentences))


@topo.command(epilog="\b\nExample:  srun --nodes=1 hpctrain topo capture -o h100.yaml")
@click.option("-o", "--output", type=Output("--output"), help="File.  [default: stdout]")
def capture(output: Path | None) -> None:
    """Write what this node is like as YAML, for show, map, check, and `node:` of a site profile.

    It reads /sys and /proc, NVML or nvidia-smi, and nvidia-smi topo -m. NICs keep the roles that were found for them;
    mend them in the file where they are wrong.
    """
    from hpctrain.cluster import nodefile

    with Console(stderr=True).status("reading this machine"):
        node = inputs.live()
    for said in node.problems:
        click.echo(f"warning: {said}", err=True)
    text = nodefile.dump(node)
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text)
    click.echo(f"{output}: {len(node.gpus)} GPUs, {len(node.nics)} NICs of which {len(node.rails)} rails")


def _known(job: Job) -> list[str]:
    """What the table was made of."""
    nodes = f"nodes: {' and '.join(job.nodes[0].sources)}" if job.nodes else "nodes: not known; GPU i is near rail i"
    if job.nodes and not job.nodes[0].gpus:
        nodes += ", which tells of no GPUs"
    switches = "fabric: not known; every rail is one switch"
    if job.fabric is not None:
        switches = f"fabric: {' and '.join(job.fabric.sources) or job.fabric.kind}"
    return [nodes, switches]


def _explained(
    what: str,
    recipe: str | None,
    overrides: tuple[str, ...],
    node_files: tuple[str, ...],
    profile: str | None,
    hosts: str | None,
    fabric_words: str | None,
) -> list[str]:
    from hpctrain.cli.topo_text import device
    from hpctrain.cluster import explain as because

    number = what.lower().removeprefix("rank")
    if number.isdecimal():
        if recipe is None:
            raise ConfigError(
                "topo explain", what, "a rank is one of a job", "name its recipe, or write gpu0 for a GPU"
            )
        job = inputs.planned(recipe, overrides, node_files, profile, fabric_words, hosts)
        if int(number) >= len(job.table):
            raise ConfigError("rank", int(number), f"the job has ranks 0 to {len(job.table) - 1}")
        return because.of_rank(job.table, int(number))
    if recipe:
        nodes = inputs.planned(recipe, overrides, node_files, profile, fabric_words, hosts).nodes
    else:
        nodes = inputs.nodes_of(node_files, profile)
    for node in nodes:
        gpu = device(node, what)
        if gpu is not None:
            return because.of_gpu(node, gpu)
        for nic in node.nics:
            if what in (nic.name, nic.interface, nic.pci):
                return because.of_nic(node, nic)
    names = [one for node in nodes[:1] for one in (*(g.key for g in node.gpus), *(n.name for n in node.nics))]
    raise ConfigError(
        "topo explain", what, f"there are {', '.join(names) or 'no GPUs and NICs here'}", "name one of them"
    )
