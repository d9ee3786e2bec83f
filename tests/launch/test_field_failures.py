"""The failures seen in the field (`docs/binding.md`), each reproduced, and prevented or stopped. One test each, here or
where the number is named: the last test of this file looks for all of them."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from hpctrain.cluster import sysfs
from hpctrain.cluster.wiring import visible
from hpctrain.launch.life.identity import Identity, detect
from hpctrain.launch.meet import rendezvous
from hpctrain.launch.meet.rollcall import Arrival, judge
from hpctrain.launch.place import machine, routes
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.place.device import choose
from hpctrain.launch.place.routes import beside, interface_of, interface_to, is_up, networks, own_address, taken
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.proof import probe as looks
from hpctrain.launch.proof.compare import of_rank
from hpctrain.launch.proof.finding import Finding, Rank
from hpctrain.launch.proof.probe import Found, limits, machine_faults, probe
from hpctrain.launch.proof.verdict import Met, Proof, examine
from hpctrain.launch.submit.environment import submission_environment
from hpctrain.launch.submit.lint import lint
from tests.cluster.test_live import stand_in
from tests.cluster.test_sysfs import node_tree
from tests.launch.machines import bindings, captured, config, job, running

NODE = captured("smi_topo/sglang_env_8gpu_8nic_clean.txt")
HOSTS = ["n0", "n1"]
TESTS = Path(__file__).parents[1]
BRIDGE = "172.17.0.1/16"
"""Of docker0, the same on every host."""


def address(host: str) -> str:
    return f"10.0.0.1{HOSTS.index(host)}"


@functools.cache
def table() -> JobTable:
    return job(NODE, HOSTS, config(2, 8, tp=8))


def good() -> list[tuple[Binding, Found]]:
    """Bindings and findings of two hosts of 8 GPUs, all as planned."""
    live = running(NODE)
    out = []
    for host in HOSTS:
        for binding in bindings(table(), host, live, allowed=range(192)):
            here = Found(
                host=host,
                cpus=",".join(map(str, binding.cpus)),
                cpu_count=192,
                asked_cpus=24,
                mems="0-1",
                policy="default",
                visible="0,1,2,3,4,5,6,7",
                devices=8,
                uuid=binding.uuid,
                nic="active",
                rate_gbit=400.0,
                interface=binding.interface,
                up=True,
                at=(f"{address(host)}/24",),
                hcas=binding.hcas,
                sockets="=eth0",
                socket="eth0",
                socket_at=(f"{address(host)}/24",),
                addresses=(f"{address(host)}/24", BRIDGE) if binding.row % 8 == 0 else (),
                limits={"memlock": -1, "nofile": 65536, "stack": 8 << 20},
                shm_bytes=64 << 30,
                versions={"torch": "2.13.0", "nccl": "2.27.3", "hpctrain": "1", "python": "3.11", "driver": "570"},
            )
            out.append((binding, here))
    return out


def proof(ranks: list[tuple[Binding, Found]], exclusive: bool = False, ahead: dict[int, float] | None = None) -> Proof:
    """Of ranks whose roll call went well, but for clocks."""
    made = replace(table(), exclusive=exclusive)
    skews = {rank: (ahead or {}).get(rank, 0.0) for rank in range(16)}
    met = {r: Met(address(ranks[r][1].host), (skew - 0.25, skew + 0.1)) for r, skew in skews.items()}
    return examine(made, dict(enumerate(ranks)), met)


def changed(rank: int, **found: object) -> list[tuple[Binding, Found]]:
    """One rank has found something else."""
    ranks = good()
    ranks[rank] = (ranks[rank][0], replace(ranks[rank][1], **found))  # type: ignore[arg-type]
    return ranks


def by_hand(name: str, **found: object) -> list[tuple[Binding, Found]]:
    """All ranks have a variable that somebody has set."""
    return [
        (replace(b, kept={name: b.set[name]}, set={k: v for k, v in b.set.items() if k != name}), replace(f, **found))  # type: ignore[arg-type]
        for b, f in good()
    ]


def stopping(made: Proof) -> list[tuple[int, str]]:
    return [(one.rank, one.what) for one in made.findings if one.stops]


def warned(made: Proof) -> list[tuple[int, str]]:
    return [(one.rank, one.what) for one in made.findings if not one.stops]


def test_all_as_planned() -> None:
    made = proof(good(), exclusive=True)
    assert (made.findings, made.error) == ((), "")
    assert made.summary == "proof: 16 ranks on 2 hosts, 16 of them placed by the rank table: all as planned"


def test_1_masks_of_another_job() -> None:
    """Eight ranks on four cores: the variable does not get into the job, and if it does, the proof sees it."""
    env = {"SLURM_CPU_BIND": "quiet,mask_cpu:0xf", "SLURM_TRES_PER_TASK": "cpu:4", "SLURM_JOB_ID": "1", "HOME": "/h"}
    assert submission_environment(env) == {"HOME": "/h"}
    ranks = good()
    for local, binding in enumerate(bindings(table(), "n1", running(NODE), allowed=range(4))):
        own = ",".join(map(str, binding.cpus)) or "0-3"
        ranks[8 + local] = (binding, replace(ranks[8 + local][1], cpus=own, asked_cpus=0))
    assert stopping(proof(ranks)) == [(rank, "CPUs of the node") for rank in range(8, 16)]
    text = proof(ranks).table()
    assert text.splitlines()[1].startswith(
        "8-15  CPUs of the node  8 for 8 ranks  4      SLURM_CPU_BIND of another job"
    )
    assert "unset SLURM_CPU_BIND in the prologue" in text


@pytest.mark.parametrize(("cpus", "stops"), [("95", True), ("84-95", True), ("84-95,180-185", False), ("0-191", False)])
def test_2_fewer_cpus_than_planned(cpus: str, stops: bool) -> None:
    made = proof(changed(7, cpus=cpus))
    assert (stopping(made), warned(made))[not stops] == [(7, "CPUs")]
    assert bool(made.error) == stops


def test_2_one_core_for_a_task() -> None:
    """Where ranks have no table: srun has lost --cpus-per-task."""
    (found,) = of_rank(Rank(0, None, Found(cpus="5", cpu_count=96, asked_cpus=12, shm_bytes=1 << 40)))
    assert (found.what, found.planned, found.found, found.stops) == (
        "number of CPUs",
        "12 (SLURM_CPUS_PER_TASK)",
        "1",
        True,
    )


def test_3_each_task_sees_one_gpu() -> None:
    assert (9, "visible GPUs") in stopping(proof(changed(9, devices=1, visible="0")))


def leave(store, me: Identity) -> None:
    """Rank 0, which owns the store, is the last."""
    store.add("left", 1)
    while me.rank == 0 and store.add("left", 0) < me.world:
        time.sleep(0.01)


def where_rank_0_is(folder: Path) -> list[str]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(SLURM_JOB_NODELIST="a[1-2],z9", SLURM_NODELIST="a[1-2],z9", SLURM_LAUNCH_NODE_IPADDR="192.0.2.1")
    os.environ["SLURMD_NODENAME"] = "z9" if rank == 0 else f"a{rank}"
    me = Identity(rank, 3, 0, 1, "srun", "slurm-7-0-0")
    store, _ = rendezvous.meet(me, folder, Arrival(3, f"h{rank}", (0,)), 20.0)
    leave(store, me)
    hosts: list[str] = json.loads(rendezvous.rendezvous_file(folder, me).read_text())["hosts"]
    return hosts


def test_5_rank_0_says_itself_where_it_is(ranks, tmp_path: Path) -> None:
    """With a host file rank 0 need not be on the first host of a sorted list. Ranks meet where it is all the same."""
    for hosts in ranks(3, where_rank_0_is, tmp_path):
        assert hosts[0] == "z9" and hosts[1] == socket.gethostname()
        assert not {"a1", "a2", "192.0.2.1"} & {*hosts}, "what launchers say of nodes is not believed"
    moved = good()
    moved[0], moved[8] = moved[8], moved[0]
    found = proof(moved)
    assert not found.stops and warned(found) == [(0, "place"), (8, "place")]


def test_8_devices_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """FASTEST_FIRST: torch's device 0 is not the first on the bus. A device is found by its UUID."""
    import torch

    from hpctrain.launch.place import device

    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(device, "names", lambda index: (str((index + 3) % 8), ""))
    binding = good()[5][0]
    assert binding.uuid == "GPU-5" and binding.set["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert choose("cuda", Identity(5, 16, 5, 8, "srun", "k"), binding) == torch.device("cuda", 2) == chosen[0]
    monkeypatch.setattr(device, "names", lambda index: ("", f"0000:{index:02x}:00.0"))
    by_address = replace(binding, uuid="", pci="0000:06:00.0")
    assert choose("cuda", Identity(5, 16, 5, 8, "srun", "k"), by_address) == torch.device("cuda", 6)
    assert stopping(proof(changed(5, uuid="GPU-2"))) == [(5, "GPU")]


@pytest.mark.parametrize(
    ("found", "stops"),
    [
        ({"interface": "docker0", "at": (BRIDGE,)}, True),  # each host has this address itself
        ({"interface": "cni0", "at": ("10.244.1.1/24",)}, True),  # a network of this host alone
        ({"interface": "lo", "at": ("127.0.0.1/8",)}, True),
        ({"interface": "ib0", "at": ("10.0.0.77/24",)}, False),  # beside the other host
        ({"interface": "nope0", "up": None, "at": ()}, True),
        ({"interface": "ib0", "up": False}, True),
        ({"interface": "=eth0"}, True),  # NCCL's syntax, which gloo has not
    ],
)
def test_9_the_wrong_interface(found: dict[str, object], stops: bool) -> None:
    """Set by hand: it stops the job where it cannot work, and is a warning where it can."""
    made = proof(by_hand("GLOO_SOCKET_IFNAME", **found))
    assert (stopping(made), warned(made))[not stops] == [(rank, "interface") for rank in range(16)]
    assert stopping(proof(changed(4, **found))) == [(4, "interface")], "not by hand, so the plan was not followed"


@pytest.mark.parametrize(
    ("sockets", "takes", "where", "said"),
    [
        ("^docker0", "lo", {"socket_at": ("127.0.0.1/8",)}, "^docker0: takes lo, from which no way leads to them"),
        ("d", "docker0", {"socket_at": (BRIDGE,)}, "d: takes docker0, from which no way"),
        ("=en0", "", {"socket_at": ()}, "=en0: names none of this host"),
        ("eth", "eth0", {}, "set by hand"),
    ],
)
def test_9_the_interface_that_nccl_takes(sockets: str, takes: str, where: dict[str, object], said: str) -> None:
    names = ("lo", "eth0", "eth1", "docker0")
    assert next(iter(taken(sockets, names)), "") == takes
    where = {**where, "sockets": sockets, "socket": takes}
    made = proof(by_hand("NCCL_SOCKET_IFNAME", **where))
    assert {what for _, what in stopping(made)} == (set() if takes == "eth0" else {"interface of NCCL"})
    assert said in made.table()
    on_cpus = proof(by_hand("NCCL_SOCKET_IFNAME", **where, devices=0, uuid=""))
    assert not on_cpus.stops, "nobody asks for it there"


def test_9_the_interface_is_that_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1" and interface_of("127.0.0.1") == "lo"
    assert interface_to(["127.0.0.1"]) == "", "the loopback reaches no other host"
    assert interface_to([]) == "" == interface_to(["no-such-host.invalid"])
    assert is_up("lo") is True and is_up("nope0") is None and is_up("lo,nope0") is None
    assert "127.0.0.1/8" in networks(["lo"]) and not any(one.startswith("127.") for one in networks())

    def card(family: int, where: str, mask: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=where, netmask=mask)

    eth0 = [card(socket.AF_INET, "10.9.0.4", "255.255.0.0"), card(socket.AF_INET6, "fe80::1%eth0", "ffff::")]
    rail = [card(socket.AF_INET6, "fd00::4", "ffff:ffff::"), card(socket.AF_PACKET, "aa:bb", None)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": eth0, "rail1": rail})
    assert networks() == ("10.9.0.4/16", "fd00::4/32") and networks(["rail1"]) == ("fd00::4/32",)
    assert interface_of("fd00::4") == "rail1"
    assert beside(networks(["eth0"]), ["10.9.7.7/16"]) and not beside(networks(["rail1"]), ["10.9.7.7/16"])


@pytest.mark.parametrize(
    ("hcas", "stops", "said"),
    [
        ("mlx5_1", True, "mlx5_1: takes mlx5_10:1, mlx5_11:1, no rail"),
        ("mlx5_2", False, "without = it is a list of prefixes"),
        ("^mlx5_0", True, "takes mlx5_10:1, mlx5_11:1, no rail"),
        ("^mlx5_1", False, "set by hand"),
        ("=mlx5_10", True, "takes mlx5_10:1, no rail"),
        ("=mlx5_9:1", True, "=mlx5_9:1: takes no device"),
        ("=mlx5_0:2", True, "takes no device"),
        ("=mlx5_0:1,mlx5_1:1:1:0", False, "set by hand"),
    ],
)
def test_10_lists_of_hcas(hcas: str, stops: bool, said: str) -> None:
    """Beside eight rails there are storage ports: mlx5_10 and mlx5_11."""
    ports = tuple(f"mlx5_{i}:1" for i in (*range(8), 10, 11))
    ranks = [(replace(b, verbs=ports), f) for b, f in by_hand("NCCL_IB_HCA", hcas=hcas)]
    made = proof(ranks)
    assert {what for _, what in (made.stops and stopping(made)) or warned(made)} == {"NCCL_IB_HCA"}
    assert made.stops == stops and said in made.table()


def test_10_lists_and_ports_of_single_ranks() -> None:
    """One rank with another list; a port that is down, or slow."""
    found = proof(changed(2, hcas="=mlx5_2:1"))
    assert (2, "NCCL_IB_HCA") in stopping(found) and (0, "NCCL_IB_HCA") in stopping(found), "not alike on the node"
    assert stopping(proof(changed(3, nic="down"))) == [(3, "NIC")]
    assert stopping(proof(changed(3, nic="absent"))) == [(3, "NIC")]
    assert warned(proof(changed(3, rate_gbit=100.0))) == [(3, "rate of NIC")]


def test_19_a_resolver_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host whose name it does not know. The interface is that of the next one's route."""
    heard = threading.Event()

    def slow(host: str) -> str:
        if host == "silent":
            heard.wait()
        return {"known": "10.0.0.5", "here": "127.0.0.1"}.get(host, "")

    monkeypatch.setattr(routes, "NAMES_S", 0.05)
    monkeypatch.setattr(routes, "own_address", slow)
    monkeypatch.setattr(routes, "interface_of", {"10.0.0.5": "eth0", "127.0.0.1": "lo"}.__getitem__)
    try:
        assert interface_to(["silent", "here", "known"]) == "eth0"
        assert interface_to(["silent", "here", "nobody"]) == "" == interface_to(["silent"])
    finally:
        heard.set()


def low_limits() -> tuple[dict[str, int], list[tuple[str, bool]]]:
    """What a process finds whose limits are too low, and what is made of that."""
    for name, value in (("MEMLOCK", 64 << 10), ("NOFILE", 60), ("STACK", 512 << 10)):
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))
    found = replace(probe(Binding(hcas="=mlx5_0:1")), hcas="=mlx5_0:1", devices=1)
    rows = of_rank(Rank(0, Binding(hcas="=mlx5_0:1"), found, world=4))
    mine = ("locked memory", "open files", "stack")
    return dict(found.limits), [(row.what, row.stops) for row in rows if row.what in mine]


def test_11_limits(ranks) -> None:
    (found, said) = ranks(0, low_limits)[0]
    assert found == {"memlock": 64 << 10, "nofile": 60, "stack": 512 << 10}
    assert said == [("locked memory", True), ("open files", True), ("stack", False)]
    usual = {"memlock": -1, "nofile": 65536, "stack": 8 << 20}
    assert warned(proof(changed(1, limits={**usual, "memlock": 1 << 30}))) == [(1, "locked memory")]
    assert warned(proof(changed(1, limits={**usual, "stack": -1}))) == [(1, "stack")]
    assert limits()["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_12_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs("/dev/shm")
    assert probe(None).shm_bytes == pytest.approx(real.f_bavail * real.f_frsize, rel=0.5)
    for free, shown in ((SimpleNamespace(f_bavail=16 << 10, f_frsize=4096), 64 << 20), (None, None)):

        def answer(path: str, free: object = free) -> object:
            if path != "/dev/shm" or free is None:
                raise FileNotFoundError(path)
            return free

        monkeypatch.setattr(os, "statvfs", answer)
        assert (found := probe(None).shm_bytes) == shown
        assert warned(proof(changed(1, shm_bytes=found))) == [(1, "/dev/shm")]


def test_13_a_picture_of_another_machine(tmp_path: Path) -> None:
    drawn = TESTS / "cluster/data/nccl_xml/azure_ndv4-topo.xml"
    live = replace(captured("nccl_xml/azure_ndv4-topo.xml"), sources=("sysfs",))
    assert machine_faults(live, str(drawn)) == ()
    other = replace(live, gpus=tuple(replace(g, pci=f"00aa:0{g.index}:00.0") for g in live.gpus))
    said = machine_faults(other, str(drawn))
    assert any("GPU 0001:00:00.0" in one and "not in sysfs" in one for one in said), said
    assert stopping(proof(changed(0, faults=said[:1]))) == [(0, "machine")]
    odd = replace(live, gpus=(*live.gpus[:7], replace(live.gpus[7], pci="00aa:00:00.0")))
    assert any("00aa:00:00.0" in one for one in machine_faults(odd, str(drawn)))
    assert "cannot be opened" in machine_faults(live, str(tmp_path / "none.xml"))[0]


def test_14_masks_that_contradict_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In VMs and containers: NVML, NCCL's picture and the kernel do not agree on the CPUs of a GPU. It costs speed
    alone. So does memory of another NUMA node."""
    node_tree(tmp_path)
    root = sysfs.read(tmp_path)
    nvml = stand_in([(gpu.pci, 0) for gpu in root.gpus], {(0, 1): 4})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine.sysfs, "read", lambda *_: root)
    seen = looks._faults("")
    assert len(seen) == 1 and "NVML and sysfs under" in seen[0] and "disagree on the CPUs of 2 GPUs" in seen[0], seen
    nvml.nvmlDeviceGetCpuAffinity = lambda h, words: [sum(1 << c for c in root.gpus[h].cpus), *[0] * (words - 1)]
    assert looks._faults("") == ()

    live = captured("nccl_xml/azure_ndv4-topo.xml")
    shifted = replace(live, numas=tuple(replace(n, index=3 - n.index) for n in live.numas), sources=("sysfs",))
    drawn = machine_faults(shifted, str(TESTS / "cluster/data/nccl_xml/azure_ndv4-topo.xml"))
    assert any("disagree on the CPUs" in one for one in drawn), drawn
    for one in (*seen, *(said for said in drawn if "disagree" in said)):
        assert {*warned(proof(changed(0, faults=(one,))))} == {(0, "machine")}
    assert warned(proof(changed(8, mems="2-3"))) == [(8, "NUMA memory")]
    assert warned(proof(changed(8, policy="bind:1"))) == [(8, "memory policy")]


def strangers(folder: Path) -> tuple[str, str]:
    """Rank 0 of two on two hosts is known to nobody by its name; addresses do."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    own = rendezvous.addresses
    os.environ["SLURMD_NODENAME"] = "no-such-host.invalid"
    rendezvous.addresses = lambda me: [*own(me)[:1], "127.0.0.1"]  # this machine may have no other address
    rendezvous.interface_of = lambda address: {"127.0.0.1": "eth7"}[address]
    me = Identity(rank, 2, 0, 1, "srun", "slurm-7-0-0")
    store, verdict = rendezvous.meet(me, folder, Arrival(2, f"h{rank}", (0,)), 20.0)
    leave(store, me)
    return json.loads(rendezvous.rendezvous_file(folder, me).read_text())["hosts"][0], verdict.route


def test_19_names_that_only_some_nodes_resolve(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 publishes every address it has, and ranks try all of them; what they reached it by is gloo's interface."""
    assert ranks(2, strangers, tmp_path) == [("no-such-host.invalid", "eth7")] * 2
    cards = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "docker0": [BRIDGE[:-3]]}

    def card(text: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=text)

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [*map(card, found)] for name, found in cards.items()})
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    found = rendezvous.addresses(Identity(0, 4, 0, 2, "srun", "k"))
    assert found == ["n7", socket.gethostname(), "10.0.0.5", "172.17.0.1"]


def test_20_a_gpu_without_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any host, by NVML or by nvidia-smi; where neither is there it is said that nobody looked."""
    shown = "smi_topo/vllm16336_b200_gpu2_lost_nvlink_truncated.txt"
    faults = machine_faults(captured(shown))
    assert len(faults) == 1 and "broken NVLink on gpu2" in faults[0]
    assert stopping(proof(changed(8, faults=faults))) == [(8, "machine")]

    gpus = tuple(replace(gpu, pci=f"0000:0{gpu.index}:00.0") for gpu in NODE.gpus)
    bare = replace(NODE, gpus=gpus, nvlinks={}, distances={}, sources=("sysfs",))
    monkeypatch.setattr(machine.sysfs, "read", lambda *_: bare)
    pairs = {(i, -1): 18 if i != 2 else 12 for i in range(8)}
    monkeypatch.setitem(sys.modules, "pynvml", stand_in([(gpu.pci, 0) for gpu in gpus], pairs))
    assert "broken NVLink on gpu2" in looks._faults("")[0]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(looks, "matrices", lambda problems: [captured(shown)])
    assert "broken NVLink on gpu2" in looks._faults("")[0]
    monkeypatch.setattr(looks, "matrices", lambda problems: [])
    assert looks._faults("") == ("NVLinks were not looked at",)
    said = proof(changed(8, faults=("NVLinks were not looked at",)))
    assert warned(said) == [(8, "machine")] and "pip install nvidia-ml-py" in said.table()


def test_21_one_gpu_for_two_ranks() -> None:
    """The roll call refuses equal UUIDs; instances of MIG have different ones, and one GPU all the same."""
    both = {rank: Arrival(2, "n0", (rank,), "GPU-1") for rank in range(2)}
    assert judge(both, 2, 1.0).error.startswith("ranks 0, 1 on n0 all have GPU GPU-1")
    assert (6, "GPU") in stopping(proof(changed(6, visible="MIG-41b3, MIG-5c21")))
    twice = good()
    twice[1] = twice[0]
    assert stopping(proof(twice)) == [(0, "place"), (1, "place")]
    assert [gpu.index for gpu in visible("2,0", NODE.gpus)] == [2, 0] and visible("7,9,1", NODE.gpus)[-1].index == 7


def test_22_what_the_batch_shell_takes_for_itself() -> None:
    script = (
        "#!/bin/bash\n#SBATCH --nodes=2\n# a comment's apostrophe\n\n#SBATCH --time=5\nexport A=1\n#SBATCH --mem=0\n"
        "srun sh -c 'echo $SLURM_PROCID'\nsrun python x.py --rank=$SLURM_PROCID\necho \"it's ${SLURM_LOCALID}\"\n"
    )
    assert lint(script) == [
        "line 5: #SBATCH --time=5 is not read, as the blank line 4 comes before it",
        "line 7: #SBATCH --mem=0 is not read, as the command in line 6 comes before it",
        "line 9: $SLURM_PROCID is replaced by the batch script, which is no rank: put it between single quotes, for a "
        "shell that each rank starts",
        "line 10: $SLURM_LOCALID is replaced by the batch script, which is no rank: put it between single quotes, for "
        "a shell that each rank starts",
    ]


def test_versions_and_clocks() -> None:
    """Not in the list, and as costly: another torch on one node, a clock that is behind."""
    versions = {"torch": "2.12.1", "nccl": "2.27.3", "hpctrain": "1", "python": "3.11", "driver": "570"}
    assert stopping(proof(changed(3, versions=versions))) == [(3, "version of torch")]
    assert warned(proof(changed(3, versions={**versions, "torch": "2.13.0", "driver": "550"}))) == [
        (3, "version of driver")
    ]
    for skew, said in ((-9.0, "8.9 s or more behind on n1"), (9.0, "8.8 s or more ahead on n1")):
        made = proof(good(), ahead=dict.fromkeys(range(8, 16), skew))
        assert warned(made) == [(8, "clock")] and said in made.table()
    wide = examine(None, dict(enumerate(good())), {rank: Met(ahead=(-60.0, 0.1)) for rank in range(8, 16)})
    assert warned(wide) == [], "a message that took a minute says nothing of clocks"


def test_what_somebody_set_is_a_warning() -> None:
    kept = [(replace(b, kept={"NCCL_CROSS_NIC": "0"}), f) for b, f in good()]
    found = proof(kept)
    assert not found.stops and {what for _, what in warned(found)} == {"variable NCCL_CROSS_NIC"}
    assert found.table().splitlines()[1].startswith("0-15  ")


def test_a_long_table_is_cut() -> None:
    found = [Finding(rank, f"thing {rank}", "a" * 99, "b", "c", "d") for rank in range(40)]
    lines = Proof(tuple(found), 40, 5, 0).table().splitlines()
    assert len(lines) == 26 and lines[-1] == "and 16 more, in proof.json" and "a" * 57 + "..." in lines[1]


def test_a_process_looks_at_itself() -> None:
    found = probe(None, versions={"torch": "x"})
    assert found.cpus and found.cpu_count > 0 and found.versions["torch"] == "x"
    assert set(found.limits) == {"memlock", "nofile", "stack"}
    assert Found.of(json.loads(json.dumps(found.plain()))) == found
    assert probe(Binding(nic="lo")).nic == "active" and probe(Binding(nic="nope0")).nic == "absent"


def test_every_failure_has_its_test() -> None:
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    here = {int(number) for number in re.findall(r"def test_(\d+)_", Path(__file__).read_text())}
    named = {
        int(number)
        for line in re.findall(r"Field failures? ([0-9, and]+)", text)
        for number in re.findall(r"\d+", line)
    }
    assert here | named == set(range(1, 23))


def test_7_tasks_of_the_step() -> None:
    """The step says how many tasks there are, also unevenly; the job may have other ones."""
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "3",
        "SLURM_NTASKS": "99",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    }
    me = detect(env)
    assert me is not None and (me.rank, me.world, me.local_rank, me.local_world) == (6, 7, 0, 1)
