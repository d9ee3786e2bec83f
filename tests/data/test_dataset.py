"""What a run reads, from its configuration: blends, copies, files that are cut, what is refused."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from hpctrain.config.load import load
from hpctrain.data import cache, format
from hpctrain.data.bpe import train_bpe
from hpctrain.data.build import build
from hpctrain.data.cache import local_copy
from hpctrain.data.corpus import Corpus
from hpctrain.data.dataset import batches, open_dataset
from hpctrain.data.sources import list_sources
from hpctrain.errors import ConfigError, DataError


@pytest.fixture
def files(corpus_of):
    rng = np.random.default_rng(0)
    return [corpus_of(*(rng.bytes(n) for n in rng.integers(30, 90, 40)), name=name).path for name in ("a", "b", "c")]


def config(files, *overrides):
    return load("gpt-tiny", [f"data.blend=[{', '.join(map(str, files))}]", "data.seq=16", *overrides])


def test_a_blend_from_a_configuration(files):
    settings = config(files, "data.weights=[5, 3, 2]", 'data.anneal=["500 1 1 8"]', "data.validation=0.2")
    data = open_dataset(settings)
    assert data.blend.counts(100).tolist() == [50, 30, 20] and data.blend.counts(600).tolist() == [260, 160, 180]
    training, validation = batches(settings, data, True), batches(settings, data, False)
    places = [p for at in range(0, 400, settings.train.global_batch) for p in training.places(at)]
    kept = [p for at in range(0, validation.samples, 16) for p in validation.places(at)]
    first_kept = [split.first_document for split in data.validation]
    assert all(document < first_kept[c] for c, document, _ in places)  # no document in both
    assert {(c, d) for c, d, _ in kept}.isdisjoint({(c, d) for c, d, _ in places})
    assert {c for c, _, _ in places} == {c for c, _, _ in kept} == {0, 1, 2}
    assert data.entropy == pytest.approx(sum(w * c.header.entropy for w, c in zip((0.5, 0.3, 0.2), data.corpora)))


@pytest.mark.parametrize("anneal", ["[]", '["40 0 0 1"]', '["40 0 0 1", "50 1 0 0"]', '["5 1 1 8"]'])
def test_validation_means_the_same_whatever_the_phases(files, anneal):
    """The phases are those of training: what is kept is read whole, once, in the proportions of data.weights."""

    def kept(*overrides):
        settings = config(files, "data.weights=[5, 3, 2]", "data.validation=0.3", *overrides)
        data = open_dataset(settings)
        stream = batches(settings, data, False)
        size = settings.train.global_batch
        rows = [stream.batch(at) for at in range(0, stream.samples, size)]
        places = [p for at in range(0, stream.samples, size) for p in stream.places(at)]
        labels = np.concatenate([row.labels.numpy() for row in rows])
        return data, stream.samples, [p for p, row in zip(places, labels) if (row >= 0).any()], labels, data.entropy

    data, length, places, labels, entropy = kept(f"data.anneal={anneal}")
    _, wanted_length, wanted_places, wanted_labels, wanted_entropy = kept()
    assert length == wanted_length and places == wanted_places and (labels == wanted_labels).all()
    assert entropy == wanted_entropy
    assert len(places) == len(set(places)) == sum(split.samples(16) for split in data.validation)
    assert [sum(c == n for c, _, _ in places[:10]) for n in range(3)] == [5, 3, 2]


def test_a_corpus_that_comes_in_late_is_in_every_validation(files):
    """With the share that it has first."""
    settings = config(files, "data.weights=[1, 1, 0]", 'data.anneal=["40 1 1 2", "60 1 1 8"]', "data.validation=0.3")
    data = open_dataset(settings)
    validation = batches(settings, data, False)
    assert [float(share) for share in data.validation_blend.shares[0]] == [1 / 3, 1 / 3, 1 / 3]
    places = {p for at in range(0, validation.samples, 16) for p in validation.places(at)}
    assert [len({d for c, d, _ in places if c == n}) for n in range(3)] == [12, 12, 12]


def test_hash_of_a_blend_names_corpora_and_weights(files):
    first = open_dataset(config(files)).sha256
    assert open_dataset(config(files, "data.weights=[2, 2, 2]")).sha256 == first
    assert open_dataset(config(files, "data.weights=[2, 2, 1]")).sha256 != first
    assert open_dataset(config(files[::-1])).sha256 != first
    phased = {open_dataset(config(files, f'data.anneal=["{at} 1 1 2"]')).sha256 for at in (300, 400)}
    assert len(phased) == 2 and first not in phased
    alone = open_dataset(load("gpt-tiny", [f"data.corpus={files[0]}", "data.seq=16"]))
    assert alone.sha256 == Corpus.open(files[0]).header.sha256  # as checkpoints of old have it


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("data.weights=[1, 2]", r"data\.weights=\[1\.0, 2\.0\]: must have one number for each of the 3 corpora"),
        ("data.weights=[0, 0, 0]", r"data\.weights=.*one of them above it"),
        ("data.anneal=[soon]", r"data\.anneal='soon': must be written 'SAMPLES w w \.\.\.' with 3 weights"),
        ('data.anneal=["5 1 2"]', r"data\.anneal='5 1 2'"),
        ('data.anneal=["0 1 2 3"]', r"data\.anneal=\[0\]: must begin at sample counts that ascend"),
        ("data.blend=[]", r"data\.weights|data\.blend=\[\]: must name corpora"),
    ],
)
def test_blends_that_cannot_be(files, override, match):
    with pytest.raises(ConfigError, match=match):
        open_dataset(config(files, override))
    with pytest.raises(ConfigError, match=r"data\.weights=\[1\.0\]: is about corpora of data\.blend"):
        open_dataset(load("gpt-tiny", [f"data.corpus={files[0]}", "data.weights=[1]"]))


def test_corpora_of_two_tokenizers(files, tmp_path):
    texts = [b"some words"] * 50
    one, two = train_bpe(texts, 257), train_bpe([b"other ones"] * 50, 257)
    (tmp_path / "t.txt").write_bytes(b"some other words " * 30)
    for name, tokenizer in (("x", one), ("y", two)):
        build(tmp_path / f"{name}.h5", list_sources([tmp_path / "t.txt"]), [], tokenizer=tokenizer)
    settings = load("gpt-tiny", [f"data.blend=[{files[0]}, {tmp_path / 'x.h5'}]", "data.seq=16", "data.validation=0",
                                 "train.eval_batches=0"])  # fmt: skip
    with pytest.raises(DataError, match=r"x\.h5 was made with tokenizer bpe-257, but .*a\.h5 with bytes-257"):
        open_dataset(settings)


def test_packing_by_best_fit(files):
    settings = config(files, "data.packing=best_fit")
    data = open_dataset(settings)
    batch = batches(settings, data, True).batch(0)
    assert (batch.documents[:, -1] > 0).any() and batch.tokens.shape == (settings.train.global_batch, 16)


def test_a_copy_on_the_node_is_made_once_and_read(files, tmp_path, monkeypatch):
    folder, copies = tmp_path / "local", []
    real = cache._make
    monkeypatch.setattr(cache, "_make", lambda *args: copies.append(args) or real(*args))
    settings = config(files, f"data.cache={folder}")
    ranks = [threading.Thread(target=open_dataset, args=(settings, True)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    data = open_dataset(settings, cached=True)
    assert len(copies) == 3 and all(c.path.parent == folder for c in data.corpora)
    assert [c.path.read_bytes() for c in data.corpora] == [path.read_bytes() for path in files]
    assert open_dataset(settings).corpora[0].path == files[0]  # before ranks are started, nothing is copied


DAMAGE = {
    "cut": lambda data: data[:-100],
    "a bit": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "never written": lambda data: data[:-4096] + bytes(4096),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_copy_that_is_damaged_is_made_again(files, tmp_path, name):
    """Of the same size, too: as after a crash of the node, or when somebody has written to it."""
    copy = local_copy(files[0], tmp_path / "local")
    copy.write_bytes(DAMAGE[name](copy.read_bytes()))
    assert local_copy(files[0], tmp_path / "local") == copy and copy.read_bytes() == files[0].read_bytes()


def test_a_copy_is_read_whole_once(files, tmp_path, monkeypatch):
    """And again when it was touched, however it looks; not by every rank of every run."""
    read = []
    real = Corpus.verify
    monkeypatch.setattr(Corpus, "verify", lambda self: read.append(self.path.name) or real(self))
    copy = local_copy(files[0], tmp_path / "local")
    assert len(read) == 1 and read[0].endswith(".part")
    local_copy(files[0], tmp_path / "local")
    assert len(read) == 1
    os.utime(copy)
    local_copy(files[0], tmp_path / "local")
    local_copy(files[0], tmp_path / "local")
    assert read[1:] == [copy.name]
    copy.with_suffix(".checked").unlink()
    local_copy(files[0], tmp_path / "local")
    assert len(read) == 3


def test_a_copy_is_on_the_disk_before_it_has_its_name(files, tmp_path, monkeypatch):
    order = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    copy = local_copy(files[0], tmp_path / "local")
    assert order[:2] == [str(copy.with_suffix(".part")), str(copy.parent)]


def test_a_corpus_that_is_damaged_is_not_copied(files, tmp_path):
    with files[0].open("r+b") as file:
        file.seek(format.read(files[0])[1].tokens)
        file.write(b"???")
    with pytest.raises(DataError, match=r"a\.h5 cannot be copied to .*not sound: see `hpctrain data check .*a\.h5`"):
        local_copy(files[0], tmp_path / "local")
    assert not list((tmp_path / "local").glob("*.h5")) and not list((tmp_path / "local").glob("*.part"))


def test_a_copy_that_was_begun_by_a_killed_process(files, tmp_path):
    copy = local_copy(files[0], tmp_path / "local")
    copy.rename(copy.with_suffix(".part"))
    copy.with_suffix(".part").write_bytes(b"half")
    assert local_copy(files[0], tmp_path / "local").read_bytes() == files[0].read_bytes()
    assert not copy.with_suffix(".part").exists()


def test_no_room_for_a_copy(files, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache.format.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        DataError, match=r"cannot be copied to .*local \(data\.cache\): No space left.*data\.cache=null"
    ):
        local_copy(files[0], tmp_path / "local")
    assert not list((tmp_path / "local").glob("*.h5")) and not list((tmp_path / "local").glob("*.part"))


def test_a_corpus_that_is_cut_while_it_is_read_ends_with_a_sentence(files):
    """And not with SIGBUS, without a word, as reading what is gone does."""
    code = f"""
import os
from hpctrain.config.load import load
from hpctrain.data.dataset import batches, open_dataset
settings = load("gpt-tiny", ["data.corpus={files[0]}", "data.seq=16"])
stream = batches(settings, open_dataset(settings), True)
stream.batch(0)
os.truncate({str(files[0])!r}, 4096)
stream.batch(16)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert done.returncode not in (-signal.SIGBUS, 0)
    assert "a.h5 was cut while it was in use: it had " in done.stderr and "and has 4,096" in done.stderr
