"""The library's patterns for names of modules, understood here too: what matches nothing is found before it is asked.

``{*}`` stands for digits, ``{a-b}`` for a number from a to b, ``*`` for anything, ``?`` for one character.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import AfterValidator

_BRACES: Final = re.compile(r"\{([^}]*)\}")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_NUM_NAMED: Final = 5


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a whole name; ValueError where its braces hold something else than ``*`` or a range."""
    parts: list[str] = []
    ranges: list[tuple[int, int] | None] = []
    end = 0
    for found in _BRACES.finditer(pattern):
        parts += [_plain(pattern[end : found.start()]), r"(\d+)"]
        ranges.append(_range(pattern, found[1]))
        end = found.end()
    match = re.fullmatch("".join([*parts, _plain(pattern[end:])]), name)
    if match is None:
        return False
    pairs = zip(match.groups(), ranges, strict=True)
    return all(limits is None or limits[0] <= int(number) <= limits[1] for number, limits in pairs)


def closest(pattern: str, names: Iterable[str]) -> str:
    """List the names that look most like what a pattern may have meant."""
    wanted = _BRACES.sub("0", pattern).replace("*", "")
    return ", ".join(difflib.get_close_matches(wanted, list(names), n=_NUM_NAMED, cutoff=0.0))


def _checked(pattern: str) -> str:
    if not pattern:
        raise ValueError("a pattern must not be empty")
    matches(pattern, "")
    return pattern


ModulePattern = Annotated[str, AfterValidator(_checked)]
"""A pattern that the library will understand."""


def _plain(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")


def _range(pattern: str, inside: str) -> tuple[int, int] | None:
    if inside == "*":
        return None
    found = _RANGE.fullmatch(inside.replace(" ", ""))
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"pattern {pattern!r}: {{{inside}}} must be {{*}} for digits or {{low-high}} for a range")
    return int(found[1]), int(found[2])
