"""Whether a run has nothing left to do, from its folder alone: no model is built, nothing is loaded or evaluated."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint.catalog import candidates
from hpctrain.checkpoint.manifest import Manifest, load_manifest
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError
from hpctrain.telemetry.metrics import EvalMetrics, read_records
from hpctrain.telemetry.sinks import METRICS_FILE


class Finished(NamedTuple):
    """Where a run has ended.

    Attributes:
        steps: done in all.
        last: its evaluation there; None where nothing is kept for validation.
    """

    steps: int
    last: EvalMetrics | None


def finished(config: RunConfig) -> Finished | None:
    """How a run ended, if it has done all steps, saved and evaluated, under the same settings.

    None also where that cannot be told in moments: then whoever continues the run finds out. Contents of the newest
    checkpoint are not read, as nothing is to start from it; its files have to be there, whole.
    """
    if config.checkpoint.resume == "never":
        return None
    with suppress(CheckpointError, OSError):
        for newest in candidates(config.run_folder)[:1]:
            manifest = load_manifest(newest)
            if manifest.step < config.train.steps or not _whole(newest, manifest) or not _alike(config, manifest):
                return None
            last = _evaluation(config.run_folder / METRICS_FILE, manifest.step)
            return Finished(manifest.step, last) if last or not config.data.validation else None
    return None


def _whole(folder: Path, manifest: Manifest) -> bool:
    return all((folder / record.name).stat().st_size == record.bytes for record in manifest.files)


def _alike(config: RunConfig, manifest: Manifest) -> bool:
    """Whether the checkpoint was written under these settings, on however many nodes."""

    def settings(of: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key != "cluster"}

    return settings(manifest.extra.get("config", {})) == settings(config.model_dump(mode="json"))


def _evaluation(path: Path, step: int) -> EvalMetrics | None:
    last: EvalMetrics | None = None
    for record in read_records(path):
        if record["kind"] == "eval" and record.get("step") == step:
            fields = EvalMetrics.__dataclass_fields__
            last = EvalMetrics(**{key: record[key] for key in fields if key in record})  # type: ignore[arg-type]
    return last
