"""What numbers of hardware files and profiles may be: wide enough for any machine there is, and narrow enough that
nothing which is computed of them overflows or vanishes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _within(least: float, most: float, unit: str, whole: bool = False) -> AfterValidator:
    """A check that a number lies between two others, both allowed."""
    kind = "a whole number of" if whole else "a number of"

    def check(value: float) -> float:
        if not least <= value <= most or (whole and value != int(value)):
            raise ValueError(f"must be {kind} {unit}, {least:g} to {most:g}")
        return value

    return AfterValidator(check)


ByteRate = Annotated[float, _within(1, 1e18, "bytes/s")]
FlopRate = Annotated[float, _within(1, 1e21, "FLOP/s")]
Bytes = Annotated[float, _within(1, 1e21, "bytes")]
SomeBytes = Annotated[float, _within(0, 1e21, "bytes")]
Units = Annotated[float, _within(1, 1e6, "units", whole=True)]
Copies = Annotated[float, _within(1, 2, "copies", whole=True)]
Ports = Annotated[float, _within(0, 1e4, "ports", whole=True)]
Ratio = Annotated[float, _within(0.01, 1e4, "times")]
LineRate = Annotated[float, _within(1, 1e30, "bytes/s")]  # a fit whose bytes hardly show has a high one
Hours = Annotated[float, _within(0.001, 1e9, "hours")]
Seconds = Annotated[float, _within(0, 1e7, "seconds")]
