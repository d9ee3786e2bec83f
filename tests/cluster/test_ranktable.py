"""Ranks on slots: orders, links and bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.linkbytes import LINKS, LinkBytes, group_matrix
from hpctrain.cluster.node import Gpu, Nic, Node, Numa
from hpctrain.cluster.ranktable import RankTable, rank_table
from hpctrain.cluster.slots import slots_of
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import DENSE, EXPERT
from hpctrain.layout.traffic import (
    context_traffic,
    data_bytes,
    expert_traffic,
    pipeline_bytes,
    replica_bytes,
    tensor_traffic,
    wire,
)


def names(number: int) -> list[str]:
    return [f"n{i}" for i in range(number)]


def rail_fabric(nodes: int, rails: int, unit: int, pod: int = 0) -> Fabric:
    """Rail-optimized: a leaf for each unit and rail; a spine, or one for each pod and rail under a core switch."""
    leaves = {name: tuple(f"l{i // unit}r{r}" for r in range(rails)) for i, name in enumerate(names(nodes))}
    units = range(-(-nodes // unit))
    parents = {f"l{u}r{r}": (f"p{u // pod}r{r}" if pod else "spine",) for u in units for r in range(rails)}
    if pod:
        parents |= {f"p{u // pod}r{r}": ("core",) for u in units for r in range(rails)}
    return Fabric(leaves=leaves, parents=parents, kind="rails")


def tree(nodes: int, unit: int) -> Fabric:
    leaves = {name: (f"l{i // unit}",) for i, name in enumerate(names(nodes))}
    return Fabric(leaves=leaves, parents={f"l{i}": ("top",) for i in range(-(-nodes // unit))})


def row(table: RankTable, axis: str) -> dict[str, float]:
    return {link: n for link, n in table.bytes.by_axis[axis].items() if n}


def test_thousand_nodes_of_eight_on_three_levels() -> None:
    """tp fills nodes: data keeps to its rail, whatever the order in which hosts were listed."""
    hosts = names(1024)
    np.random.default_rng(3).shuffle(hosts)
    table = rank_table(Layout(pp=4, dp=256, tp=8), hosts, None, rail_fabric(1024, 8, 32, 8), per_node=8)
    assert row(table, "tp").keys() == {"nvlink"}
    assert table.bytes.over("cross_rail") == 0
    assert row(table, "data")["leaf"] > 4 * (row(table, "data")["spine"] + row(table, "data")["core"])
    assert np.array_equal(table.rail, np.arange(8192) % 8)
    assert all(table.hosts[i] in hosts for i in table.node)
    assert table.in_blocks and sorted(table.hosts) == sorted(hosts)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_rings_of_several_ranks_a_node_keep_to_rails(nodes: int, tp: int) -> None:
    """One ring over an odd number of nodes with two groups each is the one that cannot, if it fills nodes in turn."""
    layout = Layout(dp=nodes * 8 // tp, tp=tp)
    table = rank_table(layout, names(nodes), None, rail_fabric(nodes, 8, 16), per_node=8)
    assert table.bytes.over("cross_rail") == 0
    assert tp == 1 or row(table, "tp").keys() == {"nvlink"}
    assert table.slurm["by name"].over("cross_rail") > 0
    assert table.in_blocks == (not (nodes % 2 and tp == 4))


SETTINGS: list[tuple[dict[str, Any], dict[str, int]]] = [
    (dict(parallel=dict(tp=4, sp=True)), dict(tp=4, dp=4)),
    (dict(parallel=dict(tp=2, cp=2, pp=2)), dict(pp=2, cp=2, tp=2, dp=2)),
    (dict(parallel=dict(cp=4, cp_method="ulysses")), dict(cp=4, dp=4)),
    (dict(parallel=dict(pp=4, tp=2), model=dict(vocab=255, tied=True)), dict(pp=4, tp=2, dp=2)),
    (dict(sharding=dict(stage=3)), dict(dp=16)),
    (dict(sharding=dict(engine="fsdp")), dict(dp=16)),
    (dict(model=dict(moe=dict(experts=8, top_k=2)), parallel=dict(tp=2, ep=4)), dict(tp=2, dp=8, ep=4)),
    (dict(model=dict(moe=dict(experts=8, top_k=2)), parallel=dict(tp=2, ep=2, etp=2)), dict(tp=2, dp=8, ep=2, etp=2)),
]


def config_of(sections: dict[str, Any]) -> RunConfig:
    model = dict(layers=4, hidden=32, heads=8, kv_heads=4, vocab=256) | sections.get("model", {})
    base = dict(train=dict(global_batch=32, micro_batch=1), data=dict(seq=64), cluster=dict(nodes=4, gpus_per_node=4))
    return RunConfig.model_validate(base | sections | {"model": model})


@pytest.mark.parametrize("sections, axes", SETTINGS, ids=str)
def test_bytes_are_those_of_the_formulas(sections: dict[str, Any], axes: dict[str, int]) -> None:
    config, layout = config_of(sections), Layout(**axes)
    table = rank_table(layout, names(4), None, rail_fabric(4, 4, 2), per_node=4, config=config)
    want: Counter[str] = Counter()
    for rank in range(16):
        want["tp"] += sum(wire(op, p.bytes, layout.tp) for op, p in tensor_traffic(config, layout, rank).items())
        want["cp"] += sum(wire(op, p.bytes, layout.cp) for op, p in context_traffic(config, layout, rank).items())
        for axis, traffic in expert_traffic(config, layout, rank).items():
            want[axis] += sum(wire(op, p.bytes, getattr(layout, axis)) for op, p in traffic.items())
        for axis, over, ranks in (("data", DENSE, layout.dp * layout.cp), ("experts", EXPERT, layout.edp)):
            want[axis] += sum(wire(op, n, ranks) for op, n in data_bytes(config, layout, rank, over).items())
        want["pp"] += pipeline_bytes(config, layout, rank)
    got = {axis: sum(links.values()) for axis, links in table.bytes.by_axis.items()}
    assert got == pytest.approx({axis: n for axis, n in want.items() if n})
    assert set(got) >= {axis for axis in ("tp", "cp", "pp") if getattr(layout, axis) > 1}


def test_replicas_of_state_keep_all_but_one_reduction_inside_nodes() -> None:
    """Of 16 ranks in four nodes: weights and gradients of each node's copy stay there, and what is then summed over the
    copies does not."""
    sections, layout = dict(sharding=dict(engine="fsdp", replicas=4)), Layout(dp=16)
    config = config_of(sections)
    found = rank_table(layout, names(4), None, rail_fabric(4, 4, 2), per_node=4, config=config).bytes.by_axis
    shared = sum(wire(op, n, 4) for op, n in data_bytes(config, layout).items())
    summed = wire("all_reduce", replica_bytes(config, layout), 4)
    assert found["data"]["nvlink"] == sum(found["data"].values()) == pytest.approx(16 * shared)
    assert found["data replicas"]["nvlink"] == 0
    assert sum(found["data replicas"].values()) == pytest.approx(16 * summed)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_every_rank_has_a_place_of_its_own(dp: int, pp: int, cp: int, tp: int, unit: int) -> None:
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    nodes = -(-layout.world // 4)
    table = rank_table(layout, names(nodes), None, rail_fabric(nodes, 2, unit), per_node=4)
    assert len(set(zip(table.node.tolist(), table.gpu.tolist()))) == layout.world == len(table)
    assert table.node.max() < len(table.hosts) <= nodes
    for host in table.hosts:
        ranks = table.ranks_of(host)
        assert [table[r].local_rank for r in ranks] == list(range(len(ranks)))
        assert {table[r].host for r in ranks} == {host}
    assert all(table.rail[r] == table.gpu[r] % 2 for r in range(layout.world))
    own = table.slurm["by name"]
    assert (off_nvlink(table.bytes), table.bytes.leaving) <= (off_nvlink(own), own.leaving)


def off_nvlink(counted: LinkBytes) -> float:
    return sum(n for link, n in counted.by_axis.get("tp", {}).items() if link != "nvlink")


def test_groups_as_in_the_layout() -> None:
    layout = Layout(pp=2, dp=4, cp=2, tp=2, ep=4, etp=2)
    for axes in (("tp",), ("dp", "cp"), ("pp",), ("ep",), ("etp",), ("edp",)):
        assert sorted(map(tuple, group_matrix(layout, *axes).tolist())) == sorted(layout.groups(*axes)), axes


def test_links_by_hand() -> None:
    fabric = rail_fabric(6, 2, 2, 2)
    slots = slots_of(names(6), [(0, 1)] * 6, fabric)

    def link(a: tuple[int, int], b: tuple[int, int]) -> str:
        one, other = (np.array([node * 2 + gpu]) for node, gpu in (a, b))
        return LINKS[slots.links(one, other)[0]]

    assert link((0, 0), (0, 1)) == "nvlink"
    assert link((0, 0), (1, 0)) == "leaf"
    assert link((0, 0), (2, 0)) == "spine"
    assert link((0, 0), (4, 0)) == "core"
    assert link((0, 0), (1, 1)) == link((0, 1), (4, 0)) == "cross_rail"
    one = slots_of(names(4), [(0, 1)] * 4, Fabric(leaves=dict.fromkeys(names(2), ("a",))))
    assert LINKS[one.links(np.array([0]), np.array([3]))[0]] == "leaf"  # two NICs on one switch
    assert LINKS[one.links(np.array([0]), np.array([5]))[0]] == "core"
    assert "n2, n3" in one.problems[0]


def test_a_rail_without_port_is_not_used() -> None:
    fabric = Fabric(leaves={"n0": ("a0", "a1", "", "a3"), "n1": ("a0", "a1", "a2", "a3")})
    table = rank_table(Layout(dp=2, tp=4), ["n0", "n1"], None, fabric, per_node=4)
    assert {(p.host, p.gpu): (p.rail, p.leaf) for p in table}["n0", 2] == (3, "a3")


def test_nvlink_domains_wider_than_nodes() -> None:
    """tp of eight over two nodes of four: racks with an odd node left over give it away."""
    hosts = names(10)
    fabric = Fabric(leaves=dict.fromkeys(hosts, ("l0",)), domains={h: f"rack{i // 5}" for i, h in enumerate(hosts)})
    table = rank_table(Layout(dp=4, tp=8), hosts, None, fabric, per_node=4)
    assert row(table, "tp").keys() == {"nvlink"}
    assert table.slurm["by name"].by_axis["tp"]["leaf"] > 0
    assert set(table.hosts) == {*names(4), "n5", "n6", "n7", "n8"}


def machine(gpus: int = 4) -> Node:
    numas = (Numa(0, tuple(range(8))), Numa(1, tuple(range(8, 16))), Numa(2, (), of_gpu=True))
    return Node(
        "n",
        tuple(Gpu(i, pci=f"0000:{i:02x}:00.0", uuid=f"GPU-{i}", numa=i * 2 // gpus) for i in range(gpus)),
        (*(Nic(f"mlx5_{i}", role="rail") for i in range(2)), Nic("mlx5_9", role="storage")),
        numas,
    )


def test_row() -> None:
    table = rank_table(Layout(pp=2, dp=1, tp=4), ["a1", "a0"], machine(), None)
    place = table[6]
    assert (place.host, place.node, place.local_rank, place.gpu, place.uuid, place.pci) == (
        "a1", 1, 2, 2, "GPU-2", "0000:02:00.0",
    )  # fmt: skip
    assert (place.pp, place.dp, place.cp, place.tp) == (1, 0, 0, 2)
    assert (place.cpus, place.numa, place.nic, place.rail, place.leaf) == ((8, 9, 10, 11), 1, "mlx5_0", 0, "rail0")
    assert table[-1].rank == 7 and [p.rank for p in table[2:4]] == [2, 3] and len(list(table)) == 8
    assert table.in_blocks and table.host_file() == ["a0"] * 4 + ["a1"] * 4
    assert "no fabric is known" in table.problems[0]


def test_too_few_places() -> None:
    with pytest.raises(ConfigError, match="16 ranks do not fit on 2 nodes with 8 places"):
        rank_table(Layout(dp=16), names(2), machine())
    with pytest.raises(ConfigError, match="a host is in the allocation once"):
        rank_table(Layout(dp=2), ["a", "a"])


def test_order_as_given() -> None:
    hosts = ["n3", "n1", "n0", "n2"]
    table = rank_table(Layout(dp=16), hosts, None, rail_fabric(4, 4, 2), per_node=4, order="given")
    assert table.hosts == tuple(hosts) and table.gpu.tolist() == [0, 1, 2, 3] * 4


def test_neighbours_of_a_pipeline_share_leaves_where_data_costs_less() -> None:
    """Four stages of two nodes on leaves of four: data goes round two nodes, so stages may be halved over leaves."""
    config = config_of(dict(parallel=dict(pp=4, tp=4), train=dict(global_batch=4096, micro_batch=1)))
    table = rank_table(Layout(pp=4, dp=2, tp=4), names(8), None, rail_fabric(8, 4, 4), per_node=4, config=config)
    assert row(table, "data").keys() == {"spine"} and row(table, "pp").keys() == {"leaf"}
    few = config_of(dict(parallel=dict(pp=4, tp=4), train=dict(global_batch=2, micro_batch=1)))
    other = rank_table(Layout(pp=4, dp=2, tp=4), names(8), None, rail_fabric(8, 4, 4), per_node=4, config=few)
    assert row(other, "data").keys() == {"leaf"} and row(other, "pp").keys() == {"leaf", "spine"}


def test_against_slurm() -> None:
    table = rank_table(Layout(dp=8, tp=4), names(4), None, rail_fabric(4, 8, 4), per_node=8)
    assert table.against_slurm()[0] == (
        "by name: 128 bytes a step leave leaf switches, 128 of them from rail to rail; "
        "in this order 0, 0 of them from rail to rail"
    )
    same = rank_table(Layout(dp=4, tp=8), names(4), None, rail_fabric(4, 8, 2), per_node=8)
    assert same.against_slurm() == [f"by {word}: as many bytes leave leaf switches" for word in ("name", "topology")]


def test_hosts_of_different_size() -> None:
    rails = {"n0": (0, 1, 2, 3), "n1": (0, 1), "n2": (0, 1, 2, 3)}
    table = rank_table(Layout(dp=5, tp=2), names(3), None, rail_fabric(3, 4, 4), rails=rails)
    assert [len(table.ranks_of(host)) for host in names(3)] == [4, 2, 4] and row(table, "tp").keys() == {"nvlink"}


def test_rails_by_the_map_of_the_node() -> None:
    """GPUs in reverse to the rails, as in NVIDIA/nccl#1453; and two GPUs a rail, of which tp takes one each."""
    reverse = rank_table(Layout(dp=2, tp=4), names(2), None, rail_fabric(2, 4, 2), rails=(3, 2, 1, 0))
    assert reverse.rail.tolist() == [3, 2, 1, 0] * 2 and reverse.bytes.over("cross_rail") == 0
    shared = rank_table(Layout(dp=6, tp=4), names(3), None, rail_fabric(3, 4, 4), rails=(0, 0, 1, 1, 2, 2, 3, 3))
    assert shared.bytes.over("cross_rail") == 0 and shared.in_blocks
    assert shared.gpus_of("n0") in ((0, 2, 4, 6, 1, 3, 5, 7), (1, 3, 5, 7, 0, 2, 4, 6))


def test_relayed_bytes() -> None:
    """What crosses rails could go over NVLink to the GPU on the right rail, if there is one."""
    cross = rank_table(Layout(dp=4), names(2), None, rail_fabric(2, 2, 2), per_node=2, order="given")
    assert cross.bytes.over("cross_rail") == cross.bytes.relayed == 16
    alone = rank_table(Layout(dp=2), names(2), None, rail_fabric(2, 2, 2), rails={"n0": (0,), "n1": (1,)})
    assert alone.bytes.over("cross_rail") == 16 and alone.bytes.relayed == 0


def test_rings_of_many_ranks_go_there_and_back() -> None:
    table = rank_table(Layout(dp=32, tp=4), names(16), None, rail_fabric(16, 8, 16), per_node=8)
    assert table.bytes.over("cross_rail") == 0 and table.in_blocks
    assert {table.gpus_of(host) for host in names(16)[1::2]} == {(4, 5, 6, 7, 0, 1, 2, 3)}
    odd = rank_table(Layout(dp=17 * 4, tp=2), names(17), None, rail_fabric(17, 8, 17), per_node=8)
    assert odd.bytes.over("cross_rail") == 0 and odd.in_blocks


def test_hosts_follow_the_fabric_and_not_their_names() -> None:
    """Host i is in unit i % 8 and pod i % 2: a ring leaves every unit once, and every pod once."""
    hosts = names(64)
    leaves = {host: tuple(f"l{i % 8}r{r}" for r in range(4)) for i, host in enumerate(hosts)}
    up = {f"l{u}r{r}": (f"p{u % 2}r{r}",) for u in range(8) for r in range(4)}
    fabric = Fabric(leaves, up | {f"p{p}r{r}": ("core",) for p in range(2) for r in range(4)})
    table = rank_table(Layout(dp=64, tp=4), hosts, None, fabric, per_node=4)
    data = row(table, "data")
    assert {link: n / (4 * 8.0) for link, n in data.items()} == {"leaf": 64 - 8, "spine": 6, "core": 2}
    assert table.slurm["by name"].by_axis["data"]["core"] == 64 * 4 * 8.0
    assert table.slurm["by topology"].by_axis["data"]["core"] == 64 * 4 * 8.0


def test_gpus_that_no_node_tells_of_are_said() -> None:
    """A file of a machine with fewer GPUs, or one that breaks off; a node without any is one of CPUs."""
    four = Node(gpus=tuple(Gpu(i) for i in range(4)))
    said = "a: 4 GPUs are known where 8 ranks go; of the others GPU i is taken to be near rail i"
    layout = Layout(dp=2, tp=8)
    assert said in rank_table(layout, ["a", "b"], {"a": four}, None, per_node=8).problems
    both = rank_table(layout, ["a", "b"], four, None, per_node=8).problems
    assert said.replace("a:", "a, b:", 1) in both
    for node, places in ((four, 4), (Node(), 8), (None, 8)):
        hosts = [f"n{i}" for i in range(16 // places)]
        assert not any("are known" in one for one in rank_table(layout, hosts, node, None, per_node=places).problems)
