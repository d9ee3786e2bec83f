"""Batch scripts: whole texts against golden files, and what bash makes of them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.slurm.profile import Profile, Site, profiles, site
from hpctrain.launch.slurm.rules import Slurm
from hpctrain.launch.submit.lint import lint
from hpctrain.launch.submit.sbatch import JobFolders, Options, sbatch_text

GOLDEN = Path(__file__).parent / "golden"
HOME, STAMP = Path("/shared/runs/tiny"), "20260101-120000-abcdef"
CODE = HOME / "code" / STAMP
PYTHON = "/opt/venv/bin/python"


def config(nodes: int = 2, per_node: int = 2) -> RunConfig:
    return RunConfig.model_validate({"name": "tiny", "cluster": {"nodes": nodes, "gpus_per_node": per_node}})


def made(script: str = "", **fields: object) -> Site:
    profile = Profile.model_validate({"about": "for a test", "prologue": "x.sh" if script else None, **fields})
    return Site(name="made", profile=profile, prologue=script)


def contained(kind: str, **fields: object) -> Site:
    container = {"kind": kind, "image": "/images/torch.sif", "mounts": ["/scratch:/scratch"], **fields}
    return made(mpi="pmix", environment={"HF_HOME": "/scratch/hf"}, container=container)


FOLDERS = JobFolders(HOME, STAMP, CODE, (Path("/shared/corpora"), HOME / "inside"))
ALL = Options(partition="gpu", account="physics", time="1-12", qos="high", after="4711")

CASES = {
    "generic": (config(1, 8), site("generic"), Options(), JobFolders(HOME, STAMP)),
    "lab": (config(), site("lab"), Options(time="5"), FOLDERS),
    "dgx-h100-chained": (config(16, 8), site("dgx-h100"), ALL, FOLDERS),
    "array": (config(1, 1), made(gpus="none"), Options(elements=12), FOLDERS),
    "health": (config(), made(health=True, spares=1, cpus_per_task=4), Options(), FOLDERS),
    "pyxis": (config(), contained("pyxis", args=("--no-container-mount-home",)), Options(), FOLDERS),
    "enroot": (config(), contained("enroot"), Options(), FOLDERS),
    "apptainer": (config(), contained("apptainer", python="/opt/conda/bin/python"), Options(), FOLDERS),
}


def text(name: str) -> str:
    return sbatch_text(*CASES[name], PYTHON, Slurm.of("slurm 22.05.8")).replace(
        f"hpctrain {__version__}", "hpctrain VERSION"
    )


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("HPCTRAIN_WRITE_GOLDEN"):
        file.write_text(text(name))
    assert text(name) == file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_it_is_read_otherwise_than_meant(name: str) -> None:
    """Field failure 22."""
    assert lint(text(name)) == []


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_it(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text(name), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", profiles())
def test_every_profile_makes_a_script(name: str) -> None:
    assert "srun" in sbatch_text(config(), site(name), Options(), FOLDERS, PYTHON)


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


Done = subprocess.CompletedProcess[str]


def execute(script: str, folder: Path, **env: str) -> tuple[list[str], dict[str, str], Done]:
    """Run a script with an srun that notes what it was given: its arguments, its environment; and how it ended.

    STATUS is that of srun, LEAVES a command that the ranks run, and squeue says what ANSWER has.
    """
    note = f'printf "%s\\0" "$@" >{folder}/args\nenv -0 >{folder}/env\neval "$LEAVES"\nexit ${{STATUS:-0}}\n'
    put(folder, "srun", note)
    put(folder, "squeue", f'echo "squeue $*" >>{folder}/asked; echo "${{ANSWER:-no limit}}"')
    for waiting in re.findall(r'\[ ! -d "([^"]*)" \]', script):
        if str(folder) in waiting:
            Path(waiting).mkdir(parents=True, exist_ok=True)
    script = re.sub(r'\[ ! -d "/shared[^"]*" \]', "false", script)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **env}
    (folder / "slurm_script").write_text(script)
    done = subprocess.run(["bash", "slurm_script"], env=env, capture_output=True, text=True, cwd=folder)
    arguments = (folder / "args").read_text().split("\0")[:-1] if (folder / "args").exists() else []
    noted = (folder / "env").read_text() if (folder / "env").exists() else ""
    pairs = [entry.split("=", 1) for entry in noted.split("\0") if entry]
    return arguments, dict(pairs), done


def test_what_bash_makes_of_it(tmp_path: Path) -> None:
    odd = 'it\'s "$HOME" `id` \\ %j'
    where = JobFolders(tmp_path / "run", STAMP, tmp_path / "code")
    profile = made("export FROM_PROLOGUE=$ODD", environment={"ODD": odd}, srun_args=(odd,))
    python = f"/opt/{odd}/python"
    script = sbatch_text(config(), profile, Options(), where, python)
    mine = {"PYTHONPATH": "/before", "SQUEUE_FORMAT": "%j", "SLURM_CLUSTERS": "here,there"}
    arguments, env, done = execute(script, tmp_path, SLURM_JOB_ID="7", STATUS="3", **mine)
    assert (done.returncode, done.stderr) == (3, ""), "the job ends as its ranks do"
    assert env["ODD"] == env["FROM_PROLOGUE"] == odd
    assert odd in arguments
    assert f"--output={tmp_path}/run/logs/7/rank-%t.log" in arguments
    assert arguments[-5:] == [python, "-u", "-m", "submitit.core._submit", f"{tmp_path}/run/jobs/{STAMP}/%j"]
    assert arguments[-6] == python, "it may have to block signals too"
    assert env["PYTHONPATH"] == f"{tmp_path}/code:/before"
    assert not {"SQUEUE_FORMAT", "SLURM_CLUSTERS"} & env.keys()
    assert (tmp_path / "run" / "logs" / "7").is_dir()


def ours(folder: Path) -> str:
    return sbatch_text(config(), made(), Options(), JobFolders(folder / "run", STAMP), PYTHON)


def test_ranks_are_told_when_the_time_limit_is(tmp_path: Path) -> None:
    _, env, _ = execute(ours(tmp_path), tmp_path, SLURM_JOB_ID="7", ANSWER="1796034725")
    assert env["HPCTRAIN_END_TIME"] == "1796034725"
    assert (tmp_path / "asked").read_text() == "squeue --noheader --jobs=7 --format=%e\n"
    _, env, _ = execute(ours(tmp_path), tmp_path, SLURM_JOB_ID="7", SLURM_JOB_END_TIME="12")
    assert env["HPCTRAIN_END_TIME"] == "12"


LEAVES = 'mkdir -p "${HPCTRAIN_STOPPED_FILE%/*}"; touch "$HPCTRAIN_STOPPED_FILE"'
"""What the first rank of a run that has stopped does."""


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("RUNNING|None", True),
        ("COMPLETING|TimeLimit", True),
        ("slurm_load_jobs: warning\nRUNNING|None", True),
        ("COMPLETING|None", False),
        ("CANCELLED|None", False),
        ("PENDING|BeginTime", False),
        ("REQUEUED|None", False),
    ],
)
@pytest.mark.parametrize("status", ["0", "143"])
def test_a_job_whose_run_has_stopped_requeues_itself(tmp_path: Path, state: str, requeued: bool, status: str) -> None:
    """Unless Slurm is ending it already, for another reason than its time limit."""
    put(tmp_path, "scontrol", f'echo "scontrol $*" >>{tmp_path}/asked')
    element = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    given = {"SLURM_JOB_END_TIME": "1", "ANSWER": state, "STATUS": status, "LEAVES": LEAVES}
    *_, done = execute(ours(tmp_path), tmp_path, **element, **given)
    assert (done.returncode, done.stderr) == (int(status), "")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "squeue --noheader --states=all --jobs=7_2 --format=%T|%r"
    assert asked[1:] == ["scontrol requeue 7_2"] * requeued


def test_one_that_has_not_stopped_in_this_life_does_not(tmp_path: Path) -> None:
    put(tmp_path, "scontrol", f'echo "scontrol $*" >>{tmp_path}/asked')
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "ANSWER": "RUNNING|None"}
    execute(ours(tmp_path), tmp_path, LEAVES=LEAVES, **given)
    assert "scontrol requeue 7\n" in (tmp_path / "asked").read_text()
    (tmp_path / "asked").unlink()
    execute(ours(tmp_path), tmp_path, SLURM_RESTART_COUNT="1", **given)
    assert not (tmp_path / "asked").exists()


def test_a_refusal_to_requeue_is_said_at_once(tmp_path: Path) -> None:
    put(tmp_path, "scontrol", 'echo "Requested operation is presently disabled for job 7" >&2; exit 1')
    put(tmp_path, "sleep", "exit 9")
    given = {"SLURM_JOB_ID": "7", "ANSWER": "RUNNING|None", "LEAVES": LEAVES}
    *_, done = execute(ours(tmp_path), tmp_path, **given)
    assert done.returncode == 1
    assert done.stderr == (
        "error: the run has saved and stopped, but its job cannot be put back into the queue (Requested operation is "
        "presently disabled for job 7): submit it again, or several in a row with --chain\n"
    )


@pytest.mark.parametrize(
    "trouble",
    [
        'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1',
        'echo "Socket timed out on send/recv operation" >&2; exit 1',
        "exit 124",
    ],
)
@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_a_controller_that_is_away_is_waited_for(tmp_path: Path, command: str, trouble: str) -> None:
    script = ours(tmp_path)
    first = f"if [ ! -e {tmp_path}/back ]; then touch {tmp_path}/back; {trouble}; fi"
    away = f'{first}; echo "{command} $*" >>{tmp_path}/asked'
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "ANSWER": "RUNNING|None"}
    put(tmp_path, "sleep", f'echo "sleep $*" >>{tmp_path}/asked')
    put(tmp_path, "scontrol", f'echo "scontrol $*" >>{tmp_path}/asked')
    put(tmp_path, "later", f"{away}; [ {command} = scontrol ] || echo 'RUNNING|None'")
    *_, done = execute(script, tmp_path, LEAVES=f"{LEAVES}; mv {tmp_path}/later {tmp_path}/{command}", **given)
    assert done.returncode == 0 and "trying again in 1 s" in done.stderr
    asked = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert (
        asked
        == {"squeue": ["sleep", "squeue", "scontrol"], "scontrol": ["squeue", "sleep", "squeue", "scontrol"]}[command]
    )
    assert (tmp_path / "asked").read_text().endswith("scontrol requeue 7\n")


def test_a_controller_that_stays_away_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    put(tmp_path, "scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    put(tmp_path, "sleep", "")
    *_, done = execute(
        ours(tmp_path).replace("deadline=$((SECONDS + 600))", "deadline=$((SECONDS + 6))"),
        tmp_path,
        **{"SLURM_JOB_ID": "7", "ANSWER": "RUNNING|None", "LEAVES": LEAVES},
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: the run has saved and stopped, but")


def test_signals_to_the_batch_script_do_not_keep_it_from_requeueing(tmp_path: Path) -> None:
    put(tmp_path, "scontrol", f'echo "scontrol $*" >>{tmp_path}/asked')
    given = {"SLURM_JOB_ID": "7", "ANSWER": "COMPLETING|TimeLimit"}
    *_, done = execute(ours(tmp_path), tmp_path, LEAVES=f"{LEAVES}; kill -TERM $PPID; kill -USR2 $PPID", **given)
    assert done.returncode == 0 and "scontrol requeue 7\n" in (tmp_path / "asked").read_text()


def test_a_submission_that_was_withdrawn_does_nothing(tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-s"], input=ours(tmp_path), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(
        f"error: {tmp_path}/run/jobs/{STAMP} is gone: the submission was"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_prologue_that_fails_is_the_end(tmp_path: Path) -> None:
    scripts: list[str] = []

    def run(prologue: str, number: int) -> tuple[bool, Done]:
        (tmp_path / "args").unlink(missing_ok=True)
        scripts.append(sbatch_text(config(), made(prologue), Options(), JobFolders(tmp_path / "run", STAMP), PYTHON))
        given = {"SLURM_JOB_ID": str(number), "STATUS": "3", "ANSWER": "RUNNING|None", "LEAVES": LEAVES}
        *_, done = execute(scripts[-1], tmp_path, **given)
        return (tmp_path / "args").exists(), done

    module = 'module() { false; [ "$2" = cuda ]; }'
    put(tmp_path, "read.sh", "false\ntrue")
    put(tmp_path, "scontrol", f'echo "scontrol $*" >>{tmp_path}/asked')
    good = ("false || true", "[ -e /nowhere ] && export A=1", "set -euo pipefail", "source ./read.sh")
    for number, harmless in enumerate(good):
        ran, done = run(f"{module}\nmodule load cuda\n{harmless}", number)
        assert ran and (done.returncode, done.stderr) == (3, ""), harmless
        assert f"scontrol requeue {number}" in (tmp_path / "asked").read_text(), f"{harmless}: not for what is ours"
    for harmful in ("module load cudda", "no-such-command 2>/dev/null", "source ./gone.sh 2>/dev/null"):
        ran, done = run(f"{module}\n{harmful}\nexport A=1", 9)
        assert not ran and done.returncode == 1, harmful
        number = 1 + scripts[-1].splitlines().index(harmful)
        assert done.stderr.startswith("error: the prologue failed with status "), done.stderr
        assert f", in line {number} of the batch script: " in done.stderr


def shell_of_a_rank(folder: Path, python: str = sys.executable) -> list[str]:
    """The words of srun's command before Python."""
    arguments, *_ = execute(sbatch_text(config(), made(), Options(), FOLDERS, python), folder, SLURM_JOB_ID="7")
    return arguments[arguments.index("sh") : -5]


def warn_while_it_starts(command: list[str], word: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program under it that is warned before it knows of warnings, and says what has become of the signal."""
    script = (
        f"import os, signal as s; os.kill(os.getpid(), s.SIG{word}); s.signal(s.SIG{word}, lambda *_: print('came'));"
        f"print(s.SIG{word} in s.sigpending()); s.pthread_sigmask(s.SIG_UNBLOCK, [s.SIG{word}])"
    )
    env = {**os.environ, **env}
    return subprocess.run([*command, sys.executable, "-c", script], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("word", ["USR2", "TERM"])
@pytest.mark.parametrize(("old_env", "python"), [(False, "/nowhere/python"), (True, sys.executable)])
def test_a_warning_waits_for_a_rank_that_starts(tmp_path: Path, word: str, old_env: bool, python: str) -> None:
    command = shell_of_a_rank(tmp_path, python)
    if old_env:
        put(tmp_path, "env", 'echo "env: unrecognized option" >&2; exit 125')
    done = warn_while_it_starts(command, word, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "came"], "")
    assert warn_while_it_starts(["nice"], word).returncode == -signal.Signals[f"SIG{word}"], "what it is for"


def test_a_rank_survives_the_warning_where_nothing_can_block_it(tmp_path: Path) -> None:
    command = shell_of_a_rank(tmp_path, "/nowhere/python")
    put(tmp_path, "env", 'echo "env: unrecognized option" >&2; exit 125')
    done = warn_while_it_starts(command, "USR2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["False"], "")


def test_elements_of_an_array_have_logs_of_their_own(tmp_path: Path) -> None:
    script = sbatch_text(config(), made(), Options(elements=3), JobFolders(tmp_path / "run", STAMP, CODE), PYTHON)
    of_array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    arguments, env, _ = execute(script, tmp_path, SLURM_JOB_ID="9", **of_array)
    assert f"--output={tmp_path}/run/logs/7_2/rank-%t.log" in arguments
    assert env["PYTHONPATH"] == str(CODE), "an empty element would be the working directory"


def test_enroot_passes_the_variables_of_a_task_and_no_others(tmp_path: Path) -> None:
    script = sbatch_text(config(), contained("enroot"), Options(), JobFolders(tmp_path / "run", STAMP), PYTHON)
    arguments, *_ = execute(script, tmp_path, SLURM_JOB_ID="7")
    (tmp_path / "enroot").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "enroot").chmod(0o755)
    names = {"SLURM_PROCID": "5", "PMIX_RANK": "5", "HF_HOME": "/x", "HF_HOME_OF_OTHERS": "1", "LD_PRELOAD_": "1"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **names}
    command = arguments[arguments.index("bash") :]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert {word for word in shown if word.startswith("--env=")} == {f"--env={n}" for n in list(names)[:3]}
    assert shown[0] == "start" and shown[-6:-4] == ["/images/torch.sif", "python3"]


def test_flags_of_a_profile() -> None:
    flags = {"reservation": "maint", "nice": 5, "overcommit": True, "contiguous": False}
    profile = made(sbatch=flags, gpu_type="h100", switches="1@10:00")
    lines = sbatch_text(config(), profile, Options(), FOLDERS, PYTHON).splitlines()
    for line in ("--reservation=maint", "--switches=1@10:00", "--nice=5", "--overcommit", "--gres=gpu:h100:2"):
        assert f"#SBATCH {line}" in lines
    assert not any("contiguous" in line for line in lines)


def test_what_is_asked_for_wins_over_the_profile() -> None:
    profile = made(partition="a", account="b", qos="c", time="10")
    lines = sbatch_text(config(), profile, ALL, FOLDERS, PYTHON).splitlines()
    asked = {shlex.split(line)[1] for line in lines if line.startswith("#SBATCH")}
    assert {"--partition=gpu", "--account=physics", "--qos=high", "--time=1-12"} < asked
    assert not {"--partition=a", "--account=b", "--qos=c", "--time=10"} & asked


@pytest.mark.parametrize("odd", ["with space", "100%", "new\nline", 'quo"te', "apo'strophe", "$HOME", "a,b", "back\\"])
def test_paths_that_slurm_would_misread_are_refused(odd: str) -> None:
    with pytest.raises(ConfigError, match=r"^folder=.*can be told to Slurm; use another folder\.$"):
        JobFolders(Path("/runs") / odd, STAMP)
    with pytest.raises(ConfigError):
        JobFolders(HOME, STAMP, None, (Path("/data") / odd,))
