"""Corpora across processes, and their parts."""

import os
import pickle
import subprocess
import sys

import h5py
import numpy as np
import pytest

from hpctrain.data.corpus import Corpus, check_vocabulary
from hpctrain.errors import DataError

WORDS = [b"alpha", b"be", b"gamma delta", b"d", b"epsilon"]


@pytest.fixture
def corpus(corpus_of):
    return corpus_of(*WORDS)


def test_nothing_of_hdf5_stays_open(corpus):
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET) == 0
    assert corpus.tokens[0] == ord("a")


def test_a_corpus_that_cannot_be_mapped(corpus, monkeypatch):
    def refuse(*args, **how):
        raise OSError(19, "No such device")

    monkeypatch.setattr("hpctrain.data.mapped.mmap.mmap", refuse)
    with pytest.raises(DataError, match=r"cannot be memory-mapped.*No such device"):
        Corpus.open(corpus.path)


def test_arrays_cannot_be_written(corpus):
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        corpus.split(0)[0].windows(3)[0, 0] = 1


def test_forked_children_and_their_parent_read_the_same(corpus):
    want = corpus.tokens.tolist()
    for _ in range(3):
        pid = os.fork()
        if not pid:
            ok = corpus.tokens.tolist() == want and Corpus.open(corpus.path).tokens.tolist() == want
            os._exit(0 if ok else 1)
        assert corpus.tokens.tolist() == want
        assert os.waitpid(pid, 0)[1] == 0


def test_split_survives_pickling_into_another_process(corpus, tmp_path):
    split = corpus.view(1, 4)
    copy = pickle.loads(pickle.dumps(split))
    assert (copy.first_token, copy.tokens) == (split.first_token, split.tokens)
    assert len(pickle.dumps(split)) < 1000
    (tmp_path / "split.pickle").write_bytes(pickle.dumps(split))
    code = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); print(s.windows(3).tolist())"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "split.pickle"], capture_output=True, text=True)
    assert done.stdout.strip() == str(split.windows(3).tolist())


def test_pickle_notices_that_the_corpus_was_replaced(corpus, corpus_of):
    data = pickle.dumps(corpus)
    os.replace(corpus_of(b"another", name="other").path, corpus.path)
    assert corpus.tokens[0] == ord("a")  # what is mapped stays
    with pytest.raises(DataError, match="was replaced"):
        pickle.loads(data)


def test_windows_overlap_by_the_token_to_predict(corpus):
    stream = [t for w in WORDS for t in (*w, 256)]
    windows = corpus.split(0)[0].windows(4)
    assert windows.tolist() == [stream[i : i + 5] for i in range(0, len(stream) - 4, 4)]
    assert len(windows) == (len(stream) - 1) // 4 == 7


def test_a_window_may_end_with_the_last_token(corpus):
    split = corpus.view(0, 1)  # 6 tokens
    assert split.windows(5).tolist() == [[*b"alpha", 256]]
    assert split.samples(5) == 1 and split.samples(2) == 2


@pytest.mark.parametrize(("share", "kept"), [(0.001, 1), (0.2, 1), (0.29, 1), (0.31, 2), (0.4, 2), (0.8, 4), (0.99, 4)])
def test_validation_is_whole_documents_at_the_end(corpus, share, kept):
    training, validation = corpus.split(share)
    assert (training.first_document, training.end_document) == (0, 5 - kept)
    assert (validation.first_document, validation.end_document) == (5 - kept, 5)
    assert training.first_token == 0 and validation.first_token == training.tokens
    assert training.tokens + validation.tokens == corpus.header.tokens
    first = corpus.tokens[validation.first_token :][: len(WORDS[5 - kept])]
    assert bytes(first.astype(np.uint8)) == WORDS[5 - kept]


def test_no_validation(corpus):
    training, validation = corpus.split(0.0)
    assert training.tokens == corpus.header.tokens and validation is None


def test_one_document_cannot_be_split(corpus_of):
    with pytest.raises(DataError, match=r"has one document.*data\.validation=0"):
        corpus_of(b"only").split(0.01)


def test_too_small_for_a_sample(corpus):
    split = corpus.view(1, 3)  # 3 + 12 tokens
    assert split.samples(14) == 1
    with pytest.raises(DataError, match=r"Documents 1 to 2 of corpus .*corpus\.h5 have 15 tokens, a sample needs 16"):
        split.samples(15)


def test_vocabulary(corpus):
    check_vocabulary(corpus, 257)
    for vocab in (256, 32000):
        with pytest.raises(DataError, match=rf"vocabulary of 257.*model\.vocab={vocab}: set model\.vocab=257"):
            check_vocabulary(corpus, vocab)
