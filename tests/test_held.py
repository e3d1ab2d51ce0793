"""No check is lost: faults that tests hold, and mutants that the conformance kit catches, are listed beside this."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.conformance_mutants import MUTANTS
from tests.repository import ROOT, python_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LISTS = ROOT / "tests" / "held"


def faults_of(source: str) -> Iterator[int]:
    """Give the numbers of each ``pytest.mark.fault(…)``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            yield from (ast.literal_eval(argument) for argument in node.args)


def listed(name: str) -> set[str]:
    return set((LISTS / f"{name}.txt").read_text(encoding="utf-8").split())


def _order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (0, name)


def require_same(name: str, held: set[str], record_property: Callable[[str, object], None]) -> None:
    record_property("summary", f"{len(held)} {name} held: {' '.join(sorted(held, key=_order))}")
    assert sorted(listed(name) - held) == [], f"no test holds these {name} any more"
    assert sorted(held - listed(name)) == [], f"add these to {(LISTS / name).relative_to(ROOT)}.txt, one a line"


def test_the_faults_that_tests_hold_are_those_listed(record_property: Callable[[str, object], None]) -> None:
    sources = [path.read_text(encoding="utf-8") for path in python_files() if "tests" in path.parts]
    require_same("faults", {str(number) for source in sources for number in faults_of(source)}, record_property)


def test_the_mutants_that_the_kit_catches_are_those_listed(record_property: Callable[[str, object], None]) -> None:
    require_same("mutants", set(MUTANTS), record_property)


def test_numbers_are_found_wherever_a_test_is_marked() -> None:
    source = """
pytestmark = [pytest.mark.dist, pytest.mark.fault(3)]
@pytest.mark.fault(1, 2)
def test_a(): ...
CASES = [pytest.param(1, marks=pytest.mark.fault(4))]
"""
    assert sorted(faults_of(source)) == [1, 2, 3, 4]
