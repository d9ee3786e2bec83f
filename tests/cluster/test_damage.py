"""Damaged sources: never anything but a sentence, and what was read is never what the whole file does not say."""

from __future__ import annotations

import contextlib
import csv
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hpctrain.cluster.affinity import differences, near, unfit
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.read import _decode, read_node, read_text
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import ConfigError

DATA = Path(__file__).parent / "data"
FILES = [row["file"] for row in csv.DictReader((DATA / "MANIFEST.csv").open())]
SMALL = [f for f in FILES if not f.endswith(".gz") and (DATA / f).stat().st_size < 9000]
MATRICES = [f for f in FILES if f.startswith("smi_topo") and "rocm" not in f and "_1gpu" not in f]


@cache
def text_of(file: str) -> str:
    return _decode((DATA / file).read_bytes(), file)


def use(node: Node) -> None:
    """Everything that is done with a node."""
    judged = assign_roles(node)
    near(judged)
    unfit(judged)
    differences([judged, judged])
    merge([judged, node])


@st.composite
def damage(draw: st.DrawFn, files: list[str]) -> tuple[str, str]:
    file = draw(st.sampled_from(files))
    text = text_of(file)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["delete", "flip", "double", "cut", "head", "line", "swap", "column", "space"]))
        at, length = draw(st.integers(0, max(len(text) - 1, 0))), draw(st.integers(1, 12))
        lines = text.split("\n")
        row = at % len(lines)
        if kind == "delete":
            text = text[:at] + text[at + length :]
        elif kind == "flip":
            text = text[:at] + draw(st.sampled_from("0123456789abcXNVSYGPU<>&;\"'\t \n-,:./|\x00é")) + text[at + 1 :]
        elif kind == "double":
            text = text[: at + length] + text[at:]
        elif kind == "cut":
            text = text[:at]
        elif kind == "head":
            text = text[at:]
        elif kind == "line":
            text = "\n".join(lines[:row] + lines[row + 1 :])
        elif kind == "swap":
            other = length % len(lines)
            lines[row], lines[other] = lines[other], lines[row]
            text = "\n".join(lines)
        elif kind == "column":
            text = "\n".join(line[:length] + line[length + 8 :] for line in lines)
        else:
            text = text.replace("\t", " ") if length % 2 else " ".join(text.split(" ", at % 40))
    return file, text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damage(SMALL))
def test_nothing_but_sentences(case: tuple[str, str]) -> None:
    _, text = case
    try:
        node = read_text(text, "damaged")
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)
        return
    use(node)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from(["", "<system>", "kind: ResourceSlice\n", "\tGPU0\tGPU1\nGPU0\tX\t", "GPU 0: a (UUID: "]),
)
def test_noise(data: bytes, head: str) -> None:
    with contextlib.suppress(ConfigError):
        use(read_text(head + _decode(data, "noise"), "noise"))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(MATRICES), st.data())
def test_one_letter_of_a_matrix_changed_shows_or_changes_nothing_unseen(file: str, data: st.DataObject) -> None:
    """A cell damaged so that it is no word of the matrix is said, and gives no distance that was not there."""
    lines = text_of(file).split("\n")
    whole = read_text("\n".join(lines), "whole")
    rows = [i for i, line in enumerate(lines) if line.strip(" |").startswith(("GPU", "NIC", "mlx")) and ("X" in line)]
    row = data.draw(st.sampled_from(rows))
    first = len(lines[row]) - len(lines[row].lstrip(" |")) + 6
    spots = [i for i, c in enumerate(lines[row]) if c in "PSNIXBHOY" and i > first]
    assume(spots)
    at = data.draw(st.sampled_from(spots))
    lines[row] = lines[row][:at] + "#" + lines[row][at + 1 :]
    try:
        node = read_text("\n".join(lines), "damaged")
    except ConfigError:
        return
    assert set(node.problems) - set(whole.problems)
    for pair, distance in node.distances.items():
        assert whole.distance(*pair) in (distance, whole.distance(pair[1], pair[0]))


@pytest.mark.parametrize("file", FILES)
def test_half_of_any_file(file: str) -> None:
    text = text_of(file)
    whole = read_text(text, "whole")
    for part in (3, 2):
        try:
            node = read_text(text[: len(text) * (part - 1) // part], "half")
        except ConfigError:
            continue
        use(node)
        assert node.partial or node.problems or len(node.devices) == len(whole.devices)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("/no/such/file", "cannot be opened"),
        ("", "cannot be opened|no /sys tree|empty"),
        ("hello\nworld\n", "none of"),
        ("\n", "empty"),
    ],
)
def test_refused(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_node(what)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + b"junk" * 9)
    (tmp_path / "b").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "c").write_bytes("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n".encode("utf-16"))
    with pytest.raises(ConfigError, match="unzipped"):
        read_node(tmp_path / "a.gz")
    with pytest.raises(ConfigError, match="none of"):
        read_node(tmp_path / "b")
    assert read_node(tmp_path / "c").nvlinks == {("gpu0", "gpu1"): 4}
    with pytest.raises(ConfigError, match="no /sys tree"):
        read_node(tmp_path)
