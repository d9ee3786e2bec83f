"""Building a corpus from text, in parallel, in bounded memory; resumed after a kill; whole or not at all.

All that a build writes before it is done lies in one folder beside the output (`data.workplace`). The parts in there
are functions of the sources alone (`data.parts`), so whoever comes after a kill, with any number of workers, makes what
is missing and lays the same bytes into the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.data.duplicates import leave_out
from hpctrain.data.format import Header
from hpctrain.data.lay import Laid, Place, kept, lay
from hpctrain.data.partfile import Facts, Part, done, facts
from hpctrain.data.parts import Job, Unit, make, mended, units
from hpctrain.data.pool import Pool, Task
from hpctrain.data.records import Reading
from hpctrain.data.seal import entropy, seal
from hpctrain.data.sources import Listing
from hpctrain.data.team import Team
from hpctrain.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from hpctrain.data.workplace import Workplace, folder_of, workplace
from hpctrain.errors import DataError

PLAIN = Reading()
NAMED = 100
"""Sources that are named in the provenance; their number is always there."""

Progress = Callable[[int], None]
"""Called with the number of bytes of sources that were read since the last call."""


def build(
    output: Path,
    listing: Listing,
    sources: Sequence[Path],
    *,
    tokenizer: Tokenizer | None = None,
    end: str | None = None,
    reading: Reading = PLAIN,
    unique: bool = False,
    workers: int = 1,
    team: Team | None = None,
    unit: int | None = None,
    replace_existing: bool = False,
    progress: Progress = lambda done: None,
    **provenance: Any,
) -> Header:
    """Write a corpus. Each file of text, or each record, becomes a document: its tokens and an end of document.

    The corpus appears under its name when it is complete, on disk and verified; until then, and after any
    failure, there is nothing under that name, or what was there before. Collective over `team`.

    Args:
        output: the corpus file; its directory is made.
        listing: the files, from `list_sources`; the same on every rank.
        sources: the paths they were found under, for the provenance.
        tokenizer: makes ids of text; default that of bytes.
        end: name of its token that ends a document, if it was named.
        reading: how records become documents.
        unique: leave out documents whose text was there before.
        workers: processes of this rank.
        team: ranks that build together; they see the same filesystem.
        unit: bytes of sources in a part; default what suits the whole.
        replace_existing: replace a file of that name.
        progress: see `Progress`.
        provenance: further JSON facts to keep.

    Returns:
        the header of the corpus.

    Raises:
        DataError: the output exists, cannot be written or does not fit; a source cannot be read or changes.
    """
    tokenizer, team = tokenizer or ByteTokenizer(), team or Team()
    reading = replace(reading, text=tokenizer.text)
    assert isinstance(tokenizer, (ByteTokenizer, JsonTokenizer)), tokenizer
    job = Job(folder_of(output), tokenizer.json, end, reading, unique)
    work = units(listing, job, tokenizer.sha256, unit)
    known = {
        "sources": [str(s) for s in sources[:NAMED]],
        "source_count": len(sources),
        "files": len(listing.sources),
        "empty_files": listing.empty,
        "bytes": listing.bytes,
        "listing_sha256": listing.sha256,
        "hpctrain": __version__,
        **provenance,
    }
    name = hashlib.sha256(json.dumps([[unit.key for unit in work], known], default=str).encode()).hexdigest()
    with workplace(output, replace_existing, team, name) as place:
        if place.finished:
            return team.first(lambda: Corpus.open(output).header)
        team.first(lambda: _check_room(output, listing, tokenizer))
        found = team.first(lambda: [done(job.folder, unit.key) for unit in work])
        busy = min(workers, len(work[team.rank :: team.size]))
        with Pool(_task(job, tokenizer), _prepare, (job,), busy) as pool:
            parts = _make(work, found, team, pool, progress)
            return _merge(output, place, job, tokenizer, list(zip(work, parts)), team, pool, known)


def _check_room(output: Path, listing: Listing, tokenizer: Tokenizer) -> None:
    """Refuse at once what is known not to fit: bytes become as many tokens."""
    if isinstance(tokenizer, ByteTokenizer) and not any(s.compression or s.kind != "text" for s in listing.sources):
        size = format.file_size(listing.bytes + len(listing.sources), len(listing.sources), tokenizer.vocab)
        format.check_room(output.parent, size)


@dataclass(frozen=True)
class _Laying:
    """A part and where it goes."""

    unit: Unit
    part: Part
    place: Place


def _task(job: Job, tokenizer: Tokenizer) -> Task:
    """What workers do: make the part of a unit, or lay one that is made."""

    def work(item: Unit | _Laying, progress: Progress) -> Part | Laid:
        if isinstance(item, Unit):
            return make(item, job, tokenizer, progress)
        key, part, place = item.unit.key, item.part, item.place
        return mended(item.unit, part, job, tokenizer, lambda: lay(job.folder, key, part, place))

    return work


def _prepare(job: Job) -> Task:
    """The task in a process that has nothing yet."""
    return _task(job, job.tokenizer())


def _make(work: Sequence[Unit], found: Sequence[Part | None], team: Team, pool: Pool, progress: Progress) -> list[Part]:
    """All parts, in order. Those that are there are not made again."""
    missing = [unit for unit, part in zip(work, found) if part is None]
    progress(sum(unit.bytes for unit, part in zip(work, found) if part is not None) // team.size)
    mine = missing[team.rank :: team.size]

    def make_mine() -> dict[str, Part]:
        return {mine[number].key: part for number, part in pool.spread(mine, progress)}

    made = {key: part for some in team.all(make_mine) for key, part in some.items()}
    return [part or made[unit.key] for unit, part in zip(work, found)]


def _merge(
    output: Path,
    place: Workplace,
    job: Job,
    tokenizer: Tokenizer,
    parts: Sequence[tuple[Unit, Part]],
    team: Team,
    pool: Pool,
    known: dict[str, Any],
) -> Header:
    """Lay all parts into one file, each rank its own, and seal it."""
    left_out, sizes = team.first(lambda: _sizes(job, tokenizer, parts))
    tokens, documents = (int(n) for n in sizes.sum(0))
    if not documents:
        raise DataError(f"No text to build from: the sources of {output} have no document that is not empty or bad.")
    firsts = (sizes.cumsum(0) - sizes).tolist()
    vocab, masked = tokenizer.vocab, job.reading.prompt is not None
    places = team.first(
        lambda: format.create(place.corpus, tokens, documents, vocab, loss_mask=masked, tokenizer=tokenizer.json)
    )
    work = [
        _Laying(unit, part, Place(place.corpus, places, vocab, *first)) for (unit, part), first in zip(parts, firsts)
    ]
    mine = list(range(len(work)))[team.rank :: team.size]

    def lay_mine() -> dict[int, Laid]:
        return {mine[n]: one for n, one in pool.spread([work[number] for number in mine], lambda done: None)}

    laid = {number: one for some in team.all(lay_mine) for number, one in some.items()}
    more = {
        "empty_records": sum(part.empty for _, part in parts),
        "bad_records": sum(part.bad for _, part in parts),
        "duplicates": left_out,
        "shares": _shares(parts),
    }

    def finish() -> Header:
        counts: NDArray[np.int64] = np.sum([one.counts for one in laid.values()], 0)
        header = Header(
            tokenizer=tokenizer.identity,
            tokenizer_sha256=tokenizer.sha256,
            vocab=vocab,
            end_of_document=tokenizer.end_of_document,
            tokens=tokens,
            documents=documents,
            sha256="",
            entropy=entropy(counts),
            provenance={**known, **{key: value for key, value in more.items() if value}},
            loss_mask=masked,
        )
        in_order = [laid[number] for number in sorted(laid)]
        masks = [one.mask for one in in_order] if header.loss_mask else []
        return seal(place.corpus, places, header, [one.tokens for one in in_order], masks)

    return team.first(finish)


def _sizes(job: Job, tokenizer: Tokenizer, parts: Sequence[tuple[Unit, Part]]) -> tuple[int, NDArray[np.int64]]:
    """How many documents are left out, and [parts, 2] tokens and documents of each part that are not."""
    if not job.unique:
        return 0, np.array([(part.tokens, part.documents) for _, part in parts])

    def facts_of(number: int) -> Facts:
        unit, part = parts[number]
        return mended(unit, part, job, tokenizer, lambda: facts(job.folder, unit.key, part))

    named = [(unit.key, part) for unit, part in parts]
    left_out = leave_out(job.folder, named, facts_of)
    keep = [kept(job.folder, key, part) for key, part in named]
    return left_out, np.array([(facts_of(n).lengths[one].sum(), one.sum()) for n, one in enumerate(keep)])


def _shares(parts: Sequence[tuple[Unit, Part]]) -> dict[str, int]:
    """Tokens by number of the source on the command line, before duplicates were left out."""
    total: dict[str, int] = {}
    for _, part in parts:
        for root, tokens in part.shares.items():
            total[root] = total.get(root, 0) + tokens
    return dict(sorted(total.items(), key=lambda item: int(item[0])))
