"""What software reaches of the hardware's numbers: all fitted constants of the planner, in `constants.yaml`.

`benchmarks/planner/fit.py` writes the file from three published tables and nothing else. `docs/planner-errors.md` holds
the fingerprint of the constants it was made with, and a test compares the two.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.config import plain_yaml
from hpctrain.config.schema import Count, Section
from hpctrain.plan import bounds
from hpctrain.plan.files import section

Positive = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.5)]


class Line(Section):
    """A way of sending: seconds before the first byte, and bytes/s of a device from then on.

    Bytes are those that leave a device (`layout.traffic.wire`), so that the rate is what nccl-tests calls busbw.
    """

    latency: Annotated[float, Field(ge=0.0)]
    rate: Positive


class Link(Section):
    """What software reaches of a kind of link, in a group of `ranks`.

    Latencies inside a domain are those of an all-reduce, which goes around a ring twice.

    A collective takes the fastest of its lines, as NCCL chooses among its protocols; rates are shares of what the
    hardware says. `hop` is what each further rank of a ring costs, seconds.
    """

    ranks: int = 8
    lines: tuple[Line, ...]
    all_reduce: Share | None = None
    hop: Annotated[float, Field(ge=0.0)]
    source: str


class Training(Section):
    """What a step reaches of what a benchmark of one operation does.

    Attributes:
        collective: of collectives over the links of a domain.
    """

    matmul: Share
    memory: Share
    collective: Share
    source: str


class Constants(Section):
    """All fitted constants.

    Attributes:
        matmul: of a device's dense peak by dtype, the share that a product reaches whose tiles fill it for ever.
        links: by `Domain.link` and `Fabric.network`.
        training: of all three by how a step differs from a benchmark.
    """

    matmul: dict[str, dict[str, Share]]
    links: dict[str, Link]
    training: Training


@cache
def constants() -> Constants:
    """The constants of the package."""
    return Constants.model_validate_json(json.dumps(plain_yaml.read(_file().read_text(encoding="utf-8"))))


def fingerprint() -> str:
    """Twelve hexadecimal digits that change with any constant."""
    return hashlib.sha256(_file().read_bytes()).hexdigest()[:12]


def _file() -> Path:
    return Path(str(files("hpctrain.plan").joinpath("constants.yaml")))


Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class MeasuredLine(Line):
    """A line of which both are measured, not shares of what hardware says."""

    latency: bounds.Seconds
    rate: bounds.LineRate


class Measured(Section):
    """A piecewise fit of one operation in one kind of group, as `hpctrain bench` writes it.

    Attributes:
        backend: nccl, gloo, mpi.
        devices, hosts: of the group that was measured.
        lines: the operation takes the fastest; bytes are those that leave a device, rates are bytes/s.
    """

    operation: Operation
    backend: str
    devices: Count
    hosts: Count
    lines: Annotated[tuple[MeasuredLine, ...], Field(min_length=1)]


def profile(path: Path) -> Profile:
    """A profile that was measured: a file that `hpctrain bench fit`, `gemm` and `memory` write.

    Raises:
        ConfigError: there is no such file, or it is not as it should be.
    """
    return section(Profile, path, "profile", str(path), "make one with hpctrain bench")


class Profile(Section):
    """What was measured on one cluster. It goes before the hardware file and the constants.

    Attributes:
        cluster: name of the hardware file it belongs to.
        matmul: FLOP/s by dtype that large products reach.
        memory_bandwidth: bytes/s of a device.
        collectives: fits, of which that of the nearest group counts.
    """

    cluster: str
    matmul: dict[str, bounds.FlopRate] = Field({})
    memory_bandwidth: bounds.ByteRate | None = None
    collectives: tuple[Measured, ...] = ()
