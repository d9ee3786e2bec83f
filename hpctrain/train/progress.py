"""Where a run stands, and its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.collective import Found, SaveReport, find, save
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError, ConfigError, DataError
from hpctrain.layout.parameters import parameter_specs
from hpctrain.parallel.comm import Axis
from hpctrain.train.session import Session


@dataclass
class Progress:
    """The position of a run. With the engine's state it is all that a later life needs: order of samples,
    dropout and learning rate are functions of it.

    Attributes:
        step: optimizer steps done, skipped ones included.
        samples: global count of samples consumed.
        tokens: positions consumed over all ranks.
        skipped: steps skipped so far because something was not finite.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0


def save_checkpoint(session: Session, progress: Progress) -> SaveReport:
    """Save engine and progress into the run folder. Collective."""
    config, header = session.config, session.corpus.header
    extra = {
        "progress": asdict(progress),
        "config": config.model_dump(mode="json"),
        "layout": asdict(session.mesh.layout),
        "engine": engine_name(config),
        "corpus": {"sha256": header.sha256, "tokenizer": header.tokenizer, "tokenizer_sha256": header.tokenizer_sha256},
    }
    return save(
        config.run_folder,
        progress.step,
        session.engine,
        extra,
        session.mesh.world,
        keep=config.checkpoint.keep,
        refused=session.refused,
    )


def resume(session: Session) -> tuple[Progress, Found | None]:
    """Continue from the newest valid checkpoint, as `checkpoint.resume` and `checkpoint.load` say. Collective.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or one must be there and is not.
        ConfigError: `resume=never` over an older run.
        DataError: the corpus has another tokenizer.
    """
    found = choose(session.config, session.mesh.world)
    if found is None:
        return Progress(), None
    found.reader.expect({s.name: s.shape for s in parameter_specs(session.config.model)})
    _check_corpus(session, found)
    session.engine.load(found.reader)
    session.refused = found.refused
    return Progress(**found.extra["progress"]), found


def choose(config: RunConfig, world: Axis) -> Found | None:
    """The checkpoint that a run starts from, if any. Collective."""
    settings, folder = config.checkpoint, config.run_folder
    if settings.resume == "never":
        if committed(folder / FOLDER):
            raise ConfigError(
                "checkpoint.resume",
                "never",
                f"{folder} already holds checkpoints of an earlier run, which would be overwritten",
                "choose another name=..., or resume=auto to continue it",
            )
        found = None
    else:
        found = find(folder, world)
    if found is None and settings.load is not None:
        if not settings.load.exists():
            raise CheckpointError(f"checkpoint.load={settings.load} does not exist: give a run folder or a checkpoint.")
        found = find(settings.load, world)
    if found is None and (settings.resume == "must" or settings.load is not None):
        where = settings.load or folder
        raise CheckpointError(f"{where} holds no checkpoint to start from: give one with checkpoint.load=PATH.")
    return found


def _check_corpus(session: Session, found: Found) -> None:
    before, now = found.extra["corpus"], session.corpus.header
    if before["tokenizer_sha256"] != now.tokenizer_sha256:
        raise DataError(
            f"Corpus {session.corpus.path} was made with tokenizer {now.tokenizer}, but checkpoint {found.path} was "
            f"trained with {before['tokenizer']}: use a corpus made with the latter."
        )


def engine_name(config: RunConfig) -> str:
    """Engine and stage in one word, for records."""
    return config.engine if config.engine == "none" else f"{config.engine}-{config.sharding.stage}"
