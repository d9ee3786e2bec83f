"""One checkpoint of a whole model from adapters and the weights that they were trained over. By one process, a matrix
at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.collective import Found, SaveReport, find, save
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.config.load import dump
from hpctrain.config.schema import RunConfig
from hpctrain.data.tokenizer import TOKENIZER_FILE
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.layout.parameters import ParameterSpec, bias_specs, parameter_specs
from hpctrain.model.packed import Packed
from hpctrain.parallel.comm import Axis
from hpctrain.sharding.state import WEIGHT, Piece, StateReader
from hpctrain.telemetry.meter import Meter
from hpctrain.train.base import open_base
from hpctrain.train.preflight import without_adapters
from hpctrain.train.progress import position

CPU = torch.device("cpu")


def merge(run: Path, out: Path, base: Path | None = None) -> SaveReport:
    """Make a run folder with the checkpoint of a whole model: weights alone, without an optimizer's state.

    What was in 4 bits is merged as it was computed with, so that the model computes what it did with its adapters.

    Args:
        run: folder of a run with adapters, or one checkpoint in it.
        out: folder to be made.
        base: the checkpoint that they were trained over, if it was moved.

    Raises:
        CheckpointError: there are no adapters, or not what they were trained over.
        ConfigError: `out` is there.
    """
    if committed(out / FOLDER) or (out.exists() and not out.is_dir()):
        raise ConfigError("OUT", str(out), "is there already", "name another folder")
    alone = Axis("self", (0,), 0, None, Meter())
    own = find(run, alone)
    if own is None:
        raise CheckpointError(f"{run} holds no checkpoint: give a run folder, or one checkpoint in it.")
    position(own)  # of a run
    config = RunConfig.model_validate(own.extra["config"])
    if config.model.adapter is None:
        raise CheckpointError(f"{own.path} has no adapters to merge: it holds a whole model.")
    if base is not None:
        own.extra["base"] = {**own.extra["base"], "path": str(base)}
    under = open_base(config, alone, own)
    plain = without_adapters(config)
    plain = plain.model_copy(update={"checkpoint": plain.checkpoint.model_copy(update={"base": None})})
    extra = {key: value for key, value in own.extra.items() if key != "base"}
    extra |= {"config": plain.model_dump(mode="json"), "engine": "merged", "layout": {}}
    extra["merged"] = {"adapters": str(own.path.absolute()), "base": str(under.path.absolute())}
    out.mkdir(parents=True, exist_ok=True)
    report = save(out, own.step, Merged(config, own, under), extra, alone)
    (out / "config.yaml").write_text(dump(plain.model_copy(update={"folder": out.absolute().parent, "name": out.name})))
    tokenizer = own.path.parent.parent / TOKENIZER_FILE
    if tokenizer.is_file():
        (out / TOKENIZER_FILE).write_bytes(tokenizer.read_bytes())
    return report


class Merged:
    """The state of the whole model, to be saved.

    Args:
        config: of the run with adapters.
        own: its checkpoint.
        base: what it was trained over.
    """

    def __init__(self, config: RunConfig, own: Found, base: Found) -> None:
        self._config, self._own, self._base = config, own, base
        specs = parameter_specs(config.model)
        self._frozen = [spec for spec in specs if not spec.trained]
        self._beside = dict(factors_beside(specs))

    def pieces(self) -> Iterator[Piece]:
        """As `StateSource`: weights, whole."""
        for spec in (*self._frozen, *bias_specs(self._config.model)):
            start = (0,) * len(spec.shape)
            stored = self._base.reader.tensors()[spec.name, WEIGHT][0].dtype
            dtype = getattr(torch, stored)
            yield Piece(spec.name, WEIGHT, spec.shape, start, spec.shape, dtype, self._fetch(spec, dtype))

    def scalars(self) -> dict[str, float]:
        """As `StateSource`."""
        return {"step": float(self._own.step)}

    def load(self, reader: StateReader) -> None:
        raise AssertionError("this is made to be saved")

    def _fetch(self, spec: ParameterSpec, dtype: torch.dtype) -> Any:
        return lambda: self._values(spec).to(dtype).contiguous()

    def _values(self, spec: ParameterSpec) -> Tensor:
        read, factors = self._base.reader.read, self._beside.get(spec.name, ())
        whole = (0,) * len(spec.shape)
        if spec.block is None:
            weight = read(spec.name, WEIGHT, whole, spec.shape)
        else:
            packed = Packed(spec.shape, spec.block)
            packed.fill(lambda start, shape: read(spec.name, WEIGHT, start, shape), CPU)
            weight = packed.values(torch.float32)
        if not factors:
            return weight
        a, b, *magnitude = (
            self._own.reader.read(f.name, WEIGHT, (0,) * len(f.shape), f.shape).double() for f in factors
        )
        assert self._config.model.adapter is not None
        changed = weight.double() + self._config.model.adapter.scale * (b @ a)
        if magnitude:
            changed *= (magnitude[0] / changed.norm(dim=-1))[..., None]
        return changed


def factors_beside(specs: tuple[ParameterSpec, ...]) -> Iterator[tuple[str, list[ParameterSpec]]]:
    """Names of weights, and what is trained beside each: it follows the weight in the table."""
    weight, factors = "", list[ParameterSpec]()
    for spec in specs:
        if spec.trained:
            factors.append(spec)
            continue
        if factors:
            yield weight, factors
        weight, factors = spec.name, []
