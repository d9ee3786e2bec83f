"""Slurm's picture of a fabric, unfolded by what nodes are like: leaves of rails, and blocks that are NVLink domains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.fabrics import fat_tree, rail_optimized, topology_conf
from hpctrain.cluster.node import Gpu, Nic, Node
from hpctrain.cluster.ranktable import RankTable, rank_table
from hpctrain.cluster.slurmtopology import from_conf
from hpctrain.cluster.unfold import Domains, Leaves, spans_nodes, unfolded
from hpctrain.layout.layout import Layout

HOSTS = [f"n{i}" for i in range(8)]


def railed(gpus: int = 8, name: str = "NVIDIA H100 80GB HBM3", clique: str | None = None) -> Node:
    """A node with a rail for each GPU."""
    return Node(
        gpus=tuple(Gpu(i, name, clique=clique) for i in range(gpus)),
        nics=tuple(Nic(f"mlx5_{i}", role="rail") for i in range(gpus)),
    )


def slurm_tree() -> Fabric:
    """What slurmibtopology and topograph make of two units of four hosts on eight rails: one leaf a unit."""
    return from_conf(topology_conf(rail_optimized(HOSTS, 8, 4)))


def table(fabric: Fabric, node: Node | None, tp: int = 4, **told: object) -> RankTable:
    width = len(node.gpus) if node is not None else 8
    layout = Layout(dp=len(HOSTS) * width // tp, tp=tp)
    return rank_table(layout, HOSTS, node, fabric, per_node=width, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", ["auto", "separate"])
def test_a_slurm_tree_has_a_leaf_for_each_rail(leaves: Leaves) -> None:
    """With tp of four on eight GPUs Slurm's own order changes rails at every host, and the planner's nowhere: the same
    as on the fabric that the tree was made of."""
    true, found = table(rail_optimized(HOSTS, 8, 4), railed()), table(slurm_tree(), railed(), leaves=leaves)
    assert true.slurm["by name"].over("cross_rail") == found.slurm["by name"].over("cross_rail") > 0
    assert found.bytes.over("cross_rail") == 0
    assert [found.bytes.over(link) for link in ("nvlink", "leaf", "spine")] == [
        true.bytes.over(link) for link in ("nvlink", "leaf", "spine")
    ]
    assert all(place.leaf == f"leaf0-{place.node // 4}/rail{place.gpu}" for place in found), "hosts of a unit together"
    assert all(place.rail == place.gpu for place in found)
    guessed = any("taken to have leaf switches of their own" in said for said in found.problems)
    assert guessed == (leaves == "auto")


def test_a_leaf_that_all_rails_share_stays_one() -> None:
    shared = table(slurm_tree(), railed(), leaves="shared")
    assert shared.slurm["by name"].over("cross_rail") == 0 and shared[9].leaf == "leaf0-0"
    assert all(place.rail == place.gpu for place in shared), "the NIC of the GPU all the same"
    literal = table(fat_tree(HOSTS, 4), railed())
    assert literal.slurm["by name"].over("cross_rail") == 0, "a fat tree that is made up is meant as it is"
    single = table(slurm_tree(), replace(railed(), nics=(Nic("mlx5_0", role="rail"),)))
    assert single[9].leaf == "leaf0-0" and single.problems == ()


def test_rails_of_nodes_that_are_not_known() -> None:
    """Before there is an allocation a site can say it: GPU i is near rail i."""
    told = table(slurm_tree(), None, leaves="separate")
    assert all(place.leaf.endswith(f"/rail{place.gpu}") for place in told)
    assert table(slurm_tree(), None)[9].leaf == "leaf0-0"


BLOCKS = "BlockName=b0 Nodes=n[0-3]\nBlockName=b1 Nodes=n[4-7]\nBlockSizes=4\n"
CLIQUE = "5e797fc6-0f46-421a-8724-0e102c0f723c/1"


@pytest.mark.parametrize(
    ("node", "domains", "linked"),
    [
        (railed(4, "NVIDIA A100-SXM4-80GB"), "auto", False),  # four GPUs a node, and blocks that are racks of switches
        (railed(4, "NVIDIA GB200"), "auto", True),
        (railed(4, "NVIDIA GB300", clique=CLIQUE), "auto", True),
        (railed(4, "NVIDIA GB200", clique=""), "auto", False),  # a board of four, as NVML says
        (railed(8, "NVIDIA B200", clique=CLIQUE), "auto", True),
        (railed(4, "NVIDIA GB200"), "hosts", False),
        (railed(4, "NVIDIA A100-SXM4-80GB"), "blocks", True),
    ],
)
def test_a_block_is_an_nvlink_domain_if_gpus_say_so(node: Node, domains: Domains, linked: bool) -> None:
    found = table(from_conf(BLOCKS), node, tp=2 * len(node.gpus), domains=domains)
    tp = {link for link, n in found.bytes.by_axis["tp"].items() if n}
    assert (tp == {"nvlink"}) == linked
    assert any("blocks are not taken for NVLink domains" in s for s in found.problems) == (
        not linked and domains == "auto"
    )


def test_of_nodes_that_are_not_known_a_block_is_none_unless_the_site_says_so() -> None:
    assert "what GPUs the nodes have is not known" in str(table(from_conf(BLOCKS), None, tp=16).problems)
    linked = table(from_conf(BLOCKS), None, tp=16, domains="blocks")
    assert {link for link, n in linked.bytes.by_axis["tp"].items() if n} == {"nvlink"}


def test_nvml_of_each_node_goes_before_blocks() -> None:
    """n3 is in block b0, and in the clique of the other rack."""
    nodes = {host: railed(4, "NVIDIA GB200", f"rack/{int(i > 2)}") for i, host in enumerate(HOSTS)}
    wired = unfolded(from_conf(BLOCKS), nodes)
    assert wired is not None
    assert wired.domains["n2"] != wired.domains["n3"] == wired.domains["n4"]
    assert any("b0: blocks of several NVLink domains by NVML" in said for said in wired.problems)
    bare = unfolded(None, nodes)
    assert bare is not None and len(set(bare.domains.values())) == 2
    assert unfolded(None, railed()) is None and unfolded(None, None) is None


def test_where_nvlink_leaves_a_node() -> None:
    assert not spans_nodes(Node()) and not spans_nodes(railed(1, "NVIDIA GH200 480GB"))
    assert spans_nodes(railed(4, "NVIDIA GB200")) and not spans_nodes(railed(4, "NVIDIA GB200", ""))
