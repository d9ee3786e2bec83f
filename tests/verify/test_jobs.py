"""Jobs that are verified, with a stand-in for Slurm: none is left behind, and a verdict is lost only with its job."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.cli import main
from hpctrain.config.schema import RunConfig
from hpctrain.errors import LaunchError
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.client import SlurmError
from hpctrain.launch.slurm.jobs import Job
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.slurm.state import JobState
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request
from hpctrain.telemetry.meter import Meter
from hpctrain.verify import jobs, rank
from hpctrain.verify.cases import Case, cases
from hpctrain.verify.jobs import Jobs, spread
from hpctrain.verify.trace import Share
from tests.verify.test_verify import SMALL


class Slurm:
    """Takes jobs up to a number, ends each when it is waited for, and notes which are cancelled."""

    def __init__(self, patch: pytest.MonkeyPatch, takes: int = 9, interrupted: str = "", mute: bool = False) -> None:
        self.takes, self.interrupted, self.mute = takes, interrupted, mute
        self.queued: list[str] = []
        self.cancelled: list[str] = []
        self.warned: list[str] = []
        for name in ("submit", "wait", "cancel"):
            patch.setattr(jobs, name, getattr(self, name))

    def submit(self, request: Request, warn: object) -> list[Job]:
        if len(self.queued) == self.takes:
            raise LaunchError("Slurm refused the job")
        self.queued.append(str(100 + len(self.queued)))
        return [Job((self.queued[-1],), "2026-01-01T00:00:00", request.home)]

    def wait(self, ids: Sequence[str], poll_s: float) -> list[JobState]:
        if self.interrupted in ids:
            raise KeyboardInterrupt
        return [JobState(ids[0], "COMPLETED")]

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids
        if self.mute:
            raise SlurmError("scancel has not answered")

    def jobs(self, found: Sequence[Case]) -> Jobs:
        return Jobs(found, 1, site("lab"), Options(), self.warned.append)


@pytest.fixture
def three(tmp_path: Path) -> tuple[Case, ...]:
    return spread(cases("dp=1;tp=2;dp=2", "llama-tiny", SMALL, 1, "float64"), 2, tmp_path)


def test_all_that_was_queued_goes_when_one_is_refused(monkeypatch: pytest.MonkeyPatch, three: tuple[Case, ...]) -> None:
    slurm = Slurm(monkeypatch, takes=2)
    with pytest.raises(LaunchError, match="Slurm refused"), slurm.jobs(three):
        pytest.fail("nothing is judged")
    assert slurm.cancelled == slurm.queued == ["100", "101"]


def test_what_has_not_ended_goes_with_the_context(monkeypatch: pytest.MonkeyPatch, three: tuple[Case, ...]) -> None:
    slurm = Slurm(monkeypatch)
    monkeypatch.setattr(rank, "read_shares", lambda folder, world: [])
    with pytest.raises(ZeroDivisionError), slurm.jobs(three) as run:
        run(three[1].config, 2, 1)
        raise ZeroDivisionError
    assert slurm.cancelled == ["100", "102"]
    slurm = Slurm(monkeypatch)
    with slurm.jobs(three) as run:
        for case in three:
            run(case.config, case.world, 1)
    assert slurm.cancelled == [] and slurm.warned == []


def test_a_slurm_that_cancels_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch, three: tuple[Case, ...]) -> None:
    slurm = Slurm(monkeypatch, mute=True)
    with pytest.raises(ZeroDivisionError), slurm.jobs(three):
        raise ZeroDivisionError
    assert slurm.warned == ["jobs 100 101 102 may be left in the queue: scancel has not answered"]


def test_ctrl_c_leaves_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hpctrain.verify import judge

    slurm = Slurm(monkeypatch, interrupted="101")
    monkeypatch.setattr(client, "has_slurm", lambda: True)
    monkeypatch.setattr(rank, "read_shares", lambda folder, world: (_ for _ in ()).throw(LaunchError("nothing there")))
    monkeypatch.setattr(judge, "Local", lambda with_deepspeed: _Nothing())
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main(["verify", "llama-tiny", *SMALL, f"folder={tmp_path}", "--layouts", "dp=1;tp=2;dp=2", "--slurm"])
    assert (slurm.queued, slurm.cancelled) == (["100", "101", "102"], ["101", "102"])


class _Nothing:
    """In the place of the processes of this machine."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reference(self, config: RunConfig, steps: int) -> None:
        pass


def test_shares_that_a_file_system_shows_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First nothing, then a file with half its bytes, then all of it."""
    whole = pickle.dumps(Share([1.0]))
    rank.share_file(tmp_path, 0).write_bytes(whole)
    shown = iter((whole[: len(whole) // 2], whole))
    monkeypatch.setattr(rank.time, "sleep", lambda _: rank.share_file(tmp_path, 1).write_bytes(next(shown)))
    assert [share.losses for share in rank.read_shares(tmp_path, 2)] == [[1.0], [1.0]]


def test_a_rank_that_left_nothing_is_named(tmp_path: Path) -> None:
    rank.share_file(tmp_path, 0).write_bytes(pickle.dumps(Share()))
    with pytest.raises(LaunchError, match=r"what rank 1 computed cannot be read from .*rank-1\.share \(FileNotFound"):
        rank.read_shares(tmp_path, 2, patience_s=0.0)


LIMITS = ["cluster.timeout_s=77", "cluster.silence_s=7"]


def test_limits_of_the_cluster_hold_in_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in training: the watchdog is told both, and watches the counters of the ranks' own groups."""
    (case,) = cases("dp=1", "llama-tiny", [*SMALL, *LIMITS, f"folder={tmp_path}"], 1, "float64")
    given: list[Any] = []
    meter = Meter()

    @contextmanager
    def group(*arguments: Any) -> Iterator[Any]:
        given.append(arguments[3::2])
        yield SimpleNamespace(device=torch.device("cpu"), group_timeout_s=92.0, meter=meter)

    build = rank.build_mesh
    monkeypatch.setattr(rank, "process_group", group)
    monkeypatch.setattr(rank, "build_mesh", lambda *a: given.append(a[3:]) or build(*a))  # type: ignore[func-returns-value]
    rank.run_in_job(case.config.model_dump(mode="json"), 1, str(tmp_path))
    assert given == [(77.0, 7.0), (92.0, meter)] and meter.step == 1
    rank.run(case.config.model_dump(mode="json"), 1)
    assert given[2] == (77.0, None), "on this machine"
