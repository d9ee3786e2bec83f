"""The table for people, in the columns of nccl-tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hpctrain.comms.result import Result, Row
from hpctrain.comms.sizes import DTYPES

MOST_GROUPS = 8
"""With more groups that run at once, a size shows the slowest, the middle and the fastest of them."""

Pair = tuple[Row | None, Row | None]
"""The same out of place and in place."""

PERCENTILES = "p50/p95/p99 are of iterations on their slowest rank"


def lines(result: Result) -> Iterator[str]:
    """The whole table."""
    spec = result.spec
    ranks, hosts = len(result.where), len({at.host for at in result.where})
    yield (
        f"# {result.library}: {ranks} ranks on {hosts} host{'s' * (hosts != 1)}; {spec['warm_up']} warm-up iterations; "
        f"{spec['checks']} results checked a line; GB/s are 1e9 B/s; {PERCENTILES}"
    )
    for name, rows in _tables(result.rows).items():
        yield ""
        yield f"# {name}"
        yield from _table(rows)
    yield ""
    wrong = sum(row.elements for row in result.rows)
    yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
    for bad in result.damaged:
        yield f"#   {bad.operation} {bad.size} B {bad.placement}: {bad.wrong} of {bad.checked} results wrong"
    mean = mean_busbw(result.rows)
    yield f"# Avg bus bandwidth    : {'n/a' if mean is None else f'{mean:.6g}'}"


def mean_busbw(rows: Sequence[Row]) -> float | None:
    """GB/s over all rows that have a busbw."""
    found = [row.busbw for row in rows if row.busbw is not None]
    return sum(found) / len(found) if found else None


def _tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        how = f" by {row.algorithm}" if row.algorithm else ""
        found.setdefault(f"{row.operation}{how} over {row.groups}", []).append(row)
    return found


def paired(rows: Sequence[Row]) -> list[Pair]:
    """Rows out of place beside those in place. Sizes that were asked for may come to the same, in whole elements or
    parts of them: then there are several such pairs."""
    found: dict[tuple[object, ...], tuple[list[Row], list[Row]]] = {}
    for row in rows:
        key = (row.operation, row.algorithm, row.groups, row.ranks, row.dtype, row.reduction, row.size)
        found.setdefault(key, ([], []))[row.placement == "in_place"].append(row)
    return [pair for both in found.values() for pair in itertools.zip_longest(*both)]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    groups = {row.ranks for row in rows}
    several = len(groups) > 1
    pairs = paired(rows)
    if len(groups) > MOST_GROUPS:
        pairs = _few(pairs)
    left = f"# {'size':>12} {'count':>12} {'type':>8} {'redop':>6} {'root':>4}"
    right = f" {'time':>9} {'algbw':>7} {'busbw':>7} {'p50':>9} {'p95':>9} {'p99':>9} {'#wrong':>6}"
    units = f" {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'(us)':>9} {'(us)':>9} {'(us)':>9} {'':>6}"
    yield f"{'':{len(left)}}{' out of place':<{len(right)}}{' in place':<{len(right)}}".rstrip()
    yield left + right * 2 + ("  ranks" if several else "")
    yield f"# {'(B)':>12} {'(elements)':>12} {'':>8} {'':>6} {'':>4}{units * 2}".rstrip()
    for pair in pairs:
        row = pair[0] or pair[1]
        assert row is not None
        head = f"  {row.size:>12} {row.count:>12} {DTYPES[row.dtype][0]:>8} {row.reduction:>6} {row.root:>4}"
        yield head + "".join(map(_measures, pair)) + (f"  {named(row.ranks)}" if several else "")


def _few(pairs: Sequence[Pair]) -> list[Pair]:
    by_size: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        row = pair[0] or pair[1]
        assert row is not None
        by_size.setdefault((row.size, row.dtype, row.reduction), []).append(pair)
    out: list[Pair] = []
    for several in by_size.values():
        ordered = sorted(several, key=lambda pair: -max(row.seconds for row in pair if row))
        out += [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return out


def _measures(row: Row | None) -> str:
    if row is None:
        return "".join(f" {'n/a':>{width}}" for width in (9, 7, 7, 9, 9, 9, 6))
    spread = row.spread
    times = [f" {_number(seconds * 1e6, 9)}" for seconds in (spread.p50, spread.p95, spread.p99)]
    checked = f"{row.elements}" if row.checked else "n/a"
    rates = f" {_number(row.algbw, 7)} {_number(row.busbw, 7)}"
    return f" {_number(row.seconds * 1e6, 9)}{rates}{''.join(times)} {checked:>6}"


def _number(value: float | None, width: int) -> str:
    if value is None:
        return f"{'n/a':>{width}}"
    digits = 0 if value >= 10 ** (width - 3) else 1 if value >= 10 ** (width - 4) else 2 if value >= 1 else 3
    return f"{value:>{width}.{digits}f}"


def named(ranks: Sequence[int]) -> str:
    """`0-3`, `0,4,8`, or `0,4,...,28`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 8:
        return f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
    return ",".join(map(str, ranks))
