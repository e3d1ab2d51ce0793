from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.yaml_text import read_yaml, write_yaml


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("+7", 7),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1.0", 1.0),
        ('"1.0"', "1.0"),
        ("True", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("~", None),
        ("", None),
        ("Null", None),
        ("2026-11-30", "2026-11-30"),
        ("0b1", "0b1"),
        ("0x_", "0x_"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
        ("=", "="),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = read_yaml(text)
    assert read == value
    assert type(read) is type(value)


LAUGHS = "\n".join(["x0: &x0 [1]", *(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 9))])


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("9" * 5000, "line 1, column 1: a number of 5000 digits; at most 100"),
        ("!!int foo", "line 1, column 1: 'foo' is not of the type int"),
        ("!!set {a}", "tag:yaml.org,2002:set cannot be used here"),
        ("!mine 3", "the tag !mine cannot be used here"),
        ("{a: " * 300 + "1" + "}" * 300, "nested more than 50 deep"),
        ("[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("a: &a [*a]", "nested more than 50 deep"),
        (LAUGHS, "more than 10000 values; aliases count as often"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: found duplicate key a"),
        ("1: a", "the key '1' is no text; put it in quotes"),
        ("? [a]\n: b", "is no text"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "line 3, column 3: merge keys"),
        ("1e999", "1e999 is no number that can be held"),
        ("-1e-999", "-1e-999 is no number that can be held"),
        (".inf", ".inf is no number"),
        (".nan", ".nan is no number"),
        ("a: \x07", "not valid YAML"),
        ("a: b\u2028c", r'U+2028 as it is; write "\u2028"'),
        ("a: [1", "line 1, column 6: not valid YAML"),
        ("*x", "line 1, column 1: not valid YAML: found undefined alias"),
    ],
)
def test_what_cannot_be_held_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 300


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_LIKE_SCALARS = st.from_regex(r"[-+.0-9eExoOfnNyYtTrusalI:_~]{1,6}", fullmatch=True)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**99), 10**99) | st.floats(allow_nan=False, allow_infinity=False)
_KEYS = (_TEXTS | _LIKE_SCALARS).filter(lambda key: key != "<<")
_VALUES = st.recursive(
    _SCALARS | _TEXTS | _LIKE_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner), max_leaves=8
)


@pytest.mark.fault(23, 24)
@settings(deadline=None)
@given(st.dictionaries(_KEYS, _VALUES, max_size=3))
def test_what_is_written_is_read_again(values: dict[str, Any]) -> None:
    text = write_yaml(values)
    assert repr(read_yaml(text) or {}) == repr(values)
    assert repr(yaml.safe_load(text)) == repr(values), "who reads it as YAML 1.1 gets the same"
