"""Submission on a real Slurm: what ranks find, refusals that leave nothing, arrays, chains, snapshots, requeueing."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.lab import Cluster, LabSpec, cluster
from hpctrain.lab import config as lab_config
from hpctrain.launch.place.jobplan import PLAN
from hpctrain.launch.place.plan import rank_plan
from hpctrain.launch.slurm.jobs import Job, accounts, cancel, locate, refuse_second, requeue, states, wait
from hpctrain.launch.submit.postmortem import LIFE
from hpctrain.launch.submit.send import Request, submit
from tests.launch import jobs
from tests.launch.submission import request, run_config
from tests.user import ROOT, until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]


def send(made: Request) -> list[Job]:
    def warn(text: str) -> None:
        assert "git does not track" in text

    return submit(made, warn)


def done(*ids: str) -> list[str]:
    return [state.state for state in wait(ids, 0.3)]


def reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))]


def test_ranks_find_what_the_plan_says(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = request(tmp_path, jobs.report, str(out), nodes=2, ranks=2)
    (job,) = send(made)
    assert done(*job.ids) == ["COMPLETED"], (job.logs / job.ids[0] / "rank-0.log").read_text()
    found = reports(out)
    places = [(p.rank, p.node, p.local_rank) for p in rank_plan(made.configs[0])]
    assert [(r["rank"], int(r["SLURM_NODEID"]), r["local_rank"]) for r in found] == places
    assert {(r["world"], r["local_world"]) for r in found} == {(4, 2)}
    assert {r["CUDA_VISIBLE_DEVICES"] for r in found} == {"0,1"}, "each rank sees all GPUs that the node was asked for"
    assert {r["SLURM_CPUS_PER_TASK"] for r in found} == {"2"}
    assert {str(r["code"]) for r in found} == {str(job.code / "hpctrain" / "__init__.py")}
    assert {r["cwd"] for r in found} == {str(tmp_path / "run")}
    ours = "hpctrain.launch.rank.task"
    assert {tuple(r["handlers"]) for r in found} == {(ours, "SIG_DFL", ours)}, "none is submitit's"
    assert Job.read(tmp_path / "run") == job
    assert {path.name for path in (job.logs / job.ids[0]).iterdir()} == {f"rank-{rank}.log" for rank in range(4)}
    (folder,) = (tmp_path / "run" / "jobs").iterdir()
    assert {path.name for path in folder.iterdir()} == {*job.ids, PLAN}, "no temporary file is left"
    pickled = folder / job.ids[0] / f"{job.ids[0]}_submitted.pkl"
    assert pickle.loads(pickled.read_bytes()).args == (jobs.report, (str(out),))
    assert locate(job.ids[0], tmp_path) == (tmp_path / "run", job)


def test_variables_of_sbatch_change_nothing_that_was_asked_for(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To sbatch they count more than what the script says."""
    others = {"PARTITION": "high", "TIMELIMIT": "7", "NO_REQUEUE": "1", "SIGNAL": "USR1@5", "OUTPUT": "/dev/null"}
    for name, value in {**others, "WAIT": "1", "GRES": "gpu:4", "COMMENT": "mine"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    (job,) = send(request(tmp_path, jobs.report, str(tmp_path / "out"), profile={"sbatch": {"hold": True}}, time="3"))
    shown = slurm.run(["scontrol", "show", "job", job.ids[0]]).stdout
    for fact in ("Partition=batch", "TimeLimit=00:03:00", "Requeue=1", f"StdOut={job.logs}/slurm-{job.ids[0]}.out"):
        assert fact in shown
    assert "gres:gpu:1" in shown and "USR1" not in shown
    cancel(job.ids)


def test_pmix_reaches_the_ranks(tmp_path: Path) -> None:
    (job,) = send(request(tmp_path, jobs.report, str(tmp_path / "out"), ranks=2, profile={"mpi": "pmix"}))
    assert done(*job.ids) == ["COMPLETED"]
    assert [r["PMIX_RANK"] for r in reports(tmp_path / "out")] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        ({"partition": "nowhere"}, 1, r"Invalid partition name specified \(invalid .*: nowhere\)"),
        ({"profile": {"cpus_per_task": 1}}, 5, "Requested node configuration is not available"),
        ({}, 5, r"Requested node configuration is not available \(CPU count per node can not be satisfied\)"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_nothing(tmp_path: Path, options, ranks: int, said: str) -> None:
    with pytest.raises(LaunchError, match=f"^Slurm refused the job: {said}; change") as caught:
        send(request(tmp_path / "runs", jobs.report, "", ranks=ranks, **options))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_chain_withdraws_what_was_queued(tmp_path: Path, slurm: Cluster, monkeypatch) -> None:
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    refusal = 'if grep -q dependency= "$2"; then echo "sbatch: error: no more" >&2; exit 1; fi'
    wrapper.write_text(f'#!/bin/bash\n{refusal}\nexec {shutil.which("sbatch")} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{slurm.environment()['PATH']}")
    held = {"sbatch": {"hold": True}}  # what has begun by then leaves its log
    with pytest.raises(LaunchError, match="Slurm refused the job: no more"):
        send(request(tmp_path / "runs", jobs.sleep, str(tmp_path / "out"), chain=2, name="withdrawn", profile=held))
    known = slurm.run(["squeue", "--noheader", "--states=all", "--sort=-i", "--format=%j %T"]).stdout
    assert known.splitlines()[0] == "withdrawn CANCELLED"
    assert not (tmp_path / "runs").exists()


def test_submitting_from_inside_a_job(tmp_path: Path, slurm: Cluster) -> None:
    outer = ["srun", "-N1", "-n1", "--gres=gpu:3", "--cpus-per-task=1", "--mem=100", "--cpu-bind=none", "--mpi=pmix"]
    inner = [sys.executable, "-m", "tests.launch.submission", str(tmp_path)]
    said = slurm.run([*outer, *inner], cwd=ROOT, timeout_s=60).stdout
    job = said.split()[-1]
    assert done(job) == ["COMPLETED"]
    (found,) = reports(tmp_path / "out")
    assert (found["world"], found["SLURM_JOB_ID"]) == (1, job)
    assert found["CUDA_VISIBLE_DEVICES"] in ("0", "3"), "one GPU, the first that the outer job does not hold"
    assert (found["SLURM_CPUS_PER_TASK"], found["PMIX_RANK"]) == ("2", None)


def test_a_cancelled_job_ends_the_wait_without_accounting(tmp_path: Path) -> None:
    (job,) = send(request(tmp_path, jobs.sleep, str(tmp_path / "out"), ranks=2))
    until(lambda: len(reports(tmp_path / "out")) == 2)
    with pytest.raises(LaunchError, match=rf"run has job {job.ids[0]} RUNNING \(on n0\) already: end it with"):
        refuse_second(tmp_path / "run")
    cancel(job.ids)
    began = time.monotonic()
    assert done(*job.ids) == ["CANCELLED"]
    assert time.monotonic() - began < 15
    refuse_second(tmp_path / "run")


def test_array_elements_have_run_folders_of_their_own(tmp_path: Path) -> None:
    configs = tuple(run_config(tmp_path / "sweep", name) for name in ("lr-1", "lr-2", "lr-3"))
    one = request(tmp_path, jobs.report, "", elements=3)
    entries = tuple((jobs.report, (str(config.run_folder / "out"),)) for config in configs)
    made = Request(configs, entries, tmp_path / "sweep", one.site, one.options)
    sent = send(made)
    array = sent[0].ids[0].split("_")[0]
    assert [job.ids for job in sent] == [(f"{array}_{index}",) for index in range(3)]
    assert done(*(job.ids[0] for job in sent)) == ["COMPLETED"] * 3
    for config, job in zip(configs, sent):
        assert Job.read(config.run_folder) == job
        assert len(reports(config.run_folder / "out")) == 1
        assert (job.logs / job.ids[0] / "rank-0.log").exists()


def test_a_chain_runs_in_order_also_after_a_failure(tmp_path: Path) -> None:
    (job,) = send(request(tmp_path, jobs.line_up, str(tmp_path / "line"), chain=3))
    assert len(job.ids) == 3
    assert done(*job.ids) == ["FAILED", "COMPLETED", "COMPLETED"]
    assert (tmp_path / "line").read_text().split() == list(job.ids)


def test_edited_sources_do_not_change_a_queued_job(tmp_path: Path, slurm: Cluster) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    checkout = tmp_path / "checkout"
    for name in filter(None, tracked.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    subprocess.run("git init -q && git add -A", shell=True, cwd=checkout, check=True)
    # Without another checkout on the path: `python -m` puts the working directory first.
    submission = [sys.executable, "-m", "tests.launch.submission", str(tmp_path / "o"), "--hold"]
    command = ["env", "-u", "PYTHONPATH", *submission]
    job = slurm.run(command, cwd=checkout).stdout.split()[-1]
    (checkout / "hpctrain" / "launch" / "task.py").write_text("raise RuntimeError('edited')\n")
    assert [str(state) for state in states([job]).values()] == [f"job {job} PENDING (JobHeldUser)"]
    slurm.run(["scontrol", "release", job])
    assert done(job) == ["COMPLETED"]
    (found,) = reports(tmp_path / "o" / "out")
    assert str(found["code"]).startswith(str(tmp_path / "o" / "run" / "code"))


def test_a_requeued_job_starts_anew_and_keeps_its_log(tmp_path: Path) -> None:
    (job,) = send(request(tmp_path, jobs.sleep_once, str(tmp_path / "out")))
    until(lambda: reports(tmp_path / "out"))
    requeue(job.ids[0])
    assert not states(job.ids)[job.ids[0]].ended
    assert done(*job.ids) == ["COMPLETED"]
    assert [r["life"] for r in reports(tmp_path / "out")] == [1]
    assert (job.logs / job.ids[0] / "rank-0.log").read_text().count(LIFE) == 2


def test_a_sweep_from_the_command_line_is_listed_and_cancelled_as_one(tmp_path: Path, slurm: Cluster) -> None:
    """On more nodes than there are: Slurm takes such a job, and it waits for ever."""
    (tmp_path / "text.txt").write_text("".join(f"line {i % 10} of {i % 7}\n" for i in range(4000)))
    ours = [sys.executable, "-m", "hpctrain"]
    slurm.run([*ours, "data", "build", "c.h5", "text.txt"], cwd=tmp_path)
    small = [
        "data.corpus=c.h5",
        "cluster.gpus_per_node=1",
        "parallel.tp=1",
        "train.micro_batch=1",
        "train.global_batch=18",
        "data.validation=0",
        "train.eval_batches=0",
    ]
    settings = ["gpt-tiny", *small, "cluster.nodes=9", "--profile", "lab", "--array", "train.seed=1,2", "--json"]
    sent = slurm.run([*ours, "submit", *settings], cwd=tmp_path)
    runs = {row["run"]: row["jobs"] for row in json.loads(sent.stdout)}
    assert list(runs) == [f"{tmp_path}/runs/gpt-tiny/seed-{seed}" for seed in (1, 2)]
    assert len(re.findall(r"PENDING \(Partition\w+\): it will not start before that changes", sent.stderr)) == 2
    listed = json.loads(slurm.run([*ours, "jobs", "--json"], cwd=tmp_path).stdout)
    assert [(row["run"], [row["job"]], row["state"]) for row in listed] == [
        (f"runs/gpt-tiny/seed-{seed}", ids, "PENDING") for seed, ids in zip((1, 2), runs.values())
    ]
    again = slurm.run([*ours, "submit", *settings], cwd=tmp_path, check=False)
    assert again.returncode == 1 and "seed-1 has job" in again.stderr
    said = slurm.run([*ours, "cancel", "gpt-tiny"], cwd=tmp_path).stdout
    assert said == f"cancelled job {', '.join(job for ids in runs.values() for job in ids)}\n"
    assert {state.state for state in wait([ids[0] for ids in runs.values()], 0.3)} == {"CANCELLED"}
    for name, words in (("gpt-tiny", "is a sweep: name one of its runs"), (f"{tmp_path}/runs/x", "no run and no job")):
        done = slurm.run([*ours, "logs", name], cwd=tmp_path, check=False)
        assert done.returncode == 1 and words in done.stderr


def test_training_from_the_command_line_to_its_end(tmp_path: Path, slurm: Cluster) -> None:
    """With rank 0 on the second node: that the first name of a sorted list is its host is a guess, and wrong here."""
    (tmp_path / "hosts").write_text("n1\nn1\nn0\nn0\n")
    profile = f"environment: {{SLURM_HOSTFILE: {tmp_path}/hosts, OMP_NUM_THREADS: '1'}}\n"
    (tmp_path / "mine.yaml").write_text(f"about: mine\nsrun_args: [--distribution=arbitrary]\n{profile}")
    text = "".join(f"line {i % 10} of {i % 7}\n" for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    ours = [sys.executable, "-m", "hpctrain"]
    slurm.run([*ours, "data", "build", "c.h5", "text.txt"], cwd=tmp_path)
    small = ("model.layers=1", "model.hidden=32", "data.seq=32", "train.steps=20", "optimizer.warmup_steps=2")
    size = ("cluster.nodes=2", "cluster.gpus_per_node=2", "train.log_every=5", "data.corpus=c.h5", "data.validation=0")
    settings = ["gpt-tiny", *small, *size, "train.eval_batches=0", "--profile", "mine.yaml"]
    shown = slurm.run([*ours, "submit", *settings, "--follow"], cwd=tmp_path, timeout_s=150)
    assert "COMPLETED (on n[0-1])" in shown.stderr
    logs = slurm.run([*ours, "logs", "gpt-tiny"], cwd=tmp_path).stdout
    losses = [float(line.split("loss ")[1].split()[0]) for line in logs.splitlines() if "  loss " in line]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5
    assert logs in shown.stdout
    assert "4 ranks, dp=2 tp=2" in logs
    assert json.loads((tmp_path / "runs" / "gpt-tiny" / "environment.json").read_text())["host"] == "n1"
    assert "global_rank=3(4)" in slurm.run([*ours, "logs", "gpt-tiny", "--rank", "3"], cwd=tmp_path).stdout
    (row,) = json.loads(slurm.run([*ours, "jobs", "--json"], cwd=tmp_path).stdout)
    assert (row["run"], row["state"], row["step"]) == ("runs/gpt-tiny", "COMPLETED", 20)
    again = slurm.run([*ours, "cancel", "gpt-tiny"], cwd=tmp_path, check=False)
    assert (again.returncode, again.stderr.startswith("error: no job of")) == (1, True)


def test_accounting_refuses_an_unknown_account_and_agrees_with_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounting = lab_config._accounting
    monkeypatch.setattr(
        lab_config, "_accounting", lambda spec: f"{accounting(spec)}AccountingStorageEnforce=associations\n"
    )
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        spec = LabSpec(Path(folder) / "lab", nodes=1, gpus=2, accounting=True)
        with cluster(spec) as accounted:
            monkeypatch.setenv("SLURM_CONF", str(spec.slurm_conf))
            with pytest.raises(
                LaunchError, match=r"^Slurm refused the job: Invalid account or account/partition combi"
            ):
                send(request(tmp_path / "runs", jobs.report, "", account="nobody"))
            assert not (tmp_path / "runs").exists()
            flags = ["--parsable", "--output=/dev/null"]
            scripts = (
                ["--wrap=exit 3"],
                ["--wrap=true"],
                ["--hold", "--array=0-1", "--wrap=true"],
                ["--wrap=kill -9 $$"],
            )
            ids = [accounted.run(["sbatch", *flags, *script]).stdout.strip() for script in scripts]
            failed, good, array, killed = ids
            accounted.run(["scancel", array])
            every = [failed, good, f"{array}_0", f"{array}_1", killed]
            ended = {state.id: state.state for state in wait(every, 0.3)}
            assert list(ended.values()) == ["FAILED", "COMPLETED", "CANCELLED", "CANCELLED", "FAILED"]
            until(lambda: {job: state.state for job, state in accounts(every).items()} == ended)
            known = accounts([*every, "7"])
            assert [known[job].reason for job in (failed, good, killed)] == ["exit status 3", "", "signal 9"]
            assert known[f"{array}_0"].reason == "by 0"
            assert known["7"].state == "FORGOTTEN"
