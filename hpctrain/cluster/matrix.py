"""The matrices that `nvidia-smi topo` and `rocm-smi` print, as they arrive: pasted, cut, glued together.

A row is trusted when its `X` stands under its own name: a cell lost or doubled before it would have moved it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.source import clean_lines

AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_AFFINITY = re.compile("|".join(a.replace(" ", r"\s+") for a in AFFINITIES), re.IGNORECASE)
_VERBS = r"(?:mlx[45]|hfi1|qib|irdma|efa|rxe|siw|erdma|ionic|bnxt_re|ib|roce|ibp|rocep|rdmap|cxgb4|hns)_?(?:bond_?)?"
_NAME = re.compile(rf"(?:GPU|NIC)\d+|{_VERBS}\d+(?:_\d+)?(?=mlx|GPU|NIC|\s|$)|[a-z][a-z_]*[0-9][a-z0-9_]*")
_GPU = re.compile(r"GPU\d+")
SELF = "X"


@dataclass
class Matrix:
    """A matrix.

    Attributes:
        columns: names over the columns, as read; "" for one that cannot be read.
        rows: of each row's name, its cells; "" for one that cannot be read. Only rows that can be trusted.
        rest: of each row's name, what stands after its cells: tab-separated cells, or words.
        affinities: which of AFFINITIES the header names.
        tabbed: rows whose cells are separated by tabs, so that blank ones are seen.
        cut: rows that end early.
    """

    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    rest: dict[str, list[str]] = field(default_factory=dict)
    affinities: tuple[str, ...] = ()
    tabbed: set[str] = field(default_factory=set)
    cut: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Names over columns that no row has."""
        return [name for name in self.columns if name and name not in self.rows]


def read_matrix(text: str, words: str, this: str = SELF) -> Matrix | None:
    """The first matrix in a text, None if there is none.

    Args:
        words: regular expression of what a cell may hold, besides `this`.
        this: what stands where a row meets its own column.
    """
    cell = re.compile(rf"{words}|{this}")
    lines = clean_lines(text)
    found = next(((i, h) for i, line in enumerate(lines) if (h := _header(line, cell))), None)
    if found is None:
        return _headless(lines, cell, this)
    start, matrix = found
    for i, line in enumerate(lines[start + 1 :], start + 1):
        if (again := _header(line, cell)) is not None:
            if again.columns == matrix.columns and not matrix.rows:
                continue  # the header is printed twice
            matrix.problems.append("a second matrix follows, which is not read")
            break
        if line.strip() and not _add_row(matrix, line, cell, this, last=not any(x.strip() for x in lines[i + 1 :])):
            if re.match(r"\s*(Legend|NIC Legend)\b", line):
                if any(_header(later, cell) for later in lines[i + 1 :]):
                    matrix.problems.append("a second matrix follows, which is not read")
                break
            matrix.problems.append(f"a line in the matrix is not a row: {line.strip()[:40]!r}") if _inside(
                lines[i + 1 :], matrix
            ) else None
    return _name_columns(matrix, this) if matrix.rows else None


def _inside(later: Sequence[str], matrix: Matrix) -> bool:
    """Whether rows of the matrix still follow."""
    names = {name for name in matrix.columns if name} - set(matrix.rows)
    return any((words := line.split()) and len(words) > 1 and words[0] in names for line in later)


def _header(line: str, cell: re.Pattern[str]) -> Matrix | None:
    first = _AFFINITY.search(line)
    left = line[: first.start()] if first else line
    names: list[str] = []
    for word in left.split():
        names += _NAME.findall(word) if "".join(_NAME.findall(word)) == word else [""]
    known = [name for name in names if name]
    if not names or not any(_GPU.fullmatch(name) for name in known) or ":" in left:
        return None
    words = [word for word in left.split() if word not in known]
    if (
        any(cell.fullmatch(word) for word in words)
        or (len(known) < 2 and not first and names != ["GPU0"])
        or len(known) * 2 <= len(names)
    ):
        return None
    matrix = Matrix(columns=names)
    if first:
        said = [" ".join(a.split()).lower() for a in _AFFINITY.findall(line)]
        matrix.affinities = tuple(a for a in AFFINITIES if a.lower() in said)
    for i, name in enumerate(names):
        if name and name in names[:i]:
            matrix.problems.append(f"two columns are called {name}")
            matrix.columns[i] = ""
    return matrix


def _add_row(matrix: Matrix, line: str, cell: re.Pattern[str], this: str, last: bool) -> bool:
    label = re.match(r"\s*(GPU\d+|NIC\d+|[a-z][\w.-]*?\d[a-z0-9_]*)(?=\s|$)", line) or re.match(
        rf"\s*((?:GPU|NIC)\d+?)(?=(?:{cell.pattern})+(?:\s|$))", line
    )
    if not label:
        return False
    name, count = label[1], len(matrix.columns)
    cells, rest, tabbed = _cells(line[label.end() :], count, cell)
    if not any(cells):
        return False
    if name in matrix.rows:
        if matrix.rows[name] != cells:
            matrix.problems.append(f"two different rows are called {name}; neither is used")
            matrix.rows[name] = [""] * count
        return True
    own = matrix.columns.index(name) if name in matrix.columns else None
    places = [i for i, text in enumerate(cells) if text == this]
    if len(cells) < count and last and (own is None or places == ([own] if own < len(cells) else [])):
        matrix.problems.append(f"row {name} ends after {len(cells)} of {count} cells")
        matrix.cut.append(name)
        cells = cells[:-1] if own != len(cells) - 1 else cells  # the last one may be half a word
        cells += [""] * (count - len(cells))
    elif len(cells) < count or (own is not None and places != [own]):
        why = f"has {len(cells)} of {count} cells" if len(cells) < count else f"does not have its {this} under {name}"
        matrix.problems.append(f"row {name} {why}: it is not used")
        cells = [""] * count
        rest = [] if len(rest) < len(matrix.affinities) else rest
    for i, text in enumerate(cells):
        if text and not cell.fullmatch(text):
            matrix.problems.append(f"row {name} holds {text!r} under {matrix.columns[i] or 'a nameless column'}")
            cells[i] = ""
    matrix.rows[name], matrix.rest[name] = cells, rest
    if tabbed:
        matrix.tabbed.add(name)
    return True


def _cells(text: str, count: int, cell: re.Pattern[str]) -> tuple[list[str], list[str], bool]:
    """Cells of a row, what follows them, and whether tabs separate them."""
    parts = [part.strip() for part in text.split("\t")]
    if text.startswith("\t") and len(parts) > count and all(cell.fullmatch(p) for p in parts[1 : count + 1]):
        return parts[1 : count + 1], parts[count + 1 :], True
    cells: list[str] = []
    at = 0
    while len(cells) < count:
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            break
        if match := cell.match(text, at):
            word = match[0]
        else:
            word = text[at:].split()[0]
            if re.match(r"\d+([-,]\d|$)|N/A", word):  # the affinity begins: cells are missing
                break
        cells.append(word)
        at += len(word)
    after = text[at:].removeprefix("\t") if text[at : at + 1] == "\t" else None
    if after is not None and "\t" in text.strip():
        return cells, [part.strip() for part in after.split("\t")], True
    return cells, text[at:].split(), False


def _name_columns(matrix: Matrix, this: str) -> Matrix:
    """A column whose name cannot be read is that of the row that has its X there; a row without column goes."""
    for i, column in enumerate(matrix.columns):
        if column:
            continue
        own = [name for name, cells in matrix.rows.items() if cells[i] == this and name not in matrix.columns]
        if len(own) == 1:
            matrix.problems.append(f"the name over column {i + 1} cannot be read; by its row it is {own[0]}")
            matrix.columns[i] = own[0]
        else:
            matrix.problems.append(f"the name over column {i + 1} cannot be read")
    for name in [name for name in matrix.rows if name not in matrix.columns]:
        matrix.problems.append(f"row {name} has no column: it is not used")
        del matrix.rows[name]
    return matrix


def _headless(lines: Sequence[str], cell: re.Pattern[str], this: str) -> Matrix | None:
    """A matrix whose header is cut off, if every row has its X where its place says.

    Where rows of GPUs alone are left, what stands in them after the GPUs is NICs, in the order of their numbers.
    """
    rows: list[tuple[str, list[str], list[str], bool]] = []
    for line in lines:
        label = re.match(r"\s*(GPU\d+|NIC\d+|mlx[45]_\d+)\s", line)
        words = line.split()
        if label and len(words) > 1 and (cell.fullmatch(words[1])):
            width = sum(1 for word in words[1:] if cell.fullmatch(word))
            rows.append((label[1], *_cells(line[label.end(1) :], width, cell)))
    names = [row[0] for row in rows]
    width = len(rows[0][1]) if rows else 0
    if len(rows) < 2 or len(set(names)) < len(names) or any(len(cells) != width for _, cells, *_ in rows):
        return None
    if width < len(rows) or any(
        [j for j, word in enumerate(cells) if word == this] != [i] for i, (_, cells, *_) in enumerate(rows)
    ):
        return None
    others = [f"NIC{i}" for i in range(width - len(names))]
    if others and not all(map(_GPU.fullmatch, names)):
        return None
    after = {max((k for k, word in enumerate(rest) if word), default=-1) + 1 for *_, rest, _ in rows}
    matrix = Matrix(
        columns=names + others,
        rows={row[0]: row[1] for row in rows},
        rest={row[0]: row[2] for row in rows},
        affinities=AFFINITIES if after == {4} else AFFINITIES[:2] if after == {2} else (),
        tabbed={row[0] for row in rows if row[3]},
    )
    said = f", and the {len(others)} after them to be {others[0]} to {others[-1]}" if others else ""
    matrix.problems.append(f"the header is missing; columns are taken to be in the order of rows{said}")
    return matrix


def symmetric(matrix: Matrix) -> dict[tuple[str, str], str]:
    """The cell of each pair of names, once; two cells that differ are a problem, and the pair is left out."""
    pairs: dict[tuple[str, str], str] = {}
    clashes: set[tuple[str, str]] = set()
    for row, cells in matrix.rows.items():
        for column, text in zip(matrix.columns, cells):
            if not column or not text or column == row:
                continue
            known = pairs.get((column, row))
            if known is None:
                pairs[row, column] = text
            elif known != text:
                matrix.problems.append(f"{column} to {row} is {known}, {row} to {column} is {text}")
                clashes.add((column, row))
    return {pair: text for pair, text in pairs.items() if pair not in clashes}


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, a long row of them by its first and last."""
    names = list(names)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"


def legend(lines: Sequence[str]) -> Mapping[str, str]:
    """Verbs devices by column, from `NIC Legend:` (NIC0: mlx5_0); a device named twice counts for neither."""
    names: dict[str, str] = {}
    for line in lines:
        if match := re.fullmatch(r"\s*(NIC\d+)\s*:\s*([A-Za-z][\w.-]*)\s*", line):
            names.setdefault(match[1], match[2])
    values = list(names.values())
    return {nic: name for nic, name in names.items() if values.count(name) == 1}
