"""Units of memory. Rates are in decimal GB/s, 1e9 bytes."""

from decimal import Decimal

MIB, GIB = 1 << 20, 1 << 30


def in_gib(size: float) -> str:
    """Bytes as GiB, three digits and never an exponent."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{Decimal(f'{size / GIB:.3g}'):f}"
