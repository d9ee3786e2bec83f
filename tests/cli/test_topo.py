"""`hpctrain topo`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.cli.topo_picture import box_of_host, shown
from hpctrain.cli.topo_text import kinds, size
from hpctrain.cluster.fabrics import rail_optimized
from hpctrain.cluster.node import Gpu, Node
from hpctrain.cluster.ranktable import rank_table
from hpctrain.cluster.read import read_node
from hpctrain.layout.layout import Layout
from tests.cluster.machines import railed

DATA = Path(__file__).parents[1] / "cluster" / "data"
REVERSED = DATA / "smi_topo" / "nccl1453_h100_8gpu_9nic_reversed.txt"
"""GPU i is near NIC 8-i (NVIDIA/nccl#1453)."""
JOB = ["llama-70b", "cluster.nodes=4", "cluster.gpus_per_node=8", "parallel.tp=4"]


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, ["topo", *map(str, words)])


def run(*words: object, code: int = 0) -> str:
    result = invoke(*words)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Eight GPUs, each behind one bridge with the NIC of the other end of the row; a ninth NIC far from all."""
    path = tmp_path / "gpu1.txt"
    legend = [f"mlx5_{i}" for i in range(9)]
    path.write_text(railed(extra=1, order=range(7, -1, -1), legend=legend).tabbed())
    return path


def test_show_says_what_every_nic_is_for(node: Path) -> None:
    lines = run("show", node).splitlines()
    assert lines[0] == "gpu1: 8 GPUs, 9 NICs of which 8 rails, 2 NUMA nodes"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["gpu0"][1:] == ["0", "0-55,112-167", "18", "x", "7", "PIX", "mlx5_7", "mlx5_7"]
    assert rows["gpu7"][-1] == "mlx5_0"
    assert rows["mlx5_7"][:6] == ["mlx5_7", "rail", "0", "PIX", "to", "gpu0"]
    assert rows["mlx5_8"][1] == "unknown"


def test_show_as_json_can_be_read_back_as_a_node(node: Path, tmp_path: Path) -> None:
    tree = json.loads(run("show", node, "--fabric", "rails:4", "--json"))
    (found,) = tree["nodes"]
    assert [entry["nccl_takes"] for entry in found["near"]] == [[f"mlx5_{i}"] for i in range(7, -1, -1)]
    assert tree["fabric"]["leaves"] == {"gpu1": [f"leaf{r}-0" for r in range(8)]}
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({k: v for k, v in found.items() if k not in ("near", "rails")}, sort_keys=False))
    assert [nic.name for nic in read_node(again).rails] == found["rails"] == [f"mlx5_{i}" for i in range(7, -1, -1)]


def test_nodes_that_are_alike_are_shown_once(node: Path, tmp_path: Path) -> None:
    other = tmp_path / "gpu2.txt"
    other.write_text(node.read_text())
    third = tmp_path / "gpu3.txt"
    third.write_text(railed(extra=1, legend=[f"mlx5_{i}" for i in range(9)]).tabbed())
    lines = run("show", node, other, third).splitlines()
    heads = [line for line in lines if "NICs of which" in line]
    assert [head.split(":")[0] for head in heads] == ["gpu[1-2]", "gpu3"]
    assert "! gpu3: names of rails: 0: mlx5_0, most have mlx5_7; 1: mlx5_1, most have mlx5_6; and 6 more" in lines


def test_own_facts_make_no_kinds() -> None:
    made = [Node(f"n{i}", gpus=(Gpu(0, "X", uuid=f"GPU-{i}"),), sources=(f"file {i}",)) for i in range(2)]
    assert [names for names, _ in kinds(made)] == [["n0", "n1"]]
    assert len(kinds([*made, Node("n2", gpus=(Gpu(0, "Y"),))])) == 2


def test_readings_of_one_node_are_merged(node: Path) -> None:
    """A second reading of the same node that says otherwise is contradicted, not shown as a node."""
    other = node.with_name("b.txt")
    other.write_text(node.read_text().replace("56-111,168-223\t1", "56-111,168-223\t0"))
    lines = run("show", f"{node}+{other}").splitlines()
    assert [line for line in lines if "NICs of which" in line] == [
        "gpu1: 8 GPUs, 9 NICs of which 8 rails, 2 NUMA nodes"
    ]
    assert any(line.startswith("! ") and "NUMA" in line for line in lines)


def test_map_places_ranks_where_the_nodes_say(node: Path) -> None:
    tree = json.loads(
        run("map", *JOB, "--nodes", node, "--fabric", "rails:2", "--hosts", "n[3-6]", "--ranks", "--json")
    )
    assert tree["hosts"] == ["n3", "n4", "n5", "n6"]
    first = tree["ranks"][0]
    assert (first["host"], first["gpu"], first["nic"], first["rail"], first["leaf"]) == (
        "n3",
        0,
        "mlx5_7",
        0,
        "leaf0-0",
    )
    assert tree["ranks"][7]["nic"] == "mlx5_0" and tree["ranks"][7]["cpus"] == "98-111,210-223"
    over = {name: sum(row["cross_rail"] for row in axes.values()) for name, axes in tree["bytes"].items()}
    assert over["this order"] == 0 and over["by name"] > 1e14
    assert sum(tree["bytes"]["this order"]["tp"].values()) == tree["bytes"]["this order"]["tp"]["nvlink"]


def test_map_in_lines(node: Path) -> None:
    lines = run("map", *JOB, "--nodes", node, "--fabric", "rails:2").splitlines()
    assert lines[:3] == [
        "nodes: nvidia-smi topo (gpu1.txt)",
        "fabric: generated: rail-optimized",
        "32 ranks, dp=8 tp=4 on 4 hosts",
    ]
    hosts = [line.split()[:2] for line in lines if line.startswith("node")][1:]
    assert hosts == [["node0", "0-7"], ["node1", "8-15"], ["node2", "16-23"], ["node3", "24-31"]]
    (cross,) = (line for line in lines if line.startswith("cross_rail"))
    assert re.fullmatch(r"cross_rail +0 B +(\d+) TB +\1 TB", cross)
    (last,) = (line for line in lines if line.startswith("of these leave"))
    assert "63.2 TB in this order, 126 TB in Slurm by name (2 x)" in last


def test_many_hosts_have_a_line_a_unit() -> None:
    words = ["llama-70b", "cluster.nodes=64", "cluster.gpus_per_node=8", "parallel.tp=8"]
    lines = run("map", *words, "--fabric", "rails:32").splitlines()
    rows = [line.split()[:2] for line in lines if line.startswith("node[")]
    assert rows == [["node[0-31]", "0-255"], ["node[32-63]", "256-511"]]


def test_map_refuses_what_training_would_refuse() -> None:
    result = invoke("map", "gpt-tiny", "cluster.nodes=4", "cluster.gpus_per_node=2", "train.global_batch=4")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: train.global_batch=4: must be a multiple of")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fabric", "rails"], "fabric='rails': must be like single, tree:32"),
        (["--fabric", "tree:0"], "fabric='tree:0': must be like"),
        (["--fabric", "nosuch"], "--fabric='nosuch': there is no such file"),
        (["--nodes", "nosuch.txt"], "nosuch.txt"),
        (["--hosts", "n[1-2"], "hostlist='n[1-2': the last bracket is not closed"),
        (["--hosts", "n1"], "cluster.nodes=1: 32 ranks do not fit on 1 nodes"),
        (["--picture", "x.bmp"], "--picture='x.bmp': a picture's name ends in .png, .svg or .pdf"),
        (["--picture", "nosuch/x.png"], "--picture='nosuch/x.png': its folder must be there"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(words: list[str], said: str) -> None:
    result = invoke("map", *JOB, *words)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_check_finds_nothing_on_nodes_that_are_alike(node: Path, tmp_path: Path) -> None:
    other = tmp_path / "gpu2.txt"
    other.write_text(node.read_text())
    fabric = tmp_path / "topology.conf"
    fabric.write_text("SwitchName=s0 Nodes=gpu[1-2]\n")
    gres = tmp_path / "gres.conf"
    gres.write_text("NodeName=gpu[1-2] Name=gpu File=/dev/nvidia[0-7]\n")
    assert run("check", node, other, fabric, gres) == "2 nodes, fabric, gres.conf: nothing amiss\n"


def test_check_says_what_where_and_how_to_mend(node: Path, tmp_path: Path) -> None:
    broken = tmp_path / "gpu2.txt"
    links = lambda a, b: "SYS" if 2 in (a, b) else "NV18"  # noqa: E731
    broken.write_text(
        railed(extra=1, order=range(7, -1, -1), legend=[f"mlx5_{i}" for i in range(9)], link=links).tabbed()
    )
    third = tmp_path / "gpu3.txt"
    third.write_text(node.read_text())
    fabric = tmp_path / "topology.conf"
    fabric.write_text("SwitchName=s0 Nodes=gpu[1-2]\n")
    gres = tmp_path / "gres.conf"
    gres.write_text("NodeName=gpu1 Name=gpu File=/dev/nvidia[0-6]\n")
    tree = json.loads(run("check", node, broken, third, fabric, gres, "--json", code=1))
    found = [(one["where"], one["what"]) for one in tree["findings"] if not one["note"]]
    assert ("gpu2", "broken NVLink on gpu2: none to others, which have 18 between them") in found
    assert ("gpu2", "NVLinks: 7 x 0 21 x 18, most have 28 x 18") in found
    assert ("gpu3", "no switch of the fabric has it") in found
    assert ("gpu1", "gres.conf gives gpu1 7 GPUs, and it has 8") in found
    assert len(found) == 4 and all(one["mend"] for one in tree["findings"])
    lines = run("check", node, broken, third, fabric, gres, code=1).splitlines()
    assert lines[-1] == "3 nodes, fabric, gres.conf: 4 amiss"
    assert lines[0].startswith("AMISS  gpu2: broken NVLink") and lines[1].startswith("       mend: leave the node out")


def test_explain_a_rank(node: Path) -> None:
    words = ["--nodes", node, "--fabric", "rails:2"]
    assert run("explain", 5, *JOB, *words).splitlines() == [
        "Rank 5 of 32 is dp 1 of 8, tp 1 of 4; on node0 it is local rank 5 of 8.",
        "It computes on gpu5, known by its number alone.",
        "It sends by mlx5_2 (rail 5), which is behind at most one PCIe bridge (PIX).",
        "The next nearest rails, mlx5_3, mlx5_1 and mlx5_0, are on the same NUMA node (NODE).",
        "mlx5_2 is a rail by these signals: PIX to gpu5.",
        "It runs on CPUs 70-83,182-195, its part of those of NUMA node 1 (56-111,168-223), which 4 ranks share.",
        "Rail 5 of node0 hangs on leaf5-0, which 1 other hosts of this job have too.",
        "Next on dp is rank 9 on node1, over one leaf switch.",
        "Next on tp is rank 6 on node0, over NVLink.",
    ]
    crossing = run("explain", 13, *JOB, *words)
    assert "Next on dp is rank 17 on node2, over a switch above leaves." in crossing
    assert "It computes on gpu1, known by its number alone, as the order of ranks on the node is not that" in crossing


def test_explain_a_nic_and_a_gpu(node: Path) -> None:
    rail = run("explain", "mlx5_7", "--nodes", node).splitlines()
    assert rail[1:3] == ["It is rail 0: PIX to gpu0.", "gpu0 is behind at most one PCIe bridge (PIX)."]
    assert rail[-1] == "NCCL gives it to gpu0."
    far = run("explain", "mlx5_8", "--nodes", node).splitlines()
    assert far[1].startswith("What it is for cannot be told: ")
    assert far[-1] == "It is not in NCCL_IB_HCA: no rank sends by it."
    gpu = run("explain", "gpu0", "--nodes", node).splitlines()
    assert "Near are CPUs 0-55,112-167: NUMA node 0 is near it." in gpu
    assert gpu[-1] == "It has 18 NVLinks to each of 7 other GPUs."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["5"], "a rank is one of a job; name its recipe"),
        (["99", *JOB], "rank=99: the job has ranks 0 to 31"),
        (["mlx5_99"], "there are gpu0"),
    ],
)
def test_explain_refuses_what_is_not_there(node: Path, words: list[str], said: str) -> None:
    result = invoke("explain", *words, "--nodes", node)
    assert result.exit_code == 2 and said in result.stderr


def test_capture_writes_what_show_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.cluster import read

    monkeypatch.setattr(read, "read_live", lambda: read_node(REVERSED))
    path = tmp_path / "node.yaml"
    assert run("capture", "-o", path) == f"{path}: 8 GPUs, 9 NICs of which 8 rails\n"
    live: dict[str, Any] = json.loads(run("show", "--json"))["nodes"][0]
    filed: dict[str, Any] = json.loads(run("show", path, "--json"))["nodes"][0]
    assert filed["rails"] == ["NIC8", "NIC7", "NIC6", "NIC5", "NIC4", "NIC3", "NIC2", "NIC1"]
    assert {**filed, "name": ""} == {**live, "name": ""}
    assert run("capture") == path.read_text()


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures(node: Path, tmp_path: Path, ending: str) -> None:
    paths = [tmp_path / f"{name}.{ending}" for name in ("show", "map")]
    run("show", node, "--picture", paths[0])
    run("map", *JOB, "--nodes", node, "--fabric", "rails:2", "--picture", paths[1])
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" if ending == "png" else b"<svg" in path.read_bytes()


def test_a_picture_shows_hosts_of_several_units() -> None:
    hosts = [f"n{i}" for i in range(16)]
    table = rank_table(Layout(dp=64), hosts, None, rail_optimized(hosts, 4, 8), per_node=4)
    assert shown(table) == ["n0", "n1", "n8", "n9"]
    assert shown(rank_table(Layout(dp=64), hosts, per_node=4)) == ["n0", "n1", "n2", "n3"]
    box = box_of_host(table, "n8")
    assert box.leaves == ("leaf0-1", "leaf1-1", "leaf2-1", "leaf3-1")
    assert [(slot.rank.split("\n")[0], slot.rail) for slot in box.slots] == [("32", 0), ("33", 1), ("34", 2), ("35", 3)]


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 999.6, 1.234e12, 5e19)] == ["0 B", "999 B", "1 kB", "1.23 TB", "5e+04 PB"]
