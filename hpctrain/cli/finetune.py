"""`hpctrain finetune`: a recipe over the weights of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.outputs import Output
from hpctrain.cli.overrides import overrides_argument

if TYPE_CHECKING:
    from hpctrain.config.schema import RunConfig

EXAMPLE = "hpctrain finetune lora --from runs/gpt-tiny name=mine data.corpus=corpora/mine.h5 model.adapter.rank=16"


@click.command(epilog=f"\b\nExample:  {EXAMPLE}")
@click.argument("recipe")
@overrides_argument()
@click.option(
    "--from", "base", required=True, type=click.Path(path_type=Path), help="A run folder, or one checkpoint in it."
)
@click.option(
    "--write",
    "out",
    type=Output("--write"),
    help="Write the recipe for hpctrain submit, and train nothing.",
)
def finetune(recipe: str, overrides: tuple[str, ...], base: Path, out: Path | None) -> None:
    """Train RECIPE from the weights of a checkpoint, and nothing else of it: step 0, no optimizer state.

    The model is that of the checkpoint; RECIPE says how it is trained. With model.adapter its weights stay as they are,
    and what is trained and saved lies beside them. A run lives in folder/name and is continued if it has a checkpoint.
    """
    from hpctrain.cli.train import as_rank, on_this_machine
    from hpctrain.config.load import dump
    from hpctrain.launch.life.identity import detect

    config = resolved(recipe, overrides, base)
    if out is not None:
        from hpctrain.train.preflight import preflight

        preflight(config, config.cluster.nodes * config.cluster.gpus_per_node)
        out.write_text(dump(config))
        click.echo(f"hpctrain submit {out}")
        return
    identity = detect(os.environ)
    if identity is not None:
        as_rank(config.model_dump(mode="json"), identity.rank)
    else:
        on_this_machine(config)


def resolved(recipe: str, overrides: tuple[str, ...], base: Path) -> RunConfig:
    """The recipe with the model of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not of a run.
    """
    from hpctrain.checkpoint.catalog import candidates
    from hpctrain.checkpoint.manifest import load_manifest
    from hpctrain.config.load import load
    from hpctrain.errors import CheckpointError
    from hpctrain.train.preflight import check_base, nothing_at_base

    plain = load(recipe, overrides)
    found = candidates(base)
    if not found:
        raise nothing_at_base(base, "--from ")
    try:
        extra = load_manifest(found[0]).extra
    except CheckpointError as error:
        raise CheckpointError(f"{found[0]} is not a usable checkpoint: {error}.") from error
    model = {key: value for key, value in extra.get("config", {}).get("model", {}).items() if key != "adapter"}
    place = f"checkpoint.base={base.absolute()}"
    config = load(recipe, [f"model={json.dumps(model)}", *overrides, place] if model else [*overrides, place])
    check_base(config, found[0], extra)
    for note in _notes(plain, config):
        click.echo(f"note: {note}, as in {found[0]}", err=True)
    return config


def _notes(plain: RunConfig, config: RunConfig) -> Iterator[str]:
    """Settings of a model that a recipe names, and the checkpoint has otherwise."""
    from hpctrain.config.keys import as_written

    usual: dict[str, Any] = type(config.model)().model_dump(mode="json")
    asked, got = plain.model.model_dump(mode="json"), config.model.model_dump(mode="json")
    for key, value in asked.items():
        if key != "adapter" and value not in (got[key], usual[key]):
            yield f"model.{key} is {as_written(got[key])} and not {as_written(value)}"
