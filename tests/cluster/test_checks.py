"""What is amiss with nodes, switches and gres.conf."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.affinity import differences
from hpctrain.cluster.checks import findings
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.fabrics import generated
from hpctrain.cluster.gres import looks_like as looks_like_gres
from hpctrain.cluster.gres import read_gres
from hpctrain.cluster.inventory import Inventory, distinct, read_inventory
from hpctrain.cluster.node import Node
from hpctrain.cluster.read import read_text
from hpctrain.cluster.readfabric import looks_like as looks_like_fabric
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import ConfigError
from tests.cluster.machines import railed

DATA = Path(__file__).parent / "data"
LEGEND = [f"mlx5_{i}" for i in range(8)]


def node(name: str, **more: object) -> Node:
    return replace(assign_roles(read_text(railed(**{"legend": LEGEND, **more}).tabbed())), name=name)  # type: ignore[arg-type]


def amiss(seen: Inventory, note: bool = False) -> list[tuple[str, str]]:
    return [(one.where, one.what) for one in findings(seen) if one.note == note]


def test_nothing_is_amiss_with_nodes_alike() -> None:
    assert findings(Inventory((node("a"), node("b")), generated("rails:2", ["a", "b"]))) == []


def test_names_of_devices_may_differ() -> None:
    """As on Oracle's H100 images: mlx5_0 here, mlx5_18 there."""
    other = node("c", legend=[f"mlx5_{i + 18}" for i in range(8)])
    seen = Inventory((node("a"), node("b"), other))
    assert amiss(seen) == []
    assert amiss(seen, note=True) == [
        ("c", "names of rails: 0: mlx5_18, most have mlx5_0; 1: mlx5_19, most have mlx5_1; and 6 more")
    ]


def test_a_rail_that_is_down_and_a_gpu_that_is_gone() -> None:
    down = node("b")
    down = replace(down, nics=(replace(down.nics[0], state="down", role="unknown", why=""), *down.nics[1:]))
    gone = node("c")
    gone = replace(gone, gpus=gone.gpus[:7])
    said = amiss(Inventory((node("a"), node("d"), node("e"), down, gone)))
    assert ("c", "GPUs: 7, most have 8") in said
    assert ("b", "rails: 7, most have 8") in said


def test_the_rails_of_a_unit_hold_the_same_hosts() -> None:
    """Slurm's tree merges them into one leaf, which is wrong otherwise."""
    fabric = Fabric({"a": ("l0", "l1"), "b": ("l0", "l1"), "c": ("l0", "l9")}, sources=("file",))
    assert amiss(Inventory(fabric=fabric)) == [("file", "rail 1: the hosts around a are on the leaves l1, l9")]


def test_ports_of_a_node_and_of_the_fabric() -> None:
    fabric = Fabric({"a": (*(f"l{i}" for i in range(7)), "")}, sources=("file",))
    assert ("a", "it has 8 rails, and the fabric 7 ports of it") in amiss(Inventory((node("a"),), fabric))


def test_gres_conf() -> None:
    conf = read_gres("NodeName=a Name=gpu File=/dev/nvidia[0-7] Cores=0-3\nNodeName=a Name=gpu Count=x\n")
    said = amiss(Inventory((node("a"),), gres=conf))
    assert said[0] == ("gres.conf", "line 2: Count=x is no number")
    said = amiss(Inventory((node("a"),), gres=read_gres("NodeName=a Name=gpu File=/dev/nvidia[0-7] Cores=0-3\n")))
    assert said == [("a", "gres.conf puts other GPUs of a near the same cores than the machine does")]


def test_what_differs_is_said_once_and_short() -> None:
    """Of a table only the rows that differ."""
    far = node("c", affinity=lambda g: ("0-55", "0", "N/A") if g != 7 else ("56-111", "1", "N/A"))
    renamed = node("d", legend=["mlx5_1", "mlx5_0", *LEGEND[2:]])
    found = differences([node("a"), node("b"), far, renamed])
    what = "NICs and NUMA node of GPUs"
    words = [f"gpu{g}: PIX rail {g} NUMA 0, most have PIX rail {g} NUMA 1" for g in (4, 5)]
    assert found["c"] == {what: f"{what}: {words[0]}; {words[1]}; and 1 more"}
    assert found["d"] == {"names of rails": "names of rails: 0: mlx5_1, most have mlx5_0; 1: mlx5_0, most have mlx5_1"}


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.*")), ids=lambda path: path.name)
def test_files_are_told_apart(path: Path) -> None:
    """No file of a node is taken for a fabric or gres.conf, and the other way round."""
    kind = path.parent.name
    if kind in ("data", "smi_misc") or path.name in ("topograph_example_truth.csv", "superbench_ibstat.txt"):
        return
    if path.suffix == ".gz":
        return
    text = path.read_text(errors="replace")
    assert looks_like_fabric(text) == (kind in ("slurm_topology", "ibnetdiscover"))
    assert looks_like_gres(text) == (kind == "gres_conf")


def test_files_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "n1.txt").write_text(railed(legend=LEGEND).tabbed())
    (tmp_path / "topology.conf").write_text("SwitchName=s0 Nodes=n[1-2]\n")
    (tmp_path / "gres.conf").write_text("NodeName=n1 Name=gpu Count=8\n")
    seen = read_inventory([str(path) for path in sorted(tmp_path.iterdir())])
    assert [one.name for one in seen.nodes] == ["n1"] and len(seen.nodes[0].rails) == 8
    assert seen.fabric is not None and list(seen.fabric.leaves) == ["n1", "n2"]
    assert seen.gres is not None and seen.gres.lines[0].count == 8
    with pytest.raises(ConfigError, match="two of them are fabrics"):
        read_inventory([str(tmp_path / "topology.conf")] * 2)


def test_nodes_have_names_of_their_own() -> None:
    assert [one.name for one in distinct([Node("a"), Node("a"), Node("b"), Node("a")])] == ["a", "a#2", "b", "a#3"]


@pytest.mark.parametrize("words", ["", "topology.conf", "railsomething:3"])
def test_no_words_for_a_fabric(words: str) -> None:
    assert generated(words, ["a"]) is None


def test_words_for_fabrics() -> None:
    hosts = [f"n{i}" for i in range(8)]

    def leaves(words: str) -> int:
        made = generated(words, hosts, 4)
        assert made is not None
        return len({leaf for mine in made.leaves.values() for leaf in mine})

    assert [leaves(w) for w in ("single", "tree:2", "tree:2:2", "rails:2", "rails:4:1", "nvl72")] == [4, 4, 4, 16, 8, 4]
    assert leaves("dragonfly:2:2") == 4
