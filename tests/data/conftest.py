"""Small corpora."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.data.bpe import train_bpe
from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.sources import list_sources
from hpctrain.data.tokenizer import JsonTokenizer
from tests.data.texts import text


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Corpus]:
    """`corpus_of(b"one", b"two")`: a corpus with these documents in this order."""

    def make(*documents: bytes, name: str = "corpus") -> Corpus:
        folder = tmp_path / f"{name}-texts"
        folder.mkdir()
        for i, document in enumerate(documents):
            (folder / f"{i:04}.txt").write_bytes(document)
        output = tmp_path / f"{name}.h5"
        build(output, list_sources([folder], order="path"), [folder])
        return Corpus.open(output)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> JsonTokenizer:
    """Byte-pair encoding of 300 tokens, trained on such texts."""
    return train_bpe((text(n).encode() for n in range(300)), 300)
