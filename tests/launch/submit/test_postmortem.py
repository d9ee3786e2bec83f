"""What logs say about a failure: causes first, the last life only, each sentence once."""

from __future__ import annotations

from pathlib import Path

from hpctrain.launch.submit.postmortem import LIFE, SHOWN, reasons

START = f"submitit INFO (2026-01-01 00:00:00,000) - {LIFE}(job_id=7)\n"


def test_causes_come_before_consequences_and_earlier_lives_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "rank-0.log").write_text(START + "error: rank 0 stopped because rank 10 hangs\n")
    (folder / "rank-10.log").write_text(START + "error: of an earlier life\n" + START + "all is well\n")
    (folder / "rank-2.log").write_text(START + "error: rank 10 hangs: the job ends here\n")
    (folder / "rank-3.log").write_text(START + "error: rank 10 hangs: the job ends here\n")
    (folder / "rank-4.log").write_text(START + "Traceback (most recent call last):\n  ...\nValueError: 3 is odd\n")
    (tmp_path / "slurm-7.out").write_text("srun: error: n1: task 10: Killed\nsrun: launching\n")
    assert reasons(tmp_path, "7") == [
        "rank-2: rank 10 hangs: the job ends here",
        "rank-4: ValueError: 3 is odd",
        "slurm-7: n1: task 10: Killed",
        "rank-0: rank 0 stopped because rank 10 hangs",
    ]
    assert reasons(tmp_path, "8") == []


def test_a_thousand_reasons_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    for rank in range(20):
        (tmp_path / "7" / f"rank-{rank}.log").write_text(f"error: number {rank}\n")
    assert reasons(tmp_path, "7") == [f"rank-{r}: number {r}" for r in range(SHOWN)]


def test_the_killed_rank_is_not_lost_among_those_that_miss_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    for rank in range(20):
        text = f"error: rank {rank} lost the connection to another rank: closed by peer [127.0.0.1]:{rank}\n"
        (tmp_path / "7" / f"rank-{rank}.log").write_text(START + text)
    (tmp_path / "slurm-7.out").write_text(
        "srun: error: n0: task 1: Exited with exit code 1\n"
        "slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n"
        "srun: error: n1: task 3: Killed\nsrun: error: n0: tasks 0-2: Exited with exit code 1\n"
    )
    said = reasons(tmp_path, "7")
    assert "slurm-7: n1: task 3: Killed" in said and not any("task 1:" in line for line in said)
    assert sum("lost the connection" in line for line in said) == 1
