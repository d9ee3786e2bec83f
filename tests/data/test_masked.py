"""Tokens that are only read have no label, in windows and in packed samples."""

import numpy as np
import pytest

from hpctrain.data.batches import Batches
from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.records import Reading
from hpctrain.data.samples import Packed, Windows
from hpctrain.data.sources import list_sources
from hpctrain.model.batch import IGNORED


@pytest.fixture
def split(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "ab", "text": "cd"}\n{"q": "", "text": "ef"}\n{"q": "ghi", "text": "j"}\n')
    sources = list_sources([tmp_path / "a.jsonl"], order="path")
    build(tmp_path / "a.h5", sources, [], reading=Reading(prompt="q"))
    corpus = Corpus.open(tmp_path / "a.h5")
    assert corpus.loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    return corpus.split(0)[0]


def labels(source, seq, count):
    return Batches([source], seq, seed=None, global_batch=count).batch(0).labels.tolist()


def test_windows(split):
    """ab cd| ef| gh in windows of four, and the token after."""
    c, d, e, f, j = b"cdefj"
    masked = labels(Windows(split, 4), 4, 3)
    assert masked == [[IGNORED, c, d, 256], [IGNORED, f, 256, IGNORED], [IGNORED, IGNORED, j, 256]]
    crossing = labels(Windows(split, 4, document_mask=False), 4, 3)
    assert crossing == [[IGNORED, c, d, 256], [e, f, 256, IGNORED], [IGNORED, IGNORED, j, 256]]


def test_packed(split):
    c, d, f, j = b"cdfj"
    got = labels(Packed(split, 6), 6, 2)
    assert got == [[IGNORED, c, d, 256, f, 256], [IGNORED, IGNORED, j, 256, IGNORED, IGNORED]]


def test_the_mask_is_part_of_the_content(split, tmp_path):
    """Its damage is found, and named by its document."""
    import h5py

    from hpctrain.errors import DataError

    with h5py.File(split.corpus.path, "r+") as file:
        file["loss_mask"][6] = 0
    with pytest.raises(DataError, match=r"checksum.*the first bad document is 1, tokens 5 to 8"):
        Corpus.open(split.corpus.path).verify()
    assert np.array_equal(Corpus.open(split.corpus.path).tokens, split.corpus.tokens)
