"""`run_local` through real submitit jobs."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.local.run import run_local
from tests.launch import jobs
from tests.launch.local.test_zygote import gone


def leftovers(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix not in (".log", ".out"))


def test_ranks_run_and_return(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("RANK", "3")  # of a launcher outside, which has nothing to say inside
    results = run_local(jobs.who, ("x",), 2, tmp_path, threads=3)
    assert results == [(rank, 2, "submitit", "x", "3", "4,7") for rank in range(2)]
    for rank in range(2):
        (log,) = tmp_path.glob(f"logs/*/rank-{rank}.log")
        assert f"I am rank {rank}" in log.read_text()
    assert leftovers(tmp_path) == []


def test_users_error_comes_back_as_itself(tmp_path):
    with pytest.raises(ConfigError) as caught:
        run_local(jobs.refuse, (1,), 2, tmp_path)
    assert str(caught.value) == "parallel.tp=3: must divide heads=4; use 1, 2 or 4."
    assert (caught.value.path, caught.value.exit_code) == ("parallel.tp", 2)
    (log,) = tmp_path.glob("logs/*/rank-1.log")
    assert "error: parallel.tp=3" in log.read_text() and "Traceback" not in log.read_text()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "job, how, said",
    [
        (jobs.break_down, "failed with ZeroDivisionError", "about to divide"),
        (jobs.be_killed, "was killed by SIGKILL", ""),
    ],
)
def test_failed_rank_is_named_with_its_log(tmp_path, job, how, said):
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_local(job, (1,), 2, tmp_path)
    assert time.monotonic() - start < 25
    assert str(caught.value).startswith(f"rank 1 {how}")
    assert re.search(r"the end of .*/rank-1\.log:\n", str(caught.value)) and said in str(caught.value)


def test_folder_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(LaunchError, match="the run folder must be writable"):
        run_local(jobs.who, (1,), 2, tmp_path)


PARENT = """
    import sys
    from pathlib import Path
    from hpctrain.launch.local.run import run_local
    from tests.launch.jobs import wait_for_ever
    folder = Path(sys.argv[1])
    run_local(wait_for_ever, (str(folder), sys.argv[2] == "deaf"), 2, folder)
"""


@pytest.mark.parametrize(
    "number, status, deaf",
    [
        (signal.SIGINT, -signal.SIGINT, "deaf"),
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_ranks_end_with_their_parent(tmp_path, number, status, deaf):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path), deaf], stderr=subprocess.DEVNULL
    )
    paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    pids = [int(path.read_text()) for path in paths]
    supervisors = {_parent_of(pid) for pid in pids}
    os.kill(parent.pid, number)
    assert parent.wait(20) == status
    assert [pid for pid in [*pids, *supervisors] if not gone(pid)] == []


def _parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_killed_supervisor_takes_its_ranks_along(tmp_path):
    seen = []

    def kill_supervisor():
        paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
        while not all(path.exists() and path.read_text() for path in paths):
            time.sleep(0.05)
        seen.extend(int(path.read_text()) for path in paths)
        os.kill(_parent_of(seen[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_supervisor, daemon=True)
    killer.start()
    with pytest.raises(LaunchError, match="supervisor of the ranks was killed by SIGKILL"):
        run_local(jobs.wait_for_ever, (str(tmp_path),), 2, tmp_path)
    killer.join(10)
    assert len(seen) == 2 and all(gone(pid) for pid in seen)
