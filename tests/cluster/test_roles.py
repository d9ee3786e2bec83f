"""Roles by signals taken alone, and maps of several nodes held against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cluster import smi_topo
from hpctrain.cluster.affinity import differences, mirrored, near, picks, unfit
from hpctrain.cluster.node import Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.roles import assign_roles
from tests.cluster.machines import railed


def node(*nics: Nic, gpus: int = 2, reach: Distance = Distance.NODE) -> Node:
    """GPUs, and NICs all as far from each."""
    found = tuple(Gpu(i, numa=0) for i in range(gpus))
    distances = {(gpu.key, nic.name): reach for gpu in found for nic in nics}
    return Node(gpus=found, nics=nics, distances=distances)


def fabric(name: str, **more: object) -> Nic:
    facts: dict[str, object] = {
        "verbs": True,
        "link_layer": "infiniband",
        "rate_gbit": 400.0,
        "state": "active",
        **more,
    }
    return Nic(name, **facts)  # type: ignore[arg-type]


def role(found: Node, name: str) -> str:
    return next(nic.role for nic in found.nics if nic.name == name)


def test_signals_tell_what_distance_does_not() -> None:
    """Two NICs at NODE of all GPUs: rails if they are known to be alike and active, else it cannot be told."""
    assert [nic.role for nic in assign_roles(node(fabric("a"), fabric("b"))).nics] == ["rail", "rail"]
    bare = assign_roles(node(Nic("a", verbs=True), Nic("b", verbs=True)))
    assert [nic.role for nic in bare.nics] == ["unknown", "unknown"]
    unlike = assign_roles(node(fabric("a"), fabric("b", rate_gbit=200.0)))
    assert [nic.role for nic in unlike.nics] == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("nic", "expected", "why"),
    [
        (Nic("ens1", interface="ens1", verbs=False), "unknown", "no verbs"),
        (Nic("eno1", interface="eno1", verbs=False), "management", "its name is one of management"),
        (Nic("ens1", interface="ens1", verbs=False, default_route=True), "management", "default route"),
        (fabric("v", virtual=True), "unknown", "virtual function"),
        (fabric("r", default_route=True), "management", "default route"),
        (fabric("s", link_layer="ethernet", rate_gbit=25.0), "management", "25 Gbit/s, others have 400"),
        (fabric("s", rate_gbit=100.0), "unknown", "100 Gbit/s, others have 400"),
        (fabric("b", bond="bond0"), "unknown", "a port of bond0"),
    ],
)
def test_what_speaks_against_a_near_nic(nic: Nic, expected: str, why: str) -> None:
    found = assign_roles(node(fabric("mlx5_0"), fabric("mlx5_1"), nic, reach=Distance.PIX))
    assert role(found, nic.name) == expected and why in found.nics[-1].why
    assert [n.name for n in found.rails] == ["mlx5_0", "mlx5_1"]


def test_a_far_fabric_port_is_storage_only_if_much_is_known() -> None:
    base = node(fabric("mlx5_0"), fabric("st"), reach=Distance.PIX)
    far = replace(base, distances={**base.distances, ("gpu0", "st"): Distance.SYS, ("gpu1", "st"): Distance.SYS})
    assert role(assign_roles(far), "st") == "unknown"
    routed = replace(far, nics=tuple(replace(nic, default_route=False) for nic in far.nics))
    assert role(assign_roles(routed), "st") == "storage"


def test_storage_is_active() -> None:
    """A far port of which it is not known whether it is up could be anything."""
    for state, expected in (("active", "storage"), ("", "unknown"), ("down", "unknown")):
        base = node(fabric("mlx5_0"), fabric("st", state=state, default_route=False), reach=Distance.PIX)
        far = {("gpu0", "st"): Distance.SYS, ("gpu1", "st"): Distance.SYS}
        assert role(assign_roles(replace(base, distances={**base.distances, **far})), "st") == expected, state


@pytest.mark.parametrize(
    ("facts", "rails"),
    [
        ({"rate_gbit": 400.0, "state": ""}, 2),
        ({"rate_gbit": None, "state": "active"}, 2),
        ({"rate_gbit": None, "state": ""}, 0),
        ({"rate_gbit": None, "state": "down"}, 0),
        ({"rate_gbit": 400.0, "state": "active", "link_layer": ""}, 0),
    ],
)
def test_ports_that_all_gpus_share_are_known(facts: dict[str, object], rails: int) -> None:
    """As near to every GPU, they are rails only with link layer, and rate or state."""
    found = assign_roles(node(*(fabric(name, verbs=None, **facts) for name in "ab"), reach=Distance.PHB))
    assert len(found.rails) == rails


def test_ports_on_other_numa_nodes_do_not_spread() -> None:
    """SYS from every GPU is no nearness at all: what can serve as a rail is then a fabric port, or a fast one."""
    for rate, rails in ((25.0, 0), (100.0, 2)):
        ports = [fabric(name, link_layer="ethernet", rate_gbit=rate) for name in "ab"]
        assert len(assign_roles(node(*ports, reach=Distance.NODE)).rails) == 2
        assert len(assign_roles(node(*ports, reach=Distance.SYS)).rails) == rails


def test_a_port_that_is_down_yields_to_one_as_near() -> None:
    found = assign_roles(node(fabric("a", state="down"), fabric("b"), reach=Distance.PIX))
    assert [(nic.name, nic.role, nic.why) for nic in found.nics[1:]] == [("a", "unknown", "down, and b is as near")]
    assert [nic.name for nic in found.rails] == ["b"] and found.problems == ()
    dead = assign_roles(node(fabric("a", state="down"), fabric("b", state="down"), reach=Distance.PIX))
    assert [nic.name for nic in dead.rails] == ["a", "b"]
    assert dead.problems == ("rail a is down", "rail b is down")


def split_node(*layers: str) -> Node:
    """A NIC behind one bridge with each GPU, of these link layers."""
    nics = tuple(fabric(f"mlx5_{i}", link_layer=layer) for i, layer in enumerate(layers))
    gpus = tuple(Gpu(i, numa=0) for i in range(len(layers)))
    reach = {
        (gpu.key, nic.name): Distance.PIX if i == gpu.index else Distance.PHB
        for gpu in gpus
        for i, nic in enumerate(nics)
    }
    return Node(gpus=gpus, nics=nics, distances=reach)


def test_of_as_many_near_nics_of_two_kinds_none_is_picked() -> None:
    """Half of the GPUs have InfiniBand near and half Ethernet (RCCL's topo_4p2h_2nic): whichever was read first is no
    better. Where more are of one kind, the others are no rails."""
    even = assign_roles(split_node("ethernet", "infiniband"))
    why = "near GPUs are as many NICs of ethernet and of infiniband"
    assert [(nic.role, nic.why) for nic in even.nics] == [("unknown", why)] * 2
    assert even.problems == (f"{why}: which of them are rails cannot be told",)
    odd = assign_roles(split_node("ethernet", "infiniband", "infiniband"))
    assert [nic.name for nic in odd.rails] == ["mlx5_1", "mlx5_2"] and odd.problems == ()
    assert odd.nics[-1].why == "ethernet, where most near NICs are infiniband"
    bare = assign_roles(split_node("ethernet", "infiniband", ""))
    assert bare.rails == (), "what is not known could be either"


def test_roles_that_are_told_stay() -> None:
    found = assign_roles(node(Nic("b", role="rail", why="told"), Nic("a", role="rail", why="told"), fabric("c")))
    assert [nic.name for nic in found.rails] == ["b", "a"]


@pytest.mark.parametrize(
    ("index", "nics", "sharing", "expected"),
    [
        (0, 2, 2, "a"),
        (1, 2, 2, "b"),
        (6, 2, 2, "a"),
        (0, 4, 4, "a"),
        (1, 4, 4, "c"),  # bits mirrored
        (2, 4, 4, "b"),
        (3, 4, 4, "d"),
        (1, 4, 1, "cdab"),
        (1, 3, 2, "bc"),
        (5, 1, 2, "a"),
        (0, 2, 1, "ab"),
    ],
)
def test_nccls_choice_among_nics_as_near(index: int, nics: int, sharing: int, expected: str) -> None:
    names = [Nic(n) for n in "abcdefgh"[:nics]]
    assert "".join(nic.name for nic in picks(index, names, sharing)) == expected


def test_mirrored_bits() -> None:
    assert [mirrored(i, 8) for i in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((Gpu(0), Gpu(1, mig=True)), "MIG instances on gpu1"),
        ((Gpu(0, uuid="GPU-1"), Gpu(1, uuid="GPU-1")), "one is shared"),
        ((), "no GPU"),
    ],
)
def test_unfit_nodes_are_refused_in_words(gpus: tuple[Gpu, ...], said: str) -> None:
    ((why, mend),) = unfit(Node(name="n1", gpus=gpus))
    assert said in why and mend


def test_the_memory_of_a_gpu_is_never_its_numa_node() -> None:
    cpus = (0, 1)
    found = Node(gpus=(Gpu(0, numa=2), Gpu(1, numa=0)), numas=(Numa(0, cpus), Numa(2, of_gpu=True)))
    assert [(entry.numa, entry.cpus) for entry in near(found)] == [(None, ()), (0, cpus)]


def test_a_board_is_known_by_the_names_of_its_gpus() -> None:
    links = {("gpu0", "gpu1"): 0}
    for name, bad in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", False), ("NVIDIA L40S", False)):
        found = Node(gpus=(Gpu(0, name), Gpu(1, name)), nvlinks=links)
        assert bool(unfit(found)) is bad, name
        assert unfit(found, nvlink=False) == [] and unfit(found, nvlink=True)


def test_nodes_whose_map_differs_are_named() -> None:
    def one(name: str, **more: object) -> Node:
        return replace(assign_roles(smi_topo.read(railed(**more).tabbed())), name=name)  # type: ignore[arg-type]

    nodes = [one("n1"), one("n2"), one("n3", order=[1, 0, 2, 3, 4, 5, 6, 7]), one("n4")]
    said = differences(nodes)
    assert list(said) == ["n3"] and "names of rails" in said["n3"]
    assert differences(nodes[:2]) == {} and differences([]) == {}
    lost = one("n5", link=lambda a, b: "NODE" if 2 in (a, b) else "NV18")
    assert "NVLinks" in differences([nodes[0], nodes[1], lost])["n5"]


def test_rail_i_is_the_nic_of_gpu_i_on_every_node() -> None:
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 2, 1, 0, 5, 4, 7, 6]):
        found = assign_roles(smi_topo.read(railed(order=order).tabbed()))
        assert [nic.name for nic in found.rails] == [f"NIC{n}" for n in order]
        assert [entry.nics[0].name for entry in near(found)] == [f"NIC{n}" for n in order]
