"""Corpora from and to other tools: bit by bit, nothing guessed, and what is wrong in one sentence."""

import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data.arrays import read_array, write_array
from hpctrain.data.build import build
from hpctrain.data.cerebras import read_cerebras
from hpctrain.data.corpus import Corpus
from hpctrain.data.foreign import canonical_crc, crc_of, import_corpus
from hpctrain.data.megatron import read_megatron, write_megatron
from hpctrain.data.sources import list_sources
from hpctrain.data.tokenizer import UnknownTokenizer
from hpctrain.errors import DataError

END = 0


def imported(foreign, tmp_path, vocab=50257, **how):
    header, crc = import_corpus(foreign, tmp_path / "out.h5", UnknownTokenizer(vocab, END), **how)
    corpus = Corpus.open(tmp_path / "out.h5")
    corpus.verify()
    assert corpus.first_bad() is None and canonical_crc(corpus) == crc == crc_of(foreign)
    assert header.provenance["tokens_crc32"] == f"{crc:08x}"
    return corpus


def refused(match, call, *args, **how):
    with pytest.raises(DataError, match=match) as caught:
        call(*args, **how)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def by_hand(prefix, documents, dtype="<u2", code=8, **change):
    """A .bin and .idx as the format says; each document is a list of sequences."""
    sequences = [s for d in documents for s in d]
    lengths = change.get("lengths", [len(s) for s in sequences])
    size = np.dtype(dtype).itemsize
    pointers = change.get("pointers", [size * sum(lengths[:i]) for i in range(len(lengths))])
    firsts = change.get("firsts", np.cumsum([0, *map(len, documents)]).tolist())
    head = change.get("magic", b"MMIDIDX\0\0") + struct.pack(
        change.get("order", "<") + "QBQQ", 1, code, len(lengths), len(firsts)
    )
    index = (
        head
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(firsts, "<i8").tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(np.array([t for s in sequences for t in s], dtype).tobytes())
    return prefix


DOCUMENTS = [[[5, 7, 0]], [[9], [50256, 0]], [[1, 0]]]


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
def test_megatron_in_by_hand(tmp_path, dtype, code):
    prefix = by_hand(tmp_path / "x_text_document", DOCUMENTS, dtype, code)
    for name in (prefix, prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        corpus = imported(read_megatron(name), tmp_path, replace_existing=True)
    assert corpus.tokens.tolist() == [5, 7, 0, 9, 50256, 0, 1, 0] and corpus.documents.tolist() == [0, 3, 6, 8]


def test_megatron_out_by_hand(tmp_path):
    corpus = imported(read_megatron(by_hand(tmp_path / "x", [[[5, 7, 0]], [[9, 50256, 0]], [[1, 0]]])), tmp_path)
    write_megatron(corpus, tmp_path / "y")
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"y{ending}").read_bytes() == (tmp_path / f"x{ending}").read_bytes()
    refused("is there already", write_megatron, corpus, tmp_path / "y")


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), vocab=st.sampled_from([300, 65499, 65501, 100_000]))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back_again(tmp_path, sizes, vocab):
    tokens = np.random.default_rng(len(sizes)).integers(0, vocab, sum(sizes))
    np.save(tmp_path / "t.npy", tokens)
    np.save(tmp_path / "d.npy", np.cumsum([0, *sizes]))
    first = imported(
        read_array(tmp_path / "t.npy", END, None, tmp_path / "d.npy"), tmp_path, vocab, replace_existing=True
    )
    sha = first.header.sha256
    write_megatron(first, tmp_path / "m", True)
    second = imported(read_megatron(tmp_path / "m"), tmp_path, vocab, replace_existing=True)
    write_array(second, tmp_path / "a.npy", True)
    third = read_array(tmp_path / "a.npy", END, None, tmp_path / "a.documents.npy")
    assert imported(third, tmp_path, vocab, replace_existing=True).header.sha256 == sha == second.header.sha256
    assert third.offsets.tolist() == np.cumsum([0, *sizes]).tolist()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"magic": b"something"}, "no index of Megatron-LM"),
        ({"order": ">"}, "is in big-endian byte order"),
        ({"code": 4}, r"x\.bin has 16 bytes, its index says 8 tokens of int32.*would fit int16 or uint16"),
        ({"code": 7}, "type code 7"),
        ({"lengths": [3, 1, 2, 3]}, "do not belong together"),
        ({"pointers": [0, 6, 8, 13]}, "do not follow each other"),
        ({"firsts": [0, 1, 3]}, "documents do not ascend from 0 to 4"),
        ({"firsts": [0, 3, 1, 4]}, "documents do not ascend"),
    ],
)
def test_megatron_that_is_wrong(tmp_path, change, match):
    refused(match, read_megatron, by_hand(tmp_path / "x", DOCUMENTS, **change))


def test_megatron_that_is_cut_or_missing(tmp_path):
    prefix = by_hand(tmp_path / "x", DOCUMENTS)
    index = (tmp_path / "x.idx").read_bytes()
    for kept in (1, 20, 33, 34, 50, len(index) - 1):
        (tmp_path / "x.idx").write_bytes(index[:kept])
        refused("is truncated|are truncated", read_megatron, prefix)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-2])
    refused("one is truncated", read_megatron, prefix)
    (tmp_path / "x.bin").write_bytes(b"")
    refused("is empty", read_megatron, prefix)
    (tmp_path / "x.bin").unlink()
    refused("cannot be read: No such file", read_megatron, prefix)


def test_raw_files_have_the_type_that_is_said_and_no_other(tmp_path):
    """A file of uint16 with an even number of tokens could be one of uint32 by its size."""
    tokens = np.random.default_rng(0).integers(1, 50257, 1000)
    two, four = tmp_path / "two.bin", tmp_path / "four.bin"
    tokens.astype("<u2").tofile(two)
    tokens.astype("<u4").tofile(four)
    refused("is not guessed: name it with --dtype", read_array, two, END)
    assert imported(read_array(two, END, "uint16"), tmp_path).tokens.tolist() == tokens.tolist()
    refused("does not have: it was made with another tokenizer", imported, read_array(two, END, "uint32"), tmp_path,
            replace_existing=True)  # fmt: skip
    refused("looks like ids of 4 bytes", read_array, four, END, "uint16")
    tokens.astype(">u4").tofile(four)
    refused("looks like ids of 4 bytes", read_array, four, END, "uint16")
    refused("another type or byte order", imported, read_array(four, END, "uint32"), tmp_path, replace_existing=True)
    tokens.astype("<i8").tofile(four)
    refused("looks like ids of 8 bytes.*say --dtype int64", read_array, four, END, "uint32")
    (tokens % 4096).astype("<u2").tofile(four)
    refused("looks like ids of 2 bytes.*say --dtype uint16", read_array, four, END, "uint8")
    two.write_bytes(two.read_bytes()[:-1])
    refused("no whole number of uint16", read_array, two, END, "uint16")
    assert Corpus.open(tmp_path / "out.h5").tokens.tolist() == tokens.tolist()  # what was there stays


def test_documents_end_after_their_end(tmp_path):
    np.save(tmp_path / "t.npy", np.array([3, 0, 4, 5, 0, 6], ">i4"))
    assert imported(read_array(tmp_path / "t.npy", END), tmp_path).documents.tolist() == [0, 2, 5, 6]


def npy_header(shape):
    """A .npy file that says so, and has nothing."""
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".replace("10**30", str(10**30))
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode().ljust(117) + b"\n"


@pytest.mark.parametrize("array", [np.zeros((2, 3), int), np.zeros(4), np.zeros(0, int)])
def test_numpy_that_is_no_tokens(tmp_path, array):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(DataError, match=r"one dimension of integers|no tokens"):
        imported(read_array(tmp_path / "t.npy", END), tmp_path)
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY" + bytes(50))
    refused("no sound .npy file", read_array, tmp_path / "t.npy", END)


def test_numpy_with_more_than_its_array(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(4, int))
    with (tmp_path / "t.npy").open("ab") as file:
        file.write(b"more")
    refused("164 bytes, and an array that ends at 160", read_array, tmp_path / "t.npy", END)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 no zip", npy_header("(10**30,)"), npy_header("('a',)"), b"", b"\x93NUMPY\x09\x00"]
)
def test_bytes_that_numpy_takes_for_its_own(tmp_path, content):
    (tmp_path / "t.npy").write_bytes(content)
    refused(r"no sound .npy file|is empty", read_array, tmp_path / "t.npy", END)


def test_a_vocabulary_that_no_memory_holds():
    refused("at most 16,777,216", UnknownTokenizer, 10**12, 0)
    assert UnknownTokenizer(1 << 24, 0).vocab == 1 << 24


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_a_directory_in_the_place_of_a_file(corpus_of, path):
    corpus = corpus_of(b"ab")
    for export in (write_megatron, write_array):
        refused("is a directory; name a file in it", export, corpus, Path(path))
    refused("is a directory; name a file in it", read_megatron, Path(path))
    with pytest.raises(DataError, match="is a directory; name a file in it"):
        build(Path(path), list_sources([corpus.path]), [corpus.path])


def test_another_number_of_tokens_than_is_known(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(5))
    refused(
        "has 5 tokens, and not the 6 that --tokens says",
        imported,
        read_array(tmp_path / "t.npy", END),
        tmp_path,
        expected=6,
    )
    assert not (tmp_path / "out.h5").exists()


def test_a_bad_id_is_named_with_its_document(tmp_path):
    np.save(tmp_path / "t.npy", np.array([3, 0, 4, 999, 0, -1]))
    refused(r"id 999 at token 3 \(document 1\)", imported, read_array(tmp_path / "t.npy", END), tmp_path, vocab=900)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.npy"]


def modelzoo(path, rows, three=False, **change):
    """Samples of 5 places: (ids and the one after them, how many of the labels are only read)."""
    ids, mask, labels = (np.zeros((len(rows), 5), np.int32) for _ in range(3))
    for i, (tokens, read) in enumerate(rows):
        n = len(tokens) - 1
        ids[i, :n], labels[i, :n], mask[i, read:n] = tokens[:-1], tokens[1:], 1
    sets = {"input_ids": ids, "attention_mask": mask, "labels": labels, **change}
    with h5py.File(path, "w") as file:
        if three:
            file["data"] = np.stack(list(sets.values()), 1)
        else:
            for name, data in sets.items():
                file.create_dataset(name, data=data, **({"compression": "gzip", "chunks": (1, 5)} if data.size else {}))


@pytest.mark.parametrize("three", [True, False])
def test_cerebras_in(tmp_path, three):
    modelzoo(tmp_path / "a.h5", [([1, 2, 3, 4, 5, 6], 0), ([7, 8, 0], 0)], three)
    corpus = imported(read_cerebras(tmp_path / "a.h5"), tmp_path)
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0] and corpus.documents.tolist() == [0, 6, 9]
    assert corpus.loss_mask is None


def test_cerebras_folder_with_prompts(tmp_path):
    folder = tmp_path / "zoo"
    folder.mkdir()
    modelzoo(folder / "b.h5", [([9, 8, 7], 1)])
    modelzoo(folder / "a.h5", [([1, 2, 3, 4, 0], 2)])
    corpus = imported(read_cerebras(folder), tmp_path)
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 0, 9, 8, 7]
    assert corpus.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]


def test_cerebras_that_is_wrong(tmp_path):
    path = tmp_path / "a.h5"
    modelzoo(path, [([1, 2, 3], 0)], labels=np.array([[9, 3, 0, 0, 0]], np.int32))
    refused("labels are not the ids that follow", read_cerebras, path)
    modelzoo(path, [([1, 2, 3], 0)], labels=np.zeros((1, 5), np.float32))
    refused("has type float32; integers", read_cerebras, path)
    none = np.zeros((1, 0), np.int32)
    modelzoo(path, [([1, 2, 3], 0)], input_ids=none, attention_mask=none, labels=none)
    refused("samples without a place", read_cerebras, path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    refused("no file of Cerebras", read_cerebras, path)
    path.write_bytes(b"no HDF5")
    refused("cannot be read as HDF5", read_cerebras, path)
    refused("has no .h5 files", read_cerebras, tmp_path / "..")


def test_no_torch_is_needed():
    names = ", ".join(f"hpctrain.data.{n}" for n in ("megatron", "cerebras", "arrays", "look", "dataset"))
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
