"""The step of the batch script that says which rank goes where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cluster.fabrics import rail_optimized
from hpctrain.cluster.readfabric import fabric_in
from hpctrain.launch.place import badnodes
from hpctrain.launch.place.arrange import Arrangement, arrange, main
from hpctrain.launch.place.jobplan import PLAN, JobPlan
from hpctrain.launch.place.tablefile import by_link, leaf_changes, load
from hpctrain.launch.slurm.profile import Profile
from hpctrain.launch.slurm.rules import Slurm
from tests.launch.machines import NEW, captured, config

CONF = "SwitchName=leaf0 Nodes=n0,n2\nSwitchName=leaf1 Nodes=n1,n3\nSwitchName=top Switches=leaf[0-1]\n"
HOSTS = ["n0", "n1", "n2", "n3"]
NODE = captured("smi_topo/sglang_env_8gpu_8nic_clean.txt")


def profile(**fields: object) -> Profile:
    return Profile.model_validate({"about": "for a test", "node": "live", "fabric": "slurm", **fields})


def made(
    slurm: Slurm = NEW, hosts: list[str] = HOSTS, nodes: int = 4, text: str = CONF, **fields: object
) -> Arrangement:
    plan = JobPlan((config(nodes, 8, tp=8),), profile(**fields))
    return arrange(plan, 0, ("7", 1), hosts, NODE, fabric_in(text, "topology.conf"), slurm)


def test_hosts_of_a_leaf_come_together() -> None:
    """Field failure 15: Slurm's own order is by name, though there is a topology.conf."""
    found = made()
    assert found.job.table.hosts in (("n0", "n2", "n1", "n3"), ("n0", "n2", "n3", "n1"))
    assert found.flags == ("--distribution=arbitrary", "--cpu-bind=none")
    assert found.job.distribution == "arbitrary"
    spine = {row["link"]: row for row in by_link(found.job.table)}["spine"]
    assert spine["this order"] < spine["Slurm by name"] / 1.9
    assert leaf_changes(found.job.table) == 1
    assert any("the leaf switch changes 1 times, 3 in Slurm's order" in said for said in found.said)
    assert any(said.startswith("ranks: bytes a step over spine: this order") for said in found.said)


def test_where_slurm_refuses_ranks_stay_in_its_order() -> None:
    blocks = "BlockName=b0 Nodes=n0,n2\nBlockName=b1 Nodes=n1,n3\nBlockSizes=2\n"
    old, new = made(Slurm((25, 11), "block"), text=blocks), made(Slurm((26, 5), "block"), text=blocks)
    assert old.flags[0] == "--distribution=arbitrary" and old.job.table.hosts[:2] == ("n0", "n2")
    assert new.flags[0] == "--distribution=block:block" == f"--distribution={new.job.distribution}"
    assert new.job.table.hosts == ("n0", "n2", "n1", "n3"), "as Slurm numbers them by itself since 26.05"
    told = made(Slurm((26, 5), "block", scheduler="CR_NO_DIST_TOPO_BLOCK"), text=blocks)
    assert told.job.table.hosts == ("n0", "n1", "n2", "n3")
    assert any("26.05 with topology/block refuses it" in said for said in told.said)


def test_an_order_that_is_slurms_own_needs_no_file() -> None:
    found = made(
        text="SwitchName=leaf0 Nodes=n[0-1]\nSwitchName=leaf1 Nodes=n[2-3]\nSwitchName=top Switches=leaf[0-1]\n"
    )
    assert found.flags == ("--distribution=block:block", "--cpu-bind=none")
    assert found.job.table.hosts == tuple(HOSTS)


def test_gpus_change_places_where_hosts_cannot() -> None:
    """Four ranks of tp on eight GPUs: a ring of data leaves a host by the rail on which it enters the next."""
    plan = JobPlan((config(4, 8, tp=4),), profile())
    found = arrange(plan, 0, ("7", 0), HOSTS, NODE, rail_optimized(HOSTS, 8), NEW)
    assert found.flags[0] == "--distribution=block:block"
    assert found.job.table.bytes.over("cross_rail") == 0
    assert found.job.table.slurm["by name"].over("cross_rail") > 0
    assert found.job.table.gpus_of("n0") != found.job.table.gpus_of("n1")


def test_the_best_of_more_nodes_are_used() -> None:
    found = made(nodes=2, spares=2)
    assert set(found.job.table.hosts) in ({"n0", "n2"}, {"n1", "n3"})
    assert {"--nodes=2", "--ntasks=16"} < set(found.flags)
    assert f"--nodelist={','.join(found.job.table.hosts)}" in found.flags or "--distribution=arbitrary" in found.flags


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    job = made(cpus_per_task=12, exclusive=True, nccl_topo="/opt/x.xml").job
    (tmp_path / "t.json").write_text(job.dump())
    back = load(tmp_path / "t.json")
    assert back is not None
    assert list(back.table) == list(job.table)
    assert (back.job, back.restart, back.cpus_per_task, back.exclusive, back.topo_file) == (
        "7",
        1,
        12,
        True,
        "/opt/x.xml",
    )
    assert back.record() == job.record() and back.node == job.node
    assert load(tmp_path / "other.json") is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "run" / "jobs" / "stamp"
    where.mkdir(parents=True)
    (where / PLAN).write_text(JobPlan((config(4, 2), config(4, 2, tp=2)), profile(cpus_per_task=2)).dump())
    return where


def env(folder: Path, **more: str) -> dict[str, str]:
    table = folder / "7" / "rank_table-0.json"
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-3]", "HPCTRAIN_RANK_TABLE": str(table), **more}


def test_in_a_job(folder: Path, programs, capsys: pytest.CaptureFixture[str]) -> None:
    text = CONF.replace("\n", "\\n")
    config = "SLURM_VERSION = 22.05.8\\nTopologyPlugin = topology/tree\\nTaskPlugin = task/cgroup,task/affinity\\n"
    config += "ConstrainCores = yes\\n"
    programs("scontrol", f'case $2 in config) printf "{config}" ;; *) printf "{text}" ;; esac')
    rails = {"HPCTRAIN_RAILS": "rail0,rail1", "HPCTRAIN_GPUS": "0,1"}
    assert main([str(folder)], env(folder, SLURM_ARRAY_TASK_ID="1", **rails)) == 0
    out = capsys.readouterr()
    assert out.out == "--cpus-per-task=2 --distribution=arbitrary --cpu-bind=none\n"
    assert "ranks: each rank has its host in SLURM_HOSTFILE; the leaf switch changes 1 times, 3 in" in out.err
    job = load(folder / "7" / "rank_table-0.json")
    assert job is not None and job.table.layout.tp == 2, "of the element"
    assert [place.nic for place in job.table] == ["rail0", "rail1"] * 4
    assert (folder / "7" / "rank_table-0.hosts").read_text().split() == [place.host for place in job.table]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_JOB_NODELIST": "n[0-1]"}, "8 ranks do not fit on 2 nodes with 4 places"),
        ({"SLURM_JOB_NODELIST": "n[0-"}, "the last bracket is not closed"),
        ({"SLURM_JOB_ID": ""}, ""),
    ],
)
def test_what_goes_wrong_costs_the_order_alone(
    folder: Path, programs, capsys, change: dict[str, str], said: str
) -> None:
    programs("scontrol", "exit 1")
    status = main([str(folder)], env(folder, **change))
    out = capsys.readouterr()
    assert status == (1 if said else 0)
    if said:
        assert out.out == "" and said in out.err
        assert out.err.splitlines()[-1].startswith("warning: ranks are where Slurm puts them, and nothing is bound: ")
    else:
        assert "warning: the fabric is not known" in out.err


def test_broken_nodes_are_not_taken_again(folder: Path, programs, capsys: pytest.CaptureFixture[str]) -> None:
    """Field failure 16: a node that was said to be exchanged is in the new allocation."""
    programs("scontrol", "exit 1")
    run = folder.parents[1]
    badnodes.remember(run, {"n2": "NVLink"})
    badnodes.remember(run, {"n9": "slow"})
    assert badnodes.known(run) == {"n2": "NVLink", "n9": "slow"}
    assert main([str(folder)], env(folder)) == 9
    assert capsys.readouterr().err.startswith(
        "error: this job was given n2, which is known to be broken (NVLink): it goes back into the queue without"
    )
    plan = JobPlan((config(3, 2),), profile(spares=1))
    (folder / PLAN).write_text(plan.dump())
    assert main([str(folder)], env(folder)) == 0
    assert json.loads((folder / "7" / "rank_table-0.json").read_text())["hosts"] == ["n0", "n1", "n3"]
    flags = capsys.readouterr().out.split()
    assert {"--nodes=3", "--ntasks=6", "--nodelist=n0,n1,n3"} <= {*flags}, "the broken node is in the allocation"
