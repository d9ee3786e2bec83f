"""Reads a node from a file or a text of any format known, or from this machine."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.cluster import hwloc_xml, nccl_xml, nodefile, nvml, resourceslice, smi_query, smi_topo, sysfs
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.source import LARGEST, plain, refusal
from hpctrain.errors import ConfigError

Reader = Callable[[str, str], Node]
KNOWN = (
    "`nvidia-smi topo -m`, `topo -p2p`, `-L` or `-q -x`, NCCL's or hwloc's XML, Kubernetes ResourceSlices, "
    "`rocm-smi --showtopo`, a node written by `hpctrain topo capture`, or a folder with a /sys tree"
)
_XML: Mapping[str, Reader] = {
    "system": nccl_xml.read,
    "topology": hwloc_xml.read,
    "nvidia_smi_log": smi_query.read_query,
}


def read_node(what: Path | str) -> Node:
    """The node of a file, of a folder with a /sys tree, or of a text.

    Args:
        what: a path, or the text itself if it has several lines or is XML.

    Raises:
        ConfigError: it cannot be read as a node; the sentence says why.
    """
    if isinstance(what, str) and ("\n" in what or what.lstrip().startswith("<")):
        return read_text(what)
    path = Path(what)
    if path.is_dir():
        if not (path / "sys").is_dir():
            raise refusal(str(path), "this folder holds no /sys tree", "name a file, or a folder that has sys/ in it")
        return sysfs.read(path)
    return read_text(text_of(path), path.name)


def text_of(path: Path) -> str:
    """The text in a file, unzipped if it has to be.

    Raises:
        ConfigError: it cannot be opened or unzipped, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise refusal(str(path), f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from None
    return _decode(data, str(path))


def _decode(data: bytes, source: str) -> str:
    if data[:2] == b"\x1f\x8b":
        try:
            unzip = zlib.decompressobj(31)
            data = unzip.decompress(data, LARGEST + 1)
        except (OSError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise refusal(source, f"it cannot be unzipped ({error})") from None
    if len(data) > LARGEST:
        raise refusal(source, f"it is larger than {LARGEST >> 20} MiB")
    return plain(data)


def read_text(text: str, source: str = "") -> Node:
    """The node of a text, by what it looks like.

    Args:
        source: what to call it in sentences.

    Raises:
        ConfigError: it looks like nothing known, or breaks off before it says anything.
    """
    if len(text) > LARGEST:
        raise refusal(source or "a text", f"it is larger than {LARGEST >> 20} MiB")
    reader, what = _reader(text)
    if reader is None:
        shown = " ".join(text.split())[:60]
        raise refusal(source or shown, f"this is none of {KNOWN}" if shown else "it is empty")
    return reader(text, f"{what} ({source})" if source else what)


def _reader(text: str) -> tuple[Reader | None, str]:
    names = {"system": "NCCL XML", "topology": "hwloc XML", "nvidia_smi_log": "nvidia-smi -q -x"}
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        tag = re.search(r"<([A-Za-z_][\w.-]*)", re.sub(r"<!--.*?(-->|\Z)", "", text, flags=re.DOTALL))
        name = tag[1] if tag else ""
        return _XML.get(name), names.get(name, "")
    if nodefile.looks_like(text):
        return nodefile.load, "captured node"
    if re.search(r"kind[\"']?\s*:\s*[\"']?ResourceSlice\b", text):
        return resourceslice.read, "ResourceSlice"
    if smi_query.looks_like_list(text):
        return smi_query.read_list, "nvidia-smi -L"
    if smi_topo.looks_like(text):
        return smi_topo.read, "nvidia-smi topo"
    return None, ""


def read_live(environ: Mapping[str, str] | None = None) -> Node:
    """This machine: /sys and /proc; NVML, else `nvidia-smi -q -x`; and the matrix of `nvidia-smi topo -m`."""
    here = sysfs.read("/", os.environ if environ is None else environ)
    found = [here]
    problems: list[str] = []
    if any(gpu.pci for gpu in here.gpus):
        try:
            found.append(nvml.read())
        except ConfigError:
            found += _run(["nvidia-smi", "-q", "-x"], problems)
        found += matrices(problems)
    node = merge(found) if len(found) > 1 else here
    return Node(**{**vars(node), "problems": (*node.problems, *problems)})


def _run(command: list[str], problems: list[str]) -> list[Node]:
    """The node that a command tells, or none and a problem. It may fail on a node that is well (one odd device)."""
    words = " ".join(command)
    if not shutil.which(command[0]):
        return []
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False, env={**os.environ, "LC_ALL": "C"})
        if done.returncode:
            problems.append(f"`{words}` fails with exit code {done.returncode}")
            return []
        return [read_text(_decode(done.stdout, words), words)]
    except subprocess.TimeoutExpired:
        problems.append(f"`{words}` does not answer within 30 s")
    except (OSError, ConfigError) as error:
        problems.append(f"`{words}` cannot be used: {error}")
    return []


def matrices(problems: list[str]) -> list[Node]:
    """What `nvidia-smi topo -m` shows of this machine, or nothing and a problem."""
    return _run(["nvidia-smi", "topo", "-m"], problems)
