"""The shared lab is a real Slurm: GPUs, topology, jobs, preemption, requeue, PMIx."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from hpctrain.errors import LabError
from hpctrain.lab import Cluster, kill_node, start_node, status
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


def sbatch(slurm: Cluster, script: str, *flags: str) -> str:
    """The id of a job that runs a shell command."""
    return slurm.run(["sbatch", "--parsable", "--output=/dev/null", *flags, f"--wrap={script}"]).stdout.strip()


def state(slurm: Cluster, job: str) -> str:
    return slurm.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"], check=False).stdout.strip()


def test_all_nodes_are_idle(slurm: Cluster) -> None:
    assert slurm.node_states() == {f"n{i}": "idle" for i in range(4)}
    partitions = slurm.run(["sinfo", "--noheader", "--format=%P %p %D"]).stdout.split("\n")
    assert [line.split() for line in partitions if line] == [["batch*", "1", "4"], ["high", "10", "4"]]


def test_tasks_have_ranks_and_gpus(slurm: Cluster) -> None:
    script = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $(hostname) gpus=$CUDA_VISIBLE_DEVICES"
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", "bash", "-c", script])
    assert sorted(done.stdout.splitlines()) == [
        "0 0 0 n0 gpus=0,1",
        "1 1 0 n0 gpus=0,1",
        "2 0 1 n1 gpus=0,1",
        "3 1 1 n1 gpus=0,1",
    ]


def test_one_gpu_a_task(slurm: Cluster) -> None:
    command = ["srun", "-N1", "-n4", "--gpus-per-task=1", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert sorted(slurm.run(command).stdout.split()) == ["0", "1", "2", "3"]


def test_tasks_do_not_interrupt_each_other(slurm: Cluster) -> None:
    shown = slurm.run(["srun", "-N2", "bash", "-c", "chrt --pid $$"]).stdout
    assert shown.count("SCHED_BATCH") == 2, shown


def test_more_gpus_than_a_node_has_are_refused(slurm: Cluster) -> None:
    with pytest.raises(LabError, match="Requested node configuration is not available"):
        slurm.run(["srun", "-N1", "--gres=gpu:5", "true"])


def test_nodes_hang_on_two_leaves(slurm: Cluster) -> None:
    done = slurm.run(["srun", "-N4", "bash", "-c", "echo $SLURM_TOPOLOGY_ADDR"])
    assert sorted(done.stdout.split()) == ["spine.leaf0.n0", "spine.leaf0.n1", "spine.leaf1.n2", "spine.leaf1.n3"]
    shown = slurm.run(["scontrol", "show", "topology"]).stdout
    assert "SwitchName=spine Level=1" in shown and "Nodes=n[2-3]" in shown


def test_nodes_know_each_other_by_name(slurm: Cluster) -> None:
    done = slurm.run(["srun", "-w", "n0", "getent", "hosts", "n0", "n3", "head"])
    expected = [[slurm.spec.address(name), name] for name in ("n0", "n3", "head")]
    assert [line.split() for line in done.stdout.splitlines()] == expected


def test_nodes_share_no_memory(slurm: Cluster) -> None:
    done = slurm.run(["srun", "-N2", "bash", "-c", "touch /dev/shm/$(hostname); sleep 1; ls /dev/shm"])
    assert sorted(done.stdout.split()) == ["n0", "n1"]


def test_batch_job_writes_its_output(slurm: Cluster, tmp_path: Path) -> None:
    job = sbatch(slurm, "srun -N2 hostname; echo $SLURM_JOB_ID", "-N2", f"--output={tmp_path}/%j.out")
    output = tmp_path / f"{job}.out"
    until(lambda: output.exists() and job in output.read_text())
    assert sorted(output.read_text().split()) == sorted(["n0", "n1", job])


def test_cancelled_job_is_gone(slurm: Cluster) -> None:
    job = sbatch(slurm, "sleep 60")
    until(lambda: state(slurm, job) == "RUNNING")
    assert status(slurm)["jobs"] == 1
    slurm.run(["scancel", job])
    until(lambda: state(slurm, job) == "")


def test_command_out_of_time_leaves_no_job(slurm: Cluster) -> None:
    with pytest.raises(LabError, match=r"salloc has not ended after 1 s; see the logs in "):
        slurm.run(["salloc", "-N4", "sleep", "60"], timeout_s=1)
    until(lambda: slurm.run(["squeue", "--noheader"]).stdout == "", timeout_s=10)


def test_pmix_on_every_node(slurm: Cluster) -> None:
    before = set(glob.glob("/tmp/spmix_*"))
    done = slurm.run(["srun", "--mpi=pmix", "-N4", "-n8", "bash", "-c", "sleep 0.3; echo $PMIX_RANK"])
    assert sorted(done.stdout.split()) == [str(rank) for rank in range(8)]
    assert set(glob.glob("/tmp/spmix_*")) == before


def test_preempted_job_is_warned_and_requeued(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    task = "trap 'echo warned' USR2; echo life ${SLURM_RESTART_COUNT:-0}; for i in {1..600}; do sleep 0.1; done"
    flags = ("-N4", "--gres=gpu:4", "--requeue", "--open-mode=append", "--signal=USR2@60", "--time=30")
    (tmp_path / "task.sh").write_text(task)
    job = sbatch(slurm, f"srun bash {tmp_path}/task.sh", *flags, f"--output={log}")
    until(lambda: log.exists() and log.read_text().count("life 0") == 4)
    assert "warned" not in log.read_text()
    urgent = sbatch(slurm, f"echo urgent >>{log}", "--partition=high", "-N4", "--gres=gpu:4")
    until(lambda: log.read_text().count("warned") == 4, timeout_s=10)
    until(lambda: "urgent" in log.read_text(), timeout_s=60)  # the job stays on, so Slurm has to end it
    until(lambda: log.read_text().count("life 1") == 4)
    assert state(slurm, urgent) == ""
    assert state(slurm, job) == "RUNNING"


def test_job_outlives_its_slurmd(slurm: Cluster, tmp_path: Path) -> None:
    begun, go, log = (tmp_path / name for name in ("begun", "go", "log"))
    job = sbatch(slurm, f"touch {begun}; until [ -e {go} ]; do sleep 0.1; done; echo done >{log}", "--nodelist=n2")
    until(begun.exists)
    kill_node(slurm.spec, "n2", slurmd_only=True)
    assert [row["daemons"] for row in status(slurm)["machines"] if row["name"] == "n2"] == [["slurmstepd"]]
    start_node(slurm.spec, "n2")
    assert state(slurm, job) == "RUNNING"
    go.touch()
    until(log.exists)
    until(lambda: state(slurm, job) == "")


def test_unknown_node(slurm: Cluster) -> None:
    for act in (kill_node, start_node):
        with pytest.raises(LabError, match="the lab has no node 'head'; it has n0, n1, n2, n3"):
            act(slurm.spec, "head")


def test_environment_speaks_of_this_cluster_alone(slurm: Cluster) -> None:
    made = slurm.environment({"PATH": "/opt/bin", "SLURM_JOB_ID": "7", "SBATCH_ACCOUNT": "x", "HOME": "/root"})
    assert made.keys() == {"PATH", "HOME", "SLURM_CONF"}
    assert made["SLURM_CONF"] == str(slurm.spec.slurm_conf)
    assert "/opt/bin" in made["PATH"].split(":") and "/usr/sbin" in made["PATH"].split(":")
