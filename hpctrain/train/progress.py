"""Where a run stands, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.collective import Found, SaveReport, find, save
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.config.keys import as_written
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError, ConfigError, DataError
from hpctrain.layout import offload
from hpctrain.layout.memory import away_of
from hpctrain.layout.offload import USUAL
from hpctrain.layout.parameters import saved_shapes
from hpctrain.parallel.agree import everywhere
from hpctrain.parallel.comm import Axis, broadcast_object
from hpctrain.telemetry.disk import kept_rates
from hpctrain.train.base import NewAdapters, TrainedAdapters, note_of, open_base
from hpctrain.train.preflight import MOE_FREE, check_model, not_there, nothing_to_start_from, refuse_used
from hpctrain.train.session import Session

NUMBERS = (
    *("optimizer", "data.document_mask", "train.global_batch", "train.precision", "train.label_smoothing"),
    *("train.z_loss", "model.dropout", "model.adapter.dropout", *(f"model.{key}" for key in sorted(MOE_FREE))),
)
"""Settings, or whole sections, that may change over trained weights and change what is computed from then on.
Micro-batch, layout and engine change the order of sums alone."""


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
    config, data = session.config, session.data
    extra = {
        "progress": asdict(progress),
        "config": config.model_dump(mode="json"),
        "layout": asdict(session.mesh.layout),
        "engine": config.engine_name,
        "corpus": {"sha256": data.sha256, "tokenizer": data.tokenizer, "tokenizer_sha256": data.tokenizer_sha256},
    }
    if session.base is not None and config.model.adapter is not None:
        extra["base"] = note_of(session.base)
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
    """Go on from the newest valid checkpoint, as `checkpoint.resume` and `checkpoint.continue_from` say; where there is
    none, begin with the weights of `checkpoint.base`. Collective.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or one must be there and is not.
        ConfigError: `resume=never` over an older run, or another run that is past the last step already.
        DataError: the corpus has another tokenizer.
    """
    config = session.config
    found = choose(config, session.mesh.world)
    adapted = config.model.adapter is not None
    if found is not None:
        progress = position(found)
        check_model(config, found.path, found.extra)
        found.reader.expect(saved_shapes(config.model))
        _check_tokenizer(session, found)
    if adapted or (found is None and config.checkpoint.base is not None):
        session.base = open_base(config, session.mesh.world, found)
        _check_tokenizer(session, session.base)
    if found is None:
        if session.base is not None:
            session.engine.load(NewAdapters(session.base.reader, config))
        return Progress(), None
    over = found.reader if session.base is None else TrainedAdapters(found.reader, session.base.reader, config)
    session.engine.load(over)
    session.refused = found.refused
    return progress, found


def position(found: Found) -> Progress:
    """Where the run of a checkpoint stood.

    Raises:
        CheckpointError: its manifest, sound as it is, is none of a run's.
    """
    extra = found.extra
    try:
        progress = Progress(**extra["progress"])
        known = all(isinstance(n, int) and n >= 0 for n in asdict(progress).values())
        sections = [extra["config"][name] for name in ("model", "data", "train")] + [extra["corpus"]]
        known &= all(isinstance(section, dict) for section in sections) and {"seed", "steps"} <= set(
            extra["config"]["train"]
        )
        known &= all(isinstance(extra["corpus"].get(k), str) for k in ("sha256", "tokenizer", "tokenizer_sha256"))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found.path} is not of a training run ({error!r}); name another checkpoint.") from error
    if not known:
        raise CheckpointError(f"{found.path} is not of a training run: its position is {extra['progress']!r:.80}; "
                              f"name another checkpoint.")  # fmt: skip
    return progress


def choose(config: RunConfig, world: Axis) -> Found | None:
    """The checkpoint that a run starts from, if any. Collective; the first rank looks and decides."""
    settings, folder = config.checkpoint, config.run_folder
    other = settings.continue_from
    has_own, other_there = broadcast_object(
        (bool(committed(folder / FOLDER)), other is not None and other.exists()), world
    )
    if settings.resume == "never" and has_own:
        refuse_used(folder)
    found = find(folder, world) if settings.resume != "never" else None
    if found is not None or (other is None and settings.resume != "must"):
        return found
    if other is not None and not other_there:
        raise not_there(other)
    found = find(other, world) if other is not None else None
    if found is None:
        raise nothing_to_start_from(other or folder)
    if found.step >= config.train.steps:
        raise ConfigError(
            "train.steps", config.train.steps, f"{found.path} has done {found.step} steps already", "ask for more"
        )
    return found


def differences(session: Session, found: Found) -> Iterator[str]:
    """What makes the rest of a resumed run another one than it would have been, in words."""
    before: dict[str, Any] = found.extra["config"]
    now = session.config
    if found.extra["corpus"]["sha256"] != session.data.sha256:
        yield "the corpus or the blend is another one, so its order of samples is new"
    for section, key in (("data", "seq"), ("data", "packing"), ("data", "validation"), ("train", "seed")):
        new = getattr(getattr(now, section), key)
        old = before[section].get(key, "windows" if key == "packing" else None)  # older runs had nothing else
        if old != new:
            yield f"{section}.{key} was {old} and is {new}, so the order of samples is new"
    old = before["train"]["steps"]
    if old != now.train.steps and now.optimizer.schedule != "constant":
        yield f"train.steps was {old} and is {now.train.steps}, so the learning rate follows another curve"
    then, later = _leaves(before), _leaves(now.model_dump(mode="json"))
    for key, value in later.items():
        counts = any(key == name or key.startswith(f"{name}.") for name in NUMBERS)
        if counts and key in then and then[key] != value:
            yield f"{key} was {as_written(then[key])} and is {as_written(value)}"


def _leaves(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _check_tokenizer(session: Session, found: Found) -> None:
    before, now = found.extra["corpus"], session.data
    if before["tokenizer_sha256"] != now.tokenizer_sha256:
        raise DataError(
            f"Corpus {now.corpora[0].path} was made with tokenizer {now.tokenizer}, but checkpoint {found.path} was "
            f"trained with {before['tokenizer']}: use a corpus made with the latter."
        )


def engine_in_words(config: RunConfig) -> str:
    """Engine and stage for people."""
    stage = f", ZeRO {config.sharding.stage}" if config.engine == "deepspeed" else ""
    return f"engine {config.engine}{stage}"


def offload_in_words(session: Session) -> str:
    """What a node keeps off its devices, and what that costs a step."""
    config, layout = session.config, session.mesh.layout
    rates = kept_rates(config.sharding.offload.folder) or USUAL
    ranks, gpu = config.cluster.gpus_per_node, session.mesh.device.type == "cuda"
    return offload.in_words(away_of(config, layout, rates), ranks, rates, gpu)


def in_words(found: Found, notes: Iterator[str]) -> str:
    """The sentence of a resume: from where, what was refused on the way, what is different now."""
    refused = [f"refused {verdict}" for verdict in found.refused]
    return "; ".join([f"from {found.path}", *refused, *notes])
