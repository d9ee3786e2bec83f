"""`hpctrain data check|sample|stats|import|export|tokenizer`: what they say is so."""

import json

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.data.bpe import train_bpe
from hpctrain.data.corpus import Corpus
from hpctrain.data.look import stats, waste
from hpctrain.data.order import shuffled
from hpctrain.data.packing import pack

WORDS = [b"alpha", b"be", b"gamma delta", b"d", b"epsilon zeta eta"]


def run(*args, code=0):
    result = CliRunner().invoke(main, ["data", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def corpus(corpus_of):
    return corpus_of(*WORDS)


def test_check(corpus):
    assert run("check", corpus.path).endswith("sound, 5 documents, 40 tokens\n")


@pytest.mark.parametrize("document", range(5))
def test_check_names_the_first_bad_document(corpus, document):
    with h5py.File(corpus.path, "r+") as file:
        file["tokens"][int(corpus.documents[document])] ^= 1
        file["tokens"][39] = 1  # and the last one
    begin, end = corpus.documents[document : document + 2]
    said = run("check", corpus.path, code=1)
    assert f"the first bad document is {document}, tokens {begin} to {end}; build it again" in said


def test_check_of_ids_offsets_and_files_of_old(corpus):
    with h5py.File(corpus.path, "r+") as file:
        file["tokens"][9] = 999
    assert "token id 999" in (said := run("check", corpus.path, code=1)) and "first bad document is 2" in said
    with h5py.File(corpus.path, "r+") as file:
        del file["checksums"]  # the document can only be named where its ids are wrong
    assert "first bad document is 2" in run("check", corpus.path, code=1)
    with h5py.File(corpus.path, "r+") as file:
        file["tokens"][9] = 1
    said = run("check", corpus.path, code=1)
    assert "was written; build it again" in said and "first bad" not in said
    with h5py.File(corpus.path, "r+") as file:
        file["documents"][3] = 2
    assert "offsets do not ascend at document 2" in run("check", corpus.path, code=1)


def test_a_file_of_old_is_read(corpus):
    """Without checksums, a tokenizer and a loss mask, as the first version wrote it."""
    with h5py.File(corpus.path, "r+") as file:
        del file["checksums"], file.attrs["loss_mask"]
    old = Corpus.open(corpus.path)
    old.verify()
    assert old.checksums is None and old.loss_mask is None and old.tokens.tolist() == corpus.tokens.tolist()


def test_sample(corpus):
    assert run("sample", corpus.path, "--document", 2) == "gamma delta\n"
    assert "documents 0 to 4, and no 5" in run("sample", corpus.path, "--document", 5, code=1)
    said = run("sample", corpus.path, "--seq", 6, "--from", 3, "--count", 2, "--seed", 9)
    window = int(shuffled(np.array([3]), 6, 9)[0])
    document, offset = corpus.split(0)[0].place(6 * window)
    assert f"--- sample 3: document {document}, from its token {offset} on\n" in said and "--- sample 4: " in said


def test_stats(corpus, tmp_path):
    found = stats(corpus)
    assert found.lengths == [(2, 4, 2, 5), (4, 8, 1, 6), (8, 16, 1, 12), (16, 32, 1, 17)]
    assert (found.median, found.longest, found.learnt) == (6, 17, 1.0)
    assert found.counts[256] == 5 and found.counts[ord("a")] == sum(w.count(b"a") for w in WORDS)
    assert found.unused == 257 - len(set(b"".join(WORDS))) - 1
    assert list(found.shares.values()) == [40]
    said = run("stats", corpus.path, "--seq", 10, "--plot", tmp_path / "x.png")
    assert "median 6 tokens, longest 17" in said and "(end)" in said and "100.0%" in said
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads(run("stats", corpus.path, "--seq", 10, "--json"))
    assert told["lengths"][0] == {"from": 2, "to": 4, "documents": 2, "tokens": 5}
    assert told["samples"]["best_fit"]["samples"] == pack(corpus.documents, 10).samples


def test_damage_is_not_counted_nor_exported(corpus, tmp_path):
    """An id that the vocabulary does not have, and one that it has: sentences, and no file."""
    with h5py.File(corpus.path, "r+") as file:
        at = file["tokens"].id.get_offset()
    for value, said in ((60_000, "token id 60000"), (ord("z"), "its content has checksum")):
        with corpus.path.open("r+b") as raw:
            raw.seek(at)
            raw.write(value.to_bytes(2, "little"))
        assert said in run("export", corpus.path, tmp_path / "x", "--format", "megatron", code=1)
        assert not list(tmp_path.glob("x*"))
        if value > 256:
            assert "the first bad document is 0" in run("stats", corpus.path, code=1)


def test_waste_by_hand(corpus):
    """Windows of ten of 6 3 12 2 17 tokens: four ends in 30 places... the last document ends past what is read."""
    costs = waste(corpus, 10)
    assert costs["windows"] == {"samples": 3, "empty": 4 / 30, "cut": 2 / 5, "documents": (5 + 3) / 3}
    assert costs["best_fit"]["empty"] == pack(corpus.documents, 10).waste and costs["best_fit"]["cut"] == 2 / 5


def test_tokenizer_build_export_import(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(5):
        (tmp_path / "in" / f"{n}.txt").write_text(f"some words of text number {n}\n" * 20)
    said = run("tokenizer", "train", tmp_path / "t.json", tmp_path / "in", "--vocab", 280)
    assert "280 ids" in said and "is there already" in run("tokenizer", "train", tmp_path / "t.json", tmp_path, code=1)
    assert " of the 5,000 wanted" in run("tokenizer", "train", tmp_path / "u.json", tmp_path / "in", "--vocab", 5000)
    run("build", tmp_path / "a.h5", tmp_path / "in", "--tokenizer", tmp_path / "t.json")
    said = run("export", tmp_path / "a.h5", tmp_path / "m", "--format", "megatron")
    crc = said.split("CRC-32 ")[1][:8]
    said = run("import", tmp_path / "b.h5", tmp_path / "m", "--tokenizer", tmp_path / "t.json")
    assert f"with CRC-32 {crc}" in said
    a, b = Corpus.open(tmp_path / "a.h5"), Corpus.open(tmp_path / "b.h5")
    assert a.header.sha256 == b.header.sha256 and a.tokenizer_json == b.tokenizer_json
    assert "some words of text" in run("sample", tmp_path / "b.h5", "--document", 0)
    run("export", tmp_path / "a.h5", tmp_path / "n", "--format", "numpy")
    run("import", tmp_path / "c.h5", tmp_path / "n.npy", "--vocab", 280, "--end", 0)
    assert Corpus.open(tmp_path / "c.h5").header.tokenizer == "unknown-280"
    assert run("sample", tmp_path / "c.h5", "--document", 0).split()[0].isdigit()
    assert "give --tokenizer FILE, or --vocab" in run("import", tmp_path / "d.h5", tmp_path / "n.npy", code=1)
    assert "cannot be told from its name" in run(
        "import", tmp_path / "d.h5", tmp_path / "t.json", "--vocab", 280, "--end", 0, code=1
    )


def test_what_is_piped_in(tmp_path):
    for kind, text, documents in (("text", "a b", 1), ("jsonl", '{"text": "a"}\n{"text": "b"}\n', 2)):
        args = ["data", "build", str(tmp_path / f"{kind}.h5"), "-", "--format", kind]
        result = CliRunner().invoke(main, args, input=text)
        assert result.exit_code == 0, result.output
        assert Corpus.open(tmp_path / f"{kind}.h5").header.documents == documents
    assert sorted(p.name for p in tmp_path.iterdir()) == ["jsonl.h5", "text.h5"]


def test_a_tokenizer_travels_in_its_corpus(tmp_path):
    """And is known again by its hash, whatever the file was called."""
    from hpctrain.data.build import build
    from hpctrain.data.sources import list_sources
    from hpctrain.data.tokenizer import tokenizer_of

    (tmp_path / "a.txt").write_text("some words")
    made = train_bpe([b"some words and others"], 270)
    header = build(tmp_path / "a.h5", list_sources([tmp_path / "a.txt"]), [], tokenizer=made)
    corpus = Corpus.open(tmp_path / "a.h5")
    known = tokenizer_of(header.tokenizer, header.tokenizer_sha256, [b"{}", corpus.tokenizer_json])
    assert known.decode(corpus.tokens.tolist()) == "some words" and known.sha256 == made.sha256
