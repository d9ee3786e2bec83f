"""What is written under one cut is read under any other, bit for bit."""

from __future__ import annotations

import json
import math
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hpctrain.checkpoint import commit, files
from hpctrain.checkpoint.boxes import first_overlap, incomplete, missing
from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.manifest import Entry
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.checkpoint.tensorfile import ALIGNMENT, header
from hpctrain.checkpoint.verify import verify
from hpctrain.checkpoint.write import snapshot, write
from hpctrain.errors import CheckpointError
from hpctrain.layout.boxes import meet
from hpctrain.sharding.state import Piece
from tests.checkpoint.state import TENSORS, FakeState, alone, cut, tiling, whole


def save_as(root: Path, writers: int, tiles: int, seed: int = 0, lost: int = -1) -> Path:
    """A save by several writers, one after the other, without the collective part."""
    shots = [snapshot(FakeState(r, writers, seed, tiles, lost=lost)) for r in range(writers)]
    staging = commit.prepare(root, 100, sum(s.bytes for s in shots))
    records = [f for r, shot in enumerate(shots) for f in write(staging, r, shot)]
    return commit.commit(staging, 100, shots[0].scalars, {}, records)


@settings(max_examples=40, deadline=None)
@given(writers=st.integers(1, 4), readers=st.integers(1, 4), tiles=st.integers(0, 999), others=st.integers(0, 999))
def test_any_cut_reads_any_other(tmp_path_factory, writers: int, readers: int, tiles: int, others: int) -> None:
    path = save_as(tmp_path_factory.mktemp("any"), writers, tiles)
    assert verify(path).valid
    reader = CheckpointReader(path)
    for rank in range(readers):
        FakeState(rank, readers, 0, others).load(reader)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_region(tmp_path_factory, seed: int) -> None:
    reader = CheckpointReader(save_as(tmp_path_factory.mktemp("region"), 3, seed))
    rng = random.Random(seed)
    for name, kind, dtype, shape in TENSORS:
        start = tuple(rng.randrange(n) for n in shape)
        size = tuple(rng.randint(0, n - a) for a, n in zip(start, shape))
        got = reader.read(name, kind, start, size)
        assert got.dtype == dtype and torch.equal(got, cut(whole(name, kind, dtype, shape), (start, size)))


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    for dtype, bits in ((torch.float32, np.uint32), (torch.float64, np.uint64)):
        values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 5e-324, 0.1], dtype=dtype)

        class One(FakeState):
            def pieces(self, v=values):
                return [Piece("x", "weight", (8,), (0,), (8,), v.dtype, lambda: v)]

        path = save(tmp_path / str(dtype), 1, One(), {}, alone()).path
        got = CheckpointReader(path).array("x", "weight", (0,), (8,))
        assert (got.view(bits) == values.numpy().view(bits)).all()


def test_scalars_and_extra(tmp_path: Path) -> None:
    extra = {"consumed_samples": 12345678901, "layout": {"tp": 2}, "list": [1, None, "ä"], "lr": 0.1 + 0.2}
    save(tmp_path, 7, FakeState(seed=3), extra, alone())
    found = find(tmp_path, alone())
    assert found is not None and (found.step, found.extra, found.refused) == (7, extra, ())
    assert found.reader.scalars() == {"step": 3.0, "loss_scale": 3.1}


def test_integer_keys_do_not_upset_the_checksum(tmp_path: Path) -> None:
    save(tmp_path, 7, FakeState(), {"by_rank": {10: "a", 9: "b"}}, alone())
    assert find(tmp_path, alone()).extra == {"by_rank": {"10": "a", "9": "b"}}


def test_extra_that_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: TypeError: .*PosixPath is not JSON"):
        save(tmp_path, 7, FakeState(), {"folder": tmp_path}, alone())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_safetensors_library_reads_the_values(tmp_path: Path) -> None:
    path = save_as(tmp_path, 2, tiles=5)
    seen = 0
    for rank in range(2):
        index = json.loads((path / f"rank-{rank:05d}.json").read_text())["pieces"]
        with safe_open(path / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            assert sorted(file.keys()) == sorted(p["key"] for p in index)
            for p in index:
                dtype = getattr(torch, p["dtype"])
                want = cut(whole(p["name"], p["kind"], dtype, tuple(p["global_shape"])), (p["start"], p["shape"]))
                got = file.get_tensor(p["key"])
                assert got.dtype == dtype and torch.equal(got, want)
                seen += got.numel()
    assert seen == sum(math.prod(shape) for *_, shape in TENSORS)


def test_header_is_aligned_and_wide_dtypes_come_first() -> None:
    assert len(header([("a", "float32", (3,))])) % ALIGNMENT == 0
    entries = snapshot(FakeState()).entries
    assert [e.dtype for e in entries] == sorted((e.dtype for e in entries), reverse=True)


def test_one_piece_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []

    class Watched(FakeState):
        def pieces(self):
            def fetch() -> torch.Tensor:
                assert all(ref() is None for ref in alive), "the piece before is still held"
                t = torch.zeros(1000)
                alive.append(weakref.ref(t.untyped_storage()))
                return t

            return [Piece("x", "weight", (5000,), (i * 1000,), (1000,), torch.float32, fetch) for i in range(5)]

    save(tmp_path, 1, Watched(), {}, alone())
    assert len(alive) == 5


def test_large_pieces_are_written_in_chunks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hpctrain.checkpoint.write.CHUNK", 16)
    monkeypatch.setattr(files.mmap, "PAGESIZE", 64)
    started = []
    monkeypatch.setattr(files.os, "posix_fadvise", lambda fd, offset, size, advice: started.append((offset, size)))
    path = save_as(tmp_path, 1, tiles=1)
    FakeState().load(CheckpointReader(path))
    assert verify(path).valid
    end = 0
    for offset, size in started:
        assert offset == end and size % 64 == 0 and size > 0
        end += size
    assert 0 <= (path / "rank-00000.safetensors").stat().st_size - end < 64 + 16


def test_short_writes_are_continued(tmp_path: Path, monkeypatch) -> None:
    real = files.os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: real(fd, data[:7]))
    path = save_as(tmp_path, 1, tiles=1)
    monkeypatch.undo()
    assert verify(path).valid
    FakeState().load(CheckpointReader(path))


class TestReaderRefuses:
    def test_unknown_tensor(self, tmp_path: Path) -> None:
        reader = CheckpointReader(save_as(tmp_path, 2, 1))
        with pytest.raises(CheckpointError, match="has no exp_avg of norm"):
            reader.read("norm", "exp_avg", (0,), (1,))

    @pytest.mark.parametrize("start, shape", [((0, 0), (8, 5)), ((6, 0), (2, 1)), ((0,), (5,)), ((-1, 0), (1, 1))])
    def test_region_outside(self, tmp_path: Path, start, shape) -> None:
        reader = CheckpointReader(save_as(tmp_path, 2, 1))
        with pytest.raises(CheckpointError, match=r"embed has shape \[7, 5\].*another model"):
            reader.read("embed", "weight", start, shape)

    def test_holes_are_named(self, tmp_path: Path) -> None:
        path = save_as(tmp_path, 2, 1)
        reader = CheckpointReader(path)
        piece = reader._pieces["embed", "weight"].pop()
        with pytest.raises(CheckpointError) as caught:
            reader.read("embed", "weight", (0, 0), (7, 5))
        missing = math.prod(piece.shape)
        assert f"{missing} elements of [0:7, 0:5]" in str(caught.value)
        assert f"first at {list(piece.start)}" in str(caught.value)

    def test_a_double_piece_does_not_hide_a_hole(self, tmp_path: Path) -> None:
        reader = CheckpointReader(save_as(tmp_path, 1, tiles=0))
        name = reader._file_of[reader._pieces["norm", "weight"][0]]
        a = Entry("x", "weight", (4,), (0,), (2,), "float32", "a")
        reader._pieces["x", "weight"] = [a, a]
        reader._file_of[a] = name
        reader._values = lambda piece: np.ones(2, np.float32)
        with pytest.raises(CheckpointError, match=r"2 elements of \[0:4\] are in no file, the first at \[2\]"):
            reader.read("x", "weight", (0,), (4,))

    def test_another_model(self, tmp_path: Path) -> None:
        reader = CheckpointReader(save_as(tmp_path, 2, 1))
        mine = {name: shape for name, _, _, shape in TENSORS}
        reader.expect(mine)
        with pytest.raises(CheckpointError, match=r"embed is \[7, 5\] in the checkpoint and \[6, 5\] in the model"):
            reader.expect({**mine, "embed": (6, 5)})
        with pytest.raises(CheckpointError, match=r"extra is absent in the checkpoint and \[2\] in the model"):
            reader.expect({**mine, "extra": (2,)})
        mine.pop("norm")
        with pytest.raises(CheckpointError, match=r"norm is \[11\] in the checkpoint and absent in the model"):
            reader.expect(mine)


class TestSaveRefuses:
    def test_state_with_a_hole(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"not a whole state: .* its pieces hold .* elements"):
            save_as(tmp_path, 2, tiles=3, lost=1)

    def test_other_dtype(self) -> None:
        with pytest.raises(CheckpointError, match=r"norm has dtype bfloat16; .* float32 or float64"):
            snapshot(FakeState(tensors=(("norm", "weight", torch.bfloat16, (4,)),)))

    def test_same_piece_twice(self) -> None:
        with pytest.raises(CheckpointError, match=r"x:weight\[\] would be written twice"):
            snapshot(FakeState(tensors=(("x", "weight", torch.float32, ()),) * 2))

    def test_piece_that_is_not_as_announced(self, tmp_path: Path) -> None:
        class Lying(FakeState):
            def pieces(self):
                return [Piece("x", "weight", (4,), (0,), (4,), torch.float32, lambda: torch.zeros(3))]

        with pytest.raises(CheckpointError, match=r"x: fetched \(3,\) torch.float32, announced \(4,\)"):
            save(tmp_path, 1, Lying(), {}, alone())


def _entries(shape, *regions, dtype="float32") -> list[Entry]:
    return [Entry("x", "weight", shape, a, n, dtype, f"{a}") for a, n in regions]


class TestBoxes:
    @given(st.integers(0, 10_000), st.integers(1, 3))
    def test_a_tiling_is_whole_and_anything_less_is_not(self, seed: int, dims: int) -> None:
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 6) for _ in range(dims))
        regions = tiling(shape, rng, cuts=8)
        assert incomplete(_entries(shape, *regions)) == []
        gone = regions.pop()
        if regions:
            assert "elements" in incomplete(_entries(shape, *regions))[0]
        at = missing((tuple(0 for _ in shape), shape), regions)
        assert at == (math.prod(gone[1]), gone[0])
        assert "overlap" in incomplete(_entries(shape, *regions, gone, gone))[0]

    @given(st.integers(0, 10_000))
    def test_overlap_agrees_with_comparing_all_pairs(self, seed: int) -> None:
        rng = random.Random(seed)
        starts = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(6))]
        boxes = [(a, (rng.randrange(4), rng.randrange(4))) for a in starts]
        pairs = any(meet(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        assert (first_overlap(boxes) is not None) == pairs

    def test_disagreement(self) -> None:
        both = [*_entries((4,), ((0,), (2,))), *_entries((5,), ((2,), (3,)))]
        assert "disagree on its global shape" in incomplete(both)[0]
        both = [*_entries((4,), ((0,), (2,))), *_entries((4,), ((2,), (2,)), dtype="float64")]
        assert "disagree on its dtype" in incomplete(both)[0]
        assert "is not inside shape [4]" in incomplete(_entries((4,), ((2,), (3,))))[0]
