"""Values of a type, within bounds and far beyond them, and texts of YAML that are often taken for something else."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel

if TYPE_CHECKING:
    from random import Random


class Unknown:
    """Stands for a value that is not compared."""


UNKNOWN: Final = Unknown()
TEXTS: Final = (
    "", "a", "off", "a.b", "toy/../x", "é ☃", "${", "${data.seed}", "a: b", "x" * 300, "~nosuchuser/a", "1:30", "*",
    "?", "model.layers.{*}", "{", "(", "[a-", "\n", " a ", "\u2028", "null", "all-linear", "torch.optim.SGD",
    "(a){99999999999}",
)  # fmt: skip
INTEGERS: Final = (0, 1, 2, 3, 4, 8, -1, 64, 1024, 65536, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**29, -(10**20))
NUMBERS: Final = (0.0, 0.5, 1.0, 0.1, -1.0, 1e-6, 3.5, 1e-300, 1e300, 1e38, 2.0**62)
ODD: Final[tuple[tuple[str, object], ...]] = (
    ("off", "off"), ("on", "on"), ("yes", "yes"), ("No", "No"), ("True", True), ("FALSE", False), ("tRue", "tRue"),
    ("010", 10), ("0o10", 8), ("0x10", 16), ("0x_", "0x_"), ("0b11", "0b11"), ("1_000", "1_000"), ("1:30", "1:30"),
    ("+3", 3), ("-0", 0), ("1e3", 1000.0), ("1e-6", 1e-6), ("1.", 1.0), (".5", 0.5), ("1.e1", 10.0), ("1e", "1e"),
    ("~", None), ("", None), ("null", None), ("Null", None), ("nULL", "nULL"), ("'1'", "1"), ('"1.0"', "1.0"),
    (".inf", UNKNOWN), (".nan", UNKNOWN), ("1e999", UNKNOWN), ("1e-999", UNKNOWN), ("9" * 5000, UNKNOWN),
    ("2026-11-30", "2026-11-30"), ("2026-11-30 10:00:00", "2026-11-30 10:00:00"), ("=", "="), ("<<", "<<"),
    ("!!int foo", UNKNOWN), ("!!str 5", "5"), ("!!float 5", 5.0), ("!!binary aGk=", UNKNOWN), ("!x 1", UNKNOWN),
    ("!!timestamp 1", UNKNOWN), ("!!python/name:os.system", UNKNOWN), ("&a 1", 1), ("*a", UNKNOWN),
    ("&a [*a]", UNKNOWN), ("[" * 300, UNKNOWN), ("[" * 300 + "]" * 300, UNKNOWN),
    ("{a: " * 300 + "}" * 300, UNKNOWN), ("{", UNKNOWN), ("{a: 1, a: 2}", UNKNOWN), ("{1: 2}", UNKNOWN),
    ("? a", UNKNOWN), ("- 1", UNKNOWN), ("| x", UNKNOWN), ("@a", UNKNOWN), ("%a", UNKNOWN), ("`a", UNKNOWN),
    ("a\tb", "a\tb"), ("\t1", UNKNOWN), ("#", None), ("1 #", 1), ("---", UNKNOWN), ("${", UNKNOWN),
    ("${data.seed}", UNKNOWN), ("${a.b}", UNKNOWN), ("${oc.env:NO_SUCH_NAME}", UNKNOWN), ("???", UNKNOWN),
    (r"\${a}", "${a}"), (r"\\\${a}", r"\${a}"), ('"\\ud800"', UNKNOWN), ('"\\0"', UNKNOWN), ("\x07", UNKNOWN),
    ("\u2028", UNKNOWN), ("\udcff", UNKNOWN), ("\ufeff", UNKNOWN), ("~nosuchuser", UNKNOWN),
    ("~nosuchuser/a", UNKNOWN), ("x" * 300, "x" * 300),
)  # fmt: skip
"""YAML texts, with what the core schema of YAML 1.2 says that they are."""


def draw_text(annotation: Any, random: Random) -> tuple[str, object]:
    """Draw a value of a type as YAML text, and what it must be where it is accepted."""
    if random.random() < 0.4:
        return random.choice(ODD)
    value = draw(annotation, random, 0)
    holds_dollar = "${" in json.dumps(value)
    return json.dumps(value, ensure_ascii=random.random() < 0.5), UNKNOWN if holds_dollar else value


def draw(annotation: Any, random: Random, depth: int) -> Any:  # noqa: PLR0911 - one for each kind of type
    """Draw a plain value of a type, or now and then of another."""
    if random.random() < 0.05 or depth > 3:
        annotation = random.choice([int, float, bool, str, types.NoneType])
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return draw(random.choice(arguments), random, depth)
    if origin is Literal:
        return random.choice([*arguments, "other"])
    if origin is tuple:
        items = [arguments[0]] * random.randrange(4) if arguments[-1] is ... else arguments
        return [draw(item, random, depth + 1) for item in items]
    if origin is dict:
        return {random.choice(TEXTS): draw(arguments[1], random, depth + 1) for _ in range(random.randrange(3))}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        chosen = [name for name in fields if random.random() < 0.5 or fields[name].is_required()]
        return {name: draw(fields[name].annotation, random, depth + 1) for name in chosen}
    if annotation is Any:
        return random.choice([None, True, 3, 0.5, "a", [1], {"a": 1}])
    pools: dict[Any, tuple[Any, ...]] = {int: INTEGERS, float: NUMBERS, bool: (True, False), types.NoneType: (None,)}
    return random.choice(pools.get(annotation, TEXTS))


def same(expected: object, value: object) -> bool:
    """Tell whether what was accepted is what was written."""
    if expected is UNKNOWN:
        return True
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(
            key in value and same(item, value[key]) for key, item in expected.items()
        )
    if isinstance(expected, list):
        return isinstance(value, list | tuple) and len(value) == len(expected) and all(map(same, expected, value))
    if isinstance(value, Path):
        return isinstance(expected, str) and value == Path(expected).expanduser().absolute()
    if isinstance(expected, bool) or isinstance(value, bool) or not isinstance(expected, int | float):
        return type(expected) is type(value) and expected == value
    # A whole number in place of a float is the nearest one: 10**29 is none itself.
    return isinstance(value, int | float) and (float(expected) if isinstance(value, float) else expected) == value
