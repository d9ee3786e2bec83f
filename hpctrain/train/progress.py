"""Where a run stands, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.collective import Found, SaveReport, find, save
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError, ConfigError, DataError
from hpctrain.layout.parameters import saved_shapes
from hpctrain.parallel.agree import everywhere
from hpctrain.parallel.comm import Axis, broadcast_object
from hpctrain.train.session import Session

MOE_FREE = {"moe.capacity", "moe.overflow", "moe.aux_loss", "moe.z_loss", "moe.bias_rate"}
MODEL_FREE = {"dropout", "init_std", "max_seq"} | MOE_FREE
"""Settings of a model that may change over trained weights; shapes are checked on their own."""


@dataclass
class Progress:
    """The position of a run. With the engine's state it is all that a later life needs: order of samples,
    dropout and learning rate are functions of it.

    Attributes:
        step: optimizer steps done, skipped ones included.
        samples: global count of samples consumed.
        tokens: positions consumed over all ranks.
        skipped: steps skipped so far because something was not finite.
        evaluated: step of the last evaluation that came to its end.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    evaluated: int = 0


def save_checkpoint(session: Session, progress: Progress) -> SaveReport:
    """Save engine and progress into the run folder. Collective.

    Raises:
        LaunchError: the folder is no longer this run's.
    """
    everywhere(session.may_save, session.mesh.world)
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
    """Go on from the newest valid checkpoint, as `checkpoint.resume` and `checkpoint.continue_from` say. Collective.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or one must be there and is not.
        ConfigError: `resume=never` over an older run, or another run that is past the last step already.
        DataError: the corpus has another tokenizer.
    """
    found = choose(session.config, session.mesh.world)
    if found is None:
        return Progress(), None
    check_model(session.config, found)
    found.reader.expect(saved_shapes(session.config.model))
    _check_tokenizer(session, found)
    session.engine.load(found.reader)
    session.refused = found.refused
    return Progress(**found.extra["progress"]), found


def choose(config: RunConfig, world: Axis) -> Found | None:
    """The checkpoint that a run starts from, if any. Collective; the first rank looks and decides."""
    settings, folder = config.checkpoint, config.run_folder
    other = settings.continue_from
    has_own, other_there = broadcast_object(
        (bool(committed(folder / FOLDER)), other is not None and other.exists()), world
    )
    if settings.resume == "never" and has_own:
        raise ConfigError(
            "checkpoint.resume",
            "never",
            f"{folder} already holds checkpoints of an earlier run, which would be overwritten",
            "choose another name=..., or resume=auto to continue it",
        )
    found = find(folder, world) if settings.resume != "never" else None
    if found is not None or (other is None and settings.resume != "must"):
        return found
    if other is not None and not other_there:
        raise CheckpointError(
            f"checkpoint.continue_from={other} does not exist: give a run folder, or one checkpoint in it."
        )
    found = find(other, world) if other is not None else None
    if found is None:
        raise CheckpointError(
            f"{other or folder} holds no checkpoint to start from: name one with checkpoint.continue_from=PATH."
        )
    if found.step >= config.train.steps:
        raise ConfigError(
            "train.steps", config.train.steps, f"{found.path} has done {found.step} steps already", "ask for more"
        )
    return found


def check_model(config: RunConfig, found: Found) -> None:
    """Refuse weights of a model that computes something else, though its shapes be the same.

    Raises:
        CheckpointError: names the first setting that differs.
    """
    now = _flat(config.model.model_dump(mode="json"))
    for key, old in _flat(found.extra["config"]["model"]).items():
        if key not in MODEL_FREE and key in now and now[key] != old:
            raise CheckpointError(
                f"{found.path} is of another model: model.{key} was {old!r} and is {now[key]!r}; set it back, or "
                f"choose another name=..."
            )


def _flat(model: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model with those of its experts beside them."""
    moe = model.get("moe") or {}
    return {**model, "moe": bool(moe), **{f"moe.{key}": value for key, value in moe.items()}}


def differences(session: Session, found: Found) -> Iterator[str]:
    """What makes the rest of a resumed run another one than it would have been, in words."""
    before: dict[str, Any] = found.extra["config"]
    now = session.config
    if found.extra["corpus"]["sha256"] != session.corpus.header.sha256:
        yield "the corpus is another one, so its order of samples is new"
    for section, key in (("data", "seq"), ("data", "validation"), ("train", "seed")):
        old, new = before[section].get(key), getattr(getattr(now, section), key)
        if old != new:
            yield f"{section}.{key} was {old} and is {new}, so the order of samples is new"
    old = before["train"]["steps"]
    if old != now.train.steps and now.optimizer.schedule != "constant":
        yield f"train.steps was {old} and is {now.train.steps}, so the learning rate follows another curve"


def _check_tokenizer(session: Session, found: Found) -> None:
    before, now = found.extra["corpus"], session.corpus.header
    if before["tokenizer_sha256"] != now.tokenizer_sha256:
        raise DataError(
            f"Corpus {session.corpus.path} was made with tokenizer {now.tokenizer}, but checkpoint {found.path} was "
            f"trained with {before['tokenizer']}: use a corpus made with the latter."
        )


def engine_name(config: RunConfig) -> str:
    """Engine and stage in one word, for records."""
    return config.engine if config.engine == "none" else f"{config.engine}-{config.sharding.stage}"


def in_words(found: Found, notes: Iterator[str]) -> str:
    """The sentence of a resume: from where, what was refused on the way, what is different now."""
    refused = [f"refused {verdict}" for verdict in found.refused]
    return "; ".join([f"from {found.path}", *refused, *notes])
