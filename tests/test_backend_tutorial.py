"""The tutorial builds what `new-backend` writes, line by line, and the engine is as small as it says."""

from __future__ import annotations

import ast
import re

import pytest

from tests.repository import ROOT
from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import render_project

PAGE = (ROOT / "docs" / "tutorial" / "write-a-backend.md").read_text(encoding="utf-8")
PROJECT = render_project(BackendNames("my_engine", "my_engine", "my-engine", "My"))
ENGINE_FILES = [f"src/my_engine/{name}.py" for name in ("config", "hooks", "engine")]
MAX_LINES = 48


def shown(path: str) -> list[str]:
    """The lines of a file that the page shows, in one block or several; blank ones between blocks do not count."""
    blocks = re.findall(r'```python title="(.+?)"\n(.*?)```', PAGE, flags=re.DOTALL)
    return [line for title, text in blocks if title == path for line in text.splitlines() if line.strip()]


def lines_of_code(text: str) -> int:
    """Count lines without blank ones, comments and docstrings."""
    tree = ast.parse(text)
    docstrings = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for number, line in lines if number not in docstrings
    )


@pytest.mark.parametrize("path", [*ENGINE_FILES, "tests/test_conformance.py"])
def test_the_page_shows_the_file_that_is_written(path: str) -> None:
    assert shown(path) == [line for line in PROJECT[path].splitlines() if line.strip()]


def test_the_page_shows_no_other_python() -> None:
    titles = set(re.findall(r"```python(.*)\n", PAGE))
    assert titles == {f' title="{path}"' for path in [*ENGINE_FILES, "tests/test_conformance.py"]}


def test_the_page_shows_the_entry_point() -> None:
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert toml in PROJECT["pyproject.toml"]


def test_the_engine_is_as_small_as_the_page_says() -> None:
    count = sum(lines_of_code(PROJECT[path]) for path in ENGINE_FILES)
    assert count <= MAX_LINES
    assert f"{count} lines of code" in " ".join(PAGE.split())


def test_lines_are_counted_right() -> None:
    assert (
        lines_of_code(
            '"""Doc,\n\nlong."""\n\nimport os  # why\n# alone\nx = """a\n\nb"""\n\ndef f():\n    """Doc."""\n'
        )
        == 4
    )
