"""Hostlists: `n[1,003-5]x[0-1]`, and names folded to such a list, as `scontrol show hostnames` and `show hostlist` do.

Held against scontrol 22.05. Where that gives nonsense without a word (a bracket never closed, a sign or a space inside
one), the list is refused here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from hpctrain.errors import ConfigError

MAX_RANGE = 65536
"""Hosts that scontrol takes in one range."""

_NUMBER_DIGITS = 18
"""Longer numbers than this do not fit the 64 bits that Slurm counts in, so they are part of a name."""


def expand(text: str) -> list[str]:
    """The names in a hostlist, in its order, repeated ones too.

    Raises:
        ConfigError: it is no hostlist.
    """
    return [name for part in _parts(text) for name in _names(part, text)]


def fold(names: Iterable[str], sort: bool = False) -> str:
    """The hostlist of names, in their order, or sorted as `scontrol show hostlistsorted` sorts.

    Only the last number of a name is folded, as Slurm does it.
    """
    ranges = [_split(name) for name in (natural(names) if sort else names)]
    out: list[str] = []
    for (prefix, numbered), group in itertools.groupby(ranges, key=lambda r: (r[0], bool(r[1]))):
        if not numbered:
            out += [prefix for _ in group]
            continue
        spans = list(_spans([digits for _, digits in group]))
        alone = len(spans) == 1 and "-" not in spans[0]
        out.append(prefix + (spans[0] if alone else f"[{','.join(spans)}]"))
    return ",".join(out)


def natural(names: Iterable[str]) -> list[str]:
    """Names sorted as Slurm sorts hosts: numbers in them by their value."""
    by_prefix: dict[tuple[str, bool], list[str]] = {}
    for prefix, number in map(_split, names):
        by_prefix.setdefault((prefix, bool(number)), []).append(number)
    out: list[str] = []
    for prefix, numbered in sorted(by_prefix, key=functools.cmp_to_key(_compare_prefixes)):
        numbers = by_prefix[prefix, numbered]
        alike = len(set(map(len, numbers))) == 1 or not any(map(_padded, numbers))
        numbers.sort(key=(lambda n: int(n or 0)) if alike else functools.cmp_to_key(_compare_numbers))
        out += [prefix + number for number in numbers]
    return out


def _refuse(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError("hostlist", shown, why, "write names and ranges, such as n[1-4,7],login")


def _parts(text: str) -> Iterator[str]:
    """What commas, spaces and line ends outside brackets keep apart."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _refuse(text, "every bracket is opened once and closed once")
        if depth == 0 and char in ", \t\r\n":
            if at > start:
                yield text[start:at]
            start = at + 1
    if depth:
        raise _refuse(text, "the last bracket is not closed")
    if start < len(text):
        yield text[start:]


def _names(part: str, text: str) -> Iterator[str]:
    """Names of one part. With several brackets the last runs fastest, then the first, the second and so on."""
    pieces = re.split(r"\[([^\]]*)\]", part)
    if len(pieces) == 1:
        yield part
        return
    if pieces[-1]:
        raise _refuse(text, f"Slurm takes nothing after the last bracket of a name, and there is {pieces[-1]!r}")
    between, values = pieces[:-1:2], [_numbers(inside, text) for inside in pieces[1::2]]
    *outer, last = values
    for slow in itertools.product(*reversed(outer)):
        head = "".join(itertools.chain.from_iterable(zip(between, reversed(slow)))) + between[-1]
        yield from (head + number for number in last)


def _numbers(inside: str, text: str) -> list[str]:
    """`1,003-5` is 1, 003, 004, 005."""
    out: list[str] = []
    for span in inside.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{0,18}))?", span)
        if found is None:
            raise _refuse(text, f"between brackets are numbers and ranges of them, and {span!r} is neither")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise _refuse(text, f"the range {span} goes down")
        if last - first >= MAX_RANGE:
            raise _refuse(text, f"the range {span} has more than {MAX_RANGE} hosts")
        out += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return out


def _split(name: str) -> tuple[str, str]:
    """What comes before a name's last number, and that number; "" if it ends in none."""
    digits = len(name) - len(name.rstrip("0123456789"))
    if not name.isascii() or digits > _NUMBER_DIGITS:
        return name, ""
    return name[: len(name) - digits], name[len(name) - digits :]


def _padded(number: str) -> bool:
    return number[:1] == "0" and len(number) > 1


def _alike(a: str, b: str) -> bool:
    """Whether two numbers can be in one range: one width pads both to what they are."""
    if len(a) == len(b) or not (_padded(a) or _padded(b)):
        return True
    padded, bare = (a, b) if _padded(a) else (b, a)
    return not _padded(bare) and len(bare) >= len(padded)


def _spans(numbers: Sequence[str]) -> Iterator[str]:
    """Numbers that follow each other, as `007-010`."""
    first = last = numbers[0]
    for number in itertools.chain(numbers[1:], [None]):
        if number is not None and int(number) == int(last) + 1 and _alike(first, number):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number


def _compare_prefixes(a: tuple[str, bool], b: tuple[str, bool]) -> int:
    """Slurm's order of what comes before numbers; names without a number first."""
    return _natural(a[0], b[0]) or a[1] - b[1]


def _compare_numbers(a: str, b: str) -> int:
    """Slurm's order of numbers: by value; those padded otherwise apart, by length."""
    return int(a) - int(b) if _alike(a, b) else len(a) - len(b)


def _natural(a: str, b: str) -> int:
    """Order of texts in which a run of digits counts by its value; one that begins with 0 is read as a fraction."""
    left, right = (re.findall(r"[0-9]+|[^0-9]", text) for text in (a, b))
    for x, y in zip(left, right):
        if x == y:
            continue
        if not (x[0].isdigit() and y[0].isdigit()):
            return -1 if x[0] < y[0] else 1
        fraction = "0" in (x[0], y[0])
        return -1 if (x < y if fraction else (len(x), x) < (len(y), y)) else 1
    return len(left) - len(right)
