"""Reads `nvidia-smi topo -m` (2017 to today), `topo -p2p`, and the link types of `rocm-smi --showtopo`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from hpctrain.cluster.cpus import parse_list
from hpctrain.cluster.matrix import SELF, Matrix, legend, listed, read_matrix, symmetric
from hpctrain.cluster.node import Cpus, Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.source import clean_lines, refusal

WORDS = {
    "PIX": Distance.PIX,
    "PXB": Distance.PXB,
    "PHB": Distance.PHB,
    "NODE": Distance.NODE,
    "SYS": Distance.SYS,
    "SOC": Distance.SYS,
    "C2C": Distance.C2C,
    "XGMI": Distance.NVLINK,
    "PCIE": Distance.UNKNOWN,
}
"""What a cell says. XGMI is AMD's link between GPUs; NV# is read apart, as it counts."""
P2P = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "the driver's registry disables it",
    "U": "not known",
}
_TOPO = r"NV\d{1,2}(?!\d)|PIX|PXB|PHB|NODE|SYS|SOC|C2C"
_ROCM = r"XGMI|PCIE"
_P2P = r"OK|CNS|GNS|TNS|NS|DR|U"


def looks_like(text: str) -> bool:
    """Whether a text is such a matrix, or the part of one."""
    return bool(re.search(r"GPU\d+", text) and re.search(rf"\b(X|{_TOPO}|{_ROCM}|GNS|CNS|TNS)\b", text))


def read(text: str, source: str = "nvidia-smi topo -m") -> Node:
    """The node of a matrix.

    Raises:
        ConfigError: there is no matrix in the text.
    """
    if re.search(r"\bXGMI\b", text):
        return _read_rocm(text, source)
    matrix, p2p = read_matrix(text, _TOPO), read_matrix(text, _P2P)
    if p2p and _readable(p2p) > (_readable(matrix) if matrix else 0):
        return _read_p2p(p2p, source)
    if matrix is None:
        raise refusal(source, "there is no matrix of `nvidia-smi topo` in it", "capture it anew")
    return _node(matrix, text, source)


def _readable(matrix: Matrix) -> int:
    return sum(1 for cells in matrix.rows.values() for cell in cells if cell not in ("", SELF))


def _node(matrix: Matrix, text: str, source: str) -> Node:
    pairs = symmetric(matrix)
    verbs = legend(clean_lines(text))
    names = {c: verbs.get(c, c) if re.match(r"NIC\d", c) else c for c in matrix.columns if c}
    keys = {c: f"gpu{int(c[3:])}" if c.startswith("GPU") else name for c, name in names.items()}
    problems = matrix.problems
    gpus, numas = _gpus(matrix, problems)
    nics = tuple(
        Nic(name=names[c], verbs=True, bond=names[c] if "bond" in names[c] else "")
        for c in names
        if not c.startswith("GPU")
    )
    unnamed = [nic.name for nic in nics if re.fullmatch(r"NIC\d+", nic.name)]
    if unnamed:
        problems.append(f"no legend says which devices {listed(unnamed)} are")
    distances, nvlinks = {}, {}
    bare = bool(re.search(r"\btopo\s+(-mp|--matrix_pci)\b", text))
    if bare:
        problems.append("this is `topo -mp`, which shows PCI alone: NVLinks are not known")
    for (a, b), word in pairs.items():
        both = keys[a], keys[b]
        links = int(word[2:]) if word.startswith("NV") else 0
        distances[both] = Distance.NVLINK if links else WORDS[word]
        if a.startswith("GPU") and b.startswith("GPU") and not bare:
            nvlinks[both] = links
    if not gpus:
        raise refusal(source, "its matrix shows no GPU")
    missing = matrix.missing
    if missing:
        problems.append(f"rows of {listed(missing)} are missing")
    part = "" if any(name.startswith("GPU") for name in missing) else _part_only(gpus)
    if part:
        problems.append(part)
    return Node(
        gpus=gpus,
        nics=nics,
        numas=numas,
        distances=distances,
        nvlinks=nvlinks,
        sources=(source,),
        problems=tuple(problems),
        partial=bool(matrix.cut or part) or (bool(missing) and not _gpus_only(matrix)),
    )


def _gpus_only(matrix: Matrix) -> bool:
    """Whether someone made a table of the rows of GPUs alone; what `nvidia-smi` prints has rows of NICs too."""
    return (
        not matrix.affinities
        and all(not name.startswith("GPU") for name in matrix.missing)
        and len(matrix.missing) == sum(1 for name in matrix.columns if not name.startswith("GPU"))
    )


def _part_only(gpus: tuple[Gpu, ...]) -> str:
    """A sentence if all GPUs are on one NUMA node that is not the first: a job sees what it was given."""
    numas = {gpu.numa for gpu in gpus}
    if len(numas) == 1 and (numa := numas.pop()) and all(gpu.cpus and 0 not in gpu.cpus for gpu in gpus):
        return f"only GPUs of NUMA node {numa} are shown: this is a part of the node"
    return ""


def _gpus(matrix: Matrix, problems: list[str]) -> tuple[tuple[Gpu, ...], tuple[Numa, ...]]:
    gpus = []
    _mark_cut(matrix)
    for column in matrix.columns:
        if not column.startswith("GPU"):
            continue
        gpu = Gpu(int(column[3:]))
        if matrix.affinities and matrix.rest.get(column):
            gpu = _affinity(gpu, column, matrix, problems)
        elif matrix.affinities and column in matrix.rows:
            problems.append(f"the affinity of {column} is missing")
        gpus.append(gpu)
    gpus.sort(key=lambda g: g.index)
    said: dict[int, set[Cpus]] = {}
    for gpu in gpus:
        if gpu.numa is not None and gpu.cpus:
            said.setdefault(gpu.numa, set()).add(gpu.cpus)
    unclear = [numa for numa, masks in said.items() if len(masks) > 1]
    problems += [f"GPUs of NUMA node {numa} are near different CPUs: these are not used" for numa in unclear]
    gpus = [replace(g, cpus=()) if g.numa in unclear else g for g in gpus]
    masks = {numa: next(iter(found)) for numa, found in said.items() if numa not in unclear}
    problems += overlaps(masks)
    memories = {m for gpu in gpus for m in gpu.memory}
    found = {gpu.numa for gpu in gpus if gpu.numa is not None} | memories
    return tuple(gpus), tuple(
        Numa(n, masks.get(n, ()) if n not in memories else (), of_gpu=n in memories) for n in sorted(found)
    )


def _mark_cut(matrix: Matrix) -> None:
    """The last row is cut if it tells less than those before it, or ranges of unlike lengths where theirs are alike."""
    rows = [name for name in matrix.rows if name.startswith("GPU") and matrix.rest.get(name)]
    if len(rows) < 2 or rows[-1] != list(matrix.rows)[-1] or rows[-1] in matrix.cut:
        return
    *before, last = (matrix.rest[name] for name in rows)
    shorter = rows[-1] not in matrix.tabbed and len(last) < max(map(len, before)) and last[-1] != "N/A"
    lengths = [{b - a for a, b in _ranges(words[0])} for words in (*before, last)]
    ragged = all(len(found) == 1 for found in lengths[:-1]) and len(lengths[-1]) > 1
    if shorter or ragged or last[0].endswith(("-", ",")):
        matrix.cut.append(rows[-1])


def _ranges(text: str) -> list[tuple[int, int]]:
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    return [(int(m[1]), int(m[2] or m[1])) for m in parts if m]


def overlaps(masks: Mapping[int, Cpus]) -> list[str]:
    """A sentence for every two NUMA nodes that share CPUs."""
    nodes = sorted(masks)
    return [
        f"NUMA nodes {a} and {b} share CPUs"
        for i, a in enumerate(nodes)
        for b in nodes[i + 1 :]
        if not set(masks[a]).isdisjoint(masks[b])
    ]


def _affinity(gpu: Gpu, row: str, matrix: Matrix, problems: list[str]) -> Gpu:
    """The GPU with what stands after its cells: CPUs, NUMA nodes and its own NUMA node, in the order of the header."""
    cells = _by_header(matrix.rest[row], matrix.affinities, row in matrix.tabbed)
    cpus_text, numa_text, own_text = cells.get("CPU Affinity", ""), cells.get("NUMA Affinity", ""), ""
    own_text = cells.get("GPU NUMA ID", "")
    if row in matrix.cut:
        problems.append(f"the affinity of {row} is cut off")
        return gpu
    if cpus_text and not numa_text and "NUMA Affinity" in matrix.affinities:
        cpus_text, numa_text, said = _unglue(cpus_text)
        problems.append(f"the affinity of {row} {said}")
    memory = () if own_text in ("", "N/A") else _list_or_none(own_text)
    numas = () if numa_text in ("", "N/A") else _list_or_none(numa_text)
    cpus = () if cpus_text in ("", "N/A") else _list_or_none(cpus_text)
    for what, value, text in (("CPU", cpus, cpus_text), ("NUMA", numas, numa_text), ("GPU NUMA", memory, own_text)):
        if value is None:
            problems.append(f"the {what} affinity of {row} cannot be read: {text!r}")
    if cpus_text == "":
        problems.append(f"the CPU affinity of {row} is blank")
    if memory and cpus and numas and set(memory) >= set(numas):
        problems.append(f"{row} has its CPUs on NUMA node {numa_text} and is said to be its memory: taken for CPUs")
        memory = ()
    memory, rest = memory or (), [n for n in numas or () if n not in (memory or ())]
    numa = rest[0] if rest and (len(rest) == 1 or memory) else None
    if len(rest) > 1 and not memory:
        problems.append(f"{row} is near NUMA nodes {numa_text}, and not one of them more than the others")
    beside = tuple(rest[1:]) if memory else ()
    return replace(gpu, cpus=cpus or (), numa=numa, memory=tuple(sorted({*memory, *beside})))


def _list_or_none(text: str) -> Cpus | None:
    try:
        return parse_list(text)
    except ValueError:
        return None


def _by_header(rest: list[str], names: tuple[str, ...], tabbed: bool) -> dict[str, str]:
    """Affinities by their names. `nvidia-smi` writes two tabs before some; spaces do not show blanks."""
    if tabbed:
        found = dict.fromkeys(names, "") | {names[0]: rest[0] if rest else ""}
        cells = [(at, cell) for at, cell in enumerate(rest[1:], 1) if cell]
        if cells and len(names) > 1 and (len(cells) > 1 or len(names) == 2 or cells[0][0] == 1):
            found[names[1]] = cells.pop(0)[1]
        if cells and len(names) > 2:
            found[names[2]] = cells[-1][1]
        for one, two in pairwise(names):  # a tab that became a space
            if not found[two] and len(found[one].split()) == 2:
                found[one], found[two] = found[one].split()
        return found
    words: list[str] = []
    rest = [part for word in rest for part in re.sub(r"(?<=\d)N/A$", " N/A", word).split()]
    for word in rest:
        if words and (words[-1].endswith(",") or word.startswith(",")):
            words[-1] += word
        else:
            words.append(word)
    if len(words) >= len(names):
        return dict(zip(names, words))
    found = {}
    if len(names) > 2 and words:
        found[names[2]] = words.pop()
    for word in words:
        numa_only = re.fullmatch(r"\d{1,2}|N/A", word) and len(names) > 1
        found.setdefault(names[1] if numa_only else names[0], word)
    return found


def _unglue(text: str) -> tuple[str, str, str]:
    """CPUs and NUMA node of a word that holds both, and a sentence. Threads of a core make ranges of equal length."""
    fits = []
    for digits in (1, 2):
        cpus, numa = text[:-digits], text[-digits:]
        ranges = [tuple(map(int, r.split("-"))) for r in cpus.split(",") if re.fullmatch(r"\d+-\d+", r)]
        lengths = {b - a for a, b in ranges}
        whole_number = re.fullmatch(r"[1-9]?\d", numa)
        if whole_number and len(ranges) == len(cpus.split(",")) > 1 and len(lengths) == 1 and min(lengths) > 0:
            fits.append((cpus, numa))
    whole = [tuple(map(int, r.split("-"))) for r in text.split(",") if re.fullmatch(r"\d+-\d+", r)]
    if len({b - a for a, b in whole}) == 1 and len(whole) > 1:
        return text, "", "does not say the NUMA node"
    if len(fits) == 1:
        return *fits[0], f"is glued; {text} is read as CPUs {fits[0][0]} and NUMA node {fits[0][1]}"
    if _list_or_none(text) is None:
        return "N/A", "", f"cannot be read: {text!r}"
    return "N/A", "", f"may be glued, CPUs and NUMA node in one: {text!r} is not used"


def _read_p2p(matrix: Matrix, source: str) -> Node:
    pairs = symmetric(matrix)
    gpus = tuple(Gpu(i) for i in sorted(int(c[3:]) for c in matrix.columns if c.startswith("GPU")))
    p2p = {(f"gpu{int(a[3:])}", f"gpu{int(b[3:])}"): word for (a, b), word in pairs.items()}
    problems = matrix.problems
    for word, why in P2P.items():
        bad = [f"{a}-{b}" for (a, b), found in p2p.items() if found == word]
        if bad:
            problems.append(f"GPUs cannot reach each other's memory ({word}, {why}): {listed(bad)}")
    if matrix.missing:
        problems.append(f"rows of {listed(matrix.missing)} are missing")
    return Node(
        gpus=gpus, sources=(source,), problems=tuple(problems), partial=bool(matrix.missing or matrix.cut), p2p=p2p
    )


def _read_rocm(text: str, source: str) -> Node:
    matrix = read_matrix(text, _ROCM, "0")
    if matrix is None:
        raise refusal(source, "there is no table of link types of `rocm-smi --showtopo` in it", "capture it anew")
    numas = {int(g): int(n) for g, n in re.findall(r"GPU\[(\d+)\][^\n]*Numa Node:\s*(\d+)", text)}
    gpus = tuple(
        Gpu(i, numa=numas.get(i)) for i in sorted(int(c[3:]) for c in matrix.columns if re.fullmatch(r"GPU\d+", c))
    )
    pairs = {(f"gpu{int(a[3:])}", f"gpu{int(b[3:])}"): word for (a, b), word in symmetric(matrix).items()}
    problems = [p for p in matrix.problems if "second matrix" not in p and "not a row" not in p]
    if matrix.missing:
        problems.append(f"rows of {listed(matrix.missing)} are missing")
    problems.append("rocm-smi counts no links of a pair and shows no NICs: XGMI counts as one link")
    return Node(
        gpus=gpus,
        distances={pair: WORDS[word] for pair, word in pairs.items()},
        nvlinks={pair: int(word == "XGMI") for pair, word in pairs.items()},
        numas=tuple(Numa(n) for n in sorted(set(numas.values()))),
        sources=(source,),
        problems=tuple(problems),
        partial=bool(matrix.missing or matrix.cut),
    )
