"""Every error is in the reference, with what causes it and what to do."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

import pytest

from tests.repository import ROOT, source_files
from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
ROWS = {name: (cause, fix) for name, cause, fix in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)}


def modules_with_errors() -> list[str]:
    """Import paths of the source files that define an error: only those are imported."""
    paths = [path for path in source_files() if re.search(r"^class \w+Error\(", path.read_text("utf-8"), re.MULTILINE)]
    return sorted(import_path(path) for path in paths)


def import_path(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


def errors() -> Iterator[type[Exception]]:
    for name in modules_with_errors():
        module = importlib.import_module(name)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, EngineError)
                and value.__module__ == name
                and value.__name__[0] != "_"
            ):
                yield value


@pytest.mark.parametrize("error", list(errors()), ids=lambda error: error.__name__)
def test_every_error_has_a_cause_and_a_fix(error: type[Exception]) -> None:
    cause, fix = ROWS[error.__name__]
    assert cause.endswith(".")
    assert fix.endswith(".")


def test_the_page_has_no_error_that_is_gone() -> None:
    assert sorted(ROWS) == sorted({error.__name__ for error in errors()})
