"""Several ranks: one save, one choice, one verdict."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import files
from hpctrain.checkpoint.collective import find, save
from hpctrain.errors import CheckpointError
from tests.checkpoint.state import FakeState, alone, world_axis

Run = Callable[..., list[Any]]


def save_all(run: Path, step: int, tiles: int = 1, keep: int = 2) -> tuple[int, Path]:
    axis = world_axis()
    report = save(run, step, FakeState(axis.index, axis.size, step, tiles), {"step": step}, axis, keep)
    return report.bytes, report.path


def load_all(run: Path, tiles: int = 2) -> tuple[int, list[str]]:
    axis = world_axis()
    found = find(run, axis)
    assert found is not None and found.extra == {"step": found.step}
    FakeState(axis.index, axis.size, found.step, tiles).load(found.reader)
    return found.step, [str(v) for v in found.refused]


def error_of(action: Callable[..., object], *args: Any) -> str:
    try:
        action(*args)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("writers, readers", [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path, ranks: Run, writers: int, readers: int) -> None:
    reports = ranks(writers, save_all, tmp_path, 100, random.randrange(1000))
    assert len(set(reports)) == 1
    size, path = reports[0]
    assert path == tmp_path / "checkpoints" / "step-00000100"
    written = [p for p in path.iterdir() if p.name != "manifest.json"]
    assert len(written) == 2 * writers and sum(p.stat().st_size for p in written) == size
    assert ranks(readers, load_all, tmp_path) == [(100, [])] * readers


def test_more_ranks_than_pieces(tmp_path: Path, ranks: Run) -> None:
    def few() -> int:
        import torch

        axis = world_axis()
        state = FakeState(axis.index, axis.size, 1, 0, tensors=(("x", "weight", torch.float32, (3,)),))
        save(tmp_path, 1, state, {}, axis)
        found = find(tmp_path, axis)
        assert found is not None
        state.load(found.reader)
        return found.step

    assert ranks(4, few) == [1] * 4


def _failing_save(run: Path, victim: int, where: str) -> str:
    axis = world_axis()
    state = FakeState(axis.index, axis.size, 200, 1)
    if axis.index == victim:

        def broken(*args: object) -> Any:
            if where == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise RuntimeError("the device is lost")

        if where == "write":
            files.write = broken
        elif where == "fetch":
            original = state.pieces
            state.pieces = lambda: [type(p)(*[*vars(p).values()][:-1], fetch=broken) for p in original()]
        else:
            setattr(state, where, broken)
    return error_of(save, run, 200, state, {"step": 200}, axis)


@pytest.mark.parametrize(
    "world, victim, where, cause",
    [
        (2, 0, "write", "No space left on device: this rank needs"),
        (3, 1, "write", "No space left on device: this rank needs"),
        (2, 1, "fetch", "RuntimeError: the device is lost"),
        (2, 0, "pieces", "RuntimeError: the device is lost"),
        (2, 1, "scalars", "RuntimeError: the device is lost"),
    ],
)
def test_a_failure_on_one_rank_is_told_to_all(
    tmp_path: Path, ranks: Run, world: int, victim: int, where: str, cause: str
) -> None:
    ranks(world, save_all, tmp_path, 100)
    texts = ranks(world, _failing_save, tmp_path, victim, where, timeout_s=20.0)
    assert len(set(texts)) == 1
    assert f"step 200 in {tmp_path}/checkpoints was not saved: rank {victim}: {cause}" in texts[0]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000100"]
    assert ranks(1, load_all, tmp_path) == [(100, [])]
    assert ranks(world, save_all, tmp_path, 200)[0][1].name == "step-00000200"


def test_all_step_back_together(tmp_path: Path, ranks: Run) -> None:
    """Each rank reads a share of the files: only one of them sees the damage."""
    for step in (100, 200, 300):
        ranks(3, save_all, tmp_path, step, 1, 3)
    for step, rank in ((300, 2), (200, 0)):
        file = tmp_path / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"
        data = bytearray(file.read_bytes())
        data[-2] ^= 4
        file.write_bytes(data)
    outcomes = ranks(3, load_all, tmp_path)
    assert outcomes == [outcomes[0]] * 3
    step, refused = outcomes[0]
    assert step == 100
    assert [text.split(" is damaged")[0] for text in refused] == [
        "step-00000300: rank-00002.safetensors",
        "step-00000200: rank-00000.safetensors",
    ]


def test_nothing_valid_is_the_same_error_on_all(tmp_path: Path, ranks: Run) -> None:
    ranks(2, save_all, tmp_path, 100)
    (tmp_path / "checkpoints" / "step-00000100" / "rank-00001.json").unlink()
    texts = ranks(2, lambda: error_of(find, tmp_path, world_axis()))
    assert texts[0] == texts[1] and "step-00000100: rank-00001.json is missing" in texts[0]


def test_nothing_there_is_none_on_all(tmp_path: Path, ranks: Run) -> None:
    assert ranks(2, lambda: find(tmp_path, world_axis())) == [None, None]


def test_folder_that_is_not_shared(tmp_path: Path, ranks: Run) -> None:
    """Each rank has its own folder under the same name, as on node-local disks."""

    def elsewhere(action: str) -> str:
        axis = world_axis()
        mine = tmp_path / str(axis.index)
        mine.mkdir(exist_ok=True)
        os.chdir(mine)
        if action == "save":
            return error_of(save, Path("run"), 100, FakeState(axis.index, axis.size), {}, axis)
        save(Path("run"), 100, FakeState(seed=axis.index), {"rank": axis.index}, alone())
        return error_of(find, Path("run"), axis)

    texts = ranks(2, elsewhere, "save")
    assert (
        texts[0] == texts[1] and "rank 1: run/checkpoints/step-00000100.partial was made by the first rank" in texts[0]
    )
    texts = ranks(2, elsewhere, "find")
    assert texts[0] == texts[1] and "manifest.json differs between ranks" in texts[0]
