"""Documents in whatever form they come: lines of JSON, compressed, Parquet; and what is wrong with some of them."""

import bz2
import gzip
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.records import Reading
from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError
from tests.data.texts import text


def one(path, tmp_path, **how):
    """The documents of a file, as bytes or text."""
    output = tmp_path / "out.h5"
    header = build(output, list_sources([path], order="path"), [path], replace_existing=True, **how)
    corpus = Corpus.open(output)
    ends = zip(corpus.documents[:-1], corpus.documents[1:])
    return header, [bytes(corpus.tokens[a : b - 1].astype(np.uint8)) for a, b in ends]


def zst(path, data):
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("no zstd")
    path.write_bytes(subprocess.run([program, "-qc"], input=data, capture_output=True, check=True).stdout)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_lines_of_json(tmp_path, ending):
    data = b'{"body": "one"}\n\n  {"x": 1, "body": "tw\\u00f6"}\n{"body": ""}\n{"body": "last"}'
    path = tmp_path / f"a.jsonl{ending}"
    if ending == ".zst":
        zst(path, data)
    else:
        path.write_bytes(gzip.compress(data) if ending else data)
    header, documents = one(path, tmp_path, reading=Reading(field="body"), unit=3)
    assert documents == [b"one", "tw\u00f6".encode(), b"last"] and header.provenance["empty_records"] == 1


def test_compressed_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 1000))
    assert one(tmp_path / "a.txt.gz", tmp_path)[1] == [b"text " * 1000]
    data = gzip.compress(b"source")
    (tmp_path / "a.tar.gz").write_bytes(data)
    assert one(tmp_path / "a.tar.gz", tmp_path)[1] == [data]  # what is no text stays as it is


def test_frames_of_zstd_by_whatever_is_there(tmp_path):
    """Files made of several, as parallel compressors and `cat` make them."""
    lines = [json.dumps({"text": text(n)}).encode() + b"\n" for n in range(3000)]
    whole = b""
    for part in (lines[:1], lines[1:2000], lines[2000:]):
        zst(tmp_path / "part", b"".join(part))
        whole += (tmp_path / "part").read_bytes()
    (tmp_path / "part").unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert one(tmp_path / "a.jsonl.zst", tmp_path)[1] == [text(n).encode() for n in range(3000)]


BAD = {
    "json": (b'{"text": "a"}\n{"text": \n', r"line 2: is no JSON"),
    "list": (b"[1]\n", r"line 1: is not an object"),
    "field": (b'{"text": "a"}\n{"txt": "b"}\n', r"line 2: there is no field 'text' but txt"),
    "type": (b'{"text": 5}\n', r"line 1: field 'text' is no text but int"),
    "utf8": (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: is not UTF-8"),
    "surrogate": (b'{"text": "\\ud800"}\n', r"line 1: has half a surrogate pair"),
    "deep": (b"[" * 100_000 + b"\n", r"line 1: is nested too deep"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("compressed", [False, True])
def test_bad_records(tmp_path, name, compressed):
    data, match = BAD[name]
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    data = data + b'{"text": "good"}\n'
    path.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(DataError, match=match) as caught:
        one(path, tmp_path)
    assert str(path) in str(caught.value) and "--skip-bad" in str(caught.value) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    header, documents = one(path, tmp_path, reading=Reading(skip=True))
    assert documents[-1] == b"good" and header.provenance["bad_records"] == 1


def test_text_that_is_not_utf8(tmp_path, tokenizer):
    """Bytes take it; a tokenizer of text names the byte, or leaves the file out, however late it comes."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"good words\n" * 200_000 + b"\xff")
    assert one(path, tmp_path)[0].tokens == 2_200_002
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8.*byte 2200000 is 0xff"):
        one(path, tmp_path, tokenizer=tokenizer)
    (tmp_path / "in").mkdir()
    shutil.move(path, tmp_path / "in" / "a.txt")
    (tmp_path / "in" / "b.txt").write_text("corpus")
    header, _ = one(tmp_path / "in", tmp_path, tokenizer=tokenizer, reading=Reading(skip=True))
    assert header.documents == 1 and header.provenance["bad_records"] == 1


@pytest.mark.parametrize("kept", [5, 40, -3])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_that_are_cut(tmp_path, kept, ending):
    data, path = json.dumps({"text": text(1) * 50}).encode() + b"\n", tmp_path / f"a.jsonl{ending}"
    if ending == ".zst":
        zst(path, data)
    else:
        path.write_bytes(gzip.compress(data))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"a\.jsonl\{ending} (is damaged|, line|, line 1|.*line 1)"):
        one(path, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_foreign_bytes_under_a_name_of_ours(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(bz2.compress(b"{}"))
    with pytest.raises(DataError, match="is damaged"):
        one(tmp_path / "a.jsonl.gz", tmp_path)


def test_no_right_to_read(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x")
    listing = list_sources([path])
    real = type(path).open

    def denied(self, *args, **how):
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **how)

    monkeypatch.setattr(type(path), "open", denied)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        build(tmp_path / "c.h5", listing, [path])
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet is a Parquet file, and pyarrow.*is not installed"):
        one(tmp_path / "a.parquet", tmp_path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [text(n) for n in range(3000)]
    parquet.write_table(pyarrow.table({"text": texts, "n": range(3000)}), tmp_path / "a.parquet", row_group_size=700)
    assert one(tmp_path / "a.parquet", tmp_path)[1] == [t.encode() for t in texts]
    with pytest.raises(DataError, match="has no column 'body', it has text, n"):
        one(tmp_path / "a.parquet", tmp_path, reading=Reading(field="body"))
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="is damaged"):
        one(tmp_path / "a.parquet", tmp_path)
