"""A lab with rails: who reaches whom by which way, bytes, faults and the way back, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks import rails as bench
from hpctrain import lab
from hpctrain.cli import main
from hpctrain.errors import LabError
from hpctrain.lab import Cluster, LabSpec, Traffic, counters, fabric, faults, machines, processes, railbind
from hpctrain.lab.fabric import LinkState
from hpctrain.lab.lifecycle import Raised
from hpctrain.layout.traffic import wire
from tests.benchmarks.test_table import check
from tests.lab.test_cluster import sbatch, state
from tests.lab.test_lifecycle import traces
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.rails, pytest.mark.xdist_group("rails")]

DISCARD = 9
"""A port that nobody listens on: who answers refuses, which shows that there is a way there and back."""

KNOCK = f"""
import socket, sys
source, peer = sys.argv[1:]
try:
    socket.create_connection((peer, {DISCARD}), 1.0, (source, 0))
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("lost")
"""


def inside(spec: LabSpec, machine: str, *command: str) -> str:
    """What a program says in the network of a machine."""
    first = machines.init(spec, machine)
    assert first
    enter = ["nsenter", f"--net=/proc/{first.pid}/ns/net", "--", *command]
    return subprocess.run(enter, capture_output=True, text=True, check=True, timeout=30).stdout


def reaches(spec: LabSpec, source: str, peer: str, rail: int, peer_rail: int) -> bool:
    addresses = (spec.rail_address(source, rail), spec.rail_address(peer, peer_rail))
    return inside(spec, source, sys.executable, "-I", "-S", "-c", KNOCK, *addresses) == "reached\n"


def routes(spec: LabSpec, node: str) -> str:
    return inside(spec, node, "ip", "route", "show", "table", "all") + inside(spec, node, "ip", "rule")


def crossed(spec: LabSpec) -> int:
    return sum(traffic.sent for traffic in counters(spec)["spine"].values())


def hpctrain(spec: LabSpec, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["lab", *arguments], env={"HPCTRAIN_LAB": str(spec.folder)})


def namespaces(spec: LabSpec) -> set[str]:
    firsts = [machines.init(spec, name) for name in spec.everything]
    return {os.readlink(f"/proc/{first.pid}/ns/net") for first in firsts if first}


def test_nodes_have_rails_and_devices(rails: Cluster) -> None:
    spec = rails.spec
    assert rails.node_states() == {f"n{i}": "idle" for i in range(4)}
    script = "echo $(hostname) $CUDA_VISIBLE_DEVICES $(ls /sys/class/net) $(ls /dev/shm | wc -l) $(command -v srun)"
    done = rails.run(["srun", "-N4", "--gres=gpu:4", "bash", "-c", script])
    rows = sorted(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert [row for row, _ in rows] == [f"n{i} 0,1,2,3 eth0 lo rail0 rail1 rail2 rail3 0" for i in range(4)]
    assert not any(program.startswith(str(spec.folder)) for _, program in rows)
    assert fabric.link_states(spec)["n2"] == {f"rail{r}": LinkState(True, 200) for r in range(4)}
    assert fabric.link_states(spec)["spine"] == {f"leaf{r}": LinkState(True, 100) for r in range(4)}
    assert "SwitchName=rails Level=0" in rails.run(["scontrol", "show", "topology"]).stdout


def test_the_host_has_nothing_of_the_fabric(rails: Cluster) -> None:
    own = os.readlink("/proc/self/ns/net")
    assert len(namespaces(rails.spec) - {own}) == 7
    host = Path("/proc/net/dev").read_text()
    assert "rail0" not in host and "leaf0" not in host and "mgmt" not in host
    assert "10.1." not in subprocess.run(["ip", "route"], capture_output=True, text=True).stdout


def test_a_rail_is_crossed_only_by_the_spine(rails: Cluster) -> None:
    spec = rails.spec
    before = counters(spec)
    assert all(reaches(spec, "n0", "n3", rail, rail) for rail in range(4))
    assert crossed(spec) == sum(traffic.sent for traffic in before["spine"].values())
    for rail in range(4):
        assert counters(spec)["n0"][f"rail{rail}"].sent > before["n0"][f"rail{rail}"].sent

    before = counters(spec)
    assert reaches(spec, "n1", "n2", 0, 3)
    now = counters(spec)
    assert now["spine"]["leaf3"].sent > before["spine"]["leaf3"].sent
    assert now["spine"]["leaf0"].sent > before["spine"]["leaf0"].sent  # the answer, and that by which rail it came
    assert now["n2"]["rail3"].sent > before["n2"]["rail3"].sent
    for name, interface in (("n1", "rail3"), ("n2", "rail0"), ("n1", "rail1")):
        assert now[name][interface].sent == before[name][interface].sent, f"{name}:{interface}"


def test_jobs_in_jobs_and_batch(rails: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = sbatch(rails, "srun -N4 hostname; getent hosts n3", "-N4", f"--output={output}")
    until(lambda: state(rails, job) == "")
    assert sorted(output.read_text().split()) == sorted(["n0", "n1", "n2", "n3", rails.spec.address("n3"), "n3"])


def test_bytes_go_where_ranks_are_and_placement_pays(rails: Cluster) -> None:
    """Ranks of a job that was submitted take the rails that its rank table has for them. What interfaces have counted
    is held against the table. Rails are slow, so that a busy machine can fill them, and as many rounds are taken as it
    takes to be sure of seconds."""
    assert railbind.obstacle(rails.spec) is None
    for rail in rails.spec.rail_names:
        lab.slow(rails.spec, rail, 40)
    result = json.loads(json.dumps(bench.measure(rails, rounds=3, mib=1, enough=lambda ratio: ratio > 2)))
    check(result, 3)
    assert result["interfaces"] == {str(rank): f"rail{rank % 4}" for rank in range(16)}

    planned = wire("all_reduce", 2**20, 4)
    assert result["foreseen"] == {rail: [planned] * 4 for rail in rails.spec.rail_names}
    moved = result["bytes"]
    for rail in rails.spec.rail_names:
        assert moved[bench.ALONG][rail] == pytest.approx(result["foreseen"][rail], rel=0.05)
        on_rail0 = 4 * planned if rail == "rail0" else 0
        assert moved[bench.CROWD][rail] == pytest.approx([on_rail0] * 4, rel=0.05, abs=1000)  # late acknowledgements
        bound = moved[bench.BOUND][rail]  # some of it twice: the queues of the spine overflow
        assert planned < min(bound) and sum(bound) < 1.3 * 4 * planned
    # gloo connects to where its peer listens, whatever rail the rank was given: nothing crosses, but rails share it.
    rotated = [sum(moved[bench.ROTATED][rail]) for rail in rails.spec.rail_names]
    assert sum(rotated) == pytest.approx(16 * planned, rel=0.05) and max(rotated) > 1.5 * 4 * planned
    assert [moved[name]["spine"] for name in (bench.ALONG, bench.CROWD, bench.ROTATED)] == [0, 0, 0]
    assert 16 * planned < moved[bench.BOUND]["spine"] < 1.3 * 16 * planned
    assert result["as_foreseen"] and result["times_as_fast"][bench.CROWD][0] > 2, result["seconds"]


def test_a_pulled_cable_is_seen_and_heals(rails: Cluster) -> None:
    spec, before = rails.spec, routes(rails.spec, "n1")
    carrier = ["srun", "-w", "n1", "cat", *(f"/sys/class/net/rail{r}/carrier" for r in range(4))]
    assert hpctrain(spec, "link-down", "n1:rail2").stdout == (
        "n1:rail2 is down; bring it back with hpctrain lab heal.\n"
    )
    assert rails.run(carrier).stdout.split() == ["1", "1", "0", "1"]
    assert not reaches(spec, "n1", "n0", 2, 2)
    assert reaches(spec, "n1", "n0", 1, 1) and reaches(spec, "n0", "n2", 2, 2)
    assert lab.status(rails)["amiss"] == ["n1:rail2 is down"]
    assert hpctrain(spec, "heal").stdout == "Mended: n1:rail2 was down.\n"
    assert rails.run(carrier).stdout.split() == ["1", "1", "1", "1"]
    assert routes(spec, "n1") == before
    until(lambda: reaches(spec, "n1", "n0", 2, 2) and reaches(spec, "n1", "n0", 2, 3), 60.0)
    assert hpctrain(spec, "heal").stdout == "Nothing was amiss.\n"


def test_an_interface_set_down_on_the_node_heals_with_its_routes(rails: Cluster) -> None:
    spec, before = rails.spec, routes(rails.spec, "n3")
    inside(spec, "n3", "ip", "link", "set", "rail1", "down")
    assert "table 101" not in inside(spec, "n3", "ip", "route", "show", "table", "all")
    assert lab.heal(rails) == ["n3:rail1 was down"]
    assert routes(spec, "n3") == before and "default via 10.1.1.254 dev rail1 table 101" in before
    assert reaches(spec, "n3", "n0", 1, 0)


@pytest.mark.parametrize(
    ("target", "slowed"),
    [
        ("n3", [f"n3:rail{r}" for r in range(4)]),
        ("rail1", [f"n{n}:rail1" for n in range(4)]),
        ("n0:rail2", ["n0:rail2"]),
        ("leaf3", ["spine:leaf3"]),
    ],
)
def test_slow_links(rails: Cluster, target: str, slowed: Sequence[str]) -> None:
    spec = rails.spec
    assert hpctrain(spec, "slow", target, "--mbit", "20").exit_code == 0
    machine, _, interface = slowed[0].partition(":")
    assert "rate 20Mbit" in inside(spec, machine, "tc", "qdisc", "show", "dev", interface)
    assert lab.status(rails)["amiss"] == [f"{name} is at 20 Mbit/s" for name in slowed]
    assert lab.heal(rails) == [f"{name} was at 20 Mbit/s" for name in slowed]
    rate = spec.spine_mbit if machine == "spine" else spec.rail_mbit
    assert f"rate {rate}Mbit" in inside(spec, machine, "tc", "qdisc", "show", "dev", interface)


def test_a_node_that_was_killed_has_its_links_back(rails: Cluster) -> None:
    spec, before = rails.spec, routes(rails.spec, "n2")
    lab.kill_node(spec, "n2")
    assert "n2" not in counters(spec) and "n2" not in fabric.link_states(spec)
    assert not reaches(spec, "n0", "n2", 0, 0)
    lab.link_down(spec, "rail0")  # what is dead is left alone
    assert hpctrain(spec, "heal").stdout == (
        "Mended: n2 was dead, n0:rail0 was down, n1:rail0 was down, n3:rail0 was down.\n"
    )
    assert routes(spec, "n2") == before
    assert reaches(spec, "n0", "n2", 0, 0) and reaches(spec, "n2", "n3", 1, 2)
    assert rails.run(["srun", "-N4", "hostname"]).stdout.count("n") == 4


def test_links_outlive_slurmd(rails: Cluster) -> None:
    before = counters(rails.spec)["n1"]
    assert before["eth0"].sent > 0
    lab.kill_node(rails.spec, "n1", slurmd_only=True)
    lab.start_node(rails.spec, "n1")
    assert counters(rails.spec)["n1"]["eth0"].sent >= before["eth0"].sent


def test_a_drained_node_gets_no_jobs(rails: Cluster) -> None:
    assert hpctrain(rails.spec, "drain", "n2").exit_code == 0
    assert rails.node_states()["n2"] == "drained"
    assert "hpctrain lab drain" in rails.run(["sinfo", "-R", "--noheader", "--format=%60E %N"]).stdout
    assert rails.run(["srun", "--immediate=1", "-N4", "true"], check=False).returncode != 0
    assert lab.heal(rails) == ["n2 was drained"]
    assert rails.node_states()["n2"] == "idle"


def test_names_that_are_no_links(rails: Cluster) -> None:
    for name in ("n4", "rail4", "n0:eth0", "head", ""):
        with pytest.raises(LabError, match=r"has no link '.*': name a node \(n0 to n3\), a rail \(rail0 to rail3\)"):
            lab.link_down(rails.spec, name)
    for mbit in (0, 10_001):
        with pytest.raises(LabError, match=f"a link cannot have {mbit} Mbit/s: choose from 1 to 10000"):
            lab.slow(rails.spec, "n0", mbit)
    with pytest.raises(LabError, match="the lab has no node 'rail0'"):
        lab.drain_node(rails, "rail0")
    assert fabric.amiss(rails.spec) == []


def test_a_plain_lab_has_no_links() -> None:
    plain = LabSpec(Path("/lab"))
    for act in (counters, lambda spec: faults.targets(spec, "n0")):
        with pytest.raises(
            LabError, match=r"the lab in /lab has no rails; bring one up with hpctrain lab up --rails 4"
        ):
            act(plain)
    assert fabric.link_states(plain) == {} and fabric.amiss(plain) == []


def test_up_says_what_there_is(rails: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = rails.spec
    assert hpctrain(spec, "up", "--rails=4").stdout.splitlines()[2:] == [
        "Each has 4 rails of 200 Mbit/s; leaf to spine: 100 Mbit/s.",
        f"Use it:  hpctrain lab shell --folder {spec.folder}",
        f"or:      export SLURM_CONF={spec.folder}/etc/slurm.conf PATH={spec.folder}/bin:$PATH",
    ]
    monkeypatch.setattr(railbind, "obstacle", lambda spec: "connections cannot be bound.")
    assert "Connections cannot be bound.\n" in hpctrain(spec, "up", "--rails=4").stdout
    made = Raised(Cluster(replace(spec, rails=0)), "", 1.0, "rails need iproute2.")
    monkeypatch.setattr(lab, "up", lambda wanted: made)
    said = hpctrain(spec, "up", "--rails=4").stdout
    assert "They have no rails: rails need iproute2.\n" in said and "Mbit/s" not in said and "PATH" not in said


def test_without_a_compiler_there_is_no_binding(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LabSpec(home.parent, rails=1)
    spec.log("x").parent.mkdir()
    monkeypatch.setattr(railbind, "PATH", "/nowhere")
    railbind.build(spec)
    assert railbind.obstacle(spec) == (
        "connections cannot be bound to a rail before apt-get install gcc libc6-dev and a new lab."
    )
    with pytest.raises(LabError, match="connections cannot be bound to a rail before"):
        railbind.environment(spec)
    monkeypatch.undo()
    monkeypatch.setattr(railbind, "SOURCE", home / "none.c")
    railbind.build(spec)
    assert str(railbind.obstacle(spec)).startswith(
        "the library that binds connections to a rail cannot be made: it said"
    )


def test_counters_on_the_command_line(rails: Cluster) -> None:
    shown = json.loads(hpctrain(rails.spec, "counters", "--json").stdout)
    assert list(shown) == ["n0", "n1", "n2", "n3", "spine"]
    assert list(shown["n0"]) == ["eth0", "rail0", "rail1", "rail2", "rail3"]
    assert shown["n0"]["eth0"].keys() == {"sent", "received"} and shown["n0"]["eth0"]["sent"] > 0
    lines = hpctrain(rails.spec, "counters").stdout.splitlines()
    assert lines[0].split() == ["machine", "interface", "bytes", "sent", "received"] and len(lines) == 1 + 4 * 5 + 4


def test_second_fabric_beside_the_first_leaves_nothing(rails: Cluster, home: Path) -> None:
    wanted = LabSpec(home, nodes=2, gpus=1, cpus=2, rails=1, rail_mbit=50)
    host = Path("/proc/net/dev").read_text().count(":")
    second = lab.up(wanted).cluster
    assert fabric.link_states(second.spec)["n1"] == {"rail0": LinkState(True, 50)}
    assert reaches(second.spec, "n0", "n1", 0, 0) and namespaces(second.spec).isdisjoint(namespaces(rails.spec))
    with pytest.raises(LabError, match=r"with rails=1, not 2 and rail_mbit=50, not 60; end it"):
        lab.up(replace(wanted, rails=2, rail_mbit=60))
    with pytest.raises(LabError, match=r"with rails=1, not 0; end it"):
        lab.up(replace(wanted, rails=0))

    spaces = namespaces(second.spec)
    outers = [processes.parse((second.spec.run / f"{name}.pid").read_text()) for name in second.spec.everything]
    assert len(spaces) == 5 and processes.kill(outers)  # all of it at once, as a crash would
    until(lambda: spaces.isdisjoint(in_use()), timeout_s=15)
    third = lab.up(wanted)
    assert third.found == "its head was dead, so it was made anew and its jobs are lost"

    spaces = namespaces(third.cluster.spec)
    lost = machines.init(third.cluster.spec, "spine")
    assert lost and processes.kill([lost])
    with pytest.raises(LabError, match=r"the network of the lab in .* is dead; replace the lab"):
        lab.attach(home)
    fourth = lab.up(wanted)
    assert fourth.found == "its network was dead, so it was made anew and its jobs are lost"

    spaces |= namespaces(fourth.cluster.spec)
    assert lab.down(home)
    until(lambda: spaces.isdisjoint(in_use()), timeout_s=3)  # a machine without a folder would end by itself, later
    for spec in (second.spec, third.cluster.spec, fourth.cluster.spec):
        assert traces(spec) == []
    assert Path("/proc/net/dev").read_text().count(":") == host
    assert fabric.amiss(rails.spec) == [] and set(rails.node_states().values()) == {"idle"}


def in_use() -> set[str]:
    """Network namespaces that any process is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(entry / "ns" / "net"))
        except OSError:
            continue
    return found


def test_lines_of_the_kernel() -> None:
    line = " rail0: 1234 5 0 0 0 0 0 0 99887 6 0 0 0 0 0 0"
    assert fabric.parse(line) == ("rail0", Traffic(sent=99887, received=1234))
    assert Traffic(5, 4) - Traffic(2, 3) == Traffic(3, 1)
