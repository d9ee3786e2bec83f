"""What HDF5 is known to do to those who train from it, and what it does here."""

import errno
import fcntl
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from hpctrain.data import format
from hpctrain.data.build import build, folder_of
from hpctrain.data.corpus import Corpus
from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError


@pytest.fixture
def corpus(corpus_of):
    rng = np.random.default_rng(0)
    return corpus_of(*(rng.bytes(int(n)) for n in rng.integers(10, 4000, 60)))


def digest(corpus):
    return int(corpus.tokens.sum(dtype=np.int64))


def test_a_filesystem_without_locks(tmp_path, monkeypatch):
    """NFS without a lock daemon answers ENOLCK, Lustre without flock ENOSYS (h5py#1082, hdf5#3311): neither building
    nor reading asks HDF5 for one, whatever the environment says, and our own lock is done without."""
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    (tmp_path / "a.txt").write_text("text")
    for number in (errno.ENOLCK, errno.ENOSYS):

        def refuse(*args, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        build(tmp_path / f"{number}.h5", list_sources([tmp_path / "a.txt"]), [])
        Corpus.open(tmp_path / f"{number}.h5").verify()


def test_hdf5_takes_no_lock_while_it_has_the_file(tmp_path, monkeypatch):
    """Held exclusively by another process from the first byte on."""
    real, tried = h5py.File, []

    def locked(path, *args, **how):
        tried.append(how.get("locking"))
        return real(path, *args, **how)

    monkeypatch.setattr(h5py, "File", locked)
    (tmp_path / "a.txt").write_text("text")
    build(tmp_path / "c.h5", list_sources([tmp_path / "a.txt"]), [])
    Corpus.open(tmp_path / "c.h5")
    assert tried and all(one is False for one in tried)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_every_process_reads_the_same(corpus, how):
    """No handle is there to be shared: a forked reader moved the file position of its parent (pytorch#11929)."""
    with multiprocessing.get_context(how).Pool(4) as pool:
        assert set(pool.map(digest, [corpus] * 16)) == {digest(corpus)}
    assert len(pickle.dumps(corpus)) < 500


def test_handles_do_not_grow(corpus):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Corpus.open(corpus.path)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET) == 0


def test_there_are_no_chunks_to_be_cached(corpus):
    """A chunk cache of 1 MiB that is smaller than a chunk reads it anew for every sample."""
    with h5py.File(corpus.path, "r") as file:
        for name in ("tokens", "documents", "checksums"):
            assert file[name].chunks is None and file[name].compression is None
            assert file[name].id.get_offset() % format.PAGE == 0 or file[name].nbytes < format.PAGE


def test_equal_content_is_an_equal_file(tmp_path):
    """HDF5 notes when a dataset was made, unless it is told not to."""
    (tmp_path / "a.txt").write_text("text")
    for name in ("a", "b"):
        build(tmp_path / f"{name}.h5", list_sources([tmp_path / "a.txt"]), [])
        time.sleep(1.1 if name == "a" else 0)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize("step", ["create", "complete"])
def test_killed_while_hdf5_writes(tmp_path, step):
    """HDF5 files of a process that was killed cannot be opened; nobody is ever shown one."""
    (tmp_path / "a.txt").write_text("text")
    code = f"""
import os, signal, h5py
from pathlib import Path
from hpctrain.data import format
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
real = format.{step}
def killed(*args, **how):
    close = h5py.File.close
    h5py.File.close = lambda self: (self.flush(), os.kill(os.getpid(), signal.SIGKILL))
    return real(*args, **how)
format.{step} = killed
build(Path({str(tmp_path / "c.h5")!r}), list_sources([Path({str(tmp_path / "a.txt")!r})]), [])
"""
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == -signal.SIGKILL
    assert not (tmp_path / "c.h5").exists() and folder_of(tmp_path / "c.h5").exists()
    build(tmp_path / "c.h5", list_sources([tmp_path / "a.txt"]), [])
    Corpus.open(tmp_path / "c.h5").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "c.h5"]


def test_odd_attributes_are_one_sentence(corpus):
    for name, value in (
        ("provenance", np.bytes_(b"\xff\xfe")),
        ("provenance", np.bytes_(b"[" * 100_000)),
        ("tokens", np.arange(3)),
        ("tokens", -1),
        ("entropy", np.bytes_(b"much")),
        ("vocab", float("inf")),
        ("loss_mask", True),
    ):
        with h5py.File(corpus.path, "r+") as file:
            before = file.attrs[name]
            file.attrs[name] = value
        with pytest.raises(DataError) as caught:
            Corpus.open(corpus.path)
        assert "\n" not in str(caught.value) and corpus.path.name in str(caught.value), name
        with h5py.File(corpus.path, "r+") as file:
            file.attrs[name] = before


def test_a_full_disk_that_is_full_for_real(tmp_path):
    """A filesystem of 2 MiB, at every size of the text; root mounts it in a namespace of its own."""
    code = f"""
import os, subprocess, sys
from pathlib import Path
folder = Path({str(tmp_path)!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder / "full")], check=True)
from hpctrain.data.bpe import train_bpe
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError
tokenizer, fitted = train_bpe([b"a few words"], 257), 0
for size in range(20_000, 2_000_000, 150_000):
    (folder / "a.txt").write_bytes(b"word " * (size // 5))
    try:
        sources = list_sources([folder / "a.txt"])
        build(folder / "full" / "c.h5", sources, [], tokenizer=tokenizer, replace_existing=True)
        fitted += 1
    except DataError as error:
        assert "does not fit (No space left" in str(error), error
        assert {{p.name for p in (folder / "full").iterdir()}} <= {{"c.h5"}}
print("fitted", fitted)
"""
    (tmp_path / "full").mkdir()
    command = ["unshare", "-m", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("no right to mount")
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout.split()[1]) < 14
