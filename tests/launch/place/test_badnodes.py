"""Nodes that a run has found broken: remembered by several jobs at once, left as soon as one is handed out again."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.launch.place import badnodes
from hpctrain.launch.slurm import exclude
from hpctrain.launch.slurm.client import SlurmError

Programs = Callable[[str, str], None]
HOSTS = ["n0", "n1", "n2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pause between tries; and SIGTERM, which a requeue has to outlive, as it was."""
    monkeypatch.setattr(exclude, "PAUSE_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def scontrol(programs: Programs, log: Path, excluded: str = "(null)", refuses: str = "nothing") -> None:
    show = f"echo 'JobId=7 ExcNodeList={excluded} NodeList=n[0-2]'"
    programs(
        "scontrol",
        f'echo "$@" >> {log}\n[ "$1" != {refuses} ] || {{ echo "no $1 today" >&2; exit 1; }}\n'
        f'[ "$1" != show ] || {show}',
    )


def _add(folder: Path, name: str) -> None:
    badnodes.remember(folder, {f"{name}{i}": "slow" for i in range(3)})


def test_elements_of_a_sweep_add_to_the_list_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_add, args=(tmp_path, name)) for name in "abcdefgh"]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert set(badnodes.known(tmp_path)) == {f"{name}{i}" for name in "abcdefgh" for i in range(3)}


@pytest.mark.parametrize("text", ["", "[1]", "{", '"n0"'])
def test_a_list_that_cannot_be_read_names_no_node(tmp_path: Path, text: str) -> None:
    (tmp_path / badnodes.FILE).write_text(text)
    assert badnodes.known(tmp_path) == {}


def test_a_job_with_a_broken_node_goes_back_without_it(tmp_path: Path, programs: Programs) -> None:
    """Field failure 16. Besides those that it excludes already; once it is in the queue, as 22.05 wants it."""
    badnodes.remember(tmp_path, {"n2": "NVLink", "n9": "slow"})
    scontrol(programs, tmp_path / "log", excluded="n[4-5]")
    assert not badnodes.leave(tmp_path, "7", HOSTS, spares=1), "it has a node to spare"
    assert not (tmp_path / "log").exists()
    assert badnodes.leave(tmp_path, "7", HOSTS)
    assert (tmp_path / "log").read_text().splitlines() == [
        "show job 7",
        "show job 7",
        "requeue 7",
        "update JobId=7 ExcNodeList=n[2,4-5,9]",
    ]


def test_a_node_that_slurm_gives_in_spite_of_all_ends_the_job(tmp_path: Path, programs: Programs) -> None:
    badnodes.remember(tmp_path, {"n2": "NVLink"})
    scontrol(programs, tmp_path / "log", excluded="n2")
    with pytest.raises(badnodes.BadNodes, match="has given this job n2, which is among the nodes that it excludes"):
        badnodes.leave(tmp_path, "7", HOSTS)
    assert "requeue" not in (tmp_path / "log").read_text()


def test_a_job_that_cannot_exclude_them_is_held(tmp_path: Path, programs: Programs) -> None:
    """It would come back to the same nodes again and again, and bill for each time."""
    badnodes.remember(tmp_path, {"n2": "NVLink"})
    scontrol(programs, tmp_path / "log", refuses="update")
    with pytest.raises(SlurmError, match=r"no update today: job 7 is in the queue and held"):
        badnodes.leave(tmp_path, "7", HOSTS)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "hold 7"


@pytest.mark.parametrize(
    ("refuses", "status", "said"),
    [
        ("nothing", 0, "the job is back in the queue, without n2\n"),
        ("requeue", 1, "error: scontrol failed with status 1: no requeue today. Submit the run again: nodes known"),
    ],
)
def test_the_step_of_the_batch_script(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str], refuses: str, status: int, said: str
) -> None:
    badnodes.remember(tmp_path, {"n2": "NVLink"})
    scontrol(programs, tmp_path / "log", refuses=refuses)
    assert badnodes.main([str(tmp_path), "7", "0"], {"SLURM_JOB_NODELIST": "n[0-2]"}) == status
    assert capsys.readouterr().err.startswith(said)
