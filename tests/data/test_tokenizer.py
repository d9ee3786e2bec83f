"""Bytes as tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.tokenizer import ByteTokenizer, tokenizer_of
from hpctrain.errors import DataError


@given(st.text())
def test_text_survives(text):
    t = ByteTokenizer()
    assert t.decode(t.encode(text.encode())) == text


@given(st.binary(), st.integers(0, 20))
def test_cutting_the_input_changes_nothing(data, cut):
    t = ByteTokenizer()
    assert (
        np.concatenate([t.encode(data[:cut]), t.encode(data[cut:])]).tolist() == t.encode(data).tolist() == list(data)
    )


def test_decode_leaves_out_ends_of_documents_and_replaces_what_is_not_utf8():
    assert ByteTokenizer().decode([104, 256, 105, 0xFF]) == "hi\ufffd"


@pytest.mark.parametrize("bad", [257, -1])
def test_id_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(DataError, match=rf"{bad} is not in the vocabulary.*0 to 256"):
        ByteTokenizer().decode([1, bad])


def test_tokenizer_is_found_by_identity_and_hash():
    t = ByteTokenizer()
    assert isinstance(tokenizer_of(t.identity, t.sha256), ByteTokenizer)
    with pytest.raises(DataError, match=r"'gpt2'.*unknown here.*bytes-257"):
        tokenizer_of("gpt2", t.sha256)
    with pytest.raises(DataError, match="unknown here"):
        tokenizer_of(t.identity, "0" * 64)


def test_meaning_of_ids_is_pinned():
    """Corpora on disk carry this hash; another one makes them all foreign."""
    assert ByteTokenizer.sha256.startswith("a65ee90470d0fd3d")
