"""What readers share: refusing a source, XML without entities, text without decoration."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import Any

from hpctrain.errors import ConfigError

LARGEST = 64 << 20
"""Bytes of a source that are read."""
DEEPEST = 100
"""Levels of XML that are read."""

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RULE = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?\|?\s*")


def refusal(source: str, reason: str, fix: str = "") -> ConfigError:
    """The error for a source that gives no node.

    Args:
        source: a path, or what the text is.
        reason: why, as the end of a sentence.
    """
    return ConfigError("node", source, reason, fix)


def plain(data: bytes) -> str:
    """The text in a file, with or without a mark of its encoding; what cannot be read is replaced."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def clean_lines(text: str) -> list[str]:
    """Lines without ANSI codes, code fences and the frame of a markdown table, whose cells become tabs."""
    lines = []
    for raw in _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        line = raw.replace("\xa0", " ")
        if line.lstrip().startswith("```"):
            continue
        if line.lstrip().startswith("|"):
            if _RULE.fullmatch(line):
                continue
            line = "\t".join(cell.strip() for cell in line.strip().strip("|").split("|"))
        lines.append(line)
    return lines


def read_xml(text: str, source: str, roots: Iterable[str]) -> tuple[ET.Element, list[str]]:
    """The root of an XML document and what is wrong with it; a document that breaks off gives the part before.

    A comment may hold two hyphens, as in RCCL's models: what these tools read themselves is read here.

    Raises:
        ConfigError: no such document, or one that declares entities.
    """
    if re.search(r"<!\s*(ENTITY|ATTLIST|ELEMENT)", text, re.IGNORECASE):
        raise refusal(source, "XML that declares entities is not read", "take the declarations out")
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    parser: ET.XMLPullParser[Any] = ET.XMLPullParser(("start",))
    problems: list[str] = []
    try:
        parser.feed(text.lstrip("\ufeff \t\r\n"))
        parser.close()
    except ET.ParseError as error:
        problems.append(f"the XML breaks off in line {error.position[0]}: what comes after is missing")
    except ValueError as error:
        raise refusal(source, f"this is not XML ({error})") from None
    root = next((element for _, element in _events(parser)), None)
    if root is None or root.tag not in roots:
        raise refusal(source, f"this is not XML with the root {' or '.join(roots)}")
    if _depth(root) > DEEPEST:
        raise refusal(source, f"the XML is nested more than {DEEPEST} levels deep")
    return root, problems


def _events(parser: ET.XMLPullParser[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for event in parser.read_events():
            found.append(event)
    except ET.ParseError:
        pass  # it was said when the parser was fed
    return found


def _depth(root: ET.Element) -> int:
    depth, level = 0, [root]
    while level and depth <= DEEPEST:
        depth, level = depth + 1, [child for element in level for child in element]
    return depth


def number(text: str | None) -> int | None:
    """A whole number that is not negative; None for anything else, as -1 for a NUMA node that is not known."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text.strip()) else None
