"""Documents out of files: text, JSON lines, Parquet; compressed or not; a stretch at a time."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hpctrain.data.sources import Source, SourceError, unreadable
from hpctrain.data.tokenizer import PIECE, cut, pieces
from hpctrain.errors import first_line

LINE = 1 << 30
"""Bytes of the longest line of JSON; a line must be in memory as a whole."""
FRAME = 1 << 14
"""Bytes of a .zst file that are decompressed at a time."""
ROWS = 1024
"""Rows of a Parquet file that are read at a time."""


@dataclass(frozen=True)
class Reading:
    """How records become documents.

    Attributes:
        field: of a record, that has the text.
        prompt: of a record, that has what comes before it and is not to be learnt; None: there is none.
        skip: leave out what is bad, and count it, in the place of stopping.
        text: bytes must be UTF-8.
    """

    field: str = "text"
    prompt: str | None = None
    skip: bool = False
    text: bool = False


@dataclass(frozen=True)
class Piece:
    """Documents of one file: all, or those of the lines that begin in [start, end), bytes."""

    source: Source
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A stretch of a document.

    Attributes:
        text: at most `PIECE` bytes.
        last: the document ends with it.
        prompt: it is read, not learnt.
        bad: the document is left out, with all of it that came before.
    """

    text: bytes
    last: bool
    prompt: bool = False
    bad: bool = False


BAD = Chunk(b"", True, bad=True)

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that were read since the last call."""


def chunks(piece: Piece, reading: Reading, progress: Progress = lambda done: None) -> Iterator[Chunk]:
    """The documents of a piece. Empty records have one chunk without text.

    Raises:
        SourceError: the file cannot be read, is damaged or changed, or a document is bad.
    """
    source = piece.source
    try:
        if source.kind == "parquet":
            yield from _parquet(source, reading)
            progress(source.size)
            return
        with opened(source) as (stream, raw):
            if source.kind == "jsonl":
                yield from _lines(piece, reading, stream, raw, progress)
            else:
                yield from _text(source, reading, stream, raw, progress)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise _damaged(source, error) from error
        raise unreadable(error, source.path) from error
    except (EOFError, zlib.error) as error:
        raise _damaged(source, error) from error


@contextmanager
def opened(source: Source) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of a file, decompressed, and the file itself."""
    with source.path.open("rb") as raw:
        if source.compression == ".gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream, raw  # type: ignore[misc]
        elif source.compression == ".zst":
            with _zstd(source.path, raw) as inner:
                yield inner, raw
        else:
            yield raw, raw


@contextmanager
def _zstd(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    """A .zst file by the zstandard module, or else by the program zstd."""
    try:
        import zstandard
    except ImportError:
        program = shutil.which("zstd")
        if program is None:
            raise SourceError(
                f"Source {path} is compressed with zstd, and neither the Python module zstandard nor the program zstd "
                f"is here: pip install zstandard."
            ) from None
        with subprocess.Popen([program, "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            yield cast(BinaryIO, process.stdout)
            if process.stdout.read(1) == b"" and process.wait():
                raise EOFError(process.stderr.read().decode(errors="replace").strip()) from None
            process.kill()
        return
    try:
        yield cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard.ZstdDecompressor().decompressobj), PIECE))
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error


class _Zstd(io.RawIOBase):
    """The frames of a .zst file, one after the other. The module's own reader takes a cut file for a whole one."""

    def __init__(self, raw: BinaryIO, frame: Callable[[], Any]) -> None:
        self._raw, self._new = raw, frame
        self._frame: Any = None
        self._ready = self._unused = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; 0 at the end.

        Raises:
            EOFError: the file ends in a frame.
        """
        while not self._ready:
            data = self._unused or self._raw.read(FRAME)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the midst of a frame")
                return 0
            self._frame = self._frame or self._new()
            self._ready = self._frame.decompress(data)
            self._unused = b""
            if self._frame.eof:
                self._unused, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _text(source: Source, reading: Reading, stream: BinaryIO, raw: BinaryIO, progress: Progress) -> Iterator[Chunk]:
    """A file as one document; exactly as many bytes as it had when it was listed."""
    left, buffer, place, before = source.size, b"", 0, 0
    try:
        while data := stream.read(PIECE if source.compression else min(PIECE, left + 1)):
            if not source.compression:
                left -= len(data)
                if left < 0:
                    break
            progress(raw.tell() - before if source.compression else len(data))
            before = raw.tell()
            buffer += data
            while len(buffer) > PIECE:
                end = cut(buffer)
                yield Chunk(_checked(buffer[:end], reading, place), False)
                buffer, place = buffer[end:], place + end
        if left and not source.compression:
            raise changed(source, os.fstat(raw.fileno()).st_size)
        yield Chunk(_checked(buffer, reading, place), True)
    except UnicodeDecodeError as error:
        if not reading.skip:
            raise SourceError(
                f"Source {source.path} is not UTF-8, which its tokenizer needs: byte {error.reason} is "
                f"0x{error.object[0]:02x}; mend it, leave it out, or leave out all such files (--skip-bad)."
            ) from error
        yield BAD


def _checked(text: bytes, reading: Reading, place: int) -> bytes:
    """The text, if it is UTF-8 or need not be."""
    if reading.text:
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start
            raise UnicodeDecodeError("utf-8", text[at : at + 1], 0, 1, str(place + at)) from None
    return text


def _lines(piece: Piece, reading: Reading, stream: BinaryIO, raw: BinaryIO, progress: Progress) -> Iterator[Chunk]:
    """The records of the lines that begin in a piece."""
    source, place, number = piece.source, piece.start, 0
    if piece.start:
        stream.seek(piece.start - 1)
        place += len(stream.readline(LINE)) - 1
    whole = bool(source.compression)
    before = raw.tell() if whole else piece.start
    while whole or place < piece.end:
        line = stream.readline(LINE)
        if not line:
            break
        number += 1
        start, place = place, place + len(line)
        if whole and raw.tell() != before:
            progress(raw.tell() - before)
            before = raw.tell()
        elif not whole:
            progress(len(line))
        if not line.strip():
            continue
        try:
            if len(line) == LINE and line[-1:] != b"\n":
                raise ValueError(f"is longer than {LINE} bytes")
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is not an object")
            yield from _record(record, reading)
        except (ValueError, RecursionError) as error:
            if reading.skip:
                yield BAD
                continue
            if not whole:
                number = _line_number(source.path, start)
            raise SourceError(f"Source {source.path}, line {number}: {_why(error)}; {MEND}.") from error
    if not whole and os.fstat(raw.fileno()).st_size != source.size:
        raise changed(source, os.fstat(raw.fileno()).st_size)


MEND = "mend the record, name another field (--field), or leave bad records out (--skip-bad)"


def _parquet(source: Source, reading: Reading) -> Iterator[Chunk]:
    """The rows of a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SourceError(
            f"Source {source.path} is a Parquet file, and pyarrow, which reads these, is not installed: "
            f"pip install pyarrow."
        ) from None
    columns = [name for name in (reading.prompt, reading.field) if name]
    row = 0
    try:
        file = parquet.ParquetFile(source.path)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise SourceError(
                f"Source {source.path} has no column {missing[0]!r}, it has {', '.join(file.schema_arrow.names)}; "
                f"name another with --field."
            )
        for batch in file.iter_batches(batch_size=ROWS, columns=columns):
            for record in batch.to_pylist():
                row += 1
                try:
                    yield from _record(record, reading)
                except ValueError as error:
                    if not reading.skip:
                        raise SourceError(f"Source {source.path}, row {row}: {_why(error)}; {MEND}.") from error
                    yield BAD
    except pyarrow.ArrowException as error:
        raise _damaged(source, error) from error


def _record(record: dict[str, Any], reading: Reading) -> Iterator[Chunk]:
    """One record. What is wrong with it is known before its first chunk."""
    prompt = b"" if reading.prompt is None else _of(record, reading.prompt)
    parts = [(piece, True) for piece in pieces(prompt)] if prompt else []
    parts += [(piece, False) for piece in pieces(_of(record, reading.field))]
    for i, (text, is_prompt) in enumerate(parts):
        yield Chunk(text, i == len(parts) - 1, is_prompt)


def _of(record: dict[str, Any], field: str) -> bytes:
    value = record.get(field)
    if not isinstance(value, str):
        if field in record:
            raise ValueError(f"field {field!r} is no text but {type(value).__name__}")
        raise ValueError(f"there is no field {field!r} but {', '.join(sorted(map(str, record))[:9]) or 'none at all'}")
    return value.encode("utf-8")


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON ({error.msg} at character {error.pos})"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start} of it)"
    if isinstance(error, UnicodeEncodeError):
        return "has half a surrogate pair, which is no Unicode text"
    return "is nested too deep" if isinstance(error, RecursionError) else str(error)


def _line_number(path: Path, place: int) -> int:
    """Which line begins at a byte of a file, from 1."""
    number = 1
    with path.open("rb") as file:
        while place > 0 and (data := file.read(min(PIECE, place))):
            number += data.count(b"\n")
            place -= len(data)
    return number


def changed(source: Source, now: int) -> SourceError:
    """The sentence about a file that is not as long as it was."""
    told = "more" if now > source.size else now
    return SourceError(
        f"Source {source.path} changed while the corpus was built: it had {source.size} bytes, now it has {told}; "
        f"build again when nobody writes it."
    )


def _damaged(source: Source, error: BaseException) -> SourceError:
    return SourceError(f"Source {source.path} is damaged ({first_line(error)}); get it again, or leave it out.")
