"""Rules of adapters: between their settings and the model, engine and layout that they are in. See `validate`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpctrain.config.keys import as_written, nearest
from hpctrain.config.schema import TARGETS, AdapterConfig, RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs, trained_specs
from hpctrain.layout.placement import place
from hpctrain.layout.stages import stages

AT = "model.adapter"


def check_adapters(config: RunConfig) -> None:
    """Whatever does not depend on the layout.

    Raises:
        ConfigError: the first rule that is broken.
    """
    adapter = config.model.adapter
    if adapter is None:
        return
    _targets(config, adapter)
    _kind(adapter)
    moe = config.model.moe
    if moe is not None and moe.bias_rate:
        reason = "moves the routers' biases, and beside adapters all else stays as it is"
        raise ConfigError("model.moe.bias_rate", moe.bias_rate, reason, "use 0")


def check_adapters_of(config: RunConfig, layout: Layout) -> None:
    """Whatever depends on the layout.

    Raises:
        ConfigError: the first rule that is broken.
    """
    adapter = config.model.adapter
    if adapter is None:
        return
    if adapter.adapts("experts") and layout.etp > 1:
        reason = "splits each expert, and adapters of experts are not split"
        raise ConfigError("parallel.etp", layout.etp, reason, f"use 1, or leave experts out of {AT}.targets")
    if adapter.kind == "qlora":
        _blocks(config, adapter, layout)
    if config.engine == "fsdp" or config.sharding.stage == 3:
        path, value = ("sharding.engine", "fsdp") if config.engine == "fsdp" else ("sharding.stage", 3)
        reason = f"shards what is not trained, too, which is not yet proved beside {AT}"
        raise ConfigError(path, value, reason, "use sharding.engine=auto with sharding.stage=0, 1 or 2")
    if config.engine != "none":
        _idle_stages(config, layout)


def _targets(config: RunConfig, adapter: AdapterConfig) -> None:
    """Each is the name of a linear, or of some, and the model has such."""
    path, given = f"{AT}.targets", as_written(adapter.targets)
    known = [*TARGETS, *(name for group in TARGETS.values() for name in group if name not in TARGETS)]
    held = {spec.linear for spec in parameter_specs(config.model) if spec.linear is not None}
    if adapter.targets is not None and not adapter.targets:
        raise ConfigError(path, given, "names no linear, so nothing would be trained", "use null for the usual ones")
    for name in adapter.targets or ():
        if name not in known:
            near = nearest(name, known)
            fix = f"use {near}, which is nearest" if near else f"use some of {', '.join(known)}"
            raise ConfigError(path, given, f"no linear is called {name}", fix)
        if not held.intersection(TARGETS.get(name, (name,))):
            fix = f"use some of {', '.join(sorted(held))}"
            raise ConfigError(path, given, f"this model has no linear called {name}", fix)
    if not any(adapter.adapts(name) for name in held):
        raise ConfigError(
            path, given, "this model has none of the usual ones", f"use some of {', '.join(sorted(held))}"
        )


def _kind(adapter: AdapterConfig) -> None:
    if adapter.kind != "qlora" and adapter.block != AdapterConfig().block:
        reason = f"is for weights in 4 bits, and {AT}.kind={adapter.kind} has none"
        raise ConfigError(f"{AT}.block", adapter.block, reason, f"use {AdapterConfig().block}, or {AT}.kind=qlora")
    if not adapter.adapts("experts"):
        return
    if adapter.kind == "dora":
        reason = "has magnitudes for linears that every token goes through, and experts are none"
        raise ConfigError(f"{AT}.kind", "dora", reason, f"use lora, or leave experts out of {AT}.targets")
    if adapter.dropout:
        reason = "drops by place in a sample, and rows of experts have left theirs"
        raise ConfigError(f"{AT}.dropout", adapter.dropout, reason, f"use 0, or leave experts out of {AT}.targets")


def _blocks(config: RunConfig, adapter: AdapterConfig, layout: Layout) -> None:
    """Blocks lie within a row, and within the part of it that a rank holds."""
    widths = dict(_widths(config, layout))
    fits = math.gcd(*widths.values())
    for name, width in widths.items():
        if width % adapter.block:
            allowed = [n for n in range(2, fits + 1, 2) if fits % n == 0]
            near = max((n for n in allowed if n <= adapter.block), default=None)
            reason = f"must divide rows of 4-bit weights, and a rank has {width} elements of one of {name}"
            fix = f"use {near}, or another parallel.tp" if near else "use another parallel.tp, or kind=lora"
            raise ConfigError(f"{AT}.block", adapter.block, reason, fix)


def _widths(config: RunConfig, layout: Layout) -> Iterator[tuple[str, int]]:
    """Elements of a row that a rank holds, of one matrix of each kind."""
    seen = set()
    for spec in parameter_specs(config.model):
        if spec.block is not None and (spec.shape, spec.cuts) not in seen:
            seen.add((spec.shape, spec.cuts))
            yield spec.name, place(spec, config.model, layout, 0).local_shape[-1]


def _idle_stages(config: RunConfig, layout: Layout) -> None:
    """DeepSpeed makes no optimizer of nothing."""
    trained = trained_specs(config.model)
    busy = {stage.home for stage in stages(config.model, layout) if any(map(stage.holds, trained))}
    if len(busy) < layout.pp:
        reason = f"leaves a rank of the pipeline without {AT}.targets, and DeepSpeed needs something to train on each"
        raise ConfigError("parallel.pp", layout.pp, reason, "use sharding.stage=0, or other targets")
