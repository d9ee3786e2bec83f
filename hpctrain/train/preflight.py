"""What can be known to fail before a rank is started. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.checkpoint.catalog import candidates, committed
from hpctrain.checkpoint.lock import refuse_held
from hpctrain.checkpoint.manifest import FOLDER, load_manifest
from hpctrain.config.keys import as_written
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.data.dataset import open_dataset
from hpctrain.errors import CheckpointError, ConfigError, os_sentence
from hpctrain.layout.budget import checked
from hpctrain.layout.fits import Room
from hpctrain.layout.layout import Layout
from hpctrain.telemetry.memory import host_memory
from hpctrain.train.finished import finished

MOE_FREE = {"moe.capacity", "moe.overflow", "moe.aux_loss", "moe.z_loss", "moe.bias_rate"}
MODEL_FREE = {"dropout", "init_std", "max_seq", "adapter.dropout"} | MOE_FREE
"""Settings of a model that may change over trained weights; shapes are checked on their own."""


def preflight(config: RunConfig, world: int) -> None:
    """Check a run for `world` ranks.

    Raises:
        ConfigError: a setting, or a combination of settings, cannot run.
        DataError: the corpus is not there, damaged, too small or of another vocabulary.
    """
    validate(config, world)
    open_dataset(config)
    check_start(config)


def check_start(config: RunConfig) -> None:
    """Refuse what the checkpoint that a new fine-tuning stands on shows by its manifest."""
    base, continues = config.checkpoint.base, config.checkpoint.continue_from or candidates(config.run_folder)
    if base is None and config.model.adapter is not None and not continues:
        raise no_base(config)
    if base is None or continues:
        return
    found = candidates(base)
    if not found:
        raise nothing_at_base(base)
    try:
        extra = load_manifest(found[0]).extra
    except CheckpointError:
        return
    check_base(config, found[0], extra)


def nothing_at_base(path: Path, named: str = "checkpoint.base=") -> CheckpointError:
    """There is nothing that a fine-tuning could stand on."""
    what = "holds no checkpoint" if path.exists() else "does not exist"
    return CheckpointError(f"{named}{path} {what}: give a run folder, or one checkpoint in it.")


def no_base(config: RunConfig) -> ConfigError:
    """Adapters with nothing to adapt."""
    assert config.model.adapter is not None
    return ConfigError(
        "model.adapter.kind",
        config.model.adapter.kind,
        "adapts the weights of a checkpoint, and none is named",
        "use hpctrain finetune RECIPE --from CHECKPOINT, or set checkpoint.base=CHECKPOINT",
    )


def without_adapters(config: RunConfig) -> RunConfig:
    """The run of the plain model, whose weights adapters lie beside."""
    return config.model_copy(update={"model": config.model.model_copy(update={"adapter": None})})


def check_base(config: RunConfig, path: Path, extra: dict[str, Any]) -> None:
    """Refuse what a fine-tuning cannot stand on.

    Raises:
        CheckpointError: the checkpoint is of no run, has adapters alone, or is of another model.
    """
    try:
        has_adapters = bool(extra["config"]["model"].get("adapter"))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not of a training run ({error!r}); name another checkpoint.") from error
    if has_adapters:
        raise CheckpointError(
            f"{path} holds adapters and no weights of a model: make one of both with hpctrain ckpt merge, and start "
            f"from that."
        )
    check_model(without_adapters(config), path, extra, "leave it as it was: the weights are of one model")


PROCESS = 320 << 20
"""Bytes that a rank takes before it has built anything: the interpreter, PyTorch, DeepSpeed. Measured on Linux."""


def room_here(config: RunConfig, world: int) -> Room:
    """What a rank of a run on this machine may use: of memory, under the limits of control groups, and of the disk
    that it offloads to. What a GPU has is for the ranks to say."""
    host, disk = max(0, host_memory().bytes // world - PROCESS), disk_here(config, world)
    apart = config.cluster.device == "cuda" or (config.cluster.device == "auto" and Path("/dev/nvidiactl").exists())
    return Room(1 << 62, host, disk) if apart else Room(host, None, disk)


def disk_here(config: RunConfig, ranks: int) -> int | None:
    """Free bytes of the disk that a run offloads to, or would, for each of so many ranks; None where there is none.

    Raises:
        ConfigError: it offloads to a disk, and its folder is none.
    """
    offload = config.sharding.offload
    if offload.folder.is_dir():
        return shutil.disk_usage(offload.folder).free // ranks
    if offload.on_disk:
        raise ConfigError(
            "sharding.offload.path", str(offload.folder), "is no folder", "make it, or name one on a disk"
        )
    return None


def check_here(config: RunConfig, world: int) -> None:
    """Refuse a run whose ranks would not fit on this machine. The ranks look again, when they are there.

    Raises:
        ConfigError: says what there is too little of, and what would fit.
    """
    if not finished(config):
        checked(config, Layout.of(config.parallel, world), room_here(config, world), validate)


def check_node(config: RunConfig, memory: int, gpus: bool) -> None:
    """Refuse a job whose ranks would not fit in what they are given of a node's memory.

    Args:
        config: of the run.
        memory: bytes of a node that the job gets.
        gpus: it gets GPUs too, whose memory is for the ranks to look at.

    Raises:
        ConfigError: says what there is too little of, and what would fit.
    """
    cluster = config.cluster
    host = max(0, memory // cluster.gpus_per_node - PROCESS)
    room = Room(1 << 62, host) if gpus and cluster.device != "cpu" else Room(host)
    checked(config, Layout.of(config.parallel, cluster.nodes * cluster.gpus_per_node), room, validate)


def check_folder(config: RunConfig) -> None:
    """Refuse what the run folder alone shows, from manifests and the lock; contents of checkpoints are not read.

    The ranks look again, together. What this cannot tell, a damaged checkpoint for one, is theirs to say.

    Raises:
        ConfigError: `resume=never` over an older run.
        CheckpointError: nothing to start from where there must be, or a checkpoint of another model.
        RunFolderInUse: another process holds the folder.
    """
    settings, folder = config.checkpoint, config.run_folder
    refuse_held(folder)
    if finished(config):
        return
    own, other = candidates(folder), settings.continue_from
    if settings.resume == "never" and committed(folder / FOLDER):
        refuse_used(folder)
    if not own and other is not None and not other.exists():
        raise not_there(other)
    start = own or (candidates(other) if other is not None else [])
    if not start and (other is not None or settings.resume == "must"):
        raise nothing_to_start_from(other or folder)
    for newest in start[:1]:
        try:
            extra = load_manifest(newest).extra
        except CheckpointError:
            return
        if "config" in extra:
            check_model(config, newest, extra)


def make_run_folder(config: RunConfig) -> None:
    """Make the run folder, and those it is in.

    Raises:
        ConfigError: that does not go.
        OSError: nor does it by a failure that `os_sentence` has words for.
    """
    try:
        config.run_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if os_sentence(error) is not None:
            raise
        reason = f"the run folder cannot be made there ({error.strerror})"
        raise ConfigError("folder", str(config.folder), reason, "use another folder") from None


def refuse_used(folder: Path) -> NoReturn:
    """`resume=never`, and there is something to resume."""
    raise ConfigError(
        "checkpoint.resume",
        "never",
        f"{folder} already holds checkpoints of an earlier run, which would be overwritten",
        "choose another name=..., or resume=auto to continue it",
    )


def not_there(path: Path) -> CheckpointError:
    """There is nothing at the path that a run is to go on from."""
    return CheckpointError(
        f"checkpoint.continue_from={path} does not exist: give a run folder, or one checkpoint in it."
    )


def nothing_to_start_from(folder: Path) -> CheckpointError:
    """A run has to start from a checkpoint, and there is none."""
    return CheckpointError(f"{folder} holds no checkpoint to start from: name one with checkpoint.continue_from=PATH.")


def check_model(
    config: RunConfig, path: Path, extra: dict[str, Any], fix: str = "set it back, or choose another name=..."
) -> None:
    """Refuse weights of a model that computes something else, though its shapes be the same.

    Args:
        path: of a checkpoint.
        extra: what the driver has saved in it.
        fix: what to do.

    Raises:
        CheckpointError: names the first setting that differs.
    """
    now = _flat(config.model.model_dump(mode="json"))
    for key, old in _flat(extra["config"]["model"]).items():
        if key not in MODEL_FREE and key in now and now[key] != old:
            was, new = (as_written(value) for value in (old, now[key]))
            raise CheckpointError(f"{path} is of another model: model.{key} was {was} and is {new}; {fix}")


def _flat(model: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model with those of its experts and adapters beside them."""
    flat = dict(model)
    for section in ("moe", "adapter"):
        inside = model.get(section)
        flat[section] = "set" if inside else None
        flat |= {f"{section}.{key}": value for key, value in (inside or {}).items()}
    return flat
