"""Labs come up once, are mended, lose nodes, and leave nothing behind however they end."""

from __future__ import annotations

import glob
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain import lab
from hpctrain.errors import LabError
from hpctrain.lab import Cluster, LabSpec, config, folder, kill_node, lifecycle, machines, processes
from tests.lab.test_cluster import sbatch, state
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


def traces(spec: LabSpec) -> list[str]:
    """All that shows that a lab is or was there."""
    where = str(spec.folder)
    found = [path for path in (where, *glob.glob("/tmp/spmix_*")) if os.path.exists(path)]
    for entry in Path("/proc").glob("[0-9]*"):
        for part in ("environ", "cmdline", "mountinfo"):
            try:
                seen = (entry / part).read_bytes()
            except OSError:
                continue
            if entry.name != str(os.getpid()) and f"{where}/".encode() in seen:
                found.append(f"{entry}/{part}")
    for port in spec.ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(f"port {port}")
    return found


def droppings() -> set[str]:
    """Files of the programs of a lab in the places that such programs use by default."""
    places = ("/run", "/dev/shm", "/var/log", "/var/spool", "/var/lib", "/etc", "/run/munge", "/run/mysqld")
    words = ("slurm", "munge", "mysql", "maria", "spmix", "pmix", "prte")
    return {
        f"{entry.path} {entry.stat(follow_symlinks=False).st_mtime_ns}"
        for place in places
        if os.path.isdir(place)
        for entry in os.scandir(place)
        if any(word in entry.name for word in words)
    }


@pytest.fixture
def spec(home: Path) -> Iterator[LabSpec]:
    """A small lab to be; nothing of it may be left, nor anything elsewhere."""
    before = droppings()
    yield LabSpec(home, nodes=2, gpus=1, cpus=2)
    assert droppings() == before


def test_second_lab_with_accounting_beside_the_first(slurm: Cluster, spec: LabSpec) -> None:
    with lab.cluster(replace(spec, accounting=True)) as second:
        job = sbatch(second, "srun -N2 true", "-N2")
        failing = sbatch(second, "exit 3")

        def accounted() -> dict[str, str]:
            rows = second.run(["sacct", "-X", "-n", "-P", "--format=JobID,State"]).stdout.split()
            return dict(row.split("|") for row in rows)

        until(lambda: accounted() == {job: "COMPLETED", failing: "FAILED"})
        assert set(slurm.node_states().values()) == {"idle"}
        assert second.run(["sinfo", "-h", "-o", "%D"]).stdout.split()[0] == "2"
        assert len(slurm.node_states()) == 4
        assert set(slurm.spec.ports).isdisjoint(second.spec.ports)
        assert traces(second.spec)
    assert traces(second.spec) == []
    assert slurm.node_states() == {f"n{i}": "idle" for i in range(4)}


def test_up_again_mends_or_refuses(spec: LabSpec) -> None:
    first = lab.up(spec)
    assert (first.found, first.cluster.spec.ports == spec.ports) == ("", False)
    again = lab.up(spec)
    assert (again.found, again.cluster.spec) == ("it runs already", first.cluster.spec)

    with pytest.raises(LabError, match=r"a lab runs in .* with nodes=2, not 3 and gpus=1, not 4; end it with"):
        lab.up(replace(spec, nodes=3, gpus=4))

    kill_node(first.cluster.spec, "n1")
    mended = lab.up(spec)
    assert (mended.found, mended.cluster.spec) == ("it ran, without n1", first.cluster.spec)
    assert mended.cluster.run(["srun", "-N2", "-l", "hostname"]).stdout.splitlines() != []

    head = machines.programs(first.cluster.spec, "head")
    processes.kill(head["slurmctld"])
    with pytest.raises(LabError, match=r"the head of the lab in .* is dead; replace the lab with hpctrain lab up"):
        lab.attach(spec.folder)
    replaced = lab.up(spec)
    assert replaced.found == "its head was dead, so it was made anew and its jobs are lost"
    assert replaced.cluster.node_states() == {"n0": "idle", "n1": "idle"}

    lab.down(spec.folder)
    assert traces(first.cluster.spec) == traces(replaced.cluster.spec) == []


def test_killed_node_is_noticed_and_its_job_requeued(spec: LabSpec) -> None:
    quick = replace(spec, nodes=3, slurmd_timeout_s=2, message_timeout_s=3)
    with lab.cluster(quick) as cluster:
        job = sbatch(cluster, "srun sleep 60", "-N2", "--requeue")
        until(lambda: state(cluster, job) == "RUNNING")
        victim = cluster.run(["squeue", "-h", f"--jobs={job}", "-o", "%B"]).stdout.strip()
        kill_node(cluster.spec, victim)
        until(lambda: state(cluster, job) == "PENDING", timeout_s=30)
        assert cluster.node_states()[victim] == "down*"
        assert "Restarts=1" in cluster.run(["scontrol", "show", "job", job]).stdout
        lab.start_node(cluster.spec, victim)
        assert cluster.node_states()[victim] == "idle"


def test_down_after_parts_were_killed(spec: LabSpec) -> None:
    made = lab.up(spec).cluster.spec
    outer = processes.parse((made.run / "n0.pid").read_text())
    processes.kill([outer, *machines.programs(made, "head")["munged"], *machines.programs(made, "n1")["slurmd"]])
    assert machines.programs(made, "n0") == {}
    assert lab.down(made.folder)
    assert traces(made) == []


def test_up_that_is_killed_half_way(spec: LabSpec) -> None:
    command = [sys.executable, "-m", "hpctrain", "lab", "up", f"--folder={spec.folder}", "--nodes=2"]
    with subprocess.Popen(command) as child:
        until(lambda: (spec.folder / "run" / "n0.up").exists())
        child.send_signal(signal.SIGKILL)
    made = folder.load(spec.folder)
    assert made and traces(made)
    assert lab.down(spec.folder)
    assert traces(made) == []


def test_machines_end_when_their_folder_is_gone(spec: LabSpec) -> None:
    made = lab.up(spec).cluster.spec
    folder.remove(made.folder)
    until(lambda: traces(made) == [], timeout_s=15)


def test_failing_daemon_is_quoted(spec: LabSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    good = config.slurm_conf
    monkeypatch.setattr(config, "slurm_conf", lambda spec: good(spec) + "SelectType=select/nonsense\n")
    with pytest.raises(LabError, match=r"slurmctld on head ended at once: it said .*fatal.*nonsense.*\(see .*log\)\."):
        lab.up(spec)
    made = folder.load(spec.folder)
    assert made and [trace for trace in traces(made) if trace != str(made.folder)] == []
    monkeypatch.undo()
    assert lab.up(spec).cluster.node_states() == {"n0": "idle", "n1": "idle"}


def test_machine_that_cannot_be_made_is_quoted(spec: LabSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "machine_script", lambda spec: "echo no mounts here >&2; exit 1\n")
    with pytest.raises(LabError, match=r"machine head of the lab did not start: it said 'no mounts here' \(see"):
        lab.up(spec)


def test_ports_in_use_are_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(lifecycle, "FIRST_PORT", port)
        monkeypatch.setattr(lifecycle, "LAST_PORT", port + 3)
        with pytest.raises(LabError, match="there are no 2 free TCP ports in a row"):
            lifecycle.free_ports(2)


def test_commands(home: Path) -> None:
    def hpctrain(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = dict(os.environ, HPCTRAIN_LAB=str(home))
        command = [sys.executable, "-m", "hpctrain", "lab", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert hpctrain("status").stderr.startswith(f"error: no lab runs in {home}; bring one up with hpctrain lab up")
    raised = hpctrain("up", "--nodes=2", "--gpus=2")
    assert raised.stdout.startswith("2 nodes with 2 GPUs each are ready after ")
    assert "it runs already" in hpctrain("up", "--nodes=2", "--gpus=2").stdout

    shown = json.loads(hpctrain("status", "--json").stdout)
    assert (shown["nodes"], shown["gpus_per_node"], shown["jobs"], shown["accounting"]) == (2, 2, 0, False)
    assert [(m["name"], m["state"], m["daemons"]) for m in shown["machines"]] == [
        ("head", "up", ["munged", "slurmctld"]),
        ("n0", "idle", ["slurmd"]),
        ("n1", "idle", ["slurmd"]),
    ]
    done = hpctrain("shell", "--", "srun", "-N2", "-l", "hostname")
    assert sorted(done.stdout.splitlines()) == ["0: n0", "1: n1"]
    assert hpctrain("shell", "--", "sh", "-c", "exit 7").returncode == 7
    assert hpctrain("shell", "--", "no-such-program").stderr == (
        "error: no-such-program cannot be run: No such file or directory.\n"
    )
    assert hpctrain("kill", "n1").stdout == "Ended n1; bring it back with hpctrain lab start n1.\n"
    assert "n1       dead" in hpctrain("status").stdout
    assert hpctrain("start", "n1").stdout == "n1 is back.\n"
    assert hpctrain("kill", "n7").stderr == "error: the lab has no node 'n7'; it has n0, n1.\n"
    assert hpctrain("down").stdout == f"Took the lab in {home} down.\n"
    assert hpctrain("down").stdout == f"There is no lab in {home}.\n"
