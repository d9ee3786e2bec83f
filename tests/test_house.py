"""The floors of `docs/architecture.md`: a room imports only from floors below it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "errors",
    "files",
    "scratch",
    "mpi",
    "config.schema",
    "layout",
    "config",
    "cluster",
    "telemetry",
    "plan",
    "model",
    "parallel",
    "sharding",
    "data",
    "checkpoint",
    "launch",
    "train",
    "verify",
    "comms",
    "scale",
    "lab",
    "cli",
)
LAUNCH = ("slurm", "life", "place", "meet", "proof", "rank", "health", "submit", "local")
"""The rooms of `launch`, lowest first: the same rule holds between them."""
PLAIN = ("errors", "files", "scratch", "mpi", "config.schema", "layout", "config", "cluster", "plan")
"""Floors that load no torch."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "hpctrain").rglob("*.py"))
}


def room(module: str) -> str:
    """The room a module is in: the longest one that its name begins with, or `roof` for `__main__`."""
    name = module.removeprefix("hpctrain").removeprefix(".")
    if name == "":
        return "errors"  # the package itself holds the version alone
    if name == "__main__":
        return "roof"
    found = [r for r in FLOORS if name == r or name.startswith(f"{r}.")]
    assert found, f"{module} is in no room of the house"
    return max(found, key=len)


def floor(name: str) -> int:
    return len(FLOORS) if name == "roof" else FLOORS.index(name)


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that code imports anywhere in it, absolute names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def climbing(module: str, code: str) -> list[str]:
    """Imports of a module that go up, or sideways into a room of the same floor."""
    home = room(module)
    ours = [name for name in imported(ast.parse(code)) if name == "hpctrain" or name.startswith("hpctrain.")]
    return [name for name in ours if room(name) != home and floor(room(name)) >= floor(home)]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    assert climbing(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.count(".") == 3 and m.startswith("hpctrain.launch.")])
def test_imports_inside_launch_go_down(module: str) -> None:
    home = LAUNCH.index(module.split(".")[2])
    names = [name.split(".") for name in imported(ast.parse(MODULES[module].read_text()))]
    assert not [n for n in names if n[:2] == ["hpctrain", "launch"] and LAUNCH.index(n[2]) > home]


@pytest.mark.parametrize(
    ("module", "code", "up"),
    [
        ("hpctrain.layout.layout", "from hpctrain.config import schema", []),
        ("hpctrain.layout.layout", "from hpctrain.config import load", ["hpctrain.config.load"]),
        ("hpctrain.layout.layout", "def f():\n    import hpctrain.train", ["hpctrain.train"]),
        ("hpctrain.config.validate", "from hpctrain.layout.layout import Layout", []),
        ("hpctrain.errors", "from hpctrain.config.schema import Count", ["hpctrain.config.schema"]),
        ("hpctrain.cli.config", "from hpctrain import __version__", []),
        ("hpctrain.__main__", "from hpctrain.cli import main", []),
    ],
)
def test_climbing_is_seen(module: str, code: str, up: list[str]) -> None:
    assert climbing(module, code) == up


def test_the_documented_table_is_this_one() -> None:
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert rows == [(str(level), name) for level, name in enumerate(FLOORS)]


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import; what only a type checker reads is left out."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in (*PLAIN, "cli")])
def test_no_torch_at_the_top(module: str) -> None:
    for node in top_level(ast.parse(MODULES[module].read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] == "torch" for name in names)


def test_plain_floors_load_no_torch() -> None:
    plain = [m for m in MODULES if room(m) in PLAIN]
    code = f"import sys, {', '.join([*plain, 'hpctrain.cli', 'hpctrain.cli.config'])}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
