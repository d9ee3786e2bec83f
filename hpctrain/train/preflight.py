"""What can be known to fail before a rank is started. No torch."""

from __future__ import annotations

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.data.corpus import Corpus, Split, check_vocabulary


def preflight(config: RunConfig, world: int) -> None:
    """Check a run for `world` ranks.

    Raises:
        ConfigError: a setting, or a combination of settings, cannot run.
        DataError: the corpus is not there, damaged, too small or of another vocabulary.
    """
    validate(config, world)
    open_data(config)


def open_data(config: RunConfig) -> tuple[Corpus, Split, Split | None]:
    """The corpus of a run, and its parts for training and validation.

    Raises:
        DataError: as `preflight`.
    """
    corpus = Corpus.open(config.data.corpus)
    check_vocabulary(corpus, config.model.vocab)
    training, validation = corpus.split(config.data.validation if config.train.eval_batches else 0.0)
    for part in (training, validation):
        if part is not None:
            part.samples(config.data.seq)
    return corpus, training, validation
