"""Ranks that hang or die, seen by their peers: who is named, and that nobody waits on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpctrain.launch.life.identity import Identity
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.launch.meet import watchdog
from hpctrain.launch.rank.body import run_rank
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.parallel.comm import Axis, all_reduce

HANG = 2
"""The rank that does not behave; 3 shares its group, 0 and 1 have one of their own."""


def body(folder: Path, how: str) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    watchdog.LOOK_S = 1.0
    hang = 0 if how == "first" else HANG
    with process_group(Identity(rank, 4, rank, 4, "srun", f"slurm-{how}"), folder, "cpu", 6.0, silence_s=3.0) as world:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
        tp = Axis("tp", pair, rank % 2, groups[rank // 2], world.meter)
        everyone = Axis("world", (0, 1, 2, 3), rank, None, world.meter)
        world.meter.step = 5
        all_reduce(torch.ones(3), everyone)
        with world.meter.phase("backward"):
            if rank == hang:
                time.sleep(3 * 0.5)  # long enough for a beat that tells where it is
            if rank == hang and how in ("stopped", "first"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == hang and how == "gone":
                os.closerange(3, 1024)  # as if its node were gone, which nobody but its peers sees
                os.execvp("sleep", ["sleep", "60"])
            if rank == hang and how == "asleep":
                time.sleep(60)
            if rank == hang and how == "raises":
                time.sleep(1)
                raise ValueError("on purpose")
            all_reduce(torch.ones(3), tp)
        if rank < 2 and how in ("raises", "stopped"):
            time.sleep(60)  # busy, and in no collective with it
        all_reduce(torch.ones(3), everyone)


def rank_body(folder: Path, how: str) -> None:
    def note(error: BaseException) -> None:
        (folder / f"said-{dist.get_rank() if dist.is_initialized() else os.getpid()}").write_text(
            f"{type(error).__name__}|{error}"
        )

    run_rank(body, (folder, how), note)


def outcome(ranks, folder: Path, how: str) -> tuple[dict[int, str], float]:
    """What each rank said as it left, and how long all of it took. A rank that is stopped has to be killed."""
    began = time.monotonic()
    with pytest.raises(RankFailure):
        ranks(4, rank_body, folder, how)
    said = {int(path.name.removeprefix("said-")): path.read_text() for path in folder.glob("said-*")}
    return said, time.monotonic() - began


def test_a_stopped_rank_is_named_also_by_ranks_far_from_it(ranks, tmp_path: Path) -> None:
    said, seconds = outcome(ranks, tmp_path, "stopped")
    assert sorted(said) == [0, 1, 3]
    kind, text = said[3].split("|")
    assert kind == "RankHung" and text.startswith("rank 2 (process ")
    assert "in step 5 in backward" in text and "after all_reduce 0 over world (ranks 0, 1, 2, 3)" in text
    assert re.search(r"has given no sign of life for [3-9] s: the job ends here; rank 3 waited for it\.", text), text
    for rank in (0, 1):
        assert said[rank].startswith(f"PeerLost|rank {rank} stopped because rank 2 (process "), said
    assert seconds < 30


def test_rank_0_is_named_though_the_store_goes_with_it(ranks, tmp_path: Path) -> None:
    said, _ = outcome(ranks, tmp_path, "first")
    hung = [text for text in said.values() if text.startswith("RankHung")]
    silent = re.compile("rank 0, which holds the store, has given no sign of life for [3-9] s")
    assert hung and all(silent.search(text) for text in hung), said


def test_a_rank_that_lives_but_does_not_come_is_named(ranks, tmp_path: Path) -> None:
    said, _ = outcome(ranks, tmp_path, "asleep")
    hung = [text for text in said.values() if text.startswith("RankHung")]
    assert hung and "has not ended in" in hung[0]
    assert "rank 2 (process " in hung[0] and "lives but does not take part, in step 5 in backward for" in hung[0]


def test_a_rank_whose_connections_close_is_named_by_its_peers(ranks, tmp_path: Path) -> None:
    said, seconds = outcome(ranks, tmp_path, "gone")
    assert 3 in said, "the others may be killed before they have found out"
    assert all("stopped because rank 2 (process " in text and "no sign of life" in text for text in said.values()), said
    assert seconds < 30


def test_a_failure_ends_ranks_that_are_busy_elsewhere(ranks, tmp_path: Path) -> None:
    said, seconds = outcome(ranks, tmp_path, "raises")
    assert said.pop(2) == "ValueError|on purpose"
    assert sorted(said) == [0, 1, 3]
    assert all("rank 2 failed first: ValueError: on purpose" in text for text in said.values())
    assert seconds < 30


def healthy(folder: Path, late: bool) -> int:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    watchdog.LOOK_S = 0.0
    if late:  # beats further apart than the silence that is borne, as with thousands of ranks, and one comes too late
        watchdog.RANKS_A_SECOND = 2
        turns, beat = iter(range(100)), watchdog.Watchdog._beat
        watchdog.Watchdog._beat = lambda dog: None if next(turns) == 3 else beat(dog)  # type: ignore[method-assign]
    with process_group(
        Identity(rank, 2, rank, 2, "srun", "slurm-healthy"), folder, "cpu", 20.0, silence_s=0.9 if late else 1.5
    ) as world:
        everyone = Axis("world", (0, 1), rank, None, world.meter)
        if rank == 1:
            end = time.monotonic() + (7 if late else 4)  # busy, and never in the store
            while time.monotonic() < end:
                sum(range(1000))
        return int(all_reduce(torch.ones(1), everyone).item())


@pytest.mark.parametrize("late", [False, True])
def test_a_slow_rank_that_lives_is_waited_for(ranks, tmp_path: Path, late: bool) -> None:
    assert ranks(2, healthy, tmp_path, late) == [2, 2]
