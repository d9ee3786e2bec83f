"""Corpora are written right, whole or not at all."""

import hashlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter

import h5py
import numpy as np
import pytest

from hpctrain.data import build as module
from hpctrain.data import format, lay, parts, records, seal, tokenizer, workplace
from hpctrain.data.build import build, folder_of
from hpctrain.data.corpus import Corpus
from hpctrain.data.seal import entropy
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
    assert provenance["order"] == "path" and provenance["shares"] == {"0": 25}
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
    for owner, name in (
        (parts, "BATCH_BYTES"),
        (parts, "BLOCK"),
        (seal, "BLOCK"),
        (lay, "BLOCK"),
        (tokenizer, "PIECE"),
    ):
        monkeypatch.setattr(owner, name, block)
    monkeypatch.setattr(records, "PIECE", block)
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
    monkeypatch.setattr(format.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(module, "_make", None)
    fails(texts, tmp_path, r"does not fit \(No space left on device\)")


@pytest.mark.parametrize("room", [0, 10, 30, 2000, 1 << 20])
def test_disk_that_fills_up(texts, tmp_path, room):
    """Files are limited to so many bytes, as on a disk that is full there; whatever is being written then."""
    (texts / "large.txt").write_bytes(bytes(10**6))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    listing = list_sources([texts])
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(DataError, match=r"corpus\.h5 does not fit \(File too large.*; make room"):
            build(tmp_path / "out" / "corpus.h5", listing, [texts])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []


def test_disk_that_fails(texts, tmp_path, monkeypatch):
    """Where the corpus is flushed; the parts before it are."""
    synced = []

    def broken(path):
        synced.append(path.name)
        if path.name == "corpus":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("hpctrain.files.sync", broken)
    fails(texts, tmp_path, "cannot be written: Input/output error")
    assert synced[-1] == "corpus"


def test_what_is_called_done_is_on_the_disk(texts, tmp_path, monkeypatch):
    """Parts before they have their name, the corpus before it has its, and then that name."""
    order, real = [], os.fsync
    replaced = type(tmp_path).replace

    def sync(handle):
        order.append(os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[2])
        return real(handle)

    def replace(self, target):
        order.append(f"{self.name} becomes {target.name}")
        return replaced(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(type(tmp_path), "replace", replace)
    (tmp_path / "out").mkdir()
    run(texts, tmp_path / "out" / "corpus.h5", unit=5)
    written = [line.split()[0] for line in order if " becomes " in line and line.endswith(".part")]
    assert len(written) == 3
    for partial in written:
        at = order.index(next(line for line in order if line.startswith(f"{partial} becomes")))
        assert order[at - 1] == partial
    note = f".published.{os.getpid()}.part"
    assert order[-6:] == [
        note, f"{note} becomes published", ".corpus.h5.parts", "corpus", "corpus becomes corpus.h5", "out"
    ]  # fmt: skip


def test_interrupt(texts, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.format, "complete", interrupted)
    fails(texts, tmp_path, kind=KeyboardInterrupt)


def test_what_does_not_arrive_on_the_disk_is_not_kept(texts, tmp_path, monkeypatch):
    real = module.seal

    def lossy(path, places, *args):
        with path.open("r+b") as file:
            file.seek(places.tokens + 3)
            file.write(b"?")
        return real(path, places, *args)

    monkeypatch.setattr(module, "seal", lossy)
    fails(texts, tmp_path, "is damaged: what is on disk.*another checksum")


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


def test_two_builds_of_one_file_are_refused(texts, tmp_path, monkeypatch):
    """Whoever is killed holds no lock any more."""
    monkeypatch.setattr(workplace, "WAIT_S", 0.1)
    output = tmp_path / "corpus.h5"
    pid = os.fork()
    if not pid:
        workplace._begin(output, folder_of(output), False, "")
        (folder_of(output) / "x.partial").touch()
        time.sleep(60)
        os._exit(1)
    while not (folder_of(output) / "x.partial").exists():
        time.sleep(0.001)
    with pytest.raises(DataError, match="is being built by another process"):
        run(texts, output)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert run(texts, output).documents == 3 and left(tmp_path) == [output.name]
    assert not folder_of(output).exists()


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
