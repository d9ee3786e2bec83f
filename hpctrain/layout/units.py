"""Units of memory. Rates are in decimal GB/s, 1e9 bytes."""

MIB, GIB = 1 << 20, 1 << 30
