"""`hpctrain generate`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click

from hpctrain.cli.overrides import overrides_argument


@click.command(epilog='Example: hpctrain generate runs/gpt-tiny --prompt "def main(" parallel.tp=1')
@click.argument("run", type=click.Path(path_type=Path))
@overrides_argument()
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1), default=200, show_default=True, help="Longest continuation.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True, help="0 takes the likeliest.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Choose among the k likeliest; 0 among all.")
@click.option("--seed", type=int, default=0, show_default=True)
def generate(
    run: Path, overrides: tuple[str, ...], prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> None:
    """Sample text from the newest checkpoint in the folder RUN, or from the checkpoint RUN.

    parallel.tp=N reads the checkpoint under another tensor parallelism, on N ranks of this machine. A run's
    pipeline and context parallelism are not used.
    """
    from hpctrain.config.load import load
    from hpctrain.errors import CheckpointError, ConfigError

    if not math.isfinite(temperature):
        raise ConfigError("--temperature", temperature, "must be finite", "0 takes the likeliest token")
    path = next((p for p in (run / "config.yaml", run.parent.parent / "config.yaml") if p.exists()), None)
    if path is None:
        raise CheckpointError(f"{run} is not a run folder (no config.yaml): give the folder that training named.")
    from hpctrain.config.schema import RunConfig
    from hpctrain.config.validate import validate
    from hpctrain.launch.local.run import run_local
    from hpctrain.train.generate import Sampling, generate_main

    config = load(path, overrides)
    settings = config.model_dump(mode="json")
    settings["sharding"] |= {"engine": "none", "stage": 0}
    settings["parallel"] |= {"pp": 1, "schedule": "1f1b", "chunks": 1, "stage_layers": None}
    settings["parallel"] |= {"cp": 1, "sp": False}  # ways to keep less for backward; the context here has any length
    settings["cluster"] |= {"nodes": 1, "gpus_per_node": config.parallel.tp}
    validate(RunConfig.model_validate(settings), config.parallel.tp)
    how = Sampling(tokens, temperature, top_k, seed)
    text, step = run_local(generate_main, (settings, run, prompt, how), config.parallel.tp, path.parent)[0]
    print(f"from step {step} of {path.parent}", file=sys.stderr)
    print(text)
