"""topology.conf, topology.yaml and `scontrol show topology`: real files, and what is wrong in them is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.readfabric import fabric_in, read_fabric
from hpctrain.cluster.slurmtopology import from_conf, from_yaml
from hpctrain.errors import ConfigError

DATA = Path(__file__).parent / "data/slurm_topology"

ANSWERS: dict[str, tuple[str, int, int, int, int]] = {
    # kind, hosts, leaves, switches with one above, domains
    "cyclecloud_block_topology.txt": ("block", 72, 4, 0, 4),
    "cyclecloud_slurm_illegal_block_topology_2.txt": ("block", 54, 3, 0, 3),
    "cyclecloud_slurm_topology.txt": ("tree", 16, 5, 5, 0),
    "cyclecloud_topology.txt": ("tree", 128, 40, 48, 0),
    "schedmd_133_1_testcase1_topology.conf": ("tree", 10000, 500, 528, 0),
    "schedmd_133_1_testcase2_topology.conf": ("tree", 10000, 500, 527, 0),
    "schedmd_133_1_testcase3_topology.conf": ("tree", 400, 20, 22, 0),
    "schedmd_133_1_testcase4_topology.conf": ("tree", 400, 20, 20, 0),
    "schedmd_133_1_testcase5_topology.conf": ("tree", 400, 20, 20, 0),
    "schedmd_133_1_testcase6_topology.conf": ("tree", 40, 5, 4, 0),
    "schedmd_backfill_topology.conf": ("block", 32, 8, 15, 8),
    "schedmd_check_topology.conf": ("block", 32, 8, 15, 8),
    "schedmd_manpage_topology.yaml": ("tree", 4, 2, 2, 0),
    "schedmd_topologyguide_tree1.conf": ("tree", 8, 4, 6, 0),
    "schedmd_topologyguide_tree2.conf": ("tree", 16, 4, 4, 0),
    "schedmd_topologyguide_tree3.conf": ("tree", 16, 4, 4, 0),
    "topograph_expected.slinky-dra-block.conf": ("block", 96, 12, 18, 12),
}
SAID: dict[str, str] = {
    "cyclecloud_slurm_illegal_block_topology_2.txt": "block4: commented out",
    "cyclecloud_topology.txt": "ibsw47 under ibsw14, .* goes round in a ring",
    "schedmd_133_1_testcase4_topology.conf": "grp10, grp11: no switch connects them",
    "schedmd_133_1_testcase5_topology.conf": "grp10, grp11: no switch connects them",
    "schedmd_133_1_testcase6_topology.conf": "spineA, spineB, leafC: no switch connects them",
    "schedmd_manpage_topology.yaml": "6 topologies; taken is topo1",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_real_files(name: str) -> None:
    fabric = read_fabric(DATA / name)
    leaves = {leaf for mine in fabric.leaves.values() for leaf in mine}
    found = (fabric.kind, len(fabric.leaves), len(leaves), len(fabric.parents), len(set(fabric.domains.values())))
    assert found == ANSWERS[name]
    assert len(fabric.problems) == (name in SAID)
    assert re.search(SAID.get(name, ""), " ".join(fabric.problems))
    assert set(ANSWERS) | {"cyclecloud_slurm_illegal_block_topology.txt"} == {p.name for p in DATA.iterdir()}


def test_nothing_but_comments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no switch and no block in it has nodes .block1, block2, block3 and 1 more"):
        read_fabric(DATA / "cyclecloud_slurm_illegal_block_topology.txt")


def test_unbalanced_tree_by_hand() -> None:
    fabric = read_fabric(DATA / "schedmd_133_1_testcase2_topology.conf")
    assert fabric.leaves["peta10019"] == ("leaf100",) and fabric.leaves["peta19999"] == ("leaf599",)
    assert [fabric.parents[s] for s in ("leaf349", "grp22", "im0", "grp23")] == [
        ("grp22",),
        ("im0",),
        ("root",),
        ("root",),
    ]
    assert "root" not in fabric.parents


def test_rings_are_cut_above() -> None:
    fabric = read_fabric(DATA / "cyclecloud_topology.txt")
    assert fabric.parents["ibsw14"] == ("ibsw47",) and "ibsw47" not in fabric.parents
    assert fabric.parents["ibsw3"] == ("ibsw14",)


def test_several_ways_up() -> None:
    fabric = read_fabric(DATA / "schedmd_topologyguide_tree2.conf")
    assert fabric.parents["s0"] == ("s4", "s5", "s6", "s7") and fabric.leaves["tux4"] == ("s1",)


def test_block_sizes_are_levels() -> None:
    fabric = read_fabric(DATA / "topograph_expected.slinky-dra-block.conf")
    assert fabric.domains["srv1101"] == "rack11" and fabric.leaves["srv6208"] == ("rack62",)
    assert fabric.parents["rack11"] == fabric.parents["rack12"] == ("blocks 1-2",)
    assert fabric.parents["blocks 1-2"] == fabric.parents["blocks 3-4"] == ("blocks 1-4",)
    assert fabric.parents["rack21"] == ("blocks 3-4",)


SCONTROL = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[2-3]
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=tux[0-3] Switches=s[0-1]
"""
SCONTROL_BLOCKS = """BlockName=b1 BlockIndex=0 Nodes=node[01-04] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=node[05-08] BlockSize=4
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-08] BlockSize=8
"""


def test_scontrol_show_topology() -> None:
    """There an upper switch lists all hosts below."""
    fabric = fabric_in(SCONTROL, "scontrol")
    assert fabric.leaves == {"tux0": ("s0",), "tux1": ("s0",), "tux2": ("s1",), "tux3": ("s1",)}
    assert fabric.parents == {"s0": ("s2",), "s1": ("s2",)} and fabric.problems == ()
    blocks = fabric_in(SCONTROL_BLOCKS, "scontrol")
    assert blocks.domains == {f"node0{i}": f"b{(i + 3) // 4}" for i in range(1, 9)} and blocks.problems == ()
    assert blocks.parents == {"b1": ("blocks 1-2",), "b2": ("blocks 1-2",)}


def test_how_a_file_may_be_written() -> None:
    text = (
        "switchname=DEFAULT linkspeed=100 # for all\n"
        'SWITCHNAME="a" NODES=n[1-2],\\\n   n3 LinkSpeed=200\r\nSwitchName=b Nodes=n4\n\n'
        "SwitchName=c Switches=a,b\nBroken\n"
    )
    fabric = from_conf(text)
    assert fabric.leaves == {"n1": ("a",), "n2": ("a",), "n3": ("a",), "n4": ("b",)}
    assert fabric.parents == {"a": ("c",), "b": ("c",)}
    assert "line 7 is neither a switch nor a block" in fabric.problems[-1]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "a is there twice; the first is taken"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\nSwitchName=c Switches=a,b", "n1: on more than one leaf switch"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,x", "x: named under Switches= but not defined"),
        ("SwitchName=a Nodes=n1\nSwitchName=b", "b has neither Switches nor Nodes"),
        ("SwitchName=a Nodes=n1,n[2-", "the last bracket is not closed"),
        ("SwitchName=a Nodes=n1 Switches=a", "a under a: goes round in a ring"),
        ("BlockName=a Nodes=n1\nBlockName=b Nodes=n1,n2", "n1: in the blocks a and b; the first is taken"),
        ("BlockName=a Nodes=n[1-4]\nBlockSizes=8", "a: fewer than the 8 nodes of the smallest block size"),
        ("BlockName=a Nodes=n[1-4]\nBlockSizes=4,12", "12 is not 4 times a power of two"),
        ("BlockName=a Nodes=n[1-4]\nBlockSizes=four", "sizes are numbers above 0"),
        ("BlockName=a Nodes=n[1-4]\nSwitchName=a Nodes=n1", "there are switches and blocks"),
    ],
)
def test_what_is_wrong_is_said(text: str, sentence: str) -> None:
    fabric = from_conf(text)
    assert any(sentence in problem for problem in fabric.problems), fabric.problems
    assert "n1" in fabric.leaves


def test_yaml() -> None:
    text = (DATA / "schedmd_manpage_topology.yaml").read_text()
    assert from_yaml(text).leaves["node03"] == ("s2",)
    assert from_yaml(text).parents == {"s1": ("sw_root",), "s2": ("sw_root",)}
    blocks = from_yaml(text, name="topo2")
    assert blocks.domains["node16"] == "b4" and blocks.parents["b4"] == ("blocks 1-4",)
    assert from_yaml(text, name="topo3").kind == from_yaml(text, name="topo3a").kind == "single"
    assert from_yaml(text, name="topo4").leaves["node09"] == ("ring1",)
    assert len(from_yaml(text, name="topo5").leaves) == 32
    with pytest.raises(ConfigError, match=r"topo9.*no such topology in it; topo1, topo2, topo3 and 3 more"):
        from_yaml(text, name="topo9")
    cut = text[: text.index("nodes: node[13-16]") + 9]  # nodes: no
    part = from_yaml(cut, name="topo2")
    assert "node12" in part.domains and "node13" not in part.domains and part.problems


@pytest.mark.parametrize(
    "text", ["", "hello\n", "- topology: a\n  tree: 3\n", "- topology: a\n", "- topology: [\n" * 50]
)
def test_what_is_no_fabric_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^fabric='"):
        fabric_in(text, "file")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_fabric(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_fabric(tmp_path)


SMALL = [(DATA / name).read_text() for name in ANSWERS if "testcase1" not in name and "testcase2" not in name]


@given(st.sampled_from([*SMALL, SCONTROL, SCONTROL_BLOCKS]), st.data())
@settings(max_examples=120, deadline=None)
def test_damage_gives_a_part_or_a_sentence(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.sampled_from([1, 5, len(text)]))
        text = (
            text[:at] + data.draw(st.text(st.sampled_from('[]=,\\#\n -:"{}&*n1\0é'), max_size=3)) + text[at + length :]
        )
    try:
        fabric = fabric_in(text, "damaged")
    except ConfigError:
        return
    assert isinstance(fabric, Fabric) and all(isinstance(p, str) and p for p in fabric.problems)
    assert fabric.leaves or fabric.kind == "single"


@pytest.mark.parametrize("code", ["utf-8-sig", "utf-16", "ascii"])
def test_files_of_any_encoding_with_many_blank_lines(tmp_path: Path, code: str) -> None:
    """The kind of a file is found in time that grows with its length, not with its cube."""
    for name, text in (
        ("topology.conf", "SwitchName=s0 Nodes=n[0-3]\n"),
        ("topology.yaml", "- topology: x\n  tree:\n    switches:\n      - switch: s0\n        nodes: n[0-3]\n"),
    ):
        path = tmp_path / name
        path.write_bytes((text + "\n" * 30000 + "# end\n").encode(code))
        assert list(read_fabric(path).leaves) == ["n0", "n1", "n2", "n3"]
    (tmp_path / "blank").write_bytes(("\n" * 30000 + "end\n").encode(code))
    with pytest.raises(ConfigError, match="neither"):
        read_fabric(tmp_path / "blank")
