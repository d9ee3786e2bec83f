"""What ranks of the health step leave, above all where one of them hangs; and where they are when they measure."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from hpctrain.cluster.node import Gpu, Nic, Node, Numa
from hpctrain.launch.health import step
from hpctrain.launch.health.judge import Device, judge
from hpctrain.launch.health.measure import Met, Sizes, links, meetings
from hpctrain.launch.health.place import TABLE, everywhere, place
from hpctrain.launch.health.record import Record, read
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.place.jobplan import PLAN, JobPlan
from hpctrain.launch.place.tablefile import JobTable, load
from tests.launch import jobs
from tests.launch.machines import NEW, bindings, captured, running
from tests.launch.submission import request

NODE = captured("smi_topo/sglang_env_8gpu_8nic_clean.txt")
SMALL = Sizes(32, 4096, 4096)
HANG = 3


def measured(life: str, where: str) -> str:
    """One of four ranks on two nodes; rank 3 hangs before or in its second round. How it ended."""
    import torch

    from hpctrain.launch.rank import bootstrap

    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    bootstrap.MARGIN_S = 0.0
    record = Record(Path(life), rank, Device(f"n{rank // 2}", rank % 2))
    exchange, rounds = dist.batch_isend_irecv, []

    def begin(number: int, peer: int | None) -> None:
        if rank == HANG and number == 1 and where == "before":
            time.sleep(60)
        rounds.append(number)
        record.begin(number, peer)

    def hang(operations):
        if rank == HANG and rounds[-1] == 1 and where == "in":
            time.sleep(60)
        return exchange(operations)

    dist.batch_isend_irecv = hang
    me = Identity(rank, 4, rank, 4, "srun", f"slurm-{where}")
    try:
        with bootstrap.process_group(me, Path(life), "cpu", 2.0, proves=False):
            for met in links(rank, 2, [0, 1], torch.device("cpu"), begin, sizes=SMALL):
                record.add(met)
            record.end()
            if rank == 0:
                time.sleep(4)  # it holds the store
    except Exception as error:
        return type(error).__name__
    return "ended"


@pytest.mark.parametrize("where", ["before", "in"])
def test_a_rank_that_hangs_is_named_and_so_is_a_link(ranks, tmp_path: Path, where: str) -> None:
    """All others wait for it, until they give up; what they wrote before each round tells who was last."""
    from hpctrain.launch.local.zygote import RankFailure

    with pytest.raises(RankFailure):
        ranks(4, measured, str(tmp_path), where, timeout_s=9.0)
    left = read(tmp_path)
    assert [(d.host, d.local) for d in left.devices] == [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)]
    assert {pair.metric for pair in left.pairs} >= {"local"}, "what was measured before is not lost"
    if where == "before":
        assert left.hung == {("n1", 1): "hung in round 1 of links"}
    else:
        assert left.hung == {
            ("n0", 1): "bytes to and from device 1 of n1 did not arrive",
            ("n1", 1): "bytes to and from device 1 of n0 did not arrive",
        }
    verdict = judge(left.devices, left.pairs, ["n0", "n1", "n2", "n3"], 2, hung=left.hung)
    assert "device 1: " in str(verdict.bad.get("n1") or verdict.notes)


def leave(life: Path, stages: dict[int, int | None], per_node: int = 1) -> None:
    """Files of ranks that were in a round, or done (None), or had not begun (-1)."""
    for rank, at in stages.items():
        device = Device(f"n{rank // per_node}", rank % per_node, samples={"matmul": (1.0,), "memory": (1.0,)})
        record = Record(life, rank, device)
        rounds = meetings(rank, per_node, range(len(stages) // per_node))
        for number, meeting in enumerate(rounds[: len(rounds) if at is None else at + 1]):
            record.begin(number, meeting.peer)
            if meeting.peer is not None and number != at:
                record.add(Met(meeting.metric, meeting.peer, (1.0, 1.0, 1.0)))
        if at is None:
            record.end()


def test_whoever_was_last_is_named(tmp_path: Path) -> None:
    leave(tmp_path / "a", {0: 2, 1: 2, 2: 2, 3: 0})
    assert read(tmp_path / "a").hung == {("n3", 0): "hung in round 1 of links"}
    leave(tmp_path / "b", {0: None, 1: None, 2: None, 3: -1})
    assert read(tmp_path / "b").hung == {("n3", 0): "hung before links were measured"}
    leave(tmp_path / "c", dict.fromkeys(range(4), 1))
    left = read(tmp_path / "c")
    assert left.hung == {} and "all ranks waited for each other in round 2 of links" in left.notes[0]
    leave(tmp_path / "d", dict.fromkeys(range(4), -1))
    leave(tmp_path / "e", dict.fromkeys(range(4)))
    for folder in ("d", "e"):
        assert read(tmp_path / folder).hung == {} and read(tmp_path / folder).notes == ()


def test_those_that_hang_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"n{i}" for i in range(6)]
    leave(tmp_path / "life", {**dict.fromkeys(range(6), 3), 4: 1})
    assert step.decide(tmp_path, tmp_path / "life", "7", 5, 1, hosts) == 0
    said = capsys.readouterr()
    assert said.out == "--exclude=n4\n" and "health: n4 is left out: device 0: hung in round 2 of links" in said.err


def test_every_host_of_the_job_has_its_places(tmp_path: Path, programs) -> None:
    """Spare nodes, too: local rank i has GPU i, its CPUs and its rail, as a training's ranks do."""
    said = "SLURM_VERSION = 22.05.8\\nTaskPlugin = task/affinity,task/cgroup\\nConstrainCores = yes\\n"
    programs("scontrol", f'printf "{said}"')
    made = request(tmp_path, jobs.report, nodes=2, ranks=2, profile={"spares": 1, "health": True})
    folder, life = tmp_path / "jobs", tmp_path / "life"
    folder.mkdir()
    (folder / PLAN).write_text(JobPlan.of(made.configs, made.site).dump())
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "HPCTRAIN_RAILS": "rail0,rail1", "HPCTRAIN_GPUS": "a,b"}
    flags = place(folder, life, env)
    assert flags.split() == ["--cpus-per-task=2", "--distribution=block:block", "--cpu-bind=none"]
    table = load(life / TABLE)
    assert table is not None and table.job == "7"
    assert [(p.host, p.local_rank, p.gpu, p.nic) for p in table.table] == [
        (f"n{node}", local, local, f"rail{local}") for node in range(3) for local in range(2)
    ]


def test_places_of_a_machine() -> None:
    """Each GPU's own rail, as the machine has it; where nothing is known nothing is bound."""
    table = JobTable("7", 0, everywhere(["n0", "n1", "n2"], NODE, 8), NODE)
    found = bindings(table, "n2", running(NODE))
    assert [b.nic for b in found] == [f"mlx5_{i}" for i in range(8)] and [b.row for b in found] == [*range(16, 24)]
    assert found[0].cpus == (*range(12), *range(96, 108))
    assert [p.nic for p in everywhere(["n0", "n1"], None, 2)] == [""] * 4
    assert NEW.version is not None


CPUS = tuple(sorted(os.sched_getaffinity(0)))


def a_rank_of_the_step(folder: str, rail: str) -> dict[str, object]:
    """What one of two ranks on one node leaves, whose rail is as named."""
    from hpctrain.launch.health import measure

    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    measure.Sizes.of = staticmethod(lambda device: SMALL)  # type: ignore[method-assign]
    nics = tuple(Nic(name, interface=name, verbs=False, role="rail") for name in dict.fromkeys(("lo", rail)))
    node = Node(gpus=tuple(Gpu(i, uuid=str(i), numa=0, cpus=CPUS) for i in range(2)), nics=nics, numas=(Numa(0, CPUS),))
    path = Path(folder, f"{rank}.table")
    path.write_text(JobTable("7", 0, everywhere(["n0"], node, 2), node).dump())
    slurm = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": str(rank), "LOCALID": str(rank), "STEP_NUM_TASKS": "2"}
    os.environ |= {f"SLURM_{name}": value for name, value in slurm.items()}
    os.environ |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURMD_NODENAME": "n0", "HPCTRAIN_RANK_TABLE": str(path)}
    os.environ |= {"HPCTRAIN_RAILS": "lo", "HPCTRAIN_GPUS": "0,1"}
    assert step.measure(Path(folder), "cpu", 20.0, dict(os.environ)) == 0
    tree: dict[str, object] = json.loads((Path(folder) / f"rank-{rank}.json").read_text())
    return {**tree, "cpus": sorted(os.sched_getaffinity(0))}


def test_a_rank_measures_on_its_place_and_tells_what_is_broken(ranks, tmp_path: Path) -> None:
    """Bound once, near its GPU. A rail that is not there is the fault of its node, ends no step, and nobody waits
    for links over it."""
    for rail, wrong, peers in (("lo", ["", ""], [[1], [0]]), ("gone0", ["device: not there"] * 2, [[], []])):
        (tmp_path / rail).mkdir()
        found = ranks(2, a_rank_of_the_step, str(tmp_path / rail), rail)
        assert [tree["done"] for tree in found] == [True, True]
        assert [[met["peer"] for met in tree["met"]] for tree in found] == peers
        assert [tree["device"]["wrong"].split(";")[0] for tree in found] == wrong
        if len(CPUS) > 1:
            assert sorted(cpu for tree in found for cpu in tree["cpus"]) == list(CPUS), "each its own, all of them used"
        left = read(tmp_path / rail)
        assert ("n0" in judge(left.devices, left.pairs, ["n0"], 2).bad) == (rail == "gone0")
    assert asdict(left.devices[0])["kind"] == "cpu"
