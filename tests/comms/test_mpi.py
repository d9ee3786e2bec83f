"""MPI: its algorithms, its variables, a rank that is lost; and that its ranks load no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.comms import store
from hpctrain.comms.environments import OPEN_MPI, open_mpi
from hpctrain.comms.history import conditions
from hpctrain.comms.local import environment, mpirun
from hpctrain.comms.mpibackend import LEVELS as NAMES
from hpctrain.comms.mpibackend import level_of
from hpctrain.errors import ConfigError
from tests.comms.command import ABSENT, ROOT, bench, has_mpi, names_the_absent


@pytest.mark.slow
@pytest.mark.skipif(not has_mpi(), reason="no mpirun")
def test_a_rank_that_never_arrives_is_named_over_mpi(tmp_path: Path) -> None:
    """By ranks without torch, through a store of ours."""
    began = time.monotonic()
    done = bench("collectives", "--backend", "mpi", "--ranks", "2", "--folder", str(tmp_path), *ABSENT)
    assert done.returncode == 1 and names_the_absent(done.stderr), done.stderr
    assert time.monotonic() - began < 90


ADDENDS = [2.0**24, 1.0, 1.0, -(2.0**24)]
"""Of four ranks, in float32: what their sum comes to depends on the order."""


SUM = f"""
import numpy
from mpi4py import MPI
mine = numpy.full(4, {ADDENDS}[MPI.COMM_WORLD.Get_rank()], dtype="f4")
out = numpy.empty(4, dtype="f4")
MPI.COMM_WORLD.Allreduce(mine, out)
if MPI.COMM_WORLD.Get_rank() == 0:
    print(out.tolist())
"""


def added(*order: int) -> float:
    """One after the other."""
    total = np.float32(0)
    for rank in order:
        total = np.float32(total + np.float32(ADDENDS[rank]))
    return float(total)


@pytest.mark.skipif(not has_mpi(), reason="no mpirun")
def test_algorithms_of_mpi_differ() -> None:
    """The variables reach the library, and it takes the algorithm: sums of floats show in which order it adds."""
    said = subprocess.run([mpirun(), "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in said:
        pytest.skip("what is known of orders is Open MPI's")
    chosen = dict(open_mpi("all_reduce"))
    pairs = float(np.float32(ADDENDS[0] + ADDENDS[1]) + np.float32(ADDENDS[2] + ADDENDS[3]))
    expected = {
        "recursive_doubling": [pairs] * 4,  # (0 + 1) + (2 + 3)
        "basic_linear": [added(3, 2, 1, 0)] * 4,
        # part i begins at rank i and goes around
        "ring": [added(*((part + i) % 4 for i in range(4))) for part in range(4)],
    }
    assert len({tuple(sums) for sums in expected.values()}) == 3
    for name, sums in expected.items():
        env = environment(4) | chosen[f"Open MPI {name}"]
        command = [mpirun(), "-n", "4", "--oversubscribe", "--bind-to", "none", sys.executable, "-c", SUM]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and json.loads(done.stdout) == sums, (name, done.stdout, done.stderr)


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="no ompi_info")
def test_open_mpi_has_the_algorithms_that_are_named() -> None:
    command = ["ompi_info", "--param", "coll", "tuned", "--level", "9", "--parsable"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, algorithms in OPEN_MPI.values():
        begin = f"mca:coll:tuned:param:coll_tuned_{name}_algorithm:enumerator:value:"
        known = {line.rsplit(":", 1)[1] for line in said.splitlines() if line.startswith(begin)}
        assert set(algorithms) <= known, name


@pytest.mark.slow
@pytest.mark.skipif(not has_mpi(), reason="no mpirun")
def test_each_run_of_a_sweep_has_its_variables(tmp_path: Path) -> None:
    """New ranks for each value; another choice of algorithm is another series."""
    where = ["--backend", "mpi", "--ranks", "2", "--folder", str(tmp_path), "--store", str(tmp_path / "s.h5")]
    name = "OMPI_MCA_coll_tuned_barrier_algorithm"
    done = bench("collectives", "--op", "barrier", "-n", "2", *where, "--sweep-env", f"{name}=tree,bruck")
    assert done.returncode == 0, done.stderr
    found = [store.read(tmp_path / "s.h5", name) for name in store.names(tmp_path / "s.h5")]
    assert [r.environment["variables"][name] for r in found] == ["tree", "bruck"]
    assert [r.spec["note"] for r in found] == [f"{name}=tree", f"{name}=bruck"]
    assert conditions(found[0]) != conditions(found[1])


LEVELS = SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, THREAD_MULTIPLE=3)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("got", range(4))
def test_calls_from_a_thread_need_a_level_that_the_library_gave(got: int, several: bool) -> None:
    mpi = SimpleNamespace(**vars(LEVELS), Query_thread=lambda: got)
    needed = 3 if several else 2
    if got >= needed:
        said = level_of(mpi, several, "multiple")
        assert said == f"MPI thread level: multiple asked for, {NAMES[got]} given, {NAMES[needed]} needed"
        return
    with pytest.raises(
        ConfigError, match=f"asked for thread level multiple and gave {NAMES[got]}, .* {NAMES[needed]};"
    ):
        level_of(mpi, several, "multiple")


@pytest.mark.slow
@pytest.mark.skipif(not has_mpi(), reason="no mpirun")
def test_overlap_says_and_checks_the_thread_level(tmp_path: Path) -> None:
    what = ["overlap", "--backend", "mpi", "--ranks", "2", "--sizes", "64K", "-n", "2", "--folder", str(tmp_path)]
    done = bench(*what)
    assert done.returncode == 0, done.stderr
    assert "# MPI thread level: multiple asked for, multiple given, serialized needed" in done.stdout
    done = bench(*what, "--env", "MPI4PY_RC_THREAD_LEVEL=funneled")
    assert done.returncode != 0 and "was asked for thread level funneled and gave funneled" in done.stderr, done.stderr


def test_mpi_needs_no_torch() -> None:
    """Its import costs seconds of every rank."""
    modules = "hpctrain.comms.rank, hpctrain.comms.mpibackend, hpctrain.comms.kinds, hpctrain.launch.rank.task"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
