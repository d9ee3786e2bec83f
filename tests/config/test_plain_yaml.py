"""Scalars mean what they look like, and whatever is written reads back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config import plain_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2", -2),
        ("012", 12),
        ("true", True),
        ("no", "no"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("none", "none"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = plain_yaml.read(text)
    assert read == value
    assert type(read) is type(value)


@settings(deadline=None)
@given(VALUES)
def test_round_trip(value: object) -> None:
    assert plain_yaml.read(plain_yaml.write(value)) == value


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: 1\nb: [\n", "line 3", "expected"),
        ("a: 1\nb: 2\na: 3\n", "line 3", "'a' is given twice"),
        ("a: 1\n? [b]\n: 2\n", "line 2", "plain name"),
        ("a: 1\nb: !!python/object:os.system 3\n", "line 2", "tags"),
        ("a: 1\nb: c: d\n", "line 2", "mapping values"),
    ],
)
def test_what_is_wrong_and_where(text: str, line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{line}.*{reason}"):
        plain_yaml.read(text)


def test_control_characters_are_refused() -> None:
    with pytest.raises(ValueError, match="special characters"):
        plain_yaml.read("a: \x01")


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: !!binary aGk=", "line 1: tags .* are not used here"),
        ("a: !!bool 3", "tags"),
        ("a: &x [*x]", "anchors .* are not used here"),
        ("a: 1\nb: *a", "line 2: anchors"),
        ("a: " + "[" * 500 + "]" * 500, "more than 20 levels"),
        ("{a: " * 2000 + "1" + "}" * 2000, "more than 20 levels"),
    ],
)
def test_what_a_configuration_has_no_use_for_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        plain_yaml.read(text)
