"""What is not a corpus is told so, by name and with the mend."""

import fcntl
import shutil

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.errors import DataError


@pytest.fixture
def good(corpus_of):
    return corpus_of(b"first document", b"second", b"third one").path


def refused(path, match):
    with pytest.raises(DataError, match=match) as caught:
        Corpus.open(path)
    text = str(caught.value)
    assert path.name in text and text.endswith(".") and "\n" not in text
    return text


def test_missing(tmp_path):
    assert "hpctrain data build" in refused(tmp_path / "corpus.h5", "is not there")


def test_directory(tmp_path):
    refused(tmp_path, "is a directory")


def test_empty(tmp_path):
    (tmp_path / "x.h5").touch()
    refused(tmp_path / "x.h5", "is empty")


@pytest.mark.parametrize("content", [b"\x89HD", b"text", np.random.default_rng(0).bytes(5000)])
def test_not_hdf5(tmp_path, content):
    (tmp_path / "x.h5").write_bytes(content)
    refused(tmp_path / "x.h5", "is not an HDF5 file")


def test_foreign_hdf5(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["tokens"] = np.arange(10)
    refused(tmp_path / "x.h5", "is not a corpus of hpctrain")


def test_foreign_hdf5_with_an_odd_format(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format"] = np.arange(10)
    refused(tmp_path / "x.h5", "is not a corpus of hpctrain")


def test_other_version(good):
    with h5py.File(good, "r+") as file:
        file.attrs["version"] = 2
    refused(good, "has version 2 of the format, this hpctrain reads 1")


@pytest.mark.parametrize("kept", [9, 60, 96, 1000, 4096, 4097, 0.5, -1])
def test_truncated(good, tmp_path, kept):
    data = good.read_bytes()
    cut = tmp_path / "cut.h5"
    cut.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    refused(cut, "is (truncated|damaged)")


def test_header_over_random_bytes(tmp_path):
    (tmp_path / "x.h5").write_bytes(format.MAGIC + np.random.default_rng(1).bytes(5000))
    refused(tmp_path / "x.h5", "is damaged")


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_byte_is_refused_or_does_not_matter(good, at, flip):
    """Any byte of the file: either the corpus opens and holds what it held, or it is refused."""
    bad = good.with_name("bad.h5")
    data = bytearray(good.read_bytes())
    data[int(at * len(data))] ^= flip
    bad.write_bytes(data)
    try:
        corpus = Corpus.open(bad)
        corpus.verify()
    except DataError as error:
        assert "bad.h5" in str(error)
    else:
        assert corpus.tokens.tolist() == Corpus.open(good).tokens.tolist()


def test_unfinished(tmp_path):
    path = tmp_path / "x.h5"
    format.create(path, 9, 2, 257)
    refused(path, "is unfinished.*delete it")


@pytest.mark.parametrize("key", ["tokenizer", "vocab", "sha256", "provenance"])
def test_incomplete_header(good, key):
    with h5py.File(good, "r+") as file:
        del file.attrs[key]
    refused(good, f"incomplete header.*{key}")


def replaced(path, name, **how):
    with h5py.File(path, "r+") as file:
        data = file[name][:]
        del file[name]
        file.create_dataset(name, data=how.pop("change", lambda x: x)(data), **how)


@pytest.mark.parametrize("how", [{"chunks": (4,)}, {"compression": "gzip"}, {"shuffle": True}])
@pytest.mark.parametrize("name", ["tokens", "documents"])
def test_chunked_or_compressed(good, name, how):
    replaced(good, name, **how)
    refused(good, f"'{name}'.*must be contiguous")


def test_stored_in_another_file(good, tmp_path):
    replaced(good, "tokens", external=[(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)])
    refused(good, "'tokens'.*stored elsewhere")


@pytest.mark.parametrize("dtype", [">u2", "<u4", "<i2", "<f4"])
def test_type_or_byte_order(good, dtype):
    replaced(good, "tokens", change=lambda x: x.astype(dtype))
    refused(good, f"has type '{dtype}', its header asks for '<u2'")


def test_shape(good):
    replaced(good, "tokens", change=lambda x: x[:-1])
    refused(good, r"'tokens'.*has shape \(31,\), its header says \(32,\)")


def test_dataset_missing(good):
    with h5py.File(good, "r+") as file:
        del file["documents"]
    refused(good, "has no dataset 'documents'")


def overwritten(path, name, at, value):
    with h5py.File(path, "r+") as file:
        file[name][at] = value


@pytest.mark.parametrize(("at", "value"), [(1, 21), (1, 22), (2, 15), (1, -3)])
def test_offsets_that_do_not_ascend(good, at, value):
    overwritten(good, "documents", at, value)
    if value == 21:  # still ascending: found by the checksum
        with pytest.raises(DataError, match="checksum"):
            Corpus.open(good).verify()
    else:
        refused(good, "offsets do not ascend")


@pytest.mark.parametrize(("at", "value"), [(0, 1), (3, 31)])
def test_offsets_that_leave_tokens_out(good, at, value):
    overwritten(good, "documents", at, value)
    refused(good, "instead of 0 to 32")


def test_flipped_token_is_found_by_verify(good):
    overwritten(good, "tokens", 5, 7)
    corpus = Corpus.open(good)
    with pytest.raises(DataError, match=r"corpus\.h5 is damaged.*checksum"):
        corpus.verify()


def test_token_outside_the_vocabulary_is_found_by_verify(good):
    overwritten(good, "tokens", 5, 300)
    with pytest.raises(DataError, match="token id 300, its vocabulary ends at 256"):
        Corpus.open(good).verify()


def test_no_right_to_read(good, monkeypatch):
    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", denied)
    refused(good, "cannot be read: Permission denied")


def test_large_vocabularies_take_four_bytes(tmp_path):
    assert [format.token_dtype(v).str for v in (257, 65536, 65537)] == ["<u2", "<u2", "<u4"]
    path = tmp_path / "x.h5"
    places = format.create(path, 3, 1, 65537)
    with path.open("r+b") as raw:
        raw.seek(places.documents)
        raw.write(np.array([0, 3], "<i8").tobytes())
        raw.seek(places.tokens)
        raw.write(np.array([1, 65536, 2], "<u4").tobytes())
    format.complete(path, format.Header("t", "0", 65537, 0, 3, 1, "0", 0.0, {}))
    assert Corpus.open(path).tokens.tolist() == [1, 65536, 2]


def test_arrays_begin_on_pages_and_the_size_foretold_is_enough(corpus_of):
    good = corpus_of(*(b"some text of a document" for _ in range(1000))).path
    header, places = format.read(good)
    assert places.tokens % format.PAGE == 0 and places.documents % format.PAGE == 0
    assert good.stat().st_size <= format.file_size(header.tokens, header.documents, header.vocab)


@pytest.mark.parametrize("stored", [0, 1, 501, 2047, 4095, 9999])
@pytest.mark.parametrize("documents", [1, 3, 50, 511])
def test_small_arrays_are_aligned_whatever_lies_among_them(tmp_path, stored, documents):
    """Those below a page are laid end to end: a tokenizer.json of odd length must not come before tokens."""
    for vocab, loss_mask in ((257, True), (70_000, False)):
        path = tmp_path / f"{vocab}.h5"
        places = format.create(path, 2 * documents + 1, documents, vocab, loss_mask=loss_mask, tokenizer=b"x" * stored)
        assert places.tokens % format.token_dtype(vocab).itemsize == 0
        assert places.documents % 8 == 0 and places.checksums % 4 == 0


def test_no_lock_is_needed_or_taken(good, tmp_path):
    """A writer that locks the file does not keep a reader out."""
    copy = tmp_path / "copy.h5"
    shutil.copy(good, copy)
    with copy.open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert Corpus.open(copy).header.documents == 3
