"""Measurements on forked gloo ranks."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.comms.rank import measured
from hpctrain.comms.spec import Spec
from hpctrain.comms.torchbackend import TorchParty


def party() -> TorchParty:
    """All forked ranks."""
    return TorchParty(None, "gloo", torch.device("cpu"), 60.0)


def run(plain: dict[str, Any]) -> dict[str, Any]:
    """What a rank measures, as plain data."""
    return measured(Spec.of(plain), party()).plain()
