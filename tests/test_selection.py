"""How conftest.py thins out matrices, and names a test that was repeated."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from conftest import selection, without_number

ROWS = [{"a": str(a), "b": str(b), "c": str(c)} for a, b, c in product(range(2), range(3), range(2))]


def test_each_value_is_kept_once() -> None:
    kept = [ROWS[index] for index in selection(ROWS, 1)]
    assert len(kept) == 3
    assert {row["b"] for row in kept} == {"0", "1", "2"}


def test_any_two_values_meet() -> None:
    kept = [ROWS[index] for index in selection(ROWS, 2)]
    assert len(kept) < len(ROWS)
    for pair in {pair for row in ROWS for pair in combinations(sorted(row.items()), 2)}:
        assert any(set(pair) <= set(row.items()) for row in kept), pair


def test_one_parameter_loses_nothing() -> None:
    assert selection([{"a": "1"}, {"a": "2"}], 1) == {0, 1}


@pytest.mark.parametrize(
    ("number", "name"),
    [
        ("tests/a.py::test_b[3-20]", "tests/a.py::test_b"),
        ("tests/a.py::test_b[vpp-3-20]@ranks", "tests/a.py::test_b[vpp]"),
        ("tests/a.py::test_b[2-3-20]", "tests/a.py::test_b[2]"),
    ],
)
def test_the_number_of_a_repetition_is_left_out(number: str, name: str) -> None:
    assert without_number(number) == name
