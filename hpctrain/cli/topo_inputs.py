"""What `hpctrain topo` is told: nodes and fabric from files, a site profile or live; a recipe; a list of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.errors import ConfigError
from hpctrain.launch.slurm.profile import LIVE, SLURM

if TYPE_CHECKING:
    from hpctrain.cluster.fabric import Fabric
    from hpctrain.cluster.inventory import Inventory
    from hpctrain.cluster.node import Node
    from hpctrain.cluster.ranktable import RankTable
    from hpctrain.config.schema import RunConfig

F = TypeVar("F", bound=Callable[..., Any])
FABRIC_HELP = "A file, slurm (scontrol show topology), or one made up: single, tree:32, rails:32, rails:32:8, nvl72."


def fabric_option(command: F) -> F:
    """--fabric."""
    return click.option("--fabric", "fabric_words", metavar="FILE|slurm|KIND", help=FABRIC_HELP)(command)


def job_options(command: F) -> F:
    """Options of commands that place ranks."""
    for option in (
        click.option("--hosts", metavar="LIST", help="Of the allocation, as Slurm writes it: n[1-64]."),
        click.option("--profile", metavar="NAME|FILE", help="Site profile.  [default: cluster.profile]"),
        click.option(
            "--nodes",
            "node_files",
            metavar="FILE",
            multiple=True,
            help="What nodes are like, over the profile; or live.",
        ),
    ):
        command = option(command)
    return fabric_option(command)


@dataclass(frozen=True)
class Job:
    """A job as far as it is known: its table of ranks, and what that was made of."""

    config: RunConfig
    table: RankTable
    fabric: Fabric | None
    nodes: tuple[Node, ...]


def inventory(files: Sequence[str], fabric_words: str | None) -> Inventory:
    """What files say, or this machine where there are none; and the fabric."""
    from dataclasses import replace

    from hpctrain.cluster.inventory import Inventory, read_inventory

    seen = read_inventory(files) if files else Inventory(nodes=(live(),))
    if fabric_words:
        if seen.fabric is not None:
            raise ConfigError("--fabric", fabric_words, "one of the files is a fabric already", "give one")
        rails = max((len(node.rails) for node in seen.nodes), default=0)
        seen = replace(seen, fabric=fabric(fabric_words, [node.name for node in seen.nodes], rails or 8))
    return seen


def live() -> Node:
    """This machine, with roles for its NICs."""
    from hpctrain.cluster.read import read_live
    from hpctrain.cluster.roles import assign_roles

    return assign_roles(read_live())


def fabric(words: str, hosts: Sequence[str], rails: int) -> Fabric:
    """The fabric that --fabric names.

    Raises:
        ConfigError: it is none.
    """
    from pathlib import Path

    from hpctrain.cluster.fabrics import GENERATED, generated
    from hpctrain.cluster.readfabric import read_fabric

    if words == SLURM:
        return of_slurm()
    made = generated(words, hosts, rails)
    if made is None and not Path(words).exists():
        raise ConfigError("--fabric", words, "there is no such file", f"or write {SLURM}, {GENERATED}")
    return read_fabric(words) if made is None else made


def of_slurm() -> Fabric:
    """What Slurm says about its switches."""
    from hpctrain.cluster.readfabric import fabric_in
    from hpctrain.launch.slurm import client

    if not client.has_slurm():
        raise ConfigError("--fabric", SLURM, "there is no Slurm here: no sbatch on PATH", "give a file")
    return fabric_in(client.show_topology(), "scontrol show topology")


def planned(
    recipe: str,
    overrides: Sequence[str],
    node_files: Sequence[str],
    profile: str | None,
    fabric_words: str | None,
    hosts: str | None,
) -> Job:
    """The job of a recipe on the nodes, switches and hosts that were named.

    Raises:
        ConfigError: the recipe, a file or the list of hosts cannot be used.
    """
    from hpctrain.cluster.hostlist import expand
    from hpctrain.config.load import load
    from hpctrain.config.validate import validate

    config = load(recipe, [*overrides, *([f"cluster.profile={profile}"] if profile else [])])
    validate(config, config.cluster.nodes * config.cluster.gpus_per_node)
    seen = _nodes(config.cluster.profile, node_files)
    names = expand(hosts) if hosts else []
    names = names or ([node.name for node in seen] if len(seen) >= config.cluster.nodes > 1 else [])
    words = fabric_words or ""
    rails = max((len(node.rails) for node in seen), default=0) or config.cluster.gpus_per_node
    made_for = names or [f"node{i}" for i in range(config.cluster.nodes)]
    found = fabric(words, made_for, rails) if words else _fabric_of_profile(config)
    return Job(config, table(config, _hosts(config, names, found), seen, found), found, seen)


def table(config: RunConfig, hosts: Sequence[str], nodes: Sequence[Node], fabric: Fabric | None) -> RankTable:
    """The table in the best order; nodes by name where they have those of hosts, else all are like the first."""
    from hpctrain.cluster.ranktable import rank_table
    from hpctrain.cluster.wiring import alike, gpu_rails
    from hpctrain.launch.slurm.profile import site
    from hpctrain.layout.layout import Layout

    profile = site(config.cluster.profile).profile
    told: Any = {"leaves": profile.rail_leaves, "domains": profile.nvlink_domains}
    per_node = config.cluster.gpus_per_node
    layout = Layout.of(config.parallel, config.cluster.nodes * per_node)
    named = {node.name: node for node in nodes}
    if nodes and set(hosts) <= named.keys():
        each = {host: named[host] for host in hosts}
        wires = {host: gpu_rails(node) for host, node in each.items() if len(node.gpus) >= per_node}
        return rank_table(layout, hosts, each, fabric, per_node=per_node, rails=wires, config=config, **told)
    shared = alike(nodes[0]) if nodes else None
    one = gpu_rails(shared) if shared is not None and len(shared.gpus) >= per_node else None
    return rank_table(layout, hosts, shared, fabric, per_node=per_node, rails=one, config=config, **told)


def nodes_of(files: Sequence[str], profile: str | None) -> tuple[Node, ...]:
    """Nodes of files; else of a profile, if it is named and has one; else this machine."""
    if list(files) == [LIVE] or not (files or profile):
        return (live(),)
    found = _nodes(profile or "", files)
    if not found:
        raise ConfigError("--profile", profile, "it says nothing about nodes", "name a file with --nodes")
    return found


def _nodes(profile: str, files: Sequence[str]) -> tuple[Node, ...]:
    """Nodes of files, or live, or of the file that the profile names."""
    from hpctrain.cluster.inventory import read_inventory
    from hpctrain.launch.place.jobplan import described
    from hpctrain.launch.slurm.profile import site

    if list(files) == [LIVE]:
        return (live(),)
    if files:
        return read_inventory(files).nodes
    found = site(profile)
    if found.node:
        return (described(found.node, f"{found.name}: {found.profile.node}"),)
    return ()  # a profile that says live means nodes of a job, which this machine need not be like


def _fabric_of_profile(config: RunConfig) -> Fabric | None:
    from hpctrain.cluster.readfabric import fabric_in
    from hpctrain.launch.slurm import client
    from hpctrain.launch.slurm.profile import site

    found = site(config.cluster.profile)
    if found.fabric:
        return fabric_in(found.fabric, found.profile.fabric or "")
    if found.profile.fabric == SLURM and client.has_slurm():
        with suppress(client.SlurmError, ConfigError):  # no answer, or no switches: nothing is known
            return of_slurm()
    return None


def _hosts(config: RunConfig, names: Sequence[str], fabric: Fabric | None) -> list[str]:
    """Hosts of the job: those named, else the first of the fabric, else made up."""
    count = config.cluster.nodes
    if names:
        return list(names)
    if fabric is not None and fabric.leaves:
        listed = list(fabric.leaves)
        if len(listed) < count:
            raise ConfigError("cluster.nodes", count, f"the fabric has {len(listed)} hosts", "ask for fewer")
        return listed[:count]
    return [f"node{i}" for i in range(count)]
