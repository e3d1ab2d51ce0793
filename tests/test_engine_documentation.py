"""The page of the engine's classes is that of their docstrings."""

from __future__ import annotations

import re
from typing import Final

import verl_engine
from docs.generate_engine_reference import PAGE, render

OTHERS: Final = {
    "AbstractContextManager",
    "Any",
    "Callable",
    "FSDPModule",
    "Hashable",
    "Iterable",
    "Iterator",
    "Mapping",
    "Self",
}
"""Python's and torch's."""


def test_the_page_is_that_of_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/generate_engine_reference.py"


def test_what_signatures_name_can_be_imported() -> None:
    blocks = re.findall(r"```python\n(.*?)```|\| `(\w+: [^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    named = {name for block in blocks for name in re.findall(r"(?<![\w.])[A-Z]\w+", " ".join(block))}
    missing = named - set(verl_engine.__all__) - OTHERS - {"False", "None", "Path", "True"}
    assert not missing, f"no author of an engine can write these types: {missing}"
