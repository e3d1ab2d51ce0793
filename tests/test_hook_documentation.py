"""Every hook is in the reference, and some test implements it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.repository import ROOT, python_files
from verl_engine.contract import hookspecs
from verl_engine.contract.names import PROJECT_NAME

PAGE = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT_NAME}_spec")]


TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for path in python_files()
    if "tests" in path.parts and path != Path(__file__).resolve()
)


def test_there_are_hooks() -> None:
    assert HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_the_reference_shows_every_hook_with_its_arguments(hook: str) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"## `{hook}({arguments})`" in PAGE


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_when_and_where_it_runs(hook: str) -> None:
    assert "When and where:" in (inspect.getdoc(getattr(hookspecs, hook)) or "")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_test_implements_the_hook(hook: str) -> None:
    assert f"def {hook}(" in TESTS


@pytest.mark.parametrize("hook", HOOKS)
def test_a_test_calls_the_hook_through_its_host(hook: str) -> None:
    assert f"host.{hook.removeprefix('engine_')}(" in TESTS


@pytest.mark.parametrize("hook", HOOKS)
def test_the_reference_says_whether_a_hook_is_required(hook: str) -> None:
    section = PAGE.partition(f"## `{hook}(")[2].partition("\n## ")[0]
    assert "\n\nRequired" in section or "\n\nOptional" in section
