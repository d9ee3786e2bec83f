"""Generated fabrics, and fabrics written as topology.conf and read again."""

from __future__ import annotations

import pytest

from hpctrain.cluster import fabrics
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.ranktable import rank_table
from hpctrain.cluster.slurmtopology import from_conf
from hpctrain.cluster.switches import uneven, units
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout

HOSTS = [f"n{i:03d}" for i in range(96)]


def heights(fabric: Fabric) -> set[int]:
    """Levels of switches over hosts."""
    found = set()
    for mine in fabric.leaves.values():
        layer, level = set(mine), 0
        while layer:
            layer, level = {p for s in layer for p in fabric.parents.get(s, ())}, level + 1
        found.add(level)
    return found


def test_single() -> None:
    assert fabrics.single(HOSTS).leaves["n005"] == ("switch",) and heights(fabrics.single(HOSTS)) == {1}
    assert fabrics.single(HOSTS, 2).leaves["n005"] == ("switch0", "switch1")


def test_fat_trees() -> None:
    two = fabrics.fat_tree(HOSTS, 16, oversubscription=4)
    assert heights(two) == {2} and len(two.parents["leaf0"]) == 4 and two.leaves["n095"] == ("leaf5",)
    three = fabrics.fat_tree(HOSTS, 8, leaves_per_pod=4)
    assert heights(three) == {3} and len(three.parents["leaf11"]) == 8
    assert not set(three.parents["leaf3"]) & set(three.parents["leaf4"])
    assert set(three.parents["pod0spine1"]) == set(three.parents["pod2spine1"]) == {"core1"}


def test_rail_optimized() -> None:
    two = fabrics.rail_optimized(HOSTS, 8, 32)
    assert two.rails == 8 and heights(two) == {2} and two.leaves["n032"][7] == "leaf7-1"
    assert [len(unit) for unit in units(two.leaves)] == [32, 32, 32] and uneven(two.leaves) == []
    three = fabrics.rail_optimized(HOSTS, 4, 8, 4)
    assert heights(three) == {3} and three.parents["leaf2-5"] == ("spine2-1",)
    assert three.parents["spine2-1"] == ("core2",)


def test_dragonfly() -> None:
    fabric = fabrics.dragonfly(HOSTS, 4, 6)
    assert fabric.leaves["n027"] == ("router6",) and fabric.parents["router6"] == ("group1",)
    assert fabric.parents["group3"] == ("global",) and heights(fabric) == {3}


def test_racks() -> None:
    fabric = fabrics.nvl72(HOSTS)
    assert fabric.domains["n017"] == "rack0" and fabric.domains["n018"] == "rack1" and fabric.rails == 4


@pytest.mark.parametrize(
    "fabric",
    [
        fabrics.single(HOSTS, 2),
        fabrics.fat_tree(HOSTS, 16),
        fabrics.fat_tree(HOSTS, 8, leaves_per_pod=4),
        fabrics.rail_optimized(HOSTS, 8, 32),
        fabrics.rail_optimized(HOSTS, 4, 8, 4),
        fabrics.dragonfly(HOSTS, 4, 6),
    ],
    ids=lambda fabric: f"{fabric.sources[0]} {fabric.rails}",
)
def test_written_as_a_tree_and_read(fabric: Fabric) -> None:
    """The rails of a unit are one leaf there; levels stay."""
    again = from_conf(fabrics.topology_conf(fabric, "tree"))
    assert again.problems == () and again.rails == 1
    assert sorted(map(sorted, units(again.leaves))) == sorted(map(sorted, units(fabric.leaves)))
    assert heights(again) == heights(fabric)
    near = [p for p in again.parents.values() if len(set(p)) != 1]
    assert near == []


def test_written_as_blocks_and_read() -> None:
    fabric = fabrics.nvl72(HOSTS)
    text = fabrics.topology_conf(fabric)
    assert text.splitlines()[0] == "BlockName=rack0 Nodes=n[000-017]" and text.splitlines()[-1] == "BlockSizes=6"
    assert from_conf(text).domains == fabric.domains
    with pytest.raises(ConfigError, match="a fabric with NVLink domains; write it as tree"):
        fabrics.topology_conf(fabrics.single(HOSTS), "block")
    with pytest.raises(ConfigError, match="tree or block"):
        fabrics.topology_conf(fabric, "ring")


def test_numbers_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"fabric.unit=0: a number above 0"):
        fabrics.rail_optimized(HOSTS, unit=0)


def test_uneven_rails_are_told() -> None:
    leaves = {"a": ("l0", "l1"), "b": ("l0", ""), "c": ("l0", "x1")}
    assert uneven(leaves) == [
        "rail 1: b of the hosts around a without a port on it",
        "rail 1: the hosts around a are on the leaves l1, x1",
    ]


def test_racks_hold_tensor_parallelism_over_nodes() -> None:
    fabric = fabrics.nvl72([f"t{i:02d}" for i in range(36)])
    table = rank_table(Layout(dp=16, tp=8), list(fabric.leaves), None, fabric, per_node=4)
    links = table.bytes.by_axis
    assert links["tp"]["nvlink"] == sum(links["tp"].values()) and table.bytes.over("cross_rail") == 0
