"""Kinds of measurements, by name."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.comms.backend import Party
from hpctrain.comms.collectives import collectives, night
from hpctrain.comms.groups import Where
from hpctrain.comms.mix import mix
from hpctrain.comms.overlap import measure_overlap
from hpctrain.comms.pairs import pairs, slow
from hpctrain.comms.result import Result
from hpctrain.comms.spec import Spec

Kind = Callable[[Spec, Party, list[Where], Result], Result]

KINDS: dict[str, Kind] = {
    "collectives": collectives,
    "night": night,
    "pairs": pairs,
    "slow": slow,
    "mix": mix,
    "overlap": measure_overlap,
}
