"""The page of the engine's classes is that of their docstrings."""

from __future__ import annotations

from docs.generate_engine_reference import PAGE, render


def test_the_page_is_that_of_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/generate_engine_reference.py"
