"""`job.json`, finding runs by word, and waiting for jobs, against commands that only pretend to be Slurm's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.slurm import jobs
from hpctrain.launch.slurm.jobs import Job, Watch, locate, refuse_second, runs, states, wait

Programs = Callable[[str, str], None]


@pytest.fixture
def fake(programs: Programs) -> Programs:
    """Slurm's commands, without accounting."""
    programs("sbatch", "exit 1")
    programs("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    return programs


def a_job(*ids: str, submitted: str = "2026-01-01T00:00:00+00:00") -> Job:
    return Job(ids, submitted, Path("/logs"), Path("/code"), "lab", {"partition": "gpu"})


def put(run: Path, job: Job) -> Path:
    run.mkdir(parents=True)
    job.write(run)
    return run


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = put(tmp_path / "a", a_job("1", "2"))
    assert Job.read(run) == a_job("1", "2")
    assert [path.name for path in run.iterdir()] == ["job.json"]
    assert Job.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ids": 3}', "null"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(LaunchError, match=r"job\.json is damaged: remove it"):
        Job.read(tmp_path)


def test_runs_and_sweeps_are_found(tmp_path: Path) -> None:
    late = put(tmp_path / "a", a_job("5", submitted="2026-01-02T00:00:00+00:00"))
    early = put(tmp_path / "b", a_job("1", "2"))
    element = put(tmp_path / "sweep" / "lr-1", a_job("3_0"))
    a_job("3_0", "3_1").write(tmp_path / "sweep")
    assert [run for run, _ in runs(tmp_path)] == [early, element, late]
    for word, run in {"a": late, str(early): early, "2": early, "3_0": element, "sweep": tmp_path / "sweep"}.items():
        assert locate(word, tmp_path) == (run, Job.read(run))
    with pytest.raises(LaunchError, match=r"no run and no job '4' is known in .*: hpctrain jobs lists"):
        locate("4", tmp_path)


def test_the_queue_is_asked_first_then_accounting(fake: Programs) -> None:
    """Field failure 18: accounting may be off, and JSON of Slurm's commands changes with every version."""
    fake("squeue", "echo '1|RUNNING|None|n0'; echo '9|RUNNING|None|n0'")
    fake("sacct", """[[ "$*" == *--jobs=2,3* ]] && echo '2|CANCELLED by 7|0:0|n1'""")
    found = states(["1", "2", "3"])
    assert [str(state) for state in found.values()] == [
        "job 1 RUNNING (on n0)",
        "job 2 CANCELLED (by 7, on n1)",
        "job 3 FORGOTTEN (Slurm keeps no record of how it ended)",
    ]


def test_a_job_is_forgotten_only_when_it_stays_away(fake: Programs, tmp_path: Path) -> None:
    """As when the controller restarts: it knows no job for a moment."""
    fake("squeue", f"echo x >>{tmp_path}/asked; [ $(wc -l <{tmp_path}/asked) -eq 2 ] || echo '1|RUNNING|None|n0'")
    watch = Watch(["1"], poll_s=0)
    assert [watch.ended() for _ in range(3)] == [False] * 3
    fake("squeue", f"echo x >>{tmp_path}/after; true")
    assert [state.state for state in wait(["1"], 0)] == ["FORGOTTEN"]
    assert (tmp_path / "after").read_text().count("x") == jobs.MISSES


@pytest.mark.parametrize("broken", ["squeue", "sacct"])
def test_a_slurm_that_does_not_answer_is_borne_with_for_a_while(
    fake: Programs, broken: str, monkeypatch, tmp_path
) -> None:
    refusal = "echo 'error: Unable to contact' >&2; exit 1"
    fake("squeue", refusal if broken == "squeue" else "true")
    fake("sacct", refusal)
    watch = Watch(["1"], poll_s=0)
    assert not watch.ended() and not watch.ended()
    fake("squeue", "echo '1|COMPLETED|None|n0'")
    assert watch.ended()
    fake("squeue", refusal if broken == "squeue" else "true")
    monkeypatch.setattr(jobs, "PATIENCE_S", -1.0)
    with pytest.raises(LaunchError, match=r"Unable to contact|has not said"):
        Watch(["1"], poll_s=0).ended()


def test_a_second_job_of_a_run_is_refused(fake: Programs, tmp_path: Path) -> None:
    run = put(tmp_path / "a", a_job("1", "2"))
    fake("squeue", "echo '1|COMPLETED|None|n0'; echo '2|PENDING|Dependency|'")
    with pytest.raises(LaunchError, match=r"a has job 2 PENDING \(Dependency\) already: end it with hpctrain cancel"):
        refuse_second(run)
    fake("squeue", "echo '1|COMPLETED|None|n0'; echo '2|TIMEOUT|TimeLimit|n0'")
    refuse_second(run)
    refuse_second(tmp_path / "new")


def test_a_job_that_left_the_queue_is_no_hindrance_when_accounting_is_down(fake: Programs, tmp_path: Path) -> None:
    run = put(tmp_path / "a", a_job("1"))
    fake("squeue", "echo '9|RUNNING|None|n0'")
    fake("sacct", "echo 'sacct: error: slurmdbd: Connection refused' >&2; exit 1")
    assert states(["1"])["1"].state == "UNKNOWN"
    refuse_second(run)


def test_slurm_is_asked_once_about_all_runs_of_a_sweep(fake: Programs, tmp_path: Path) -> None:
    runs = [put(tmp_path / str(index), a_job(f"7_{index}")) for index in range(20)]
    fake("squeue", f"echo squeue >>{tmp_path}/asked; echo '7_19|PENDING|Priority|'")
    fake("sacct", f"echo sacct >>{tmp_path}/asked")
    with pytest.raises(LaunchError, match=r"/19 has job 7_19 PENDING"):
        refuse_second(*runs)
    refuse_second(*runs[:19])
    assert (tmp_path / "asked").read_text() == "squeue\n" * 2


@pytest.mark.parametrize("record", ["7", "7_[0-1]"])
def test_accounting_may_have_one_record_for_an_array_that_never_began(fake: Programs, record: str) -> None:
    """As 22.05 has it, one way or the other; asked for an element, it says nothing."""
    fake("squeue", "true")
    fake("sacct", f"""[[ "$*" == *--jobs=7 ]] && echo '{record}|CANCELLED by 0|0:0|None assigned'""")
    found = states(["7_0", "7_1"])
    assert [str(state) for state in found.values()] == ["job 7_0 CANCELLED (by 0)", "job 7_1 CANCELLED (by 0)"]
