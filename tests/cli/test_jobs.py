"""`hpctrain jobs`, `logs`, `cancel`, `requeue` against commands that only pretend to be Slurm's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.launch.slurm.jobs import Job
from hpctrain.telemetry.metrics import to_json

Programs = Callable[[str, str], None]


@pytest.fixture
def fake(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Slurm's commands, without accounting. This process works in the folder that `runs` is in."""
    monkeypatch.chdir(tmp_path)
    programs("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    return programs


def records(run: Path, *steps: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as out:
        for step in steps:
            out.write(to_json({"kind": "train", "step": step, "loss": 5.0 - step}) + "\n")


def job(run: Path, *ids: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    Job(ids, "2026-01-01T00:00:00+00:00", run.absolute() / "logs").write(run)
    return run


def hpctrain(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_jobs(fake: Programs, tmp_path: Path) -> None:
    fake("squeue", "echo '1|COMPLETED|None|n0'; echo '2|PENDING|Dependency|'")
    records(job(Path("runs/long-name"), "1", "2"), 3, 7)
    assert hpctrain("jobs").stdout.splitlines() == [
        "run             job  state      reason      nodes  step  submitted",
        "runs/long-name    1  COMPLETED              n0        7  2026-01-01T00:00:00+00:00",
        "runs/long-name    2  PENDING    Dependency            7  2026-01-01T00:00:00+00:00",
    ]
    assert [row["job"] for row in json.loads(hpctrain("jobs", "--json").stdout)] == ["1", "2"]
    assert hpctrain("jobs", "--folder", "elsewhere").stdout == "no run in elsewhere was submitted\n"


def test_logs_of_any_run_but_to_follow_needs_a_job(fake: Programs) -> None:
    records(Path("runs/local"), 1, 2)
    assert hpctrain("logs", "local").stdout == hpctrain("logs", "runs/local").stdout
    assert [line.split()[:4] for line in hpctrain("logs", "local").stdout.splitlines()] == [
        ["step", "1", "loss", "4.0000"],
        ["step", "2", "loss", "3.0000"],
    ]
    done = hpctrain("logs", "-f", "local")
    assert done.exit_code == 1 and "no run and no job 'local' is known in runs" in done.stderr


def test_logs_by_the_id_of_a_job(fake: Programs) -> None:
    fake("sbatch", "true")
    fake("squeue", "echo '3|COMPLETED|None|n0'; echo '4|FAILED|NonZeroExitCode|n0'")
    records(job(Path("runs/r"), "3", "4"), 1, 2)
    done = hpctrain("logs", "4")
    assert (done.exit_code, [line.split()[1] for line in done.stdout.splitlines()]) == (0, ["1", "2"])
    assert done.stderr.startswith("job 4 FAILED")


def test_logs_before_there_are_any(fake: Programs) -> None:
    fake("squeue", "echo '1|PENDING|Priority|'")
    job(Path("runs/new"), "1")
    assert "runs/new has no records yet: its job waits or starts" in hpctrain("logs", "new").stderr
    done = hpctrain("logs", "1", "--rank", "0")
    assert done.exit_code == 1 and "there is no " in done.stderr and "logs/slurm-1.out" in done.stderr


def test_follow_shows_what_comes_and_ends_with_the_job(fake: Programs, tmp_path: Path) -> None:
    fake("squeue", f"[ -e {tmp_path}/end ] && echo '1|CANCELLED|None|n0' || echo '1|RUNNING|None|n0'")
    run = job(Path("runs/r"), "1")
    records(run, 1)

    def later() -> None:
        time.sleep(0.3)
        records(run, 2)
        (tmp_path / "end").touch()

    thread = threading.Thread(target=later)
    thread.start()
    done = hpctrain("logs", "-f", "r")
    thread.join()
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1", "2"]
    assert done.stderr == "job 1 CANCELLED (on n0)\n"


def test_what_a_rank_printed_over_a_chain(fake: Programs) -> None:
    run = job(Path("runs/r"), "1", "2")
    for job_id in ("1", "2"):
        (run / "logs" / job_id).mkdir(parents=True)
        (run / "logs" / job_id / "rank-3.log").write_text(f"life {job_id}\n")
    assert hpctrain("logs", "2", "--rank", "3").stdout == "life 1\nlife 2\n"


def test_cancel_ends_what_has_not_ended(fake: Programs, tmp_path: Path) -> None:
    fake("squeue", "echo '1|FAILED|None|n0'; echo '2|RUNNING|None|n0'; echo '3|PENDING|Dependency|'")
    fake("scancel", f'echo "$@" >{tmp_path}/said')
    job(Path("runs/r"), "1", "2", "3")
    assert hpctrain("cancel", "r").stdout == "cancelled job 2, 3\n"
    assert (tmp_path / "said").read_text() == "2 3\n"
    fake("squeue", "echo '1|FAILED|None|n0'; echo '2|CANCELLED|None|n0'; echo '3|CANCELLED|Dependency|'")
    done = hpctrain("cancel", "r")
    assert (done.exit_code, done.stderr) == (1, "error: no job of runs/r waits or runs: there is nothing to cancel.\n")


@pytest.mark.parametrize(
    ("queue", "code", "said"),
    [
        ("1|COMPLETED|None|n0 2|RUNNING|None|n0 3|PENDING|Dependency|", 0, "requeued job 2"),
        ("1|FAILED|None|n0 2|FAILED|None|n0 3|TIMEOUT|None|n0", 0, "requeued job 3"),
        ("1|PENDING|Priority| 2|PENDING|Dependency| 3|PENDING|Dependency|", 1, "it waits in the queue already"),
        ("", 1, "Slurm knows job 3 no more: submit runs/r again, and it continues"),
    ],
)
def test_requeue_takes_the_job_that_runs_or_ran_last(fake: Programs, queue: str, code: int, said: str) -> None:
    fake("squeue", "echo >>asked\n" + "\n".join(f"echo '{row}'" for row in queue.split()))
    fake("scontrol", '[ "$1" = requeue ]')
    job(Path("runs/r"), "1", "2", "3")
    done = hpctrain("requeue", "r")
    assert done.exit_code == code and said in done.output
    assert Path("asked").read_text() == "\n", "once, however long the chain"


def test_a_slurm_that_fails_is_one_sentence(fake: Programs) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    job(Path("runs/r"), "1")
    for command in (["jobs"], ["cancel", "r"], ["requeue", "r"]):
        done = hpctrain(*command)
        assert done.exit_code == 1
        assert (
            done.stderr == "error: squeue failed with status 1: Unable to contact slurm controller (connect failure).\n"
        )
