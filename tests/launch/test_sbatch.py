"""Batch scripts: whole texts against golden files, and what bash makes of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.profile import Profile, Site, profiles, site
from hpctrain.launch.sbatch import JobFolders, Options, sbatch_text

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
    "pyxis": (config(), contained("pyxis", args=("--no-container-mount-home",)), Options(), FOLDERS),
    "enroot": (config(), contained("enroot"), Options(), FOLDERS),
    "apptainer": (config(), contained("apptainer", python="/opt/conda/bin/python"), Options(), FOLDERS),
}


def text(name: str) -> str:
    return sbatch_text(*CASES[name], PYTHON, "22.05.8").replace(f"hpctrain {__version__}", "hpctrain VERSION")


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("HPCTRAIN_WRITE_GOLDEN"):
        file.write_text(text(name))
    assert text(name) == file.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_it(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text(name), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", profiles())
def test_every_profile_makes_a_script(name: str) -> None:
    assert "srun" in sbatch_text(config(), site(name), Options(), FOLDERS, PYTHON)


def execute(script: str, folder: Path, **env: str) -> tuple[list[str], dict[str, str], int]:
    """Run a script with an srun that notes what it was given: its arguments, its environment; and the exit status."""
    (folder / "srun").write_text(
        f'#!/bin/bash\nprintf "%s\\0" "$@" >{folder}/args\nenv -0 >{folder}/env\nexit ${{STATUS:-0}}\n'
    )
    (folder / "srun").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **env}
    done = subprocess.run(["bash", "-s"], input=script, env=env, capture_output=True, text=True, cwd=folder)
    assert done.stderr == ""
    arguments = (folder / "args").read_text().split("\0")[:-1]
    pairs = [entry.split("=", 1) for entry in (folder / "env").read_text().split("\0") if entry]
    return arguments, dict(pairs), done.returncode


def test_what_bash_makes_of_it(tmp_path: Path) -> None:
    odd = 'it\'s "$HOME" `id` \\ %j'
    where = JobFolders(tmp_path / "run", STAMP, tmp_path / "code")
    profile = made("export FROM_PROLOGUE=$ODD", environment={"ODD": odd}, srun_args=(odd,))
    script = sbatch_text(config(), profile, Options(), where, PYTHON)
    arguments, env, status = execute(script, tmp_path, SLURM_JOB_ID="7", PYTHONPATH="/before", STATUS="3")
    assert env["ODD"] == env["FROM_PROLOGUE"] == odd
    assert odd in arguments
    assert f"--output={tmp_path}/run/logs/7/rank-%t.log" in arguments
    assert arguments[-5:] == [PYTHON, "-u", "-m", "submitit.core._submit", f"{tmp_path}/run/jobs/{STAMP}/%j"]
    assert env["PYTHONPATH"] == f"{tmp_path}/code:/before"
    assert (tmp_path / "run" / "logs" / "7").is_dir()
    assert status == 3, "the job ends as its ranks do"


def shell_of_a_rank(folder: Path) -> list[str]:
    """The words of srun's command before Python."""
    arguments, *_ = execute(sbatch_text(config(), made(), Options(), FOLDERS, PYTHON), folder, SLURM_JOB_ID="7")
    return arguments[arguments.index("sh") : arguments.index(PYTHON)]


def warn_while_it_starts(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program under it that is warned before it knows of warnings, and says what has become of the signal."""
    script = (
        "import os, signal as s; os.kill(os.getpid(), s.SIGUSR2); s.signal(s.SIGUSR2, lambda *_: print('came'));"
        "print(s.SIGUSR2 in s.sigpending()); s.pthread_sigmask(s.SIG_UNBLOCK, [s.SIGUSR2])"
    )
    env = {**os.environ, **env}
    return subprocess.run([*command, sys.executable, "-c", script], env=env, capture_output=True, text=True)


def test_a_warning_waits_for_a_rank_that_starts(tmp_path: Path) -> None:
    command = shell_of_a_rank(tmp_path)
    done = warn_while_it_starts(command, tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "came"], "")
    assert warn_while_it_starts(["env"], tmp_path).returncode == -signal.SIGUSR2, "what it is for"


def test_an_old_env_lets_a_rank_survive_the_warning(tmp_path: Path) -> None:
    (tmp_path / "env").write_text('#!/bin/sh\necho "env: unrecognized option" >&2\nexit 125\n')
    (tmp_path / "env").chmod(0o755)
    (tmp_path / "script").mkdir()
    command = shell_of_a_rank(tmp_path / "script")
    done = warn_while_it_starts(command, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
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
    flags = {"reservation": "maint", "switches": "1@10:00", "nice": 5, "overcommit": True, "contiguous": False}
    lines = sbatch_text(config(), made(sbatch=flags, gpu_type="h100"), Options(), FOLDERS, PYTHON).splitlines()
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
