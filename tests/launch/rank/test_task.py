"""What a rank of Slurm does before and after its work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.core.utils import temporary_save_path

from hpctrain.launch.life.stop import SIGNALS, STOPPED_VARIABLE
from hpctrain.launch.rank.task import _clear_torn_result, _leave_word, slurm_task


@pytest.mark.parametrize(
    ("rank", "ending", "left"),
    [
        ("0", SimpleNamespace(stopped=True), True),
        ("1", SimpleNamespace(stopped=True), False),
        ("0", SimpleNamespace(stopped=True, outlived=True), False),
        ("0", SimpleNamespace(stopped=False), False),
        ("0", None, False),
    ],
)
def test_the_first_rank_of_a_run_that_has_stopped_leaves_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, ending: object, left: bool
) -> None:
    monkeypatch.setenv("SLURM_PROCID", rank)
    monkeypatch.setenv(STOPPED_VARIABLE, str(tmp_path / "stopped-0"))
    assert _leave_word(lambda: ending, ()) is ending
    assert (tmp_path / "stopped-0").exists() is left


def as_a_task(folder):
    """In a process of its own: handlers and masks are the process'."""
    names = ("SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER", "SLURM_JOB_ID", "SLURM_PROCID", STOPPED_VARIABLE)
    os.environ.update(zip(names, ("slurm", str(folder), "7", "0", str(folder / "stopped-0"))))

    def work():
        for number in SIGNALS:
            os.kill(os.getpid(), number)  # while it starts
        held = signal.sigpending() >= set(SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in SIGNALS:
            os.kill(os.getpid(), number)  # when it has saved, to a thread that does not hold them back
        return SimpleNamespace(stopped=True, held=held)

    held = slurm_task(work, ()).held
    ignored = all(signal.getsignal(number) == signal.SIG_IGN for number in SIGNALS)
    return held, (folder / "stopped-0").exists(), ignored


def test_no_signal_ends_a_rank_before_it_listens_or_after_it_has_saved(ranks, tmp_path: Path) -> None:
    """Nor while the interpreter ends, which undoes handlers that are functions."""
    assert ranks(0, as_a_task, tmp_path) == [(True, True, True)]


def test_a_result_that_an_earlier_life_has_not_finished_writing_is_no_hindrance(tmp_path: Path) -> None:
    result = tmp_path / "7_0_result.pkl"
    with pytest.raises(KeyboardInterrupt), temporary_save_path(result) as part:
        part.write_bytes(b"torn")
        raise KeyboardInterrupt
    with pytest.raises(AssertionError), temporary_save_path(result):
        pass
    _clear_torn_result(result)
    with temporary_save_path(result) as part:
        part.write_bytes(b"whole")
    assert result.read_bytes() == b"whole"
    _clear_torn_result(result)
