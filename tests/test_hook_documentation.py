"""Every hook is in the reference, with its kind."""

from __future__ import annotations

import inspect

import pytest

from tests.repository import ROOT
from verl_engine.contract import hookspecs
from verl_engine.contract.names import PROJECT_NAME

PAGE = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT_NAME}_spec")]


def test_there_are_hooks() -> None:
    assert HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_the_reference_shows_every_hook_with_its_arguments(hook: str) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"## `{hook}({arguments})`" in PAGE


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_when_and_where_it_runs(hook: str) -> None:
    assert "When and where:" in (inspect.getdoc(getattr(hookspecs, hook)) or "")
