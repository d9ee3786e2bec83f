"""Small corpora."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.sources import list_sources


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Corpus]:
    """`corpus_of(b"one", b"two")`: a corpus with these documents in this order."""

    def make(*documents: bytes, name: str = "corpus") -> Corpus:
        folder = tmp_path / f"{name}-texts"
        folder.mkdir()
        for i, text in enumerate(documents):
            (folder / f"{i:04}.txt").write_bytes(text)
        output = tmp_path / f"{name}.h5"
        build(output, list_sources([folder], order="path"), [folder])
        return Corpus.open(output)

    return make
