"""Sizes, dtypes and reductions as a command line names them."""

from __future__ import annotations

import re

from hpctrain.errors import ConfigError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 1 << 40
FORM = "BEGIN:END:FACTOR as in 1K:4G:2, or sizes with commas between, of digits and K, M or G (1024)"

DTYPES = {
    "int8": ("int8", 1),
    "uint8": ("uint8", 1),
    "int32": ("int32", 4),
    "int64": ("int64", 8),
    "float16": ("half", 2),
    "bfloat16": ("bfloat16", 2),
    "float32": ("float", 4),
    "float64": ("double", 8),
}
"""By torch's name: nccl-tests' name, and bytes."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg")


def size(text: str) -> int:
    """Bytes of `512`, `1K`, `4MiB`, `2G`.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError("--sizes", text, f"must be {FORM}")
    bytes_ = int(found[1]) * UNITS[found[2].upper()]
    if not 0 < bytes_ <= LARGEST:
        raise ConfigError("--sizes", text, "a size is between 1 byte and 1024G")
    return bytes_


def sizes(text: str) -> tuple[int, ...]:
    """The sizes of a range or a list, bytes, ascending.

    Raises:
        ConfigError: it is neither.
    """
    if ":" not in text:
        return tuple(sorted({size(part) for part in text.split(",")}))
    first, last, *factor = text.split(":")
    begin, end = size(first), size(last)
    if len(factor) > 1 or (factor and not re.fullmatch(r"\d+(\.\d+)?", factor[0])):
        raise ConfigError("--sizes", text, f"must be {FORM}")
    times = float(factor[0]) if factor else 2.0
    if begin > end or times < 1.1:
        raise ConfigError("--sizes", text, "must begin below its end, with a factor of at least 1.1")
    found, at = [], float(begin)
    while round(at) <= end:
        found.append(round(at))
        at *= times
    return tuple(dict.fromkeys(found))


def named(bytes_: float) -> str:
    """`1K`, `3M`, `1.5G`, or bytes."""
    for unit in ("G", "M", "K"):
        if bytes_ >= UNITS[unit]:
            return f"{bytes_ / UNITS[unit]:.4g}{unit}"
    return f"{bytes_:.0f}"
