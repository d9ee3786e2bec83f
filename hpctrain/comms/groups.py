"""Which ranks talk to each other at the same time: the world, axes of a layout, rails, nodes, leaves, pairs. Plain.

A `Groups` is disjoint groups that run at once, as the groups of an axis do in a training. Ranks in none are idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster.fabric import Fabric
from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.health.judge import rounds as tournament
from hpctrain.layout.layout import AXES, EXPERT_AXES, Layout, Ranks

NAMED = ("world", "node", "rail", "leaf")


@dataclass(frozen=True)
class Where:
    """Where a rank runs: host, its place among the ranks of it, process, and what it computes on."""

    host: str
    local_rank: int
    pid: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Groups:
    """Groups that run at once."""

    name: str
    ranks: tuple[Ranks, ...]


def layout_of(text: str, world: int) -> Layout:
    """The layout of `tp=8,dp=16`; dp is what is left, and checked if it is given.

    Raises:
        ConfigError: no such axis, or it does not fit the ranks.
    """
    given: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        name = key.strip().removeprefix("parallel.")
        if not equals or not value.strip().isdigit() or name not in ("tp", "pp", "dp", "cp", "ep", "etp"):
            raise ConfigError("--layout", text, "must be AXIS=RANKS with commas between, of tp, pp, dp, cp, ep, etp")
        given[name] = int(value)
    dp = given.pop("dp", None)
    layout = Layout.of(ParallelConfig.model_validate(given), world)
    if dp is not None and layout.dp != dp:
        raise ConfigError("--layout", text, f"leaves dp={layout.dp} to {world} ranks", "leave dp out, or change ranks")
    return layout


def groups(names: Sequence[str], where: Sequence[Where], layout: Layout, fabric: Fabric | None = None) -> list[Groups]:
    """The groups of the given names, those of one rank left out.

    Args:
        names: `world`, `node`, `rail`, `leaf`, an axis, axes with + between, `axes` (all of more than one rank), or
            ranks with commas between, groups with `/`.
        where: of every rank.
        layout: of the axes.
        fabric: for leaves.

    Raises:
        ConfigError: no such name, or no group of two ranks.
    """
    found: list[Groups] = []
    for name in names:
        if name == "axes":
            wide = [axis for axis in (*AXES, *EXPERT_AXES[1:]) if getattr(layout, axis) > 1]
            wide = [a for a in wide if a != "edp" or layout.ep * layout.etp > 1]
            found += [Groups(axis, layout.groups(axis)) for axis in wide]
        else:
            found.append(Groups(name, _of(name, where, layout, fabric)))
    kept = [Groups(g.name, tuple(ranks for ranks in g.ranks if len(ranks) > 1)) for g in found]
    for group in kept:
        if not group.ranks and len(where) > 1:
            raise ConfigError("--groups", group.name, "has one rank in each group", "name other groups, or more ranks")
    return kept if len(where) > 1 else found


def _of(name: str, where: Sequence[Where], layout: Layout, fabric: Fabric | None) -> tuple[Ranks, ...]:
    everybody = range(len(where))
    if name == "world":
        return (tuple(everybody),)
    if name == "node":
        return _alike([at.host for at in where])
    if name == "rail":
        return _alike([at.local_rank for at in where])
    if name == "leaf":
        if fabric is None:
            raise ConfigError("--groups", name, "needs a fabric", "name its file with --fabric")
        return _alike([_leaf(at, fabric) for at in where])
    axes = name.split("+")
    if all(axis in AXES for axis in axes) or all(axis in EXPERT_AXES for axis in axes):
        return layout.groups(*axes)
    if name.replace(",", "").replace("/", "").isdigit():
        made = tuple(tuple(sorted({int(r) for r in part.split(",") if r})) for part in name.split("/"))
        ranks = [rank for part in made for rank in part]
        if len(set(ranks)) == len(ranks) and all(rank in everybody for rank in ranks):
            return made
        raise ConfigError("--groups", name, f"must name each of the ranks 0 to {len(where) - 1} at most once")
    known = ", ".join((*NAMED, "axes", *AXES, *EXPERT_AXES[1:]))
    raise ConfigError("--groups", name, f"must be one of {known}, axes with + between, or ranks as in 0,1/2,3")


def _leaf(at: Where, fabric: Fabric) -> str:
    leaves = fabric.leaves.get(at.host) or fabric.leaves.get(at.host.split(".")[0])
    if not leaves:
        raise ConfigError(
            "--fabric", at.host, "is a host that the fabric does not know", "give the fabric of this cluster"
        )
    return leaves[at.local_rank % len(leaves)]


def _alike(labels: Sequence[object]) -> tuple[Ranks, ...]:
    """Ranks of equal labels together, in the order of their first ranks."""
    found: dict[object, list[int]] = {}
    for rank, label in enumerate(labels):
        found.setdefault(label, []).append(rank)
    return tuple(map(tuple, found.values()))


def rounds(members: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """All pairs, in rounds of disjoint ones: of n members n - 1 rounds, n if n is odd."""
    return [
        tuple((members[a], members[b]) for a, b in enumerate(partners) if b is not None and a < b)
        for partners in tournament(len(members), len(members))
    ]
