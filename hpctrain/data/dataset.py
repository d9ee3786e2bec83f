"""What a run reads, as its configuration says: corpora, their parts, how they are mixed and cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.config.schema import RunConfig
from hpctrain.data.blend import Blend, Phase
from hpctrain.data.cache import local_copy
from hpctrain.data.corpus import Corpus, Split, check_vocabulary
from hpctrain.errors import ConfigError, DataError

if TYPE_CHECKING:  # they need torch, and opening what a run reads does not
    from hpctrain.data.batches import Batches
    from hpctrain.data.samples import Samples


@dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Attributes:
        corpora: one, or those of a blend, in its order.
        training: the part of each that is trained on.
        validation: the part of each that is kept; None where nothing is.
        blend: says which corpus a sample is of; None for one corpus.
    """

    corpora: tuple[Corpus, ...]
    training: tuple[Split, ...]
    validation: tuple[Split, ...] | None
    blend: Blend | None

    @property
    def sha256(self) -> str:
        """Names the content, and of a blend the corpora, their weights and from when on these count."""
        if self.blend is None:
            return self.corpora[0].header.sha256
        text = [corpus.header.sha256 for corpus in self.corpora] + [str(self.blend.starts), str(self.blend.shares)]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    @property
    def tokenizer(self) -> str:
        """Identity of the tokenizer of all corpora."""
        return self.corpora[0].header.tokenizer

    @property
    def tokenizer_sha256(self) -> str:
        """Its hash."""
        return self.corpora[0].header.tokenizer_sha256

    @property
    def validation_blend(self) -> Blend | None:
        """How what is kept for validation is mixed: alike at all times, whatever `data.anneal` says."""
        return None if self.blend is None else self.blend.constant()

    @property
    def entropy(self) -> float:
        """Of single tokens, nats; of a blend, the mean of its corpora's as a validation weighs them, which is a little
        less."""
        blend = self.validation_blend
        if blend is None:
            return self.corpora[0].header.entropy
        return sum(float(share) * c.header.entropy for share, c in zip(blend.shares[0], self.corpora))


def open_dataset(config: RunConfig, cached: bool = False) -> Dataset:
    """Open what a run reads.

    Args:
        config: of the run.
        cached: use copies on this node, if the configuration asks for them, and make those that are not there.

    Raises:
        DataError: a corpus is not there, damaged, too small, of another vocabulary or tokenizer than the first.
        ConfigError: corpora and weights do not go together.
    """
    settings = config.data
    blend = make_blend(settings.blend, settings.weights, settings.anneal)
    paths = settings.blend or (settings.corpus,)
    if cached and settings.cache is not None:
        paths = tuple(local_copy(path, settings.cache) for path in paths)
    corpora = tuple(Corpus.open(path) for path in paths)
    for corpus in corpora:
        check_vocabulary(corpus, config.model.vocab)
        _check_same_tokenizer(corpus, corpora[0])
    parts = [corpus.split(settings.validation if config.train.eval_batches else 0.0) for corpus in corpora]
    kept = tuple(part for _, part in parts if part is not None)
    data = Dataset(corpora, tuple(part for part, _ in parts), kept or None, blend)
    if settings.packing == "windows":
        for split in (*data.training, *kept):
            split.samples(settings.seq)
    return data


def batches(
    config: RunConfig,
    data: Dataset,
    training: bool,
    rank: int = 0,
    size: int = 1,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Batches:
    """The batches of a part of the data, as one data-parallel rank reads them.

    Args:
        config: of the run.
        data: what is read.
        training: the part that is trained on; else the one kept for validation, read once, in order, and mixed alike
            in all phases.
        rank, size, spans: see `Batches`.
    """
    from hpctrain.data.batches import Batches

    splits = data.training if training else data.validation
    assert splits is not None
    return Batches(
        [samples(config, split) for split in splits],
        config.data.seq,
        seed=config.train.seed if training else None,
        global_batch=config.train.global_batch,
        rank=rank,
        size=size,
        spans=spans,
        blend=data.blend if training else data.validation_blend,
    )


def samples(config: RunConfig, split: Split) -> Samples:
    """The samples of a split."""
    from hpctrain.data.samples import Packed, Windows

    make = Packed if config.data.packing == "best_fit" else Windows
    return make(split, config.data.seq, config.data.document_mask)


def make_blend(
    paths: Sequence[Path] | None, weights: Sequence[float] | None, anneal: Sequence[str] | None
) -> Blend | None:
    """The blend that settings describe; None for one corpus.

    Raises:
        ConfigError: they do not go together.
    """
    if paths is None:
        for key, value in (("data.weights", weights), ("data.anneal", anneal)):
            if value:
                raise ConfigError(key, list(value), "is about corpora of data.blend", "set data.blend=[a.h5, b.h5]")
        return None
    if not paths:
        raise ConfigError("data.blend", [], "must name corpora", "set data.blend=[a.h5, b.h5], or null")
    weights = tuple(weights or [1.0] * len(paths))
    if len(weights) != len(paths):
        raise ConfigError(
            "data.weights", list(weights), f"must have one number for each of the {len(paths)} corpora of data.blend"
        )
    return Blend([Phase(0, weights), *(_phase(text, len(paths)) for text in anneal or ())])


def _phase(text: str, corpora: int) -> Phase:
    """`100000 1 2 3` is weights from a sample count on."""
    start, *weights = text.split() or [""]
    try:
        phase = Phase(int(start), tuple(float(w) for w in weights))
        if len(phase.weights) == corpora:
            return phase
    except ValueError:
        pass
    raise ConfigError(
        "data.anneal", text, f"must be written 'SAMPLES w w ...' with {corpora} weights", "for example '100000 1 2 3'"
    )


def _check_same_tokenizer(corpus: Corpus, first: Corpus) -> None:
    if corpus.header.tokenizer_sha256 != first.header.tokenizer_sha256:
        raise DataError(
            f"Corpus {corpus.path} was made with tokenizer {corpus.header.tokenizer}, but {first.path} with "
            f"{first.header.tokenizer}: blend corpora of one tokenizer, and build the others again."
        )
