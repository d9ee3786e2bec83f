"""Corpora are written right, whole or not at all."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data import build as module
from hpctrain.data.build import build, entropy
from hpctrain.data.corpus import Corpus
from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError

TEXTS = {"b.txt": b"second \xff", "a.txt": b"first", "empty.txt": b"", "sub/c.txt": "d\u00e9j\u00e0 vu".encode()}


@pytest.fixture
def texts(tmp_path):
    for name, content in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "texts"


def run(texts, output, **how):
    return build(output, list_sources([texts], order="path"), [texts], **how)


def left(folder):
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_content_is_that_made_by_hand(texts, tmp_path):
    output = tmp_path / "new" / "corpus.h5"
    told = []
    header = run(texts, output, progress=told.append, order="path")
    stream = [*b"first", 256, *b"second \xff", 256, *"d\u00e9j\u00e0 vu".encode(), 256]
    with h5py.File(output, "r") as file:
        assert file["tokens"][:].tolist() == stream
        assert file["documents"][:].tolist() == [0, 6, 15, 25]
        assert file["tokens"].dtype.str == "<u2" and file["documents"].dtype.str == "<i8"
        assert file.attrs["format"] == b"hpctrain-tokens"
        provenance = json.loads(file.attrs["provenance"])
    assert (header.tokens, header.documents, header.vocab, header.end_of_document) == (25, 3, 257, 256)
    assert (header.tokenizer, header.dtype.name) == ("bytes-257", "uint16")
    sha = hashlib.sha256(np.array([0, 6, 15, 25], "<i8").tobytes() + np.array(stream, "<u2").tobytes())
    assert header.sha256 == sha.hexdigest()
    shares = [n / 25 for n in Counter(stream).values()]
    assert header.entropy == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)
    assert sum(told) == 22
    assert provenance == header.provenance
    assert provenance["sources"] == [str(texts)] and provenance["files"] == 3 and provenance["empty_files"] == 1
    assert provenance["order"] == "path" and provenance["created_at"].startswith("20")
    assert left(output.parent) == ["corpus.h5"]


def test_map_equals_what_h5py_reads(corpus_of):
    rng = np.random.default_rng(0)
    corpus = corpus_of(*(rng.bytes(int(n)) for n in rng.integers(1, 5000, 40)))
    with h5py.File(corpus.path, "r") as file:
        assert (file["tokens"][:] == corpus.tokens).all() and (file["documents"][:] == corpus.documents).all()
    corpus.verify()


@pytest.mark.parametrize("block", [1, 3, 7, 10**6])
def test_blocks_do_not_show(texts, tmp_path, monkeypatch, block):
    want = run(texts, tmp_path / "want.h5").sha256
    monkeypatch.setattr(module, "BLOCK", block)
    assert run(texts, tmp_path / "got.h5").sha256 == want


def test_memory_is_bounded(tmp_path):
    """A document of 64 MB is built in well under its size."""
    import tracemalloc

    (tmp_path / "big.txt").write_bytes(bytes(64 << 20))
    tracemalloc.start()
    header = build(tmp_path / "x.h5", list_sources([tmp_path / "big.txt"]), [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.tokens == (64 << 20) + 1 and peak < 32 << 20, peak


def test_entropy_of_known_distributions():
    assert entropy(np.array([5, 0, 5])) == pytest.approx(math.log(2))
    assert entropy(np.array([0, 9])) == 0.0


def test_output_that_is_there_is_kept_unless_told(texts, tmp_path):
    output = tmp_path / "corpus.h5"
    output.write_text("precious")
    with pytest.raises(DataError, match=r"is there already.*--force"):
        run(texts, output)
    assert output.read_text() == "precious"
    run(texts, output, replace_existing=True)
    assert Corpus.open(output).header.documents == 3


def test_output_that_is_a_directory(texts, tmp_path):
    with pytest.raises(DataError, match="is a directory"):
        run(texts, tmp_path, replace_existing=True)


def test_output_below_a_file(texts, tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(DataError, match="cannot be written"):
        run(texts, tmp_path / "f" / "corpus.h5")


def fails(texts, tmp_path, match=None, kind=DataError):
    """The build fails, leaves nothing of its own, and keeps what was there."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "corpus.h5").write_text("precious")
    with pytest.raises(kind, match=match):
        run(texts, folder / "corpus.h5", replace_existing=True)
    assert left(folder) == ["corpus.h5"] and (folder / "corpus.h5").read_text() == "precious"


def test_disk_too_small_is_told_before_anything_is_written(texts, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(module.format, "create", None)
    fails(texts, tmp_path, r"needs 1,048,\d{3} bytes, its filesystem has 1,000 free")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_disk_that_fills_up(texts, tmp_path, monkeypatch):
    def full(partial):
        return Path("/dev/full").open("r+b")

    monkeypatch.setattr(module, "_raw", full)
    fails(texts, tmp_path, r"needs 1,048,\d{3} bytes and does not fit \(No space left on device\)")


def test_disk_that_fails(texts, tmp_path, monkeypatch):
    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_flush", broken)
    fails(texts, tmp_path, "cannot be written: Input/output error")


def test_interrupt(texts, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.format, "complete", interrupted)
    fails(texts, tmp_path, kind=KeyboardInterrupt)


def test_what_does_not_verify_is_not_kept(texts, tmp_path, monkeypatch):
    real = module.format.complete

    def lossy(path, header):
        real(path, header)
        with h5py.File(path, "r+") as file:
            file["tokens"][3] = 0

    monkeypatch.setattr(module.format, "complete", lossy)
    fails(texts, tmp_path, "is damaged.*checksum")


@pytest.mark.parametrize(
    ("now", "match"), [(b"second \xff!", "now it has more"), (b"se", "it had 8 bytes, now it has 2")]
)
def test_source_that_changes(texts, tmp_path, now, match):
    listing = list_sources([texts], order="path")
    (texts / "b.txt").write_bytes(now)
    with pytest.raises(DataError, match=rf"b\.txt changed.*{match}"):
        build(tmp_path / "corpus.h5", listing, [texts])
    assert left(tmp_path) == []


def test_source_that_vanishes(texts, tmp_path):
    listing = list_sources([texts], order="path")
    (texts / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt cannot be read: No such file"):
        build(tmp_path / "corpus.h5", listing, [texts])
    assert left(tmp_path) == []


def test_what_a_killed_build_left_is_removed_and_a_running_one_is_not(texts, tmp_path):
    output = tmp_path / "corpus[1].h5"
    killed = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    prefix = module._prefix(output)
    (tmp_path / f"{prefix}{killed.stdout.strip()}.aa.partial").touch()
    running = tmp_path / f"{prefix}{os.getppid()}.bb.partial"
    running.touch()
    other = tmp_path / f".corpus[1].h5.elsewhere.{killed.stdout.strip()}.cc.partial"
    other.touch()
    run(texts, output)
    assert left(tmp_path) == sorted([output.name, running.name, other.name])


def test_building_and_reading_needs_no_torch():
    code = (
        "import hpctrain.data.build, hpctrain.data.corpus, hpctrain.data.order, hpctrain.cli.data, sys;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_is_no_regular_file_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    listing = list_sources([tmp_path / "a.txt"])
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("fifo", "link"):
        with pytest.raises(DataError, match="is not a regular file, and is left alone"):
            build(tmp_path / name, listing, [tmp_path], replace_existing=True)
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "link").is_symlink()
