"""Nights: which are one series, and what has changed between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms import store
from hpctrain.comms.history import Before, before, pace
from hpctrain.comms.profile import read
from hpctrain.comms.result import Result
from tests.comms.made import result, row


def test_a_night_is_held_against_the_nights_before(forked, tmp_path: Path) -> None:
    path, where = tmp_path / "n.h5", ["--ranks", "2", "--folder", str(tmp_path / "b"), "--no-slow"]
    how = ["--op", "all_reduce", "--sizes", "1K:1M:8", "--tolerance", "9", "-n", "30"]
    first = forked("sweep", "--store", str(path), *where, *how)
    assert first.exit_code == 0 and "2 ranks, the first of its kind: 4 lines" in first.stdout, first.stderr
    earlier = store.read(path)
    fast = [replace(r, times=tuple(tuple(t / 1e6 for t in times) for times in r.times)) for r in earlier.rows]
    store.append(path, replace(earlier, rows=tuple(fast)))
    second = forked("sweep", "--store", str(path), "--nights", "1", *where, *how)
    assert second.exit_code == 1 and "against 1 nights: 4 slower" in second.stdout
    assert "4 problems: all_reduce of 1024 bytes over world of 2 takes" in second.stderr
    third = forked("sweep", "--store", str(path), "--nights", "1", *where, *how)
    assert third.exit_code == 1 and "against 1 nights: 4 slower" in third.stdout, "a slow night is no baseline"
    assert len(store.names(path)) == 4


def test_a_night_adds_its_fits_to_a_profile(monkeypatch, tmp_path: Path) -> None:
    """But for those that tell no rate, which are named."""
    rows = [row(1 << power, 1e-5 + (1 << power) / 1e9) for power in range(10, 21)]
    rows += [row(1 << power, 1e-5, operation="all_gather") for power in range(10, 21)]
    monkeypatch.setattr("hpctrain.comms.local.run_here", lambda *_: result(*rows))
    where = ["--ranks", "4", "--folder", str(tmp_path), "--no-slow", "--op", "all_reduce,all_gather"]
    files = ["--store", str(tmp_path / "n.h5"), "--profile-out", str(tmp_path / "p")]
    done = CliRunner().invoke(main, ["bench", "sweep", *files, *where])
    assert done.exit_code == 0, done.output
    assert [entry["operation"] for entry in read(tmp_path / "p")["collectives"]] == ["all_reduce"]
    assert done.stderr == f"warning: all_gather over world of 4 is not in {tmp_path}/p: no rate is known\n"


def under(made: Result, **variables: str) -> Result:
    return replace(made, environment={"variables": variables, "cpu": "Xeon", "versions": {"torch": "2.9", "h5py": "3"}})


def test_other_measurements_are_no_nights(tmp_path: Path) -> None:
    path, one = tmp_path / "n.h5", under(result(row(1024)), NCCL_ALGO="Ring", SLURM_JOB_ID="1")
    store.append(path, one)
    assert before(path, one, 7) == Before((one,))
    for same in (
        replace(one, spec={**one.spec, "note": "x", "kind": "night"}),
        under(one, NCCL_ALGO="Ring", SLURM_JOB_ID="2", MASTER_ADDR="n7"),
        replace(one, environment=one.environment | {"versions": {"torch": "2.9", "h5py": "4"}}),
    ):
        assert before(path, same, 7) == Before((one,)), same
    for other in (replace(one, spec={**one.spec, "warm_up": 9}), replace(one, where=one.where[:2])):
        assert before(path, other, 7) == Before(()), "it cannot be compared at all"


def test_a_changed_environment_is_another_series_and_is_said(tmp_path: Path) -> None:
    path, one = tmp_path / "n.h5", under(result(row(1024)), NCCL_ALGO="Ring")
    store.append(path, replace(one, start="2026-01-01T00:00:00+00:00"))
    store.append(path, one)
    for other, said in (
        (under(one, NCCL_ALGO="Tree"), "NCCL_ALGO is Tree, was Ring"),
        (under(one), "NCCL_ALGO is not set, was Ring"),
        (under(one, NCCL_ALGO="Ring", UCX_TLS="rc"), "UCX_TLS is rc, was not set"),
        (replace(one, spec={**one.spec, "environ": {"X": "1"}}), "X is 1, was not set"),
        (replace(one, library="NCCL 2.28.3"), "library is NCCL 2.28.3, was NCCL 2.27.7"),
        (replace(one, environment=one.environment | {"cpu": "EPYC"}), "cpu is EPYC, was Xeon"),
        (replace(one, where=tuple(replace(at, device="H200") for at in one.where)), "devices is H200, was cpu"),
        (
            replace(one, environment=one.environment | {"versions": {"torch": "2.10"}}),
            "version of torch is 2.10, was 2.9",
        ),
    ):
        assert before(path, other, 7) == Before((), (said,))
    tree = under(one, NCCL_ALGO="Tree")
    store.append(path, replace(tree, start="2026-01-03T00:00:00+00:00"))
    assert [len(before(path, made, 7).nights) for made in (tree, one)] == [1, 2], "two series in one store"


def test_pairs_that_all_became_slower_are_noticed() -> None:
    nights = [replace(result(), extra={"usual_s": [usual, usual]}) for usual in (1.0, 1.1, 0.9)]
    assert pace(replace(result(), extra={"usual_s": [1.4, 1.4]}), nights) == ""
    said = pace(replace(result(), extra={"usual_s": [5.0, 5.0]}), nights)
    assert said == "pairs take 5.0 times as long as in the nights before, all of them"
    assert pace(result(), nights) == pace(nights[0], []) == pace(nights[0], [result()]) == ""
