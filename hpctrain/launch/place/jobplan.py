"""What a submission leaves for its batch script, which says where ranks go once the nodes are known."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.affinity import unfit
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.node import Node
from hpctrain.cluster.ranktable import RankTable, rank_table
from hpctrain.cluster.read import read_text
from hpctrain.cluster.readfabric import fabric_in
from hpctrain.cluster.roles import assign_roles
from hpctrain.cluster.wiring import alike, gpu_rails
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.slurm.profile import LIVE, SLURM, Profile, Site
from hpctrain.launch.slurm.rules import Wanted
from hpctrain.layout.layout import Layout

PLAN = "plan.json"
"""In the folder of a submission, beside those of its jobs."""


@dataclass(frozen=True)
class JobPlan:
    """Of one submission.

    Attributes:
        configs: of the run; of a sweep, one for each element.
        profile: of the site.
        node, fabric: texts of the files that it names; "" for none.
    """

    configs: tuple[RunConfig, ...]
    profile: Profile
    node: str = ""
    fabric: str = ""

    @staticmethod
    def of(configs: tuple[RunConfig, ...], site: Site) -> JobPlan:
        """Of a submission to a site."""
        return JobPlan(configs, site.profile, site.node, site.fabric)

    def dump(self) -> str:
        return json.dumps(
            {
                "configs": [config.model_dump(mode="json") for config in self.configs],
                "profile": self.profile.model_dump(mode="json"),
                "node": self.node,
                "fabric": self.fabric,
            }
        )

    @staticmethod
    def read(folder: Path) -> JobPlan:
        """The plan in the folder of a submission."""
        tree: dict[str, Any] = json.loads((folder / PLAN).read_text())
        return JobPlan(
            tuple(map(RunConfig.model_validate, tree["configs"])),
            Profile.model_validate(tree["profile"]),
            tree["node"],
            tree["fabric"],
        )

    def wanted(self, arbitrary: bool = False) -> Wanted:
        """What its jobs want of Slurm."""
        return wanted(self.configs[0], self.profile, arbitrary)


_PLACES = re.compile(r"(--(distribution|ntasks|ntasks-per-node|nodes|nodelist|exclude|relative)\b|-[mnNwxr])")
"""Arguments of srun that put tasks somewhere."""


def orders(profile: Profile) -> bool:
    """Whether ranks are ordered and bound by what nodes and switches are like; not where srun_args place them."""
    return bool(profile.node or profile.fabric) and not any(map(_PLACES.match, profile.srun_args))


def wanted(config: RunConfig, profile: Profile, arbitrary: bool = False) -> Wanted:
    """What a job wants of Slurm."""
    return Wanted(
        config.cluster.nodes + profile.spares,
        profile.cpus_per_task,
        profile.segment,
        profile.switches,
        arbitrary,
        bind=profile.node is not None,
        whole=profile.exclusive,
        srun_args=profile.srun_args,
    )


def described(text: str, source: str) -> Node:
    """The node in a file of a profile, with roles for its NICs.

    Raises:
        ConfigError: the file is none, or describes a node that no job can use.
    """
    node = assign_roles(read_text(text, source))
    for why, mend in unfit(node) if node.gpus else ():
        raise ConfigError("cluster.profile", source, why, mend)
    return node


def tables(
    config: RunConfig,
    profile: Profile,
    hosts: list[str],
    node: Node | None,
    fabric: Fabric | None,
    own: list[str] | None = None,
) -> tuple[RankTable, RankTable]:
    """The table in the best order found, and with hosts as Slurm numbers them.

    Args:
        hosts: of the allocation, perhaps more than are needed.
        own: the same in the order in which Slurm gives them ranks; None: as they are.
    """
    per_node = config.cluster.gpus_per_node
    layout = Layout.of(config.parallel, config.cluster.nodes * per_node)
    shared = None if node is None else alike(node)
    rails = None
    if shared is not None and len(shared.gpus) >= per_node:
        rails = gpu_rails(shared)
    made = [
        rank_table(
            layout,
            names,
            shared,
            fabric,
            per_node=per_node,
            rails=rails,
            config=config,
            order=order,
            leaves=profile.rail_leaves,
            domains=profile.nvlink_domains,
        )
        for names, order in ((hosts, "best"), ((own or hosts)[: config.cluster.nodes], "hosts"))
    ]
    return made[0], made[1]


def foreseen(config: RunConfig, site: Site, fabric_text: str = "") -> RankTable | None:
    """The table of a job whose nodes are not known yet: as if it had the first ones of the fabric.

    Args:
        fabric_text: what Slurm says about its topology, where the profile asks it.

    Returns:
        None where the profile says nothing that could be planned with.
    """
    profile = site.profile
    node = described(site.node, f"{site.name}: {profile.node}") if site.node else None
    text = site.fabric or (fabric_text if profile.fabric == SLURM else "")
    fabric = fabric_in(text, profile.fabric or "") if text else None
    if node is None and fabric is None:
        return None
    count = config.cluster.nodes
    hosts = list(fabric.leaves)[:count] if fabric is not None else []
    if len(hosts) < count:
        if site.fabric and hosts:
            raise ConfigError("cluster.nodes", count, f"the fabric of the profile has {len(hosts)} hosts")
        fabric = None
        hosts = [f"node{i}" for i in range(count)]
    return tables(config, profile, hosts, node, fabric)[0]


def reads_live(profile: Profile) -> bool:
    """Whether the first node of the job says what all are like."""
    return profile.node == LIVE
