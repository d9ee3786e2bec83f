"""Nodes as files, and a described node on the machine at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.affinity import near
from hpctrain.cluster.node import Gpu, Nic, Node
from hpctrain.cluster.nodefile import dump, load, plain
from hpctrain.cluster.read import read_node
from hpctrain.cluster.roles import assign_roles
from hpctrain.cluster.wiring import alike, gpu_rails, here, visible, with_cpus, with_gpus
from hpctrain.errors import ConfigError

DATA = Path(__file__).parent / "data"
FILES = [
    *("nccl_xml/azure_ndv4-topo.xml", "nccl_xml/aws_p5.48xl-topo.xml", "hwloc_xml/aws_p5.48xl-hwloc.xml.gz"),
    *("smi_topo/nccl1505_dgxa100_8gpu_12nic_truncated.txt", "smi_topo/litgpt_a100_8gpu_10nic.txt"),
    *("smi_misc/p2p_rw_2x5090_gns.txt", "hwloc_xml/mpibind_coral-lassen.xml.gz"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_node_survives_its_file(name: str, tmp_path: Path) -> None:
    node = assign_roles(read_node(DATA / name))
    (tmp_path / "node.yaml").write_text(dump(node))
    back = read_node(tmp_path / "node.yaml")
    assert replace(back, unclassed={}) == replace(node, unclassed={})
    assert near(back) == near(node)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hpctrain_node: 2\n", "it has no hpctrain_node: 1; write it with hpctrain topo capture"),
        ("hpctrain_node: 1\ngpus: 3\n", "gpus is a list"),
        ("hpctrain_node: 1\ngpus: [{}]\n", "missing 1 required positional argument: 'index'"),
        ("hpctrain_node: 1\ngpus: [{index: x}]\n", "index of a Gpu is a number, not 'x'"),
        ("hpctrain_node: 1\nnics: [{name: a, speed: 3}]\n", "a Nic has no speed"),
        ("hpctrain_node: 1\nnumas: [{index: 0, cpus: 3-1}]\n", "'3-1' holds the range"),
        ("hpctrain_node: 1\ndistances: [gpu0 a NEAR]\n", "'NEAR' is not known"),
        ("hpctrain_node: 1\nnvlinks: [gpu0 gpu1]\n", "'gpu0 gpu1' in nvlinks is not two devices and a word"),
        ("hpctrain_node: 1\ngpus: [\n", "it must be YAML, but"),
        ("- hpctrain_node: 1\n", "it has no hpctrain_node"),
    ],
)
def test_what_is_wrong_in_a_file_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, "n.yaml")
    assert said in str(caught.value) and str(caught.value).startswith("node='n.yaml': ")


def test_what_is_not_known_is_left_out() -> None:
    assert plain(Node(gpus=(Gpu(0, pci="0000:01:00.0"),))) == {
        "hpctrain_node": 1,
        "gpus": [{"index": 0, "pci": "0000:01:00.0"}],
    }


def test_gpus_take_the_rails_that_are_near() -> None:
    """Reversed (NVIDIA/nccl#1453) they are in order all the same, as rails are numbered by GPUs."""
    node = assign_roles(read_node(DATA / "smi_topo/litgpt_a100_8gpu_10nic.txt"))
    assert [node.rails[i].name for i in gpu_rails(node)] == [f"mlx5_{i}" for i in (2, 3, 0, 1, 8, 9, 4, 5)]
    shared = assign_roles(read_node(DATA / "nccl_xml/aws_p4d-24xl-topo.xml"))
    assert gpu_rails(shared) == (0, 0, 1, 1, 2, 2, 3, 3)
    bare = Node(gpus=tuple(Gpu(i) for i in range(4)), nics=tuple(Nic(f"n{i}", role="rail") for i in range(2)))
    assert gpu_rails(bare) == (0, 1, 0, 1)


def test_a_described_node_takes_the_names_of_this_one() -> None:
    gpus = tuple(Gpu(i, pci=f"0000:0{i}:00.0", uuid=f"GPU-{i}") for i in range(2))
    nics = tuple(Nic(f"mlx5_{i}", pci=f"0000:1{i}:00.0", role="rail", state="active") for i in range(2))
    node = Node("a", gpus, nics)
    live = Node(
        "b",
        (replace(gpus[1], uuid="GPU-B1"), replace(gpus[0], uuid="GPU-B0")),
        (Nic("ens0", pci="0000:10:00.0", verbs=False), Nic("ib7", pci="0000:10:00.0", verbs=True, state="down")),
    )
    assert [gpu.uuid for gpu in alike(node).gpus] == ["", ""] and alike(node).nics[0].state == "", (
        "of each node its own"
    )
    made = here(alike(node), live)
    found = made.node
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-B0", "GPU-B1"]
    assert [(nic.name, nic.state, nic.role) for nic in found.nics] == [("ib7", "down", "rail"), ("mlx5_1", "", "rail")]
    assert made.missing == ("rail mlx5_1 (0000:11:00.0) is not on this machine",) and made.unseen == ()
    (first, *_) = here(node, replace(live, gpus=live.gpus[:1])).missing
    assert first == "gpu0 (0000:00:00.0) is not on this machine"


def test_a_machine_that_hides_its_nics_has_lost_none() -> None:
    """A container without /sys: what cannot be seen is not missing."""
    nics = tuple(Nic(f"mlx5_{i}", pci=f"0000:1{i}:00.0", role="rail") for i in range(2))
    node = Node("a", (Gpu(0, pci="0000:01:00.0"),), nics)
    made = here(node, Node("b", (Gpu(0, pci="0000:01:00.0", uuid="GPU-B"),)))
    assert made.missing == () and "no NIC can be seen" in made.unseen[0]
    assert [nic.name for nic in made.node.rails] == ["mlx5_0", "mlx5_1"] and made.node.gpus[0].uuid == "GPU-B"
    assert here(Node("a", (Gpu(0),)), Node("b")).unseen == ()


def test_threads_are_those_of_this_machine() -> None:
    told = replace(Node(gpus=(Gpu(0),)), cores=((0, 1), (2, 3)))
    assert here(told, Node(cores=((0, 2), (1, 3)))).node.cores == ((0, 2), (1, 3))
    assert here(told, Node()).node.cores == told.cores
    assert with_cpus(told, (0, 1, 2)).cores == ((0, 1), (2,))


def test_parts_of_a_node() -> None:
    node = assign_roles(read_node(DATA / "smi_topo/litgpt_a100_8gpu_10nic.txt"))
    part = with_gpus(node, node.gpus[6:])
    assert [gpu.index for gpu in part.gpus] == [0, 1]
    assert [part.rails[i].name for i in gpu_rails(part)] == ["mlx5_4", "mlx5_5"]
    assert set(part.nvlinks) <= {("gpu0", "gpu1")}
    cut = with_cpus(node, range(4))
    assert cut.gpus[0].cpus == (0, 1, 2, 3) and cut.gpus[7].cpus == ()


@pytest.mark.parametrize(
    ("text", "indices"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("0,7,1", [0]), ("GPU-b", [1]), ("GPU-", []), ("-1,0", [])],
)
def test_visible_devices(text: str | None, indices: list[int]) -> None:
    gpus = tuple(Gpu(i, uuid=f"GPU-{'abc'[i]}{i}") for i in range(3))
    assert [gpu.index for gpu in visible(text, gpus)] == indices
