"""`hpctrain submit` where nothing is queued: dry runs, refusals, and no Slurm at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.cli.submit import succeed
from hpctrain.cluster.nodefile import dump
from hpctrain.config.schema import RunConfig
from hpctrain.errors import LaunchError
from hpctrain.launch.slurm.jobs import Job
from hpctrain.launch.slurm.state import JobState
from tests.launch.machines import captured

SMALL = (
    "model.layers=1",
    "model.hidden=32",
    "data.seq=32",
    "train.steps=4",
    "optimizer.warmup_steps=1",
    "parallel.tp=1",
)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from hpctrain.data.build import build
    from hpctrain.data.sources import list_sources

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {i % 10} of {i % 7}\n" for i in range(800)))
    build(tmp_path / "c.h5", list_sources([tmp_path / "text.txt"]), [tmp_path / "text.txt"])
    return "data.corpus=c.h5"


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to("/usr/bin/git")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def submit(*arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["submit", "gpt-tiny", *SMALL, "data.validation=0", "train.eval_batches=0", *arguments]
    )


def test_a_dry_run_shows_script_and_ranks_and_makes_nothing(corpus: str, no_slurm: None, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    done = submit(
        corpus, "cluster.nodes=2", "cluster.gpus_per_node=2", "parallel.tp=2", "--dry-run", "--time", "1:00:00"
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert {"#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --gres=gpu:2", "#SBATCH --time=1:00:00"} < set(lines)
    assert lines[-6].split() == ["rank", "node", "local_rank", "pp", "dp", "cp", "tp"]
    assert [line.split() for line in lines[-3:-1]] == [
        ["2", "1", "0", "0", "1", "0", "0"],
        ["3", "1", "1", "0", "1", "0", "1"],
    ]
    assert lines[-1] == f"run folder {tmp_path}/runs/gpt-tiny"
    assert set(tmp_path.iterdir()) == before


def test_a_dry_run_as_json(corpus: str, no_slurm: None, tmp_path: Path) -> None:
    done = submit(corpus, "cluster.nodes=2", "--dry-run", "--json", "--array", "train.seed=1,2")
    found = json.loads(done.stdout)
    assert found["ranks"][3] == {"rank": 3, "node": 1, "local_rank": 1, "pp": 0, "dp": 3, "cp": 0, "tp": 0}
    assert found["runs"] == [f"{tmp_path}/runs/gpt-tiny/seed-{seed}" for seed in (1, 2)]
    assert "#SBATCH --array=0-1\n" in found["script"] and "#SBATCH --job-name=gpt-tiny\n" in found["script"]


@pytest.fixture
def wired(tmp_path: Path) -> Path:
    """A profile that knows nodes and fabric."""
    node = captured("smi_topo/sglang_env_8gpu_8nic_clean.txt")
    (tmp_path / "node.yaml").write_text(dump(node))
    (tmp_path / "fabric.conf").write_text(
        "SwitchName=a Nodes=n[0,2]\nSwitchName=b Nodes=n[1,3]\nSwitchName=c Switches=a,b\n"
    )
    (tmp_path / "wired.yaml").write_text("about: wired\nnode: node.yaml\nfabric: fabric.conf\n")
    return tmp_path / "wired.yaml"


def test_a_dry_run_where_nodes_and_fabric_are_known(corpus: str, no_slurm: None, wired: Path) -> None:
    size = ("cluster.nodes=4", "cluster.gpus_per_node=8", "train.micro_batch=1", "train.global_batch=32")
    found = json.loads(submit(corpus, *size, "--profile", str(wired), "--dry-run", "--json").stdout)
    first, ninth = found["ranks"][0], found["ranks"][8]
    assert (first["cpus"], first["nic"], first["leaf"]) == ("0-11,96-107", "mlx5_0", "a/rail0")
    assert (first["host"], ninth["host"]) == ("n0", "n2"), "those of a leaf come together"
    leaving = [row for row in found["bytes"] if row["link"] in ("spine", "core", "cross_rail")]
    ours, slurms, by_topology = (
        sum(row[order] for row in leaving) for order in ("this order", "Slurm by name", "Slurm by topology")
    )
    assert 0 < ours < min(slurms, by_topology) and leaving[-1]["this order"] == 0
    assert "hpctrain.launch.place.arrange" in found["script"]
    shown = submit(corpus, *size, "--profile", str(wired), "--dry-run").stdout.splitlines()
    header = next(i for i, line in enumerate(shown) if line.split()[:2] == ["rank", "host"])
    assert shown[header].split()[-5:] == ["cpus", "numa", "nic", "rail", "leaf"]
    names = [line.split()[0] for line in shown if line]
    assert names[names.index("link") :][:6] == ["link", "nvlink", "leaf", "spine", "core", "cross_rail"]


def test_a_fabric_that_is_too_small(corpus: str, no_slurm: None, wired: Path) -> None:
    done = submit(corpus, "cluster.nodes=8", "--profile", str(wired), "--dry-run")
    assert done.exit_code == 2 and "cluster.nodes=8: the fabric of the profile has 4 hosts" in done.stderr


def test_a_node_that_no_job_can_use(corpus: str, no_slurm: None, wired: Path) -> None:
    broken = captured("smi_topo/vllm16336_b200_gpu2_lost_nvlink_truncated.txt")
    wired.with_name("node.yaml").write_text(dump(broken))
    done = submit(corpus, "--profile", str(wired), "--dry-run")
    assert done.exit_code == 2 and "broken NVLink on gpu2" in done.stderr


def test_a_prologue_that_speaks_of_ranks_is_warned_of(corpus: str, no_slurm: None, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("about: mine\nprologue: p.sh\n")
    (tmp_path / "p.sh").write_text("export ME=$SLURM_PROCID\n")
    assert (
        "$SLURM_PROCID is replaced by the batch script" in submit(corpus, "--profile", "mine.yaml", "--dry-run").stderr
    )


def test_many_ranks_have_a_line_a_node(corpus: str, no_slurm: None) -> None:
    done = submit(
        corpus,
        "cluster.nodes=5",
        "cluster.gpus_per_node=8",
        "train.micro_batch=1",
        "train.global_batch=40",
        "--dry-run",
    )
    assert done.stdout.splitlines()[-2].split() == ["4", "32-39", "0", "32-39", "0", "0"]


def test_a_profile_of_ones_own(corpus: str, no_slurm: None, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("about: mine\npartition: big\ngpus: none\nmpi: pmix\n")
    done = submit(corpus, "--profile", "mine.yaml", "--dry-run")
    assert "#SBATCH --partition=big\n" in done.stdout and "--mpi=pmix" in done.stdout and "gpu:" not in done.stdout
    assert "partition=small" in submit(corpus, "cluster.profile=mine.yaml", "--dry-run", "--partition", "small").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--profile", "genric"), 2, "there is no such profile; the nearest is generic"),
        (("--time", "soon"), 2, "--time='soon': must be a time limit of Slurm"),
        (("train.global_batch=3",), 2, "train.global_batch=3: must be a multiple"),
        (("data.corpus=gone.h5",), 1, "gone.h5 is not there"),
        (("--array", "lr"), 2, "--array='lr': must be written KEY=v1,v2"),
        (
            ("--array", "train.micro_batch=2,3"),
            2,
            "train.global_batch=16: must be a multiple of dp x micro_batch = 2 x 3",
        ),
        (("--array", "train.seed=1,2", "--follow"), 2, "shows one run"),
        (("folder=/tmp/a b", "--dry-run"), 2, "no path with ' ' can be told to Slurm"),
        (("--chain", "2"), 2, "--chain=2: there is no Slurm here: no sbatch on PATH"),
        (("--json",), 2, "--json=true: there is no Slurm here: no sbatch on PATH"),
        (("--chain", "0"), 2, "0 is not in the range"),
    ],
)
def test_refusals(
    corpus: str, no_slurm: None, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = submit(corpus, *arguments)
    assert done.exit_code == code and said in done.output, done.output
    assert not (tmp_path / "runs").exists()


def test_without_slurm_it_says_so_and_trains_here(corpus: str, no_slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []
    monkeypatch.setattr("hpctrain.cli.train.on_this_machine", trained.append)
    done = submit(corpus, "--array", "train.seed=1,2")
    assert (done.exit_code, done.stderr) == (
        0,
        "there is no Slurm here (no sbatch on PATH): training on this machine, with the local executor\n",
    )
    assert [config.train.seed for config in trained] == [1, 2]
    done = submit(corpus, "--partition=gpu", "--account=physics", "--qos=high", "--time=10", "--wait")
    assert done.exit_code == 0
    assert "local executor; --partition, --account, --qos, --time mean nothing to it\n" in done.stderr


def test_more_nodes_than_this_machine_are_refused(corpus: str, no_slurm: None) -> None:
    done = submit(corpus, "cluster.nodes=2", "train.micro_batch=1")
    assert done.exit_code == 2 and "cluster.nodes=2: this command starts ranks on one machine" in done.stderr


def test_of_a_chain_the_last_job_counts() -> None:
    chains = [Job(("1", "2"), "", Path("/logs")), Job(("3", "4"), "", Path("/logs"))]
    words = ("TIMEOUT", "COMPLETED", "FAILED", "COMPLETED")
    ended = [JobState(str(index + 1), word) for index, word in enumerate(words)]
    succeed(ended, chains, Path("/run"))
    ended[3] = JobState("4", "CANCELLED", "by 0")
    with pytest.raises(LaunchError, match=r"^job 4 CANCELLED \(by 0\): hpctrain logs /run --rank 0 shows"):
        succeed(ended, chains, Path("/run"))


SLURM = {
    "sbatch": 'echo "$*" >>$HOME/sent; echo 7',
    "squeue": "[ -e $HOME/answers ] || exit 1; echo '7|FAILED|NonZeroExitCode|n0'",
}


@pytest.mark.parametrize(("how", "code"), [((), 0), (("--wait",), 1), (("--follow",), 1)])
def test_exit_status_is_that_of_the_job_where_it_was_waited_for(
    corpus: str, programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...], code: int
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, script in {**SLURM, "srun": "true"}.items():
        programs(name, script)
    (tmp_path / "answers").touch()
    done = submit(corpus, *how)
    assert done.exit_code == code, done.output
    assert f"job 7: run folder {tmp_path}/runs/gpt-tiny" in done.stdout
    assert ("job 7 FAILED (NonZeroExitCode, on n0)" in done.stderr) == bool(how)
    assert f"--parsable {tmp_path}/runs/gpt-tiny/jobs/" in (tmp_path / "sent").read_text()


def test_a_queued_job_is_no_failure_when_slurm_does_not_answer_after_it(
    corpus: str, programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, script in {**SLURM, "srun": "true"}.items():
        programs(name, script)
    done = submit(corpus)
    assert (done.exit_code, done.stdout) == (0, f"job 7: run folder {tmp_path}/runs/gpt-tiny\n")
