"""YAML 1.2 and plain values. PyYAML parses it; its YAML 1.1 scalars are replaced by 1.2's core schema.

In YAML 1.1 ``off`` is false, ``010`` is 8, ``1:30`` is 90 and ``1e-6`` is a text. Here they are a text, 10, a text and
a number. What cannot be held as it is written is an error: a number of a thousand digits, or one that overflows.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from verl_engine.contract.errors import ConfigError

_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""By type what a scalar without quotes looks like, and the characters that it begins with; the first that fits."""
DEEPEST: Final = 50
"""How deep values may lie in each other."""
_MOST_VALUES: Final = 10_000
_MOST_DIGITS: Final = 100
_OTHER_BREAKS: Final = re.compile("[\x85\u2028\u2029]")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: Final[dict[str, Any]] = {}  # type: ignore[misc]


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than a text."""


for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def read_yaml(text: str) -> object:
    """Read one YAML document into dicts with texts as keys, lists and scalars; an empty one is None.

    What is no valid YAML, or no setting can be, is a ConfigError that begins with line and column.
    """
    other_break = _OTHER_BREAKS.search(text)
    if other_break is not None:
        raise ConfigError(
            f'holds the character U+{ord(other_break[0]):04X} as it is; write "\\u{ord(other_break[0]):04x}"'
        )
    try:
        root = yaml.compose(text, Loader=_Loader)
        return None if root is None else _Reader().value(root, 0)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{_place(error)}: {error.problem}") from error
    except yaml.MarkedYAMLError as error:
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{_place(error)}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"values are nested more than {DEEPEST} deep") from error


def is_unicode(text: str) -> bool:
    """Tell whether a text can be written as UTF-8; an argument of other bytes cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_yaml(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML, in their order; `read_yaml` gives them back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"


def _error(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Reader:
    """Makes values of nodes; an alias counts as often as it is used."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, node: yaml.Node, depth: int) -> object:
        self._num_values += 1
        if depth > DEEPEST:
            raise _error(node, f"values are nested more than {DEEPEST} deep")
        if self._num_values > _MOST_VALUES:
            raise _error(node, f"more than {_MOST_VALUES} values; aliases count as often as they are used")
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return self._mapping(node, depth)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return [self.value(item, depth + 1) for item in node.value]
            case yaml.ScalarNode():
                return _scalar(node)
            case _:
                raise _error(node, f"the tag {node.tag} cannot be used here; leave it out")

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, value in node.value:
            if key.tag != f"{_TAG}str":
                raise _error(key, f"the key {str(key.value)[:40]!r} is no text; put it in quotes")
            if not is_unicode(key.value):
                raise _error(key, f"the key {key.value[:40]!r} holds half of a surrogate pair, which is no character")
            if key.value == "<<":
                raise _error(key, "merge keys (<<) are not part of YAML 1.2; repeat what they would bring")
            if key.value in values:
                raise _error(key, f"found duplicate key {key.value}")
            values[key.value] = self.value(value, depth + 1)
        return values


def _scalar(node: yaml.ScalarNode) -> object:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if kind == "str":
        if not is_unicode(text):
            raise _error(node, f"{text[:40]!r} holds half of a surrogate pair, which is no character")
        return text
    if kind not in _SCALARS:
        raise _error(node, f"the tag {node.tag} cannot be used here; leave it out")
    if not re.fullmatch(_SCALARS[kind][0], text):  # with a tag of its own, such as !!int
        raise _error(node, f"{text[:40]!r} is not of the type {kind} that its tag says")
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return _integer(node, text)
        case _:
            return _number(node, text)


def _integer(node: yaml.ScalarNode, text: str) -> int:
    num_digits = len(text.lstrip("+-"))
    if num_digits > _MOST_DIGITS:
        raise _error(node, f"a number of {num_digits} digits; at most {_MOST_DIGITS} are read")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _number(node: yaml.ScalarNode, text: str) -> float:
    number = math.inf if "n" in text.lower() else float(text)  # .inf and .nan: no setting takes them
    if not math.isfinite(number) or (number == 0 and re.search("[1-9]", text.lower().partition("e")[0])):
        raise _error(node, f"{text[:40]} is no number that can be held; write a finite one, from 1e-300 to 1e300")
    return number
