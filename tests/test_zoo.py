"""Architectures of each kind compute what transformers computes, and the page about all of them is current."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from docs.generate_model_reference import PAGE, RESULTS, render
from tests.zoo.selection import MUST_BE_RIGHT, SELECTION

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fault(2, 6, 8)
@pytest.mark.filterwarnings("ignore")  # of all kinds, from transformers' models
@pytest.mark.parametrize("name", list(SELECTION))
def test_a_model_of_each_kind_is_right(name: str, tmp_path: Path) -> None:
    from tests.zoo.checks import CHECKS, Subject  # imports torch

    subject = Subject(name, tmp_path)
    for check in CHECKS.values():
        check(subject)


def test_the_page_says_what_the_zoo_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/generate_model_reference.py"


def test_what_the_zoo_found_is_what_is_promised() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["architectures"] >= 100
    assert (found["wrong"], found["crashed"]) == (0, 0)
    assert found["refused"] <= 20
    for name in (*MUST_BE_RIGHT, *SELECTION):
        assert all(state.startswith("right") for state in found["checks"][name].values()), name
