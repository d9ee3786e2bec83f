"""Mistakes in a batch script that bash and sbatch take without a word. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OF_A_RANK = re.compile(r"\$\{?(SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID|PMIX_RANK|PMI_RANK|OMPI_COMM_WORLD_\w*RANK)\b")


def lint(script: str) -> list[str]:
    """What is wrong with a batch script, a sentence each."""
    return [*_directives(script), *_too_early(script)]


def _directives(script: str) -> Iterator[str]:
    """#SBATCH lines that nobody reads: sbatch stops at the first command, other readers at a blank line."""
    ended = ""
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("#SBATCH"):
            if ended:
                yield f"line {number}: {line} is not read, as {ended} comes before it"
        elif not line.strip():
            ended = ended or f"the blank line {number}"
        elif not line.startswith("#"):
            ended = f"the command in line {number}"


def _too_early(script: str) -> Iterator[str]:
    """Variables of a rank that the batch script itself would replace, once and for all ranks."""
    for number, line in enumerate(_outside_quotes(script).splitlines(), 1):
        if found := _OF_A_RANK.search(line):
            yield (
                f"line {number}: ${found[1]} is replaced by the batch script, which is no rank: "
                "put it between single quotes, for a shell that each rank starts"
            )


def _outside_quotes(script: str) -> str:
    """The script without comments and what is between single quotes; as many lines."""
    out: list[str] = []
    quote, before = "", "\n"
    comment = False
    for char in script:
        if char == "\n":
            comment = False
            out.append(char)
        elif comment:
            pass
        elif quote == "'":
            quote = "" if char == "'" else quote
        elif before == "\\":
            out.append(char)
            before = ""
            continue
        elif char == "'" and not quote:
            quote = char
        elif char == '"':
            quote = "" if quote else char
            out.append(char)
        elif char == "#" and not quote and before.isspace():
            comment = True
        else:
            out.append(char)
        before = char
    return "".join(out)
